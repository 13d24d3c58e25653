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

#ifndef SLOT_LIST_H
#define SLOT_LIST_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "util.h"

/* Slots of references
 * ===================
 *
 * What "mltw" stores entries in, and what it is compared with (benchmarks/),
 * so that those differ from it in nothing but how they find their slots.
 *
 * A slot is a FIFO of references and takes 8 bytes.  If there is only one, it
 * is there.  Otherwise they are in a list of nodes of one cache line each, all
 * of which but the last one are full, from a pool that all slots share
 * (Carousel, SIGCOMM 2017, section 5.1.2: "each free list node can hold
 * references to n packets").  A list's "cursor" is where its next reference
 * goes, counted in pointers from the start of the pool; if this is the start
 * of a node, the last node is full and another one is needed.  So the node
 * itself is not read to append to it, and the nodes of a slot are given back
 * all at once.  There are no empty nodes.
 *
 * References are multiples of 8.  A slot of which a part has been taken must
 * be emptied before any other slot of the same pool is taken from. */

#define SLOT_NODE_WORDS 8       /* A cache line, if pointers are 64 bits. */
#define SLOT_NODE_REFS (SLOT_NODE_WORDS - 1)

/* Part of a slot. */
struct slot_node {
    union {
        uint32_t next;          /* Index of next of slot, or of free list. */
        void *word;
    };
    void *refs[SLOT_NODE_REFS];
};
BUILD_ASSERT_DECL(sizeof(struct slot_node)
                  == SLOT_NODE_WORDS * sizeof(void *));

/* A slot: 0 if empty, a reference if that is all, otherwise a list: the index
 * of its first node in the upper half, SLOT_LIST, and the cursor.  Since
 * references are multiples of 8, the lowest bits tell whether this is a list
 * with room in its last node; the highest bit of an address is never set. */
typedef uint64_t slot_word;

#define SLOT_LIST (UINT64_C(1) << 63)
#define SLOT_HEAD_SHIFT 32

/* Nodes. */
struct slot_pool {
    struct slot_node *nodes;    /* Element 0 is not used. */
    uint32_t n_nodes;
    uint32_t free;              /* LIFO list, 0 if empty. */
    uint32_t fresh;             /* First one that was never used. */
    uint32_t n_taken;           /* References gone from the first node of the
                                 * slot of which a part has been taken. */
};

/* Returns the number of nodes that 'max_entries' references in 'n_slots' slots
 * can take: no node is empty, and all but a slot's last one are full, except
 * the first one of a slot of which a part has been taken, and one that is
 * being emptied. */
static inline size_t
slot_pool_n_nodes(size_t max_entries, size_t n_slots)
{
    return 1 + MIN(max_entries + 1,
                   max_entries / SLOT_NODE_REFS + n_slots + 2);
}

/* Initializes 'pool' with 'n_nodes' nodes, 'nodes', which are the caller's and
 * need not be initialized. */
static inline void
slot_pool_init(struct slot_pool *pool, struct slot_node *nodes, size_t n_nodes)
{
    *pool = (struct slot_pool) {
        .nodes = nodes,
        .n_nodes = n_nodes,
        .fresh = 1,
    };
}

/* Puts 'entry' into another node, for which 'slot', which is not empty, has no
 * room. */
static void OVS_UNUSED
slot_append_node__(struct slot_pool *pool, slot_word *slot, void *entry)
{
    uint32_t index = pool->free;
    struct slot_node *node;

    if (OVS_LIKELY(index)) {
        node = &pool->nodes[index];
        pool->free = node->next;
    } else {
        index = pool->fresh++;
        ovs_assert(index < pool->n_nodes);
        node = &pool->nodes[index];
    }

    if (*slot & SLOT_LIST) {
        uint32_t full = (uint32_t) *slot / SLOT_NODE_WORDS - 1;

        pool->nodes[full].next = index;
        node->refs[0] = entry;
        *slot = (*slot >> SLOT_HEAD_SHIFT << SLOT_HEAD_SHIFT)
                + (index * SLOT_NODE_WORDS + 2);
    } else {
        node->refs[0] = (void *) (uintptr_t) *slot;
        node->refs[1] = entry;
        *slot = SLOT_LIST + ((uint64_t) index << SLOT_HEAD_SHIFT)
                + (index * SLOT_NODE_WORDS + 3);
    }
}

