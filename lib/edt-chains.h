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

#ifndef EDT_CHAINS_H
#define EDT_CHAINS_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "openvswitch/compiler.h"

/* Which meters a packet has passed
 * ================================
 *
 * A chain is a sequence of meters, in the order in which a packet has passed
 * them.  A packet's stamp (struct edt_stamp in "packets.h") has the id of its
 * chain, so that one number tells whether two packets have passed the same
 * meters, however many these are.  Each meter that stamps a packet makes a
 * longer chain of the one before: edt_chains_next().
 *
 * Properties
 * ----------
 *
 *  * The chain of a single meter, the most frequent one, needs no table: its
 *    id is the meter's.
 *
 *  * Longer ones, and those that begin with a fair meter, are interned: the
 *    chain before and the meter are looked up in a hash map, without a lock or
 *    an atomic read-modify-write.  Only the first packet of a new chain takes
 *    a mutex and allocates memory.
 *
 *  * Ids are not used again for as long as others are left, that is after
 *    2^31: what still waits with an id is never taken for another chain's.
 *
 *  * Bounded: there are at most as many interned chains as
 *    edt_chains_create() was told.  When there are no more, packets keep the
 *    chain they had before, which is logged and counted (coverage counter
 *    "edt_chains_full"): then packets of several chains are taken for one.
 *
 *  * When a meter goes, so do the chains that it is in.
 *
 * Thread-safety
 * -------------
 *
 *  edt_chains_next(), edt_chains_get() and edt_chains_meters() may be called
 *  by any number of RCU readers, edt_chains_remove() by any thread. */

/* Id of the chain of a packet that has passed no meter, and of no meter. */
#define EDT_CHAIN_NONE UINT32_MAX

/* What an interned chain is known by is from here on, up to
 * EDT_CHAINS_LAST_ID.  Ids of meters are outside of this. */
#define EDT_CHAINS_FIRST_ID (UINT32_C(1) << 18)
#define EDT_CHAINS_LAST_ID (UINT32_MAX / 2)

/* Interned chains in a datapath: all pairs of 1024 senders and as many
 * destinations that have meters. */
#define EDT_CHAINS_MAX (UINT32_C(1) << 20)

/* Fair meters of a chain that reserve time when packets leave. */
#define EDT_CHAINS_LATE 2

struct edt_chains;

/* What FIFOs need to know of a chain. */
struct edt_chain_ends {
    uint32_t first_meter;           /* EDT_CHAIN_NONE if there is none. */
    uint32_t late_meters[EDT_CHAINS_LATE]; /* Those with 'late', in order;
                                            * EDT_CHAIN_NONE for none. */
};

struct edt_chains *edt_chains_create(uint32_t max);
void edt_chains_destroy(struct edt_chains *);
void edt_chains_remove(struct edt_chains *, uint32_t meter_id);
uint32_t edt_chains_count(const struct edt_chains *);

uint32_t edt_chains_next__(struct edt_chains *, uint32_t before,
                           uint32_t meter_id, bool late);
void edt_chains_get(const struct edt_chains *, uint32_t id,
                    struct edt_chain_ends *);
size_t edt_chains_meters(const struct edt_chains *, uint32_t id,
                         uint32_t *meters, size_t max);

/* Returns the id of the chain of a packet that was that of 'before'
 * (EDT_CHAIN_NONE if it has passed no meter) and now has passed 'meter_id',
 * which is 'late' if it is fair and yet to reserve time ("edt-late.h").
 * Returns 'before' if there can be no more chains in 'chains', which only what
 * is longer than one meter, or begins with one that is late, needs. */
static inline uint32_t
edt_chains_next(struct edt_chains *chains, uint32_t before, uint32_t meter_id,
                bool late)
{
    return (OVS_LIKELY(before == EDT_CHAIN_NONE && !late) ? meter_id
            : edt_chains_next__(chains, before, meter_id, late));
}

#endif /* edt-chains.h */
