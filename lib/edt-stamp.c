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

#include "edt-stamp.h"

#include "coverage.h"
#include "dp-packet.h"
#include "dp-packet-gso.h"
#include "edt-chains.h"
#include "edt-late.h"
#include "netlink.h"
#include "packets.h"
#include "shaper-ecn.h"
#include "shaper-offload.h"
#include "userspace-tso.h"
#include "util.h"

COVERAGE_DEFINE(datapath_meter_ecn_marked);

/* Prepares 'chain' for the meter action 'action' on 'batch': forgets the
 * meters in it unless 'action' comes directly after them and finds the same
 * packets. */
void
edt_chain_begin(struct edt_chain *chain, const struct nlattr *action,
                const struct dp_packet_batch *batch)
{
    if (chain->n
        && (chain->next != action || chain->batch != batch
            || chain->n_packets != dp_packet_batch_size(batch)
            || chain->first_packet != batch->packets[0])) {
        chain->n = 0;
    }
}

/* Notes that 'action' has been executed on 'batch'. */
void
edt_chain_end(struct edt_chain *chain, const struct nlattr *action,
              const struct dp_packet_batch *batch)
{
    chain->next = nl_attr_next(action);
    chain->batch = batch;
    chain->n_packets = dp_packet_batch_size(batch);
    chain->first_packet = chain->n_packets ? batch->packets[0] : NULL;
}

/* Gives the time of the packets that amount to 'dropped' back to the meters in
 * 'chain', those that amount to 'kept' being the batch's others.  'tail' says
 * that the dropped packets were the last ones. */
void
edt_chain_refund(struct edt_chain *chain, const struct edt_amount *kept,
                 const struct edt_amount *dropped, bool tail)
{
    for (size_t i = 0; i < chain->n; i++) {
        struct edt_chain_link *link = &chain->links[i];
        uint32_t kept_units = edt_units(link->params, kept);

        edt_meter_refund(link->meter, link->params, &link->reservation,
                         kept_units, edt_units(link->params, dropped), tail);
        if (tail) {
            link->reservation.end_ticks = link->reservation.base_ticks
                + edt_cost(link->params, kept_units);
        }
    }
}

/* Returns how many packets TSO packet 'packet' is on the wire, 0 if it cannot
 * be cut up. */
uint32_t
edt_stamp_n_segments(struct dp_packet *packet)
{
    int n_segs = (shaper_tso_payload(packet)
                  ? dp_packet_gso_nr_segs(packet) : 0);

    return MAX(n_segs, 0);
}

/* Returns what TSO packet 'packet' will be on the wire, where it is several
 * packets, each with its headers. */
struct edt_amount
edt_stamp_tso_amount(struct dp_packet *packet)
{
    const char *payload = shaper_tso_payload(packet);
    struct edt_amount amount = { dp_packet_size(packet), 1 };

    if (payload) {
        uint32_t header = payload - (char *) dp_packet_data(packet);

        amount.packets = MAX(edt_stamp_n_segments(packet), 1);
        amount.bytes += (amount.packets - 1) * header;
    }
    return amount;
}

/* Stores in 'ends[i]' how many packets the packets 0 to i of 'batch' are on
 * the wire, where a TSO packet is several. */
static void
count_packets(struct dp_packet_batch *batch, bool tso_enabled, uint32_t *ends)
{
    struct dp_packet *packet;
    uint32_t packets = 0;

    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        if (OVS_UNLIKELY(tso_enabled) && shaper_is_tso(packet)) {
            packets += edt_stamp_tso_amount(packet).packets;
        } else {
            packets++;
        }
        ends[i] = packets;
    }
}

/* What a meter makes of the chains of packets that pass it.  Neighbors in a
 * batch mostly have the same one. */
struct chain_step {
    struct edt_chains *chains;
    uint32_t meter_id;
    bool late;
    uint32_t before;
    uint32_t after;                 /* 'before' and the meter. */
};

static inline struct chain_step
chain_step_init(struct edt_chains *chains, uint32_t meter_id, bool late)
{
    return (struct chain_step) {
        chains, meter_id, late, EDT_CHAIN_NONE,
        edt_chains_next(chains, EDT_CHAIN_NONE, meter_id, late)
    };
}

/* Returns the chain of 'packet', which has passed 'step->before', from now
 * on. */
