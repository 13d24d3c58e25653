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

#include "shaper-flow-key.h"

#include <string.h>

#include "shaper-l3.h"

/* Fills in the destination of 'packet', whatever it is. */
void
shaper_flow_key_set_addr__(struct shaper_flow_key *key,
                           const struct dp_packet *packet)
{
    const uint8_t *data = dp_packet_data(packet);
    size_t size = dp_packet_size(packet);
    ovs_be16 eth_type;
    size_t ofs;

    key->addr_type = SHAPER_ADDR_ETH;
    memset(key->addr, 0, sizeof key->addr);
    if (OVS_UNLIKELY(size < ETH_HEADER_LEN)) {
        return;
    }

    eth_type = shaper_l3_find(packet, &ofs);
    if (eth_type == htons(ETH_TYPE_IP) && size >= ofs + IP_HEADER_LEN) {
        key->addr_type = SHAPER_ADDR_IPV4;
        memcpy(key->addr, data + ofs + offsetof(struct ip_header, ip_dst), 4);
    } else if (eth_type == htons(ETH_TYPE_IPV6)
               && size >= ofs + IPV6_HEADER_LEN) {
        key->addr_type = SHAPER_ADDR_IPV6;
        memcpy(key->addr,
               data + ofs + offsetof(struct ovs_16aligned_ip6_hdr, ip6_dst),
               16);
    } else {
        memcpy(key->addr, data, ETH_ADDR_LEN);
    }
}
