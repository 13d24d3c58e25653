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

#include "edt-chains.h"

#include <string.h>

#include "cmap.h"
#include "coverage.h"
#include "hash.h"
#include "openvswitch/hmap.h"
#include "openvswitch/list.h"
#include "openvswitch/thread.h"
#include "openvswitch/util.h"
#include "openvswitch/vlog.h"
#include "ovs-rcu.h"
#include "util.h"

VLOG_DEFINE_THIS_MODULE(edt_chains);

COVERAGE_DEFINE(edt_chains_full);

/* Chains that edt_chains_remove() takes out before it lets others have the
 * mutex. */
#define REMOVE_AT_ONCE 64

struct chain;

/* A meter's place in a chain. */
struct chain_link {
    struct ovs_list node;           /* In 'chains' of struct chain_meter. */
    struct chain *chain;
    uint32_t meter_id;
    bool late;
};

/* An interned chain.  Immutable, but for its lists. */
struct chain {
    struct cmap_node by_end;        /* In 'by_end' of struct edt_chains. */
    struct cmap_node by_id;
    uint32_t before;                /* Chain without the last meter. */
    uint32_t id;
    size_t n;                       /* At least 1. */
    struct chain_link links[];
};

/* A meter that is in interned chains. */
struct chain_meter {
    struct hmap_node node;
    uint32_t id;
    struct ovs_list chains;         /* Of struct chain_link. */
};

struct edt_chains {
    struct cmap by_end;             /* By the chain before and the meter. */
    struct cmap by_id;

    struct ovs_mutex mutex;         /* Held by those who add and remove. */
    struct hmap meters OVS_GUARDED; /* Of struct chain_meter. */
    uint32_t last_id OVS_GUARDED;
    uint32_t max;
};

/* Returns chains of meters, none yet, and never more than 'max' interned ones.
 * The caller owns them. */
struct edt_chains *
edt_chains_create(uint32_t max)
{
    struct edt_chains *chains = xzalloc(sizeof *chains);

    cmap_init(&chains->by_end);
    cmap_init(&chains->by_id);
    ovs_mutex_init(&chains->mutex);
    ovs_mutex_lock(&chains->mutex);
    hmap_init(&chains->meters);
    chains->last_id = EDT_CHAINS_FIRST_ID - 1;
    ovs_mutex_unlock(&chains->mutex);
    chains->max = max;
    return chains;
}

/* Is 'id' that of an interned chain? */
static bool
is_interned(uint32_t id)
{
    return id >= EDT_CHAINS_FIRST_ID && id <= EDT_CHAINS_LAST_ID;
}

static uint32_t
end_hash(uint32_t before, uint32_t meter_id, bool late)
{
    return hash_2words(before, meter_id + late);
}

static uint32_t
id_hash(uint32_t id)
{
    return hash_int(id, 0);
}

static const struct chain *
find_by_end(const struct edt_chains *chains, uint32_t before,
            uint32_t meter_id, bool late)
{
    const struct chain *c;

    CMAP_FOR_EACH_WITH_HASH (c, by_end, end_hash(before, meter_id, late),
                             &chains->by_end) {
        const struct chain_link *last = &c->links[c->n - 1];

        if (c->before == before && last->meter_id == meter_id
            && last->late == late) {
            return c;
        }
    }
    return NULL;
}

static const struct chain *
find_by_id(const struct edt_chains *chains, uint32_t id)
{
    const struct chain *c;

    if (!is_interned(id)) {
        return NULL;
    }
    CMAP_FOR_EACH_WITH_HASH (c, by_id, id_hash(id), &chains->by_id) {
        if (c->id == id) {
            return c;
        }
    }
    return NULL;
}

/* Returns the meter 'meter_id', which is added if it is not there, without
 * chains. */
static struct chain_meter *
get_meter(struct edt_chains *chains, uint32_t meter_id)
    OVS_REQUIRES(chains->mutex)
{
    uint32_t hash = hash_int(meter_id, 0);
    struct chain_meter *m;

    HMAP_FOR_EACH_WITH_HASH (m, node, hash, &chains->meters) {
        if (m->id == meter_id) {
            return m;
        }
    }
    m = xmalloc(sizeof *m);
    m->id = meter_id;
    ovs_list_init(&m->chains);
    hmap_insert(&chains->meters, &m->node, hash);
    return m;
}

/* Returns an id that no chain has. */
static uint32_t
new_id(struct edt_chains *chains)
    OVS_REQUIRES(chains->mutex)
{
    do {
        chains->last_id = (chains->last_id == EDT_CHAINS_LAST_ID
                           ? EDT_CHAINS_FIRST_ID : chains->last_id + 1);
    } while (find_by_id(chains, chains->last_id));
    return chains->last_id;
}

static void
link_init(struct edt_chains *chains, struct chain *c, uint32_t meter_id,
          bool late)
    OVS_REQUIRES(chains->mutex)
{
    struct chain_link *link = &c->links[c->n++];

    link->chain = c;
    link->meter_id = meter_id;
    link->late = late;
    ovs_list_push_back(&get_meter(chains, meter_id)->chains, &link->node);
}

/* Adds the chain of 'before' and 'meter_id', and returns its id.  (A packet
 * may still have a 'before' that has been removed: that has no meters.) */
