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

#ifndef EDT_LATE_H
#define EDT_LATE_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dp_packet_batch;
struct edt_chains;
struct edt_meter;

/* Meters that reserve when packets are about to leave
 * ===================================================
 *
 * A meter that reserves time for packets when they arrive serves them in the
 * order of their arrival: all that pass it wait in one long line, and a small
 * flow stands behind all that a bulk flow of the same tenant has sent before.
 *
 * A *fair* meter only leaves its name in a packet's stamp when the packet
 * arrives.  Packets wait in a FIFO for each of their flows, and a FIFO
 * reserves time of its meters only for the packets that it sends next: up to
 * an MTU, its turn, which leaves together as if it were one packet.  So each
 * flow that has packets waiting has one turn in the meter's schedule at any
 * time, and the flows share the rate equally, as with deficit round robin
 * (Shreedhar and Varghese, 1995), by however many threads and ports they
 * leave.  A changed rate applies to packets that wait already.
 *
 * When a meter ceases to be fair, packets wait for it in this way that have
 * yet to get a time, and new ones get theirs on arrival.  So that these do not
 * get ahead, a FIFO whose turn comes then reserves for all that it holds.
 *
 * A turn is reserved from the moment on at which the FIFO's previous packet
 * was due, not from the later one at which a poll has found it to be, so that
 * late polls take nothing from the rate. */

/* Flags of stamps: which of a packet's two fair meters have yet to reserve. */
enum {
    EDT_LATE_FIRST = 1 << 0,
    EDT_LATE_LAST = 1 << 1,
    EDT_LATE = EDT_LATE_FIRST | EDT_LATE_LAST,

    /* A meter that is not fair has given the packet a time, and has asked for
     * room for it before ("shaper-thread.h"). */
    EDT_PROMISED = 1 << 2
};

/* How to find meters by the ids that stamps name them by. */
struct edt_finder {
    /* Returns the meter 'id' of 'aux', or NULL if there is none, in the way of
     * ovsrcu_get().  Must be thread-safe. */
    struct edt_meter *(*find)(const void *aux, uint32_t id);
    const void *aux;
};

/* What is about to leave, and of which meters it needs time. */
struct edt_turn {
    uint32_t first_meter;
    uint32_t last_meter;
    uint32_t late;                  /* EDT_LATE_*, not 0. */
    uint32_t gap_ns;                /* Of an MTU, if no meter is left. */
    uint32_t first_bytes;           /* Of the first packet. */
    uint32_t n_packets;
    uint32_t n_bytes;
    uint64_t arrival_ns;            /* Of the first packet. */
    uint64_t since_ns;              /* Not before 'arrival_ns'. */
    bool tentative;                 /* If it is refused, is it not dropped? */
};

/* What a turn was given. */
struct edt_grant {
    uint64_t edt_ns;                /* Of the first packet. */
    uint32_t n_bytes;               /* For how many bytes of the turn: all, or
                                     * just the first packet. */
    uint64_t max_delay_ns;          /* That the meters allow. */
    uint64_t ecn_threshold_ns;      /* Wait above which they want a packet to
                                     * be marked with CE, UINT64_MAX: none. */
    uint32_t gap_ns;                /* Of an MTU at the lower rate. */
    bool fair;                      /* Is one of the meters (still) fair, or
                                     * none left? */
};

bool edt_late_reserve(const struct edt_finder *, const struct edt_turn *,
                      struct edt_grant *);
void edt_late_count_drop(const struct edt_finder *, uint32_t meter_id,
                         uint32_t bytes);
uint32_t edt_late_police(const struct edt_finder *, const struct edt_chains *,
                         struct dp_packet_batch *, uint64_t now_ns);

#endif /* edt-late.h */
