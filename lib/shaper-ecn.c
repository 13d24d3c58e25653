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

#include "shaper-ecn.h"

#include "csum.h"
#include "dp-packet.h"
#include "packets.h"
#include "shaper-l3.h"
#include "shaper-offload.h"
#include "unaligned.h"

/* Offsets in an IPv4 header. */
#define IPV4_TOS_OFS offsetof(struct ip_header, ip_tos)
#define IPV4_CSUM_OFS offsetof(struct ip_header, ip_csum)

/* An IPv6 header begins with four bits of version, eight of traffic class, the
 * last two of which are those of ECN, and 20 of flow label. */
#define IPV6_ECN_OFS 1
#define IPV6_ECN_SHIFT 4

/* Returns what is to be said of a packet with ECN field 'ecn'. */
static enum shaper_ecn
classify(uint8_t ecn)
{
    switch (ecn & IP_ECN_MASK) {
    case IP_ECN_NOT_ECT: return SHAPER_ECN_NOT_ECT;
    case IP_ECN_CE: return SHAPER_ECN_WAS_SET;
    default: return SHAPER_ECN_SET;
    }
}

static enum shaper_ecn
mark_ipv4(struct dp_packet *packet, uint8_t *ip, size_t size)
{
    size_t header_len;
    enum shaper_ecn result;

    if (size < IP_HEADER_LEN || IP_VER(ip[0]) != 4) {
        return SHAPER_ECN_NOT_ECT;
    }
    header_len = IP_IHL(ip[0]) * 4;
    if (header_len < IP_HEADER_LEN || header_len > size) {
        return SHAPER_ECN_NOT_ECT;
    }

    result = classify(ip[IPV4_TOS_OFS]);
    if (result == SHAPER_ECN_SET) {
        uint8_t tos = ip[IPV4_TOS_OFS];
        ovs_be16 *csum = ALIGNED_CAST(ovs_be16 *, ip + IPV4_CSUM_OFS);

        ip[IPV4_TOS_OFS] = tos | IP_ECN_CE;

        /* What is to be offloaded has yet to be computed: devices may expect
         * what is in its place.  Otherwise the checksum is right afterwards
         * if it was before (RFC 1624, equation 3), and flags that say so
         * still hold. */
        if (!shaper_ip_csum_pending(packet)) {
            put_unaligned_be16(csum,
                               recalc_csum16(get_unaligned_be16(csum),
                                             htons(tos),
                                             htons(tos | IP_ECN_CE)));
        }
    }
    return result;
}

static enum shaper_ecn
mark_ipv6(uint8_t *ip, size_t size)
{
    enum shaper_ecn result;

    if (size < IPV6_HEADER_LEN || ip[0] >> 4 != 6) {
        return SHAPER_ECN_NOT_ECT;
    }
    result = classify(ip[IPV6_ECN_OFS] >> IPV6_ECN_SHIFT);
    ip[IPV6_ECN_OFS] |= result == SHAPER_ECN_SET
                        ? IP_ECN_CE << IPV6_ECN_SHIFT : 0;
    return result;
}

/* Marks 'packet' with CE if its sender supports that, and says what it did.
 * Changes the IP header in place, with up to two VLAN tags before it, and
 * reads nothing beyond the packet's data.  The caller owns 'packet'.
 *
 * Of a packet that a tunnel has encapsulated this is the outer header.  The
 * tunnel's far end copies CE into the inner one (RFC 6040 section 4.2), which
 * supports that, too: a tunnel makes the outer header ECT only if the inner
 * one is ECT or CE. */
enum shaper_ecn
shaper_ecn_mark(struct dp_packet *packet)
{
    size_t ofs;
    ovs_be16 eth_type = shaper_l3_find(packet, &ofs);
    uint8_t *ip = (uint8_t *) dp_packet_data(packet) + ofs;
    size_t size = dp_packet_size(packet) - ofs;

    if (OVS_LIKELY(eth_type == htons(ETH_TYPE_IP))) {
        return mark_ipv4(packet, ip, size);
    }
    return eth_type == htons(ETH_TYPE_IPV6) ? mark_ipv6(ip, size)
                                            : SHAPER_ECN_NOT_ECT;
}
