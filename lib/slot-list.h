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
 * What "carousel" and "eiffel", which have millions of slots of one width,
 * have in common: numbering slots, and storing what is in them.
 *
 * A slot is a FIFO of references and takes 4 bytes.  The references are in
 * nodes from a pool that all slots share, each of which holds up to
 * SLOT_NODE_REFS of them (Carousel, SIGCOMM 2017, section 5.1.2: "each free
 * list node can hold references to n packets"), and is one cache line.
 *
 * The nodes of a slot form a ring: the last one, of which the slot knows
 * where its next reference goes, links to the first one.  So the node itself
 * is not read to append to it, and all nodes of a slot are given back at once.
 * All nodes but the last are full, and none is empty.
 *
 * Only one slot at a time may be taken in parts: no other slot of the same
 * pool may be taken from until that one is empty. */

#define SLOT_NODE_WORDS (64 / sizeof(void *))
#define SLOT_NODE_REFS (SLOT_NODE_WORDS - 1)

/* Part of a slot. */
struct slot_node {
    union {
        uint32_t next;          /* Index of next in ring, or of free list. */
        void *word;
    };
    void *refs[SLOT_NODE_REFS];
};
BUILD_ASSERT_DECL(sizeof(struct slot_node)
                  == SLOT_NODE_WORDS * sizeof(void *));
BUILD_ASSERT_DECL(IS_POW2(SLOT_NODE_WORDS));

/* A slot is where its next reference goes, counted in words from the start of
 * the pool; if this is the start of a node, the last node is full and another
 * one is needed, or it is 0 and the slot is empty. */
typedef uint32_t slot_list;

/* Nodes. */
struct slot_pool {
    struct slot_node *nodes;    /* Element 0 is not used. */
    uint32_t free;              /* LIFO list, 0 if empty. */
    uint32_t fresh;             /* First one that was never used. */
    uint32_t n_taken;           /* References gone from the first node of the
                                 * slot that is taken in parts. */
};

/* Returns the number of nodes that 'max_entries' references in 'n_slots' slots
 * can take. */
static inline size_t
slot_pool_n_nodes(size_t max_entries, size_t n_slots)
{
    return 1 + MIN(max_entries + 1,
                   max_entries / SLOT_NODE_REFS + n_slots + 2);
}

/* Initializes 'pool' with 'nodes', which are the caller's and need not be
 * initialized. */
static inline void
slot_pool_init(struct slot_pool *pool, struct slot_node *nodes)
{
    *pool = (struct slot_pool) { .nodes = nodes, .fresh = 1 };
}

/* Appends 'entry' to 'list'.  The pool must have room.  Returns true if 'list'
 * was empty. */
static inline bool
slot_list_append(struct slot_pool *pool, slot_list *list, void *entry)
{
    uint32_t cursor = *list;

    if (cursor % SLOT_NODE_WORDS) {
        ((void **) pool->nodes)[cursor] = entry;
        *list = cursor + 1;
        return false;
    }

    uint32_t index = pool->free;
    struct slot_node *node;

    if (OVS_LIKELY(index)) {
        node = &pool->nodes[index];
        pool->free = node->next;
    } else {
        index = pool->fresh++;
        node = &pool->nodes[index];
    }
    if (cursor) {
        struct slot_node *last = &pool->nodes[cursor / SLOT_NODE_WORDS - 1];

        node->next = last->next;
        last->next = index;
    } else {
        node->next = index;
    }
    node->refs[0] = entry;
    *list = index * SLOT_NODE_WORDS + 2;
    return !cursor;
}

/* Moves up to 'max' references, at least 1, from 'list', which is not empty,
 * to 'entries', and returns their number. */
static inline size_t
slot_list_take(struct slot_pool *pool, slot_list *list, void **entries,
               size_t max)
{
    uint32_t last = (*list - 1) / SLOT_NODE_WORDS;
    uint32_t n_last = (*list - 1) % SLOT_NODE_WORDS;
    struct slot_node *last_node = &pool->nodes[last];
    uint32_t first = last_node->next;
    uint32_t begin = pool->n_taken;
    uint32_t index = first;
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
                pool->nodes[done].next = pool->free;
                pool->free = first;
                last_node->next = index;
            }
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

    last_node->next = pool->free;
    pool->free = first;
    pool->n_taken = 0;
    *list = 0;
    return n;
}

/* Slot numbers
 * ============
 *
 * Slot 'i' is at i * slot_ns.  Division is by multiplication, and exact for
 * all times below 2^63: with l = log2(slot_ns), rounded up, and
 * m = 2^(63 + l) / slot_ns, rounded up, m exceeds the true quotient by less
 * than 2^l / slot_ns, and n * m / 2^(63 + l) the true quotient n / slot_ns by
 * less than 1 / slot_ns. */
struct slot_scale {
    uint64_t multiplier;        /* m */
    uint32_t shift;             /* l */
    uint32_t round_up;          /* slot_ns - 1 */
};

static inline void
slot_scale_init(struct slot_scale *scale, uint64_t slot_ns)
{
    unsigned int shift = log_2_ceil(slot_ns);
    uint64_t quotient = 0;
    uint64_t rest = 1;

    /* Long division: the numerator has 64 + l bits. */
    for (unsigned int i = 0; i < 63 + shift; i++) {
        rest *= 2;
        quotient = 2 * quotient + (rest >= slot_ns);
        rest -= rest >= slot_ns ? slot_ns : 0;
    }
    scale->multiplier = slot_ns > 1 ? quotient + (rest > 0)
                        : UINT64_C(1) << 63;
    scale->shift = shift;
    scale->round_up = slot_ns - 1;
}

/* Returns the upper half of the product of 'a' and 'b'. */
static inline uint64_t
slot_mul_high__(uint64_t a, uint64_t b)
{
#ifdef __SIZEOF_INT128__
    return (unsigned __int128) a * b >> 64;
#else
    uint64_t low = (a & UINT32_MAX) * (b & UINT32_MAX);
    uint64_t mid1 = (a >> 32) * (b & UINT32_MAX) + (low >> 32);
    uint64_t mid2 = (a & UINT32_MAX) * (b >> 32) + (mid1 & UINT32_MAX);

    return (a >> 32) * (b >> 32) + (mid1 >> 32) + (mid2 >> 32);
#endif
}

/* Returns the number of the slot that is at 'ns', which is less than 2^63, or
 * the last one before it. */
static inline uint64_t
slot_scale_floor(const struct slot_scale *scale, uint64_t ns)
{
    return slot_mul_high__(2 * ns, scale->multiplier) >> scale->shift;
}

/* Returns the number of the slot that is at 'ns', which is less than
 * 2^63 - slot_ns, or the first one after it. */
static inline uint64_t
slot_scale_ceil(const struct slot_scale *scale, uint64_t ns)
{
    return slot_scale_floor(scale, ns + scale->round_up);
}

#endif /* slot-list.h */