static inline uint32_t
chain_step_next(struct chain_step *step, const struct dp_packet *packet)
{
    uint32_t before = packet->md.edt_valid ? packet->md.edt.chain
                                           : EDT_CHAIN_NONE;

    if (OVS_UNLIKELY(before != step->before)) {
        step->before = before;
        step->after = edt_chains_next(step->chains, before, step->meter_id,
                                      step->late);
    }
    return step->after;
}

/* Notes in the stamps of 'batch' that 'meter_id', with parameters 'p', is to
 * reserve time for the packets when they are about to leave ("edt-late.h").
 * Returns false, having done nothing, if there are packets among them of which
 * two meters are already to do so, or if there can be no more 'chains'. */
static bool
stamp_late(struct edt_chains *chains, struct dp_packet_batch *batch,
           const struct edt_params *p, uint32_t meter_id, uint64_t now_ns)
{
    struct chain_step step = chain_step_init(chains, meter_id, true);
    struct dp_packet *packet;

    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        if ((packet->md.edt_valid
             && (packet->md.edt.flags & EDT_LATE) == EDT_LATE)
            || chain_step_next(&step, packet) == step.before) {
            return false;
        }
    }
    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        const uint32_t chain = chain_step_next(&step, packet);
        struct edt_stamp *stamp = &packet->md.edt;

        if (!packet->md.edt_valid) {
            pkt_metadata_set_edt(&packet->md, &(struct edt_stamp) {
                .edt_ns = now_ns,
                .chain = chain,
                .gap_ns = p->gap_ns,
                .flags = EDT_LATE_FIRST,
            });
            continue;
        }
        /* A burst that another meter lets go at once has EDTs in the past,
         * from which on this one is not to have saved time. */
        stamp->edt_ns = MAX(stamp->edt_ns, now_ns);
        stamp->chain = chain;
        stamp->gap_ns = MAX(stamp->gap_ns, p->gap_ns);
        stamp->flags |= (stamp->flags & EDT_LATE_FIRST
                         ? EDT_LATE_LAST : EDT_LATE_FIRST);
    }
    return true;
}

/* Marks those packets of 'batch' with CE, the last ones, that wait for longer
 * than the threshold of 'p'.  'r' is their reservation at 'now_ns', 'ends[i]'
 * the units of packets 0 to i. */
static void
mark_late(struct dp_packet_batch *batch, const struct edt_params *p,
          const struct edt_reservation *r, const uint32_t *ends,
          uint64_t now_ns)
{
    const uint64_t now = now_ns << EDT_TICK_SHIFT;

    for (size_t i = dp_packet_batch_size(batch); i > 0; i--) {
        uint64_t edt = r->base_ticks + edt_cost(p, i > 1 ? ends[i - 2] : 0);

        if ((int64_t) (edt - now) <= (int64_t) p->ecn_threshold_ticks) {
            break;
        }
        if (shaper_ecn_mark(batch->packets[i - 1]) == SHAPER_ECN_SET) {
            COVERAGE_INC(datapath_meter_ecn_marked);
        }
    }
}

/* Makes the packets of 'batch' pass 'meter', with parameters 'p' and datapath
 * id 'meter_id', at 'now_ns': stamps those that 'meter' admits, marks with CE
 * those of them that wait for longer than the threshold of 'p' and support
 * that, and deletes the others, giving their time back to the meters in
 * 'chain', which 'meter' then joins.  A fair meter admits all of them, unless
 * two others before it are fair: then it does as if it were not, and its rate
 * is kept all the same.  No other meter admits more than the first 'room'
 * packets, as they are on the wire, which is what shapers can hold.  'chains'
 * are those of the packets' stamps.  Stores what happened in '*result'. */
