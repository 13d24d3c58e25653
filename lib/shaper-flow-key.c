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

#include <netinet/in.h>
#include <netinet/ip6.h>
#include <string.h>

#include "entropy.h"
#include "hash.h"
#include "ovs-thread.h"
#include "shaper-l3.h"

OVS_ALIGNED_VAR(CACHE_LINE_SIZE) uint64_t shaper_flow_key_secret__[8];

/* Chooses the hash function of keys, once.  Thread-safe. */
void
shaper_flow_key_init(void)
{
    static struct ovsthread_once once = OVSTHREAD_ONCE_INITIALIZER;

    if (ovsthread_once_start(&once)) {
        get_entropy_or_die(shaper_flow_key_secret__,
                           sizeof shaper_flow_key_secret__);
        ovsthread_once_done(&once);
    }
}

/* Finds the first IP header of 'packet'.  Returns false if there is none that
 * is complete; otherwise stores its offset and its Ethernet type. */
static bool
find_ip(const struct dp_packet *packet, size_t *ofs, uint16_t *type)
{
    size_t size = dp_packet_size(packet);

    *type = ntohs(shaper_l3_find(packet, ofs));
    return ((*type == ETH_TYPE_IP && size >= *ofs + IP_HEADER_LEN)
            || (*type == ETH_TYPE_IPV6 && size >= *ofs + IPV6_HEADER_LEN));
}

/* Stores in '*key' the first 'n' bytes of the MAC addresses of 'packet', or
 * nothing if it has none. */
static void
set_macs(struct shaper_flow_key *key, const struct dp_packet *packet, size_t n)
{
    if (OVS_LIKELY(dp_packet_is_eth(packet)
                   && dp_packet_size(packet) >= ETH_HEADER_LEN)) {
        memcpy(key->addr, dp_packet_data(packet), n);
    }
}

/* Fills in the destination of 'packet', whatever it is. */
void
shaper_flow_key_set_addr__(struct shaper_flow_key *key,
                           const struct dp_packet *packet)
{
    const uint8_t *data = dp_packet_data(packet);
    uint16_t type;
    size_t ofs;

    memset(key->addr, 0, sizeof key->addr);
    if (!find_ip(packet, &ofs, &type)) {
        key->addr_type = SHAPER_ADDR_ETH;
        set_macs(key, packet, ETH_ADDR_LEN);
    } else if (type == ETH_TYPE_IP) {
        key->addr_type = SHAPER_ADDR_IPV4;
        memcpy(key->addr, data + ofs + offsetof(struct ip_header, ip_dst), 4);
    } else {
        key->addr_type = SHAPER_ADDR_IPV6;
        memcpy(key->addr,
               data + ofs + offsetof(struct ovs_16aligned_ip6_hdr, ip6_dst),
               16);
    }
}

/* Stores at 'ports' the four bytes of source and destination port of 'packet',
 * which has protocol 'proto' at 'ofs', or zeros if it has none. */
static void
get_ports(const struct dp_packet *packet, size_t ofs, uint8_t proto,
          void *ports)
{
    if ((proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP)
        && dp_packet_size(packet) >= ofs + 4) {
        memcpy(ports, (const uint8_t *) dp_packet_data(packet) + ofs, 4);
    } else {
        memset(ports, 0, 4);
    }
}

/* Fills in the flow that 'packet' belongs to. */
void
shaper_flow_key_set_flow__(struct shaper_flow_key *key,
                           const struct dp_packet *packet)
{
    const uint8_t *data = dp_packet_data(packet);
    uint16_t type;
    size_t ofs;

    if (!find_ip(packet, &ofs, &type)) {
        memset(key->addr, 0, sizeof key->addr);
        key->addr_type = SHAPER_FLOW_ETH;
        set_macs(key, packet, 2 * ETH_ADDR_LEN);
    } else if (type == ETH_TYPE_IP) {
        struct ip_header ip;

        memcpy(&ip, data + ofs, sizeof ip);
        key->addr_type = SHAPER_FLOW_IPV4;
        key->ipv4.src = get_16aligned_be32(&ip.ip_src);
        key->ipv4.dst = get_16aligned_be32(&ip.ip_dst);
        key->ipv4.proto = ip.ip_proto;
        get_ports(packet, ofs + MAX(IP_IHL(ip.ip_ihl_ver) * 4, IP_HEADER_LEN),
                  IP_IS_FRAGMENT(ip.ip_frag_off) ? 0 : ip.ip_proto,
                  &key->ipv4.src_port);
    } else {
        struct {
            struct ovs_16aligned_ip6_hdr ip6;
            uint8_t ports[4];
        } flow;
        uint8_t proto;
        ovs_u128 hash;

        memcpy(&flow.ip6, data + ofs, sizeof flow.ip6);
        proto = flow.ip6.ip6_nxt;
        get_ports(packet, ofs + IPV6_HEADER_LEN, proto, flow.ports);
        /* Only what is the same in all packets of a flow. */
        memset(&flow.ip6, 0, offsetof(struct ovs_16aligned_ip6_hdr, ip6_src));
        flow.ip6.ip6_nxt = proto;
        hash_bytes128(&flow, sizeof flow, 0, &hash);
        key->addr_type = SHAPER_FLOW_IPV6;
        key->addr[0] = hash.u64.lo;
        key->addr[1] = hash.u64.hi;
    }
}
