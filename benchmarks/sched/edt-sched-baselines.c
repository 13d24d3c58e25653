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

#include <config.h>
#undef NDEBUG

#include "edt-sched-baselines.h"

#include "lazy-mem.h"
#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "util.h"

static unsigned int
no_level(const void *sched OVS_UNUSED, uint64_t gap_ns OVS_UNUSED)
{
    return 0;
}

/* Heap. */

/* The root's index.  The children of 'i' are 4 * i - 8 to 4 * i - 5, which is
 * a cache line. */
#define ROOT 3

/* The siblings of the last node that are not in use have an 'edt_ns' of
 * UINT64_MAX, so they do not have to be told apart. */
struct heap_node {
    uint64_t edt_ns;
    void *entry;
};

struct heap_sched {
    struct heap_node *nodes;
    uint32_t end;               /* Index of the first node not in use. */
    uint32_t max_end;
    size_t memory_bytes;
};

static struct heap_sched *
heap_cast(const void *sched)
{
    return (struct heap_sched *) sched;
}

static void *
heap_create(const struct edt_sched_config *config, uint64_t now_ns OVS_UNUSED)
{
    struct heap_sched *h = xzalloc(sizeof *h);

    h->end = ROOT;
    h->max_end = ROOT + config->max_entries;
    /* Room for the siblings of the last node. */
    h->memory_bytes = (h->max_end + 4) * sizeof *h->nodes;
    h->nodes = lazy_zalloc(h->memory_bytes);
    return h;
}

static void
heap_destroy(void *sched)
{
    struct heap_sched *h = heap_cast(sched);

    lazy_free(h->nodes, h->memory_bytes);
    free(h);
}

static bool
heap_enqueue(void *sched, void *entry, uint64_t edt_ns,
             unsigned int level OVS_UNUSED)
{
    struct heap_sched *h = heap_cast(sched);

    if (h->end >= h->max_end) {
        return false;
    }

    uint32_t i = h->end++;
    for (uint32_t j = i + 1; j % 4 && !(i % 4); j++) {
        h->nodes[j].edt_ns = UINT64_MAX;
    }
    while (i > ROOT) {
        uint32_t parent = i / 4 + 2;

        if (h->nodes[parent].edt_ns <= edt_ns) {
            break;
        }
        h->nodes[i] = h->nodes[parent];
        i = parent;
    }
    h->nodes[i] = (struct heap_node) { edt_ns, entry };
    return true;
}

/* Removes the root.  The heap must not be empty. */
static inline void
heap_pop(struct heap_sched *h)
{
    struct heap_node *nodes = h->nodes;
    uint32_t end = --h->end;
    struct heap_node last = nodes[end];
    uint32_t i = ROOT;

    nodes[end].edt_ns = UINT64_MAX;
    for (;;) {
        uint32_t child = 4 * i - 8;

        if (child >= end) {
            break;
        }

        /* The smallest of four, without branches. */
        uint32_t a = child + (nodes[child + 1].edt_ns < nodes[child].edt_ns);
        uint32_t b = child + 2 + (nodes[child + 3].edt_ns
                                  < nodes[child + 2].edt_ns);
        uint32_t min = nodes[b].edt_ns < nodes[a].edt_ns ? b : a;

        if (nodes[min].edt_ns >= last.edt_ns) {
            break;
        }
        nodes[i] = nodes[min];
        i = min;
    }
    nodes[i] = last;
}

static size_t
heap_dequeue(void *sched, uint64_t now_ns, void **entries,
             size_t max)
{
    struct heap_sched *h = heap_cast(sched);
    size_t n = 0;

    while (n < max && h->end > ROOT && h->nodes[ROOT].edt_ns <= now_ns) {
        entries[n] = h->nodes[ROOT].entry;
        OVS_PREFETCH(entries[n]);
        n++;
        heap_pop(h);
    }
    return n;
}

static uint64_t
heap_next_due(const void *sched)
{
    const struct heap_sched *h = heap_cast(sched);

    return h->end > ROOT ? h->nodes[ROOT].edt_ns : UINT64_MAX;
}

static size_t
heap_flush(void *sched, void **entries, size_t max)
{
    return heap_dequeue(sched, UINT64_MAX, entries, max);
}

static size_t
heap_count(const void *sched)
{
    return heap_cast(sched)->end - ROOT;
}

static size_t
heap_memory_bytes(const void *sched)
{
    return sizeof(struct heap_sched) + heap_cast(sched)->memory_bytes;
}

