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

#ifndef SHAPER_OFFLOAD_H
#define SHAPER_OFFLOAD_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dp-packet.h"
#include "dp-packet-gso.h"
#include "openvswitch/compiler.h"
#include "util.h"

/* Offloads, as the Open vSwitch release has them
 * ==============================================
 *
 * Open vSwitch 3.5 notes what is to be done to a packet when it is sent in the
 * flags of DPDK's mbufs.  4.0 has flags of its own, which are known by
 * DP_PACKET_OL_SHIFT_COUNT, and batches that grow when what is in them is cut
 * into segments.  What our files need to know of that is here. */

/* Returns true if 'packet' is to be cut into segments. */
static inline bool
shaper_is_tso(const struct dp_packet *packet)
{
#ifdef DP_PACKET_OL_SHIFT_COUNT
    return dp_packet_get_tso_segsz(packet) != 0;
#else
    return dp_packet_hwol_is_tso(packet);
#endif
}

/* Returns the payload of TSO packet 'packet', which a guest may have described
 * wrongly, or NULL if it cannot be cut up: then it has no TCP header or a
 * wrong one, or segments of no length. */
static inline const char *
shaper_tso_payload(struct dp_packet *packet)
{
#ifdef DP_PACKET_OL_SHIFT_COUNT
    bool is_tunnel = dp_packet_tunnel(packet);
#else
    bool is_tunnel = dp_packet_hwol_is_tunnel(packet);
#endif
    const char *payload = is_tunnel ? dp_packet_get_inner_tcp_payload(packet)
                                    : dp_packet_get_tcp_payload(packet);

    return payload && dp_packet_get_tso_segsz(packet) ? payload : NULL;
}

/* Returns true if the checksum in the outermost IPv4 header of 'packet' is yet
 * to be computed. */
static inline bool
shaper_ip_csum_pending(const struct dp_packet *packet)
{
#ifdef DP_PACKET_OL_SHIFT_COUNT
    return dp_packet_ip_checksum_partial(packet);
#else
    return dp_packet_hwol_l3_csum_ipv4_ol(packet);
#endif
}

/* Cuts TSO packet 'packet', of which it takes ownership, into its 'n_segs'
 * segments (at least one).  Returns batches of them and stores the number of
 * batches in '*n_batches'; the caller owns both, and frees the batches with
 * shaper_free_segments().  Not for a packet without shaper_tso_payload(). */
static inline struct dp_packet_batch *
shaper_segment(struct dp_packet *packet, uint32_t n_segs, size_t *n_batches)
{
    struct dp_packet_batch *batches;

#ifdef DP_PACKET_OL_SHIFT_COUNT
    ovs_assert(n_segs);
    *n_batches = 1;
    batches = xmalloc(sizeof *batches);
    dp_packet_batch_init_packet(batches, packet);
    dp_packet_gso_batch(batches);
#else
    struct dp_packet_batch *last;

    *n_batches = DIV_ROUND_UP(n_segs, NETDEV_MAX_BURST);
    batches = last = xmalloc(*n_batches * sizeof *batches);
    for (size_t i = 0; i < *n_batches; i++) {
        dp_packet_batch_init(&batches[i]);
    }
    /* Fails only without a segment size: then there are no segments. */
    dp_packet_gso(packet, &last);
    dp_packet_delete(packet);
#endif
    return batches;
}

/* Frees the 'n_batches' batches in 'batches', but not the packets in them. */
static inline void
shaper_free_segments(struct dp_packet_batch *batches,
                     size_t n_batches OVS_UNUSED)
{
#ifdef DP_PACKET_OL_SHIFT_COUNT
    for (size_t i = 0; i < n_batches; i++) {
        dp_packet_batch_destroy(&batches[i]);
    }
#endif
    free(batches);
}

#endif /* shaper-offload.h */