void
edt_stamp_batch(struct edt_chains *chains, struct edt_chain *chain,
                struct edt_meter *meter, const struct edt_params *p,
                uint32_t meter_id, struct dp_packet_batch *batch,
                uint32_t room, uint64_t now_ns,
                struct edt_stamp_result *result)
{
    const size_t n = dp_packet_batch_size(batch);
    const bool tso_enabled = userspace_tso_enabled();
    uint32_t embedded[2 * NETDEV_MAX_BURST];
    /* What software cuts into segments before it encapsulates that is more. */
    uint32_t *allocated = OVS_UNLIKELY(n > NETDEV_MAX_BURST)
                          ? xmalloc(2 * n * sizeof *allocated) : NULL;
    uint32_t *byte_ends = allocated ? allocated : embedded;
    uint32_t *packet_ends = byte_ends + MAX(n, NETDEV_MAX_BURST);
    const uint32_t *ends = byte_ends;   /* In the meter's units. */
    bool counted = false;               /* Is 'packet_ends' filled in? */
    struct edt_reservation r;
    struct dp_packet *packet;
    uint32_t bytes = 0;
    size_t admitted;

    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        if (OVS_UNLIKELY(tso_enabled) && shaper_is_tso(packet)) {
            bytes += edt_stamp_tso_amount(packet).bytes;
        } else {
            bytes += dp_packet_size(packet);
        }
        /* edt_cost() takes no more. */
        bytes = MIN(bytes, EDT_MAX_BATCH_UNITS);
        byte_ends[i] = bytes;
    }
    if (OVS_UNLIKELY(p->limits.fair)
        && stamp_late(chains, batch, p, meter_id, now_ns)) {
        *result = (struct edt_stamp_result) {
            .n_packets = n,
            .n_bytes = bytes,
        };
        free(allocated);
        return;
    }
    if (p->limits.per_packet || OVS_UNLIKELY(tso_enabled)) {
        count_packets(batch, tso_enabled, packet_ends);
        counted = true;
    }
    if (p->limits.per_packet) {
        ends = packet_ends;
    }

    admitted = MIN(n, room);
    if (OVS_UNLIKELY(tso_enabled)) {
        room = MIN(room, MAX(EDT_STAMP_MAX_SEGMENTS, n));
        while (admitted && packet_ends[admitted - 1] > room) {
            admitted--;
        }
    }
    if (OVS_LIKELY(admitted)) {
        admitted = edt_meter_reserve(meter, p, now_ns, ends, admitted, &r);
    }
    uint32_t kept_bytes = admitted ? byte_ends[admitted - 1] : 0;
    struct chain_step step = chain_step_init(chains, meter_id, false);

    for (size_t i = 0; i < admitted; i++) {
        const uint32_t passed = chain_step_next(&step, batch->packets[i]);
        struct pkt_metadata *md = &batch->packets[i]->md;
        struct edt_stamp *stamp = &md->edt;
        uint64_t edt_ns = edt_reservation_edt_ns(&r, p, now_ns,
                                                 i ? ends[i - 1] : 0);

        if (!md->edt_valid) {
            md->edt_valid = true;
            stamp->edt_ns = edt_ns;
            stamp->gap_ns = p->gap_ns;
            stamp->flags = EDT_PROMISED;
        } else {
            if (edt_ns > stamp->edt_ns) {
                stamp->edt_ns = edt_ns;
                stamp->gap_ns = p->gap_ns;
            }
            stamp->flags |= EDT_PROMISED;
        }
        stamp->chain = passed;
    }

    result->n_packets = n;
    result->n_bytes = bytes;
    result->n_dropped = n - admitted;
    result->n_dropped_bytes = bytes - kept_bytes;

    if (OVS_UNLIKELY(admitted < n)) {
        /* Meters before this one may count either. */
        if (!counted) {
            count_packets(batch, tso_enabled, packet_ends);
        }

        uint32_t kept_packets = admitted ? packet_ends[admitted - 1] : 0;
        const struct edt_amount kept = { kept_bytes, kept_packets };
        const struct edt_amount dropped = {
            bytes - kept_bytes, packet_ends[n - 1] - kept_packets
        };

        for (size_t i = admitted; i < n; i++) {
            dp_packet_delete(batch->packets[i]);
        }
        batch->count = admitted;
        edt_chain_refund(chain, &kept, &dropped, true);
    }

    /* Who would come after the last packet waits longer than any of them. */
    if (OVS_UNLIKELY(admitted
                     && (int64_t) (r.end_ticks - (now_ns << EDT_TICK_SHIFT))
                        > (int64_t) p->ecn_threshold_ticks)) {
        mark_late(batch, p, &r, ends, now_ns);
    }

    if (admitted && chain->n < EDT_CHAIN_MAX) {
        struct edt_chain_link *link = &chain->links[chain->n++];

        link->meter = meter;
        link->params = p;
        link->reservation = r;
    }
    free(allocated);
}