const struct edt_sched_class heap_sched_class = {
    .name = "heap",
    .create = heap_create,
    .destroy = heap_destroy,
    .level = no_level,
    .enqueue = heap_enqueue,
    .dequeue = heap_dequeue,
    .next_due = heap_next_due,
    .flush = heap_flush,
    .count = heap_count,
    .memory_bytes = heap_memory_bytes,
};

/* Red-black tree.
 *
 * Since only the first node is ever removed, removal is simpler than that of
 * any node: the first one has no left child, and a right one only if that is a
 * red leaf; and where the tree is one black node short, it is on the left. */

enum { LEFT, RIGHT };

struct tree_node {
    uint64_t edt_ns;
    void *entry;
    uint32_t child[2];          /* Indexes, 0 if none. */
    uint32_t parent;            /* 0 for the root. */
    bool red;
};
BUILD_ASSERT_DECL(sizeof(struct tree_node) == 32);

struct tree_sched {
    struct tree_node *nodes;    /* Element 0 stands for all leaves, black. */
    uint32_t root;              /* 0 if the tree is empty. */
    uint32_t first;             /* 0 if the tree is empty. */
    uint32_t last;              /* 0 if the tree is empty. */
    uint32_t free;              /* LIFO list by 'parent', 0 if empty. */
    uint32_t fresh;             /* First node that was never used. */
    uint32_t n_entries;
    uint32_t max_entries;
    size_t memory_bytes;
};

static struct tree_sched *
tree_cast(const void *sched)
{
    return (struct tree_sched *) sched;
}

static void *
tree_create(const struct edt_sched_config *config, uint64_t now_ns OVS_UNUSED)
{
    struct tree_sched *t = xzalloc(sizeof *t);

    t->fresh = 1;
    t->max_entries = config->max_entries;
    t->memory_bytes = (t->max_entries + 1) * sizeof *t->nodes;
    t->nodes = lazy_zalloc(t->memory_bytes);
    return t;
}

static void
tree_destroy(void *sched)
{
    struct tree_sched *t = tree_cast(sched);

    lazy_free(t->nodes, t->memory_bytes);
    free(t);
}

/* Makes 'new' the child of 'parent' that 'old' has been. */
static inline void
tree_replace_child(struct tree_sched *t, uint32_t parent, uint32_t old,
                   uint32_t new)
{
    if (parent) {
        t->nodes[parent].child[t->nodes[parent].child[RIGHT] == old] = new;
    } else {
        t->root = new;
    }
    t->nodes[new].parent = parent;
}

/* Turns the tree at 'x' towards side 'dir', so that the child of 'x' on the
 * other side becomes its parent. */
static inline void
tree_rotate(struct tree_sched *t, uint32_t x, int dir)
{
    struct tree_node *node = &t->nodes[x];
    uint32_t up = node->child[!dir];
    uint32_t inner = t->nodes[up].child[dir];

    node->child[!dir] = inner;
    if (inner) {
        t->nodes[inner].parent = x;
    }
    tree_replace_child(t, node->parent, x, up);
    t->nodes[up].child[dir] = x;
    node->parent = up;
}

/* Restores the order of colors after the red node 'x' was added. */
static void
tree_fix_insert(struct tree_sched *t, uint32_t x)
{
    struct tree_node *nodes = t->nodes;

    while (nodes[nodes[x].parent].red) {
        uint32_t parent = nodes[x].parent;
        uint32_t grand = nodes[parent].parent;
        int dir = nodes[grand].child[RIGHT] == parent;
        uint32_t uncle = nodes[grand].child[!dir];

        if (nodes[uncle].red) {
            nodes[parent].red = false;
            nodes[uncle].red = false;
            nodes[grand].red = true;
            x = grand;
        } else {
            if (nodes[parent].child[!dir] == x) {
                tree_rotate(t, parent, dir);
                parent = x;
            }
            nodes[parent].red = false;
            nodes[grand].red = true;
            tree_rotate(t, grand, !dir);
            break;
        }
    }
    nodes[t->root].red = false;
}