static uint32_t
add_chain(struct edt_chains *chains, uint32_t before, uint32_t meter_id,
          bool late)
    OVS_REQUIRES(chains->mutex)
{
    const struct chain *prefix = find_by_id(chains, before);
    size_t n = (prefix ? prefix->n
                : before != EDT_CHAIN_NONE && !is_interned(before));
    struct chain *c = xmalloc(sizeof *c + (n + 1) * sizeof *c->links);

    c->before = before;
    c->id = new_id(chains);
    c->n = 0;
    for (size_t i = 0; i < n; i++) {
        link_init(chains, c, prefix ? prefix->links[i].meter_id : before,
                  prefix && prefix->links[i].late);
    }
    link_init(chains, c, meter_id, late);
    cmap_insert(&chains->by_id, &c->by_id, id_hash(c->id));
    cmap_insert(&chains->by_end, &c->by_end,
                end_hash(before, meter_id, late));
    return c->id;
}

/* Does what edt_chains_next() does for chains that are interned. */
uint32_t
edt_chains_next__(struct edt_chains *chains, uint32_t before,
                  uint32_t meter_id, bool late)
{
    static struct vlog_rate_limit rl = VLOG_RATE_LIMIT_INIT(1, 1);
    const struct chain *c = find_by_end(chains, before, meter_id, late);
    uint32_t id;

    if (OVS_LIKELY(c)) {
        return c->id;
    }

    ovs_mutex_lock(&chains->mutex);
    c = find_by_end(chains, before, meter_id, late);
    if (c) {
        id = c->id;
    } else if (cmap_count(&chains->by_id) < chains->max) {
        id = add_chain(chains, before, meter_id, late);
    } else {
        id = before;
    }
    ovs_mutex_unlock(&chains->mutex);

    if (OVS_UNLIKELY(id == before)) {
        COVERAGE_INC(edt_chains_full);
        VLOG_WARN_RL(&rl, "%"PRIu32" different chains of meters, no more are "
                     "told apart: packets may wait for others'", chains->max);
    }
    return id;
}

static void
chain_remove(struct edt_chains *chains, struct chain *c)
    OVS_REQUIRES(chains->mutex)
{
    const struct chain_link *last = &c->links[c->n - 1];

    cmap_remove(&chains->by_id, &c->by_id, id_hash(c->id));
    cmap_remove(&chains->by_end, &c->by_end,
                end_hash(c->before, last->meter_id, last->late));
    for (size_t i = 0; i < c->n; i++) {
        ovs_list_remove(&c->links[i].node);
    }
    ovsrcu_postpone(free, c);
}

/* Forgets all chains that 'meter_id' is in.  What waits with one of their ids
 * goes on.  Packets that pass the meter all the same make new chains. */
void
edt_chains_remove(struct edt_chains *chains, uint32_t meter_id)
{
    bool more = true;

    while (more) {
        struct chain_meter *m;
        size_t n = 0;

        ovs_mutex_lock(&chains->mutex);
        m = get_meter(chains, meter_id);
        while (!ovs_list_is_empty(&m->chains) && n++ < REMOVE_AT_ONCE) {
            struct chain_link *link
                = CONTAINER_OF(ovs_list_front(&m->chains), struct chain_link,
                               node);

            chain_remove(chains, link->chain);
        }
        more = !ovs_list_is_empty(&m->chains);
        if (!more) {
            hmap_remove(&chains->meters, &m->node);
            free(m);
        }
        ovs_mutex_unlock(&chains->mutex);
    }
}

static void
chains_free(struct edt_chains *chains)
{
    struct chain_meter *m;
    struct chain *c;

    CMAP_FOR_EACH (c, by_id, &chains->by_id) {
        ovsrcu_postpone(free, c);
    }
    cmap_destroy(&chains->by_id);
    cmap_destroy(&chains->by_end);
    ovs_mutex_lock(&chains->mutex);
    HMAP_FOR_EACH_POP (m, node, &chains->meters) {
        free(m);
    }
    hmap_destroy(&chains->meters);
    ovs_mutex_unlock(&chains->mutex);
    ovs_mutex_destroy(&chains->mutex);
    free(chains);
}

/* Destroys 'chains' (which may be NULL) when nobody reads them any more. */
void
edt_chains_destroy(struct edt_chains *chains)
{
    if (chains) {
        ovsrcu_postpone(chains_free, chains);
    }
}

/* Returns how many chains are interned.  Thread-safe. */
uint32_t
edt_chains_count(const struct edt_chains *chains)
{
    return cmap_count(&chains->by_id);
}

/* Stores in '*ends' what the chain 'id' is of.  A chain that has gone has no
 * meters. */
void
edt_chains_get(const struct edt_chains *chains, uint32_t id,
               struct edt_chain_ends *ends)
{
    const struct chain *c = find_by_id(chains, id);
    size_t n_late = 0;

    ends->first_meter = c ? c->links[0].meter_id : EDT_CHAIN_NONE;
    for (size_t i = 0; i < EDT_CHAINS_LATE; i++) {
        ends->late_meters[i] = EDT_CHAIN_NONE;
    }
    for (size_t i = 0; c && i < c->n && n_late < EDT_CHAINS_LATE; i++) {
        if (c->links[i].late) {
            ends->late_meters[n_late++] = c->links[i].meter_id;
        }
    }
    if (!is_interned(id)) {
        ends->first_meter = id;
    }
}

/* Stores in 'meters' the first 'max' meters of the chain 'id' and returns how
 * many it has: 0 if it has gone, or is EDT_CHAIN_NONE. */
size_t
edt_chains_meters(const struct edt_chains *chains, uint32_t id,
                  uint32_t *meters, size_t max)
{
    const struct chain *c = find_by_id(chains, id);

    if (c) {
        for (size_t i = 0; i < MIN(c->n, max); i++) {
            meters[i] = c->links[i].meter_id;
        }
        return c->n;
    }
    if (id == EDT_CHAIN_NONE || is_interned(id)) {
        return 0;
    }
    if (max) {
        meters[0] = id;
    }
    return 1;
}