/* Appends 'entry' to 'slot'.  The pool must have room.  Returns true if 'slot'
 * was empty. */
static inline bool
slot_append(struct slot_pool *pool, slot_word *slot, void *entry)
{
    slot_word word = *slot;

    if (word % SLOT_NODE_WORDS) {
        ((void **) pool->nodes)[(uint32_t) word] = entry;
        *slot = word + 1;
        return false;
    } else if (!word) {
        *slot = (uintptr_t) entry;
        return true;
    } else {
        slot_append_node__(pool, slot, entry);
        return false;
    }
}

/* Gives back the nodes from 'first' to 'last' of a list. */
static inline void
slot_nodes_free__(struct slot_pool *pool, uint32_t first, uint32_t last)
{
    pool->nodes[last].next = pool->free;
    pool->free = first;
}

/* Does what slot_take() does for a list.  (Not inline, so that the loops that
 * look for slots have the processor's registers to themselves.) */
static size_t OVS_UNUSED __attribute__((__noinline__))
slot_take_list__(struct slot_pool *pool, slot_word *slot, void **entries,
                 size_t max)
{
    uint32_t head = (*slot - SLOT_LIST) >> SLOT_HEAD_SHIFT;
    uint32_t cursor = *slot;
    uint32_t last = (cursor - 1) / SLOT_NODE_WORDS;
    uint32_t n_last = (cursor - 1) % SLOT_NODE_WORDS;
    uint32_t begin = pool->n_taken;
    uint32_t index = head;
    uint32_t done = 0;
    size_t n = 0;

    for (;;) {
        struct slot_node *node = &pool->nodes[index];
        size_t n_refs = (index == last ? n_last : SLOT_NODE_REFS) - begin;
        size_t n_copy = n_refs;

        if (OVS_LIKELY(max - n >= SLOT_NODE_REFS && !begin)) {
            /* A copy of constant size is faster than one of the right size. */
            OVS_PREFETCH(&pool->nodes[node->next]);
            memcpy(&entries[n], node->refs, sizeof node->refs);
        } else {
            n_copy = MIN(n_refs, max - n);
            memcpy(&entries[n], &node->refs[begin], n_copy * sizeof *entries);
        }
        for (size_t i = 0; i < n_copy; i++) {
            OVS_PREFETCH(entries[n + i]);
        }
        n += n_copy;

        if (OVS_UNLIKELY(n_copy < n_refs)) {
            if (done) {
                slot_nodes_free__(pool, head, done);
            }
            *slot = SLOT_LIST + ((uint64_t) index << SLOT_HEAD_SHIFT) + cursor;
            pool->n_taken = begin + n_copy;
            return n;
        }
        if (index == last) {
            break;
        }
        done = index;
        index = node->next;
        begin = 0;
    }

    slot_nodes_free__(pool, head, last);
    *slot = 0;
    pool->n_taken = 0;
    return n;
}

/* Moves up to 'max' references, at least 1, from 'slot', which is not empty,
 * to 'entries', all 'max' of which may be overwritten, prefetches what they
 * refer to, and returns their number. */
static inline size_t
slot_take(struct slot_pool *pool, slot_word *slot, void **entries, size_t max)
{
    if (!(*slot & SLOT_LIST)) {
        entries[0] = (void *) (uintptr_t) *slot;
        OVS_PREFETCH(entries[0]);
        *slot = 0;
        return 1;
    }
    return slot_take_list__(pool, slot, entries, max);
}

#endif /* slot-list.h */