static bool
tree_enqueue(void *sched, void *entry, uint64_t edt_ns,
             unsigned int level OVS_UNUSED)
{
    struct tree_sched *t = tree_cast(sched);

    if (t->n_entries >= t->max_entries) {
        return false;
    }

    uint32_t x = t->free;
    if (x) {
        t->free = t->nodes[x].parent;
    } else {
        x = t->fresh++;
    }

    uint32_t parent = 0;
    int dir = RIGHT;
    if (t->last && t->nodes[t->last].edt_ns <= edt_ns) {
        /* What is last of all needs no search. */
        parent = t->last;
        t->last = x;
    } else {
        for (uint32_t i = t->root; i; i = t->nodes[i].child[dir]) {
            parent = i;
            dir = t->nodes[i].edt_ns <= edt_ns;
        }
        if (!parent) {
            t->last = x;
        }
    }
    t->nodes[x] = (struct tree_node) {
        .edt_ns = edt_ns,
        .entry = entry,
        .parent = parent,
        .red = true,
    };
    if (parent) {
        t->nodes[parent].child[dir] = x;
    } else {
        t->root = x;
    }
    if (!t->first || (t->first == parent && dir == LEFT)) {
        t->first = x;
    }
    t->n_entries++;
    tree_fix_insert(t, x);
    return true;
}

/* Restores the order of colors after the left subtree of 'parent' has become
 * one black node short. */
static void
tree_fix_remove(struct tree_sched *t, uint32_t parent)
{
    struct tree_node *nodes = t->nodes;

    while (parent) {
        uint32_t sibling = nodes[parent].child[RIGHT];

        if (nodes[sibling].red) {
            nodes[sibling].red = false;
            nodes[parent].red = true;
            tree_rotate(t, parent, LEFT);
            sibling = nodes[parent].child[RIGHT];
        }
        if (!nodes[nodes[sibling].child[LEFT]].red
            && !nodes[nodes[sibling].child[RIGHT]].red) {
            nodes[sibling].red = true;
            if (nodes[parent].red) {
                nodes[parent].red = false;
                return;
            }
            parent = nodes[parent].parent;
            continue;
        }
        if (!nodes[nodes[sibling].child[RIGHT]].red) {
            nodes[nodes[sibling].child[LEFT]].red = false;
            nodes[sibling].red = true;
            tree_rotate(t, sibling, RIGHT);
            sibling = nodes[parent].child[RIGHT];
        }
        nodes[sibling].red = nodes[parent].red;
        nodes[parent].red = false;
        nodes[nodes[sibling].child[RIGHT]].red = false;
        tree_rotate(t, parent, LEFT);
        return;
    }
}

/* Removes the first node. */
static inline void
tree_pop(struct tree_sched *t)
{
    struct tree_node *nodes = t->nodes;
    uint32_t x = t->first;
    uint32_t parent = nodes[x].parent;
    uint32_t right = nodes[x].child[RIGHT];

    if (right) {
        tree_replace_child(t, parent, x, right);
        nodes[right].red = false;
        t->first = right;
    } else if (parent) {
        nodes[parent].child[LEFT] = 0;
        t->first = parent;
        if (!nodes[x].red) {
            tree_fix_remove(t, parent);
        }
    } else {
        t->root = t->first = t->last = 0;
    }
    nodes[x].parent = t->free;
    t->free = x;
    t->n_entries--;
}

static size_t
tree_dequeue(void *sched, uint64_t now_ns, void **entries,
             size_t max)
{
    struct tree_sched *t = tree_cast(sched);
    size_t n = 0;

    while (n < max && t->first && t->nodes[t->first].edt_ns <= now_ns) {
        entries[n] = t->nodes[t->first].entry;
        OVS_PREFETCH(entries[n]);
        n++;
        tree_pop(t);
    }
    return n;
}

static uint64_t
tree_next_due(const void *sched)
{
    const struct tree_sched *t = tree_cast(sched);

    return t->first ? t->nodes[t->first].edt_ns : UINT64_MAX;
}

static size_t
tree_flush(void *sched, void **entries, size_t max)
{
    return tree_dequeue(sched, UINT64_MAX, entries, max);
}

static size_t
tree_count(const void *sched)
{
    return tree_cast(sched)->n_entries;
}

static size_t
tree_memory_bytes(const void *sched)
{
    return sizeof(struct tree_sched) + tree_cast(sched)->memory_bytes;
}

const struct edt_sched_class tree_sched_class = {
    .name = "tree",
    .create = tree_create,
    .destroy = tree_destroy,
    .level = no_level,
    .enqueue = tree_enqueue,
    .dequeue = tree_dequeue,
    .next_due = tree_next_due,
    .flush = tree_flush,
    .count = tree_count,
    .memory_bytes = tree_memory_bytes,
};
