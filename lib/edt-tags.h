/*
 * Copyright (c) 2026 The FlowBundler authors.
 *
 * Licensed under the Apache License, Version 2.0 (the "License");
 * you may not use this file except in compliance with the License.
 * You may obtain a copy of the License at:
 *
 *     http://www.apache.org/licenses/LICENSE-2.0
 *
 * Unless required by applicable law or agreed to in writing, software
 * distributed under the License is distributed on an "AS IS" BASIS,
 * WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
 * See the License for the specific language governing permissions and
 * limitations under the License.
 */

#ifndef EDT_TAGS_H
#define EDT_TAGS_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "openvswitch/list.h"
#include "openvswitch/util.h"
#include "util.h"

/* Who of some flows is to send next
 * =================================
 *
 * A queue of flows by their tags ("edt-pace.h"), the lowest first: start-time
 * fair queueing (Goyal, Vin, Cheng, 1997).  A flow that has sent a packet
 * comes after all those that have not had as many bytes, so packets of
 * different flows alternate, where flows with large packets send fewer.
 *
 * It is a calendar: a ring of lists, each for tags that are within
 * 2^(EDT_PACE_SHIFT + 8), 256 bytes, of each other.  Flows in one list are in
 * the order in which they came.  Tags that are further ahead than the ring
 * goes are in its last list and are looked at again there.  Adding, removing
 * and finding the first is O(1).
 *
 * Thread-safety: none. */

#define EDT_TAGS_SHIFT 28
#define EDT_TAGS_SLOTS 64

struct edt_tag {
    struct ovs_list node;
    uint64_t tag;
};

struct edt_tags {
    uint64_t base;                  /* Tag that the first slot begins with. */
    uint64_t bitmap;                /* Of slots that may hold flows. */
    size_t n;
    struct ovs_list slots[EDT_TAGS_SLOTS];
};

/* Initializes 'turns' as empty. */
static inline void
edt_tags_init(struct edt_tags *turns)
{
    turns->base = turns->bitmap = turns->n = 0;
    for (size_t i = 0; i < EDT_TAGS_SLOTS; i++) {
        ovs_list_init(&turns->slots[i]);
    }
}

static inline size_t
edt_tags_slot__(uint64_t tag)
{
    return tag >> EDT_TAGS_SHIFT & (EDT_TAGS_SLOTS - 1);
}

/* Adds 'turn', whose 'tag' the caller has set, to 'turns'.  If the tag is
 * before all that may be in 'turns', it comes after others of which that is
 * so, too, or before them if 'first'. */
static inline void
edt_tags_insert__(struct edt_tags *turns, struct edt_tag *turn, bool first)
{
    const uint64_t reach = (EDT_TAGS_SLOTS - UINT64_C(1)) << EDT_TAGS_SHIFT;
    uint64_t tag = turn->tag;
    size_t slot;

    if (!turns->n) {
        turns->base = tag >> EDT_TAGS_SHIFT << EDT_TAGS_SHIFT;
        turns->bitmap = 0;
    }
    if ((int64_t) (tag - turns->base) < 0) {
        tag = turns->base;
    } else {
        tag = MIN(tag - turns->base, reach) + turns->base;
        first = false;
    }
    slot = edt_tags_slot__(tag);
    turns->bitmap |= UINT64_C(1) << slot;
    turns->n++;
    if (first) {
        ovs_list_push_front(&turns->slots[slot], &turn->node);
    } else {
        ovs_list_push_back(&turns->slots[slot], &turn->node);
    }
}

static inline void
edt_tags_insert(struct edt_tags *turns, struct edt_tag *turn)
{
    edt_tags_insert__(turns, turn, false);
}

/* Removes 'turn' from 'turns', which holds it. */
static inline void
edt_tags_remove(struct edt_tags *turns, struct edt_tag *turn)
{
    ovs_list_remove(&turn->node);
    turns->n--;
}

/* Returns the first of 'turns', which it still holds, or NULL if there is none
 * or, if 'limited', its tag is after the slot of 'limit'. */
static inline struct edt_tag *
edt_tags_first__(struct edt_tags *turns, bool limited, uint64_t limit)
{
    while (turns->n) {
        size_t slot = edt_tags_slot__(turns->base);
        uint64_t ahead = turns->bitmap >> slot
                         | turns->bitmap << (-slot & (EDT_TAGS_SLOTS - 1));
        uint64_t base = turns->base
                        + ((uint64_t) raw_ctz(ahead) << EDT_TAGS_SHIFT);
        struct ovs_list *list = &turns->slots[edt_tags_slot__(base)];
        struct edt_tag *turn;

        if (limited && (int64_t) (base - limit) > 0) {
            if (!ovs_list_is_empty(list)) {
                /* Those that came when the ring had gone past their tags are
                 * before the others. */
                turn = CONTAINER_OF(ovs_list_front(list), struct edt_tag,
                                    node);
                if ((int64_t) (turn->tag - limit) <= 0) {
                    return turn;
                }
            }
            /* What comes may be before the first. */
            if ((int64_t) (limit - turns->base) > 0) {
                turns->base = limit >> EDT_TAGS_SHIFT << EDT_TAGS_SHIFT;
            }
            return NULL;
        }
        turns->base = base;
        if (ovs_list_is_empty(list)) {
            turns->bitmap &= ~(UINT64_C(1) << edt_tags_slot__(base));
            continue;
        }
        turn = CONTAINER_OF(ovs_list_front(list), struct edt_tag, node);
        if (OVS_LIKELY((int64_t) (turn->tag - base)
                       < INT64_C(1) << EDT_TAGS_SHIFT)) {
            return turn;
        }
        /* It was further ahead than the ring went. */
        edt_tags_remove(turns, turn);
        edt_tags_insert(turns, turn);
    }
    return NULL;
}

/* Returns the first of 'turns', which it still holds, or NULL. */
static inline struct edt_tag *
edt_tags_first(struct edt_tags *turns)
{
    return edt_tags_first__(turns, false, 0);
}

#endif /* edt-tags.h */
