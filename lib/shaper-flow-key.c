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
#include "ovs-thread.h"
#include "shaper-l3.h"

OVS_ALIGNED_VAR(CACHE_LINE_SIZE) uint64_t shaper_flow_key_secret__[8];

/* What tells a flow of IPv6: addresses, ports, and protocol, each padded to
 * whole words. */
enum { FLOW_IPV6_WORDS = 10 };

/* For each word of a hash of it. */
static OVS_ALIGNED_VAR(CACHE_LINE_SIZE)
uint64_t flow_ipv6_secret[4][FLOW_IPV6_WORDS];

/* Chooses the hash functions of keys and in keys, once.  Thread-safe. */
void
shaper_flow_key_init(void)
{
    static struct ovsthread_once once = OVSTHREAD_ONCE_INITIALIZER;

    if (ovsthread_once_start(&once)) {
        get_entropy_or_die(shaper_flow_key_secret__,
                           sizeof shaper_flow_key_secret__);
        get_entropy_or_die(flow_ipv6_secret, sizeof flow_ipv6_secret);
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

/* Stores in 'hash' a hash of the flow of IPv6 'words' that stands for it: any
 * two have the same with a probability of about 2^-128, also if a sender has
 * chosen them, since he does not know the function.  (Whatever its seed, he
 * would know collisions of hash_bytes128().)  See shaper_flow_key_hash(). */
static void
hash_flow_ipv6(const uint32_t words[FLOW_IPV6_WORDS], uint64_t hash[2])
{
    uint32_t parts[ARRAY_SIZE(flow_ipv6_secret)];

    BUILD_ASSERT_DECL(sizeof parts == 2 * sizeof *hash);

    for (size_t i = 0; i < ARRAY_SIZE(parts); i++) {
        const uint64_t *secret = flow_ipv6_secret[i];
        uint64_t sum = 0;

        for (size_t j = 0; j < FLOW_IPV6_WORDS; j += 2) {
            sum += (secret[j] + words[j]) * (secret[j + 1] + words[j + 1]);
        }
        parts[i] = sum >> 32;
    }
    memcpy(hash, parts, sizeof parts);
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
        struct ovs_16aligned_ip6_hdr ip6;
        uint32_t words[FLOW_IPV6_WORDS];

        memcpy(&ip6, data + ofs, sizeof ip6);
        memcpy(&words[0], &ip6.ip6_src, sizeof ip6.ip6_src);
        memcpy(&words[4], &ip6.ip6_dst, sizeof ip6.ip6_dst);
        get_ports(packet, ofs + IPV6_HEADER_LEN, ip6.ip6_nxt, &words[8]);
        words[9] = ip6.ip6_nxt;
        key->addr_type = SHAPER_FLOW_IPV6;
        hash_flow_ipv6(words, key->addr);
    }
}
