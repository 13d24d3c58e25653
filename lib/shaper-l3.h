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

#ifndef SHAPER_L3_H
#define SHAPER_L3_H 1

#include <stddef.h>
#include <string.h>

#include "dp-packet.h"
#include "flow.h"
#include "packets.h"

/* Finds what is behind the Ethernet header of 'packet' and its VLAN tags, of
 * which there are up to FLOW_MAX_VLAN_HEADERS.  Returns its Ethernet type and
 * stores where it begins in '*ofs', which is not beyond the packet's end (but
 * may be at it).  Returns 0 for a packet that ends before that.
 *
 * The packet's own 'l3_ofs' does not say what it is the offset of.  The bytes
 * that do are those that this reads. */
static inline ovs_be16
shaper_l3_find(const struct dp_packet *packet, size_t *ofs)
{
    const uint8_t *data = dp_packet_data(packet);
    size_t size = dp_packet_size(packet);
    ovs_be16 eth_type;

    *ofs = 0;
    if (OVS_UNLIKELY(!dp_packet_is_eth(packet))) {
        return pt_ns(packet->packet_type) == OFPHTN_ETHERTYPE
               ? pt_ns_type_be(packet->packet_type) : 0;
    }
    if (OVS_UNLIKELY(size < ETH_HEADER_LEN)) {
        return 0;
    }

    *ofs = ETH_HEADER_LEN;
    memcpy(&eth_type, data + 2 * ETH_ADDR_LEN, sizeof eth_type);
    for (int i = 0; i < FLOW_MAX_VLAN_HEADERS && eth_type_vlan(eth_type);
         i++) {
        if (size < *ofs + VLAN_HEADER_LEN) {
            return 0;
        }
        memcpy(&eth_type, data + *ofs + 2, sizeof eth_type);
        *ofs += VLAN_HEADER_LEN;
    }
    return eth_type;
}

#endif /* shaper-l3.h */
