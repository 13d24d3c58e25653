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

#include "edt-late.h"

#include "dp-packet.h"
#include "edt-chains.h"
#include "edt-meter.h"
#include "packets.h"
#include "util.h"

/* A meter of a turn. */
struct late_meter {
    struct edt_meter *meter;
    const struct edt_params *params;
    struct edt_reservation reservation;
};

/* Finds the meter 'id' if 'late' says that it has yet to reserve, and if it
 * (still) assigns departure times.  Returns how many it has found. */
static size_t
late_find(const struct edt_finder *finder, uint32_t id, bool late,
          struct late_meter *m)
{
    m->meter = late ? finder->find(finder->aux, id) : NULL;
    m->params = m->meter ? edt_meter_params(m->meter) : NULL;
    return m->params != NULL;
}

/* Reserves time for 'turn' of all its meters and fills in '*grant'.  Returns
 * false if the first packet would have to wait longer than one of them allows;
 * then no time is consumed, and that meter has counted the packet as dropped,
 * unless 'turn' is tentative.
 *
 * If none of the meters shapes any more, each FIFO goes on at the rate they
 * had: what still waits leaves at up to as many times the rate as there are
 * FIFOs, but not as a burst.
 *
 * Thread-safe. */
bool
edt_late_reserve(const struct edt_finder *finder, const struct edt_turn *turn,
                 struct edt_grant *grant)
{
    struct late_meter meters[2];
    struct edt_amount amount = { turn->n_bytes, turn->n_packets };
    size_t n = 0;

    n += late_find(finder, turn->first_meter, turn->late & EDT_LATE_FIRST,
                   &meters[n]);
    n += late_find(finder, turn->last_meter, turn->late & EDT_LATE_LAST,
                   &meters[n]);

    grant->edt_ns = turn->since_ns;
    grant->max_delay_ns = grant->ecn_threshold_ns = UINT64_MAX;
    grant->gap_ns = 0;
    grant->fair = !n;
    for (size_t i = 0; i < n; i++) {
        if (meters[i].params->limits.per_packet) {
            /* Where packets count, a turn is one packet. */
            amount.bytes = turn->first_bytes;
            amount.packets = 1;
        }
    }
    grant->n_bytes = amount.bytes;

    for (size_t i = 0; i < n; i++) {
        struct late_meter *m = &meters[i];

        if (!edt_meter_reserve_late(m->meter, m->params, turn->since_ns,
                                    turn->arrival_ns,
                                    edt_units(m->params, &amount),
                                    &m->reservation)) {
            for (size_t j = 0; j < i; j++) {
                edt_meter_refund(meters[j].meter, meters[j].params,
                                 &meters[j].reservation, 0,
                                 edt_units(meters[j].params, &amount), true);
            }
            if (!turn->tentative) {
                edt_meter_count_drop(m->meter, turn->first_bytes);
            }
            return false;
        }

        uint64_t edt_ns = edt_reservation_edt_ns(&m->reservation, m->params,
                                                 turn->since_ns, 0);

        grant->fair |= m->params->limits.fair;
        grant->edt_ns = MAX(grant->edt_ns, edt_ns);
        grant->gap_ns = MAX(grant->gap_ns, m->params->gap_ns);
        grant->max_delay_ns = MIN(grant->max_delay_ns,
                                  m->params->limits.max_delay_us * 1000);
        grant->ecn_threshold_ns = MIN(grant->ecn_threshold_ns,
                                      m->params->ecn_threshold_ticks
                                      >> EDT_TICK_SHIFT);
    }
    if (!n) {
        grant->gap_ns = turn->gap_ns;
        grant->edt_ns += (uint64_t) turn->n_bytes * turn->gap_ns
                         / EDT_MTU_BYTES;
    }
    return true;
}

/* Counts a packet of 'bytes' bytes as dropped by the meter 'meter_id', if that
 * exists.  Thread-safe. */
void
edt_late_count_drop(const struct edt_finder *finder, uint32_t meter_id,
                    uint32_t bytes)
{
    struct edt_meter *meter = finder->find(finder->aux, meter_id);

    if (meter) {
        edt_meter_count_drop(meter, bytes);
    }
}

/* For packets that go to a port without a shaper at 'now_ns', where nothing
 * can wait: makes their meters, those that have yet to, reserve, and drops
 * from 'batch' the packets that these refuse, so that the port gets ahead of a
 * rate by no more than the meter's longest wait.  'chains' are those of the
 * packets' stamps.  Returns a bitmap of the packets that stay; the meters have
 * counted the others.  Thread-safe. */
uint32_t
edt_late_police(const struct edt_finder *finder,
                const struct edt_chains *chains,
                struct dp_packet_batch *batch, uint64_t now_ns)
{
    const size_t size = dp_packet_batch_size(batch);
    struct dp_packet *packet;
    uint32_t kept = 0;
    size_t i;

    BUILD_ASSERT_DECL(NETDEV_MAX_BURST <= 32);

    DP_PACKET_BATCH_REFILL_FOR_EACH (i, size, packet, batch) {
        const struct edt_stamp *stamp = &packet->md.edt;
        const bool late = packet->md.edt_valid && stamp->flags & EDT_LATE;
        struct edt_chain_ends ends = { .first_meter = EDT_CHAIN_NONE };
        struct edt_grant grant;

        if (late) {
            edt_chains_get(chains, stamp->chain, &ends);
        }

        const struct edt_turn turn = {
            .first_meter = ends.late_meters[0],
            .last_meter = ends.late_meters[1],
            .late = stamp->flags & EDT_LATE,
            .first_bytes = dp_packet_size(packet),
            .n_packets = 1,
            .n_bytes = dp_packet_size(packet),
            .arrival_ns = now_ns,
            .since_ns = now_ns,
        };

        if (!late || edt_late_reserve(finder, &turn, &grant)) {
            kept |= UINT32_C(1) << i;
            dp_packet_batch_add(batch, packet);
        } else {
            dp_packet_delete(packet);
        }
    }
    return kept;
}
