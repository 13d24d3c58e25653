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
#ifndef SHAPER_FLOW_KEY_H
#define SHAPER_FLOW_KEY_H 1

#include <stdbool.h>
#include <stdint.h>

#include "dp-packet.h"
#include "edt-chains.h"
#include "edt-late.h"
#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "packets.h"

/* Identity of the FIFO in which a packet waits
 * ============================================
 *
 * Packets that passed the same meters ("edt-chains.h"), have the same
 * destination and leave through the same output queue wait in one FIFO
 * ("flow-shaper.h").
 * The destination is that of the outermost IP header or, without one, the
 * destination MAC address; packets that have neither are all alike.  Those
 * that have passed no meter share a FIFO only if one port has received them.
 *
 * If one of the meters is fair ("edt-late.h"), it is not just the
 * destination but the whole flow: addresses, protocol and ports, the latter 0
 * for fragments.  Flows of IPv6 are told apart by a hash of 128 bits that only
 * this process can compute.
 *
 * Packets that do not wait for the rate of the port and its queue
 * ("shaper-control.h") have FIFOs of their own. */

enum shaper_addr_type {
    SHAPER_ADDR_ETH,
    SHAPER_ADDR_IPV4,
    SHAPER_ADDR_IPV6,

    SHAPER_FLOW_ETH,                /* Both MAC addresses. */
    SHAPER_FLOW_IPV4,               /* struct shaper_flow_ipv4. */
    SHAPER_FLOW_IPV6,               /* A hash. */

    /* One of the above and this, for packets that go ahead of rates
     * ("shaper-control.h") when their time has come. */
    SHAPER_ADDR_AHEAD = 1 << 8,
};

struct shaper_flow_ipv4 {
    ovs_be32 src;
    ovs_be32 dst;
    ovs_be16 src_port;
    ovs_be16 dst_port;
    uint32_t proto;
};
BUILD_ASSERT_DECL(sizeof(struct shaper_flow_ipv4) == 16);

/* 'words' is the same as the members before it, for hashing and comparing. */
struct shaper_flow_key {
    union {
        struct {
            uint32_t chain;         /* Of meters.  EDT_CHAIN_NONE if there is
                                     * none: */
            uint32_t port;          /* then that of reception, otherwise 0. */
            uint32_t queue_id;
            uint16_t addr_type;     /* enum shaper_addr_type. */
            uint16_t late;          /* EDT_LATE_FIRST, EDT_LATE_LAST. */
            union {
                uint64_t addr[2];   /* Network byte order, zero padded. */
                struct shaper_flow_ipv4 ipv4;
            };
        };
        uint64_t words[4];
    };
};
BUILD_ASSERT_DECL(sizeof(struct shaper_flow_key) == 32);

/* 'addr_type' SHAPER_ADDR_IPV4 and 'late' 0 as one. */
#ifdef WORDS_BIGENDIAN
#define SHAPER_KEY_IPV4__ ((uint32_t) SHAPER_ADDR_IPV4 << 16)
#else
#define SHAPER_KEY_IPV4__ ((uint32_t) SHAPER_ADDR_IPV4)
#endif

void shaper_flow_key_set_flow__(struct shaper_flow_key *,
                                const struct dp_packet *);
void shaper_flow_key_set_addr__(struct shaper_flow_key *,
                                const struct dp_packet *);

/* Returns two adjacent members as one word.  A word that was stored in two
 * parts would have to reach the cache before it can be loaded as a whole. */
static inline uint64_t
shaper_flow_key_pack__(uint32_t first, uint32_t second)
{
#ifdef WORDS_BIGENDIAN
    return (uint64_t) first << 32 | second;
#else
    return (uint64_t) second << 32 | first;
#endif
}

/* Fills '*key' with the identity of the FIFO for 'packet'.  Reads no further
 * than 'packet' goes: what is truncated is identified by what comes before.
 * The caller sets 'key->port' if there is no chain.  shaper_flow_key_init()
 * must have been called. */
static inline void
shaper_flow_key_extract(const struct dp_packet *packet,
                        struct shaper_flow_key *key)
{
    const struct edt_stamp *stamp = &packet->md.edt;
    const struct eth_header *eth = dp_packet_data(packet);

    key->words[0] = shaper_flow_key_pack__(packet->md.edt_valid
                                           ? stamp->chain : EDT_CHAIN_NONE, 0);
    if (OVS_UNLIKELY(packet->md.edt_valid && stamp->flags & EDT_LATE)) {
        key->queue_id = packet->md.skb_priority;
        key->late = stamp->flags & EDT_LATE;
        shaper_flow_key_set_flow__(key, packet);
    } else if (OVS_LIKELY(dp_packet_size(packet)
                          >= ETH_HEADER_LEN + IP_HEADER_LEN
                   && eth->eth_type == htons(ETH_TYPE_IP)
                   && dp_packet_is_eth(packet))) {
        const struct ip_header *ip = (const struct ip_header *) (eth + 1);
        ovs_be32 dst = get_16aligned_be32(&ip->ip_dst);

        key->words[1] = shaper_flow_key_pack__(packet->md.skb_priority,
                                               SHAPER_KEY_IPV4__);
        key->words[2] = shaper_flow_key_pack__((OVS_FORCE uint32_t) dst, 0);
        key->words[3] = 0;
    } else {
        key->queue_id = packet->md.skb_priority;
        key->late = 0;
        shaper_flow_key_set_addr__(key, packet);
    }
}

/* What nobody outside of the process knows, see shaper_flow_key_hash().  A
 * cache line. */
extern uint64_t shaper_flow_key_secret__[8];
void shaper_flow_key_init(void);

/* Returns a hash of 'key'.  shaper_flow_key_init() must have been called.
 *
 * Who sends packets chooses most of a key, and could with a hash function that
 * he knows (or whose collisions do not depend on its seed, as with CRC) put
 * thousands of FIFOs into one bucket.  So this is one of a universal family,
 * chosen at random: "multilinear-HM" of Lemire and Kaser, "Strongly universal
 * string hashing is fast" (2014), section 3.  Any two keys collide with a
 * probability of about 2^-32. */
static inline uint32_t
shaper_flow_key_hash(const struct shaper_flow_key *key)
{
    const uint64_t *secret = shaper_flow_key_secret__;
    uint64_t sum = 0;

    for (size_t i = 0; i < ARRAY_SIZE(key->words); i++) {
        sum += ((secret[2 * i] + (uint32_t) key->words[i])
                * (secret[2 * i + 1] + (key->words[i] >> 32)));
#ifdef __GNUC__
        /* One word after the other: all four as a vector could not be loaded
         * before the words, just stored, have reached the cache. */
        asm ("" : "+r" (sum));
#endif
    }
    return sum >> 32;
}

static inline bool
shaper_flow_key_equal(const struct shaper_flow_key *a,
                      const struct shaper_flow_key *b)
{
    return !((a->words[0] ^ b->words[0]) | (a->words[1] ^ b->words[1])
             | (a->words[2] ^ b->words[2]) | (a->words[3] ^ b->words[3]));
}

#endif /* shaper-flow-key.h */
