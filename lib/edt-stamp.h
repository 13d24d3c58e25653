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

#ifndef EDT_STAMP_H
#define EDT_STAMP_H 1

#include <stddef.h>
#include <stdint.h>

#include "edt-meter.h"

struct dp_packet;
struct dp_packet_batch;
struct edt_chains;
struct nlattr;

/* Meters that stamp packets
 * =========================
 *
 * A packet that passes a meter that shapes gets the meter's EDT or, if it has
 * a later one from another meter, keeps that (consolidation by maximum:
 * Carousel, SIGCOMM 2017, section 5.1.1).  The stamp is in the packet's
 * metadata, see struct edt_stamp in "packets.h".  It also says which meters
 * the packet has passed ("edt-chains.h").
 *
 * A packet that has to wait for a meter for longer than the meter's threshold
 * is marked with CE if its sender supports that ("shaper-ecn.h").  That says
 * at once what the packet's receiver would otherwise see when it has waited.
 *
 * Meters that follow each other directly in a list of actions admit packets
 * jointly: what a later one drops does not consume the rate of the earlier
 * ones.  The datapath keeps a 'struct edt_chain' while it executes a list of
 * actions, so that a reservation can be taken back.
 *
 * Fair meters ("edt-late.h") are only noted in stamps, and are not in struct
 * edt_chain.  What one of them drops, when the packet has waited, has consumed
 * nothing of the other fair one, but the time that meters that are not fair
 * have given it is lost: copies of the packet may have left, so that nobody
 * can tell whether it is theirs to give back. */

#define EDT_CHAIN_MAX 4

/* Segments that a meter admits of a batch: 32 TSO packets of 64 kB in segments
 * of 512 bytes.  Shapers cut them while others wait. */
#define EDT_STAMP_MAX_SEGMENTS 4096

struct edt_chain_link {
    struct edt_meter *meter;
    const struct edt_params *params;
    struct edt_reservation reservation;
};

/* The meters that the packets of a batch have just passed.  Zero-initialize
 * 'n' at the start of a list of actions.  Belongs to one thread, which must
 * not quiesce while it is in use. */
struct edt_chain {
    size_t n;                       /* Number of links. */
    const struct nlattr *next;      /* Where the next meter action would be. */
    const struct dp_packet_batch *batch;
    const void *first_packet;
    size_t n_packets;
    struct edt_chain_link links[EDT_CHAIN_MAX];
};

void edt_chain_begin(struct edt_chain *, const struct nlattr *action,
                     const struct dp_packet_batch *);
void edt_chain_end(struct edt_chain *, const struct nlattr *action,
                   const struct dp_packet_batch *);
void edt_chain_refund(struct edt_chain *, const struct edt_amount *kept,
                      const struct edt_amount *dropped, bool tail);

/* What edt_stamp_batch() did. */
struct edt_stamp_result {
    uint64_t n_packets;             /* In the batch at first. */
    uint64_t n_bytes;
    uint64_t n_dropped;             /* Of them. */
    uint64_t n_dropped_bytes;
};

void edt_stamp_batch(struct edt_chains *, struct edt_chain *,
                     struct edt_meter *, const struct edt_params *,
                     uint32_t meter_id, struct dp_packet_batch *,
                     uint32_t room, uint64_t now_ns,
                     struct edt_stamp_result *);
uint32_t edt_stamp_n_segments(struct dp_packet *);
struct edt_amount edt_stamp_tso_amount(struct dp_packet *);

#endif /* edt-stamp.h */
