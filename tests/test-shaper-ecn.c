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

/* Tests of marking packets with CE.
 *
 * Packets are put together byte by byte, and what is expected of them is
 * written down in a table.  Checksums are computed anew as RFC 791 says, and
 * each packet lies in memory of just its size, so that a sanitizer sees what
 * is read beyond it. */

#include <config.h>
#undef NDEBUG

#include "shaper-ecn.h"

#include <stdint.h>
#include <string.h>

#include "dp-packet.h"
#include "fb-test.h"
#include "odp-util.h"
#include "packets.h"
#include "util.h"

/* What is known of a packet's checksums, and which are to be computed when it
 * is sent, as the Open vSwitch release says it ("shaper-offload.h"). */
#ifdef DP_PACKET_OL_SHIFT_COUNT
#define OFFLOADS(PACKET) ((PACKET)->offloads)
#define OL_IP_BAD DP_PACKET_OL_IP_CKSUM_BAD
#define OL_IP_GOOD DP_PACKET_OL_IP_CKSUM_GOOD
#define OL_IP DP_PACKET_OL_IP_CKSUM_MASK
#define OL_UDP (DP_PACKET_OL_L4_PROTO_UDP | DP_PACKET_OL_L4_CKSUM_MASK)
#define OL_VXLAN DP_PACKET_OL_TUNNEL_VXLAN
#define OL_OUTER_IP OL_IP
#define OL_INNER_IP DP_PACKET_OL_INNER_IP_CKSUM_MASK
#else
#define OFFLOADS(PACKET) (*dp_packet_ol_flags_ptr(PACKET))
#define OL_IP_BAD DP_PACKET_OL_RX_IP_CKSUM_BAD
#define OL_IP_GOOD (OL_IP | DP_PACKET_OL_RX_IP_CKSUM_GOOD)
#define OL_IP (DP_PACKET_OL_TX_IPV4 | DP_PACKET_OL_TX_IP_CKSUM)
#define OL_UDP (DP_PACKET_OL_TX_IPV4 | DP_PACKET_OL_TX_UDP_CKSUM)
#define OL_VXLAN (DP_PACKET_OL_TX_TUNNEL_VXLAN | DP_PACKET_OL_TX_OUTER_IPV4)
#define OL_OUTER_IP DP_PACKET_OL_TX_OUTER_IP_CKSUM
#define OL_INNER_IP OL_IP
#endif

#define MAX_FRAME 256
#define MAX_TAGS 3

/* ECN fields (RFC 3168 section 5), below a DSCP of EF. */
#define NOT_ECT 0xb8
#define ECT_1 0xb9
#define ECT_0 0xba
#define CE 0xbb

/* What comes before the IP header. */
enum link {
    LINK_ETH,
    LINK_IP,                    /* Nothing: a packet of type IP. */
};

/* Which IP header, with or without something unusual. */
enum header {
    IPV4,
    IPV4_OPTIONS,               /* The longest header. */
    IPV4_VERSION_5,
    IPV4_IHL_4,                 /* Shorter than an IPv4 header can be. */
    IPV6,
    IPV6_VERSION_7,
    ARP,
    MPLS,                       /* An IPv4 header behind a label. */
    VXLAN4,                     /* Behind an outer IPv4 header, UDP, VXLAN. */
    VXLAN6,
};

struct test_case {
    const char *name;
    enum link link;
    unsigned int n_tags;
    enum header header;
    uint8_t tos;                /* Of the (outer) header. */
    uint8_t marked_tos;         /* The same afterwards. */
    enum shaper_ecn result;
};

static const struct test_case test_cases[] = {
    { "ECT(0)", LINK_ETH, 0, IPV4, ECT_0, CE, SHAPER_ECN_SET },
    { "ECT(1)", LINK_ETH, 0, IPV4, ECT_1, CE, SHAPER_ECN_SET },
    { "CE", LINK_ETH, 0, IPV4, CE, CE, SHAPER_ECN_WAS_SET },
    { "not ECT", LINK_ETH, 0, IPV4, NOT_ECT, NOT_ECT, SHAPER_ECN_NOT_ECT },
    { "tag", LINK_ETH, 1, IPV4, ECT_0, CE, SHAPER_ECN_SET },
    { "two tags", LINK_ETH, 2, IPV4, ECT_1, CE, SHAPER_ECN_SET },
    { "two tags, CE", LINK_ETH, 2, IPV4, CE, CE, SHAPER_ECN_WAS_SET },
    { "three tags", LINK_ETH, 3, IPV4, ECT_0, ECT_0, SHAPER_ECN_NOT_ECT },
    { "options", LINK_ETH, 0, IPV4_OPTIONS, ECT_0, CE, SHAPER_ECN_SET },
    { "options, tag", LINK_ETH, 1, IPV4_OPTIONS, ECT_1, CE, SHAPER_ECN_SET },
    { "version 5", LINK_ETH, 0, IPV4_VERSION_5, ECT_0, ECT_0,
      SHAPER_ECN_NOT_ECT },
    { "length 16", LINK_ETH, 0, IPV4_IHL_4, ECT_0, ECT_0,
      SHAPER_ECN_NOT_ECT },
    { "no Ethernet", LINK_IP, 0, IPV4, ECT_0, CE, SHAPER_ECN_SET },
    { "no Ethernet, options", LINK_IP, 0, IPV4_OPTIONS, ECT_1, CE,
      SHAPER_ECN_SET },
    { "IPv6, ECT(0)", LINK_ETH, 0, IPV6, ECT_0, CE, SHAPER_ECN_SET },
    { "IPv6, ECT(1)", LINK_ETH, 0, IPV6, ECT_1, CE, SHAPER_ECN_SET },
    { "IPv6, CE", LINK_ETH, 0, IPV6, CE, CE, SHAPER_ECN_WAS_SET },
    { "IPv6, not ECT", LINK_ETH, 0, IPV6, NOT_ECT, NOT_ECT,
      SHAPER_ECN_NOT_ECT },
    { "IPv6, tag", LINK_ETH, 1, IPV6, ECT_1, CE, SHAPER_ECN_SET },
    { "IPv6, two tags", LINK_ETH, 2, IPV6, ECT_0, CE, SHAPER_ECN_SET },
    { "IPv6, no Ethernet", LINK_IP, 0, IPV6, ECT_0, CE, SHAPER_ECN_SET },
    { "version 7", LINK_ETH, 0, IPV6_VERSION_7, ECT_0, ECT_0,
      SHAPER_ECN_NOT_ECT },
    { "ARP", LINK_ETH, 0, ARP, ECT_0, ECT_0, SHAPER_ECN_NOT_ECT },
    { "MPLS", LINK_ETH, 0, MPLS, ECT_0, ECT_0, SHAPER_ECN_NOT_ECT },
    { "VXLAN", LINK_ETH, 0, VXLAN4, ECT_0, CE, SHAPER_ECN_SET },
    { "VXLAN, tag", LINK_ETH, 1, VXLAN4, ECT_1, CE, SHAPER_ECN_SET },
    { "VXLAN, not ECT", LINK_ETH, 0, VXLAN4, NOT_ECT, NOT_ECT,
      SHAPER_ECN_NOT_ECT },
    { "VXLAN over IPv6", LINK_ETH, 0, VXLAN6, ECT_0, CE, SHAPER_ECN_SET },
};

/* A frame, and where in it is what the tests look at. */
struct frame {
    uint8_t bytes[MAX_FRAME];
    size_t size;
    size_t ip_ofs;              /* Of the (outer) IP header. */
    size_t ip_len;              /* Its length. */
    size_t inner_ofs;           /* Of the inner one, or 0. */
    bool ipv6;                  /* Is the outer one IPv6? */
};

static void
put(struct frame *f, const void *bytes, size_t n)
{
    ovs_assert(f->size + n <= sizeof f->bytes);
    memcpy(&f->bytes[f->size], bytes, n);
    f->size += n;
}

static void
put_u8(struct frame *f, uint8_t value)
{
    put(f, &value, 1);
}

static void
put_u16(struct frame *f, uint16_t value)
{
    put_u8(f, value >> 8);
    put_u8(f, value);
}

static void
put_n(struct frame *f, uint8_t value, size_t n)
{
    while (n--) {
        put_u8(f, value);
    }
}

/* Returns the checksum of the 'n' bytes at 'p', an even number: 0 if they
 * contain the right one (RFC 791 section 3.1). */
static uint16_t
checksum(const uint8_t *p, size_t n)
{
    unsigned long int sum = 0;

    for (size_t i = 0; i < n; i += 2) {
        sum += p[i] * 256 + p[i + 1];
    }
    while (sum > 0xffff) {
        sum = sum % 0x10000 + sum / 0x10000;
    }
    return 0xffff - sum;
}

/* Puts an IPv4 header with the right checksum, and 'n_options' bytes of
 * options. */
static void
put_ipv4(struct frame *f, uint8_t version, uint8_t ihl, uint8_t tos,
         uint8_t proto, size_t n_options)
{
    size_t ofs = f->size;
    uint16_t csum;

    put_u8(f, version << 4 | ihl);
    put_u8(f, tos);
    put_u16(f, 100);                        /* Total length. */
    put_u16(f, 0x1234);                     /* Identification. */
    put_u16(f, 0x4000);                     /* Do not fragment. */
    put_u8(f, 64);
    put_u8(f, proto);
    put_u16(f, 0);
    put(f, (uint8_t[]) { 10, 0, 0, 1, 10, 0, 0, 2 }, 8);
    put_n(f, 1, n_options);                 /* No operation. */
    csum = checksum(&f->bytes[ofs], f->size - ofs);
    f->bytes[ofs + 10] = csum >> 8;
    f->bytes[ofs + 11] = csum;
}

static void
put_ipv6(struct frame *f, uint8_t version, uint8_t tos, uint8_t next)
{
    put_u8(f, version << 4 | tos >> 4);
    put_u8(f, tos << 4 | 0x5);              /* Flow label 0x5abcd. */
    put_u16(f, 0xabcd);
    put_u16(f, 60);
    put_u8(f, next);
    put_u8(f, 64);
    put_n(f, 0xfd, 16);
    put_n(f, 0xfe, 16);
}

static void
put_eth(struct frame *f, unsigned int n_tags, uint16_t eth_type)
{
    put(f, (uint8_t[]) { 2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1 }, 12);
    for (unsigned int i = 0; i < n_tags; i++) {
        put_u16(f, i + 1 < n_tags ? 0x88a8 : 0x8100);
        put_u16(f, 100 + i);
    }
    put_u16(f, eth_type);
}

static void
put_vxlan(struct frame *f)
{
    put_u16(f, 49152);
    put_u16(f, 4789);
    put_u16(f, 60);
    put_u16(f, 0);
    put(f, (uint8_t[]) { 8, 0, 0, 0, 0, 0, 5, 0 }, 8);
    put_eth(f, 0, 0x0800);
    f->inner_ofs = f->size;
    put_ipv4(f, 4, 5, ECT_0, 6, 0);
}

static void
frame_init(struct frame *f, const struct test_case *t)
{
    static const uint16_t eth_types[] = {
        [IPV4] = 0x0800, [IPV4_OPTIONS] = 0x0800, [IPV4_VERSION_5] = 0x0800,
        [IPV4_IHL_4] = 0x0800, [IPV6] = 0x86dd, [IPV6_VERSION_7] = 0x86dd,
        [ARP] = 0x0806, [MPLS] = 0x8847, [VXLAN4] = 0x0800,
        [VXLAN6] = 0x86dd,
    };

    memset(f, 0, sizeof *f);
    if (t->link == LINK_ETH) {
        put_eth(f, t->n_tags, eth_types[t->header]);
    }
    if (t->header == MPLS) {
        put(f, (uint8_t[]) { 0, 1, 1, 64 }, 4);
    }
    f->ip_ofs = f->size;

    switch (t->header) {
    case IPV4:
    case ARP:
    case MPLS:
        put_ipv4(f, 4, 5, t->tos, 17, 0);
        break;
    case IPV4_OPTIONS:
        put_ipv4(f, 4, 15, t->tos, 17, 40);
        break;
    case IPV4_VERSION_5:
        put_ipv4(f, 5, 5, t->tos, 17, 0);
        break;
    case IPV4_IHL_4:
        put_ipv4(f, 4, 4, t->tos, 17, 0);
        break;
    case VXLAN4:
        put_ipv4(f, 4, 5, t->tos, 17, 0);
        break;
    case IPV6:
        put_ipv6(f, 6, t->tos, 17);
        break;
    case IPV6_VERSION_7:
        put_ipv6(f, 7, t->tos, 17);
        break;
    case VXLAN6:
        put_ipv6(f, 6, t->tos, 17);
        break;
    }
    f->ip_len = f->size - f->ip_ofs;
    f->ipv6 = t->header == IPV6 || t->header == IPV6_VERSION_7
              || t->header == VXLAN6;
    if (t->header == VXLAN4 || t->header == VXLAN6) {
        put_vxlan(f);
    }
    put_n(f, 0x5a, 20);
}

/* Changes 'f' as marking it would, if it does, according to 't'. */
static void
frame_mark(struct frame *f, const struct test_case *t)
{
    uint8_t *ip = &f->bytes[f->ip_ofs];

    if (t->tos == t->marked_tos) {
        return;
    }
    if (f->ipv6) {
        ip[0] = (ip[0] & 0xf0) | t->marked_tos >> 4;
        ip[1] = (uint8_t) (t->marked_tos << 4) | (ip[1] & 0x0f);
    } else {
        uint16_t csum;

        ip[1] = t->marked_tos;
        ip[10] = ip[11] = 0;
        csum = checksum(ip, f->ip_len);
        ip[10] = csum >> 8;
        ip[11] = csum;
    }
}

/* Returns a packet of 'size' of the bytes of 'f', in memory of just that size
 * but for 'headroom' bytes before it. */
static struct dp_packet *
packet_create(const struct frame *f, enum link link, size_t size,
              size_t headroom)
{
    struct dp_packet *packet = dp_packet_new(0);

    dp_packet_uninit(packet);
    dp_packet_use(packet, xmalloc(MAX(headroom + size, 1)), headroom + size);
    dp_packet_reserve(packet, headroom);
    memcpy(dp_packet_put_uninit(packet, size), f->bytes, size);
    pkt_metadata_init(&packet->md, ODPP_NONE);
    packet->packet_type = htonl(link == LINK_ETH ? PT_ETH
                                : f->ipv6 ? PT_IPV6 : PT_IPV4);
    dp_packet_set_l3(packet, (char *) dp_packet_data(packet)
                             + MIN(f->ip_ofs, size));
    return packet;
}

static void
check_same(const struct dp_packet *packet, const struct frame *f,
           const char *name)
{
    const uint8_t *data = dp_packet_data(packet);

    for (size_t i = 0; i < dp_packet_size(packet); i++) {
        CHECK(data[i] == f->bytes[i], "%s, %"PRIuSIZE" bytes: byte %"PRIuSIZE
              " is 0x%02x, not 0x%02x", name,
              (size_t) dp_packet_size(packet), i, data[i], f->bytes[i]);
    }
}

/* Each packet of the table, cut off after each of its bytes, at even and odd
 * addresses: one of which the header is there is marked, and nothing else. */
static void
test_table(void)
{
    for (size_t i = 0; i < ARRAY_SIZE(test_cases); i++) {
        const struct test_case *t = &test_cases[i];
        struct frame before, after;

        frame_init(&before, t);
        after = before;
        frame_mark(&after, t);
        for (size_t size = 0; size <= before.size; size++) {
            bool complete = size >= before.ip_ofs + before.ip_len;
            struct dp_packet *packet = packet_create(&before, t->link, size,
                                                     size & 1);
            enum shaper_ecn result = shaper_ecn_mark(packet);
            enum shaper_ecn expected = complete ? t->result
                                       : SHAPER_ECN_NOT_ECT;

            CHECK(result == expected, "%s, %"PRIuSIZE" bytes: result %d, "
                  "not %d", t->name, size, result, expected);
            CHECK(dp_packet_size(packet) == size, "%s: another size",
                  t->name);
            check_same(packet, complete ? &after : &before, t->name);

            /* Once more: there is nothing left to do. */
            result = shaper_ecn_mark(packet);
            CHECK(result == (expected == SHAPER_ECN_SET ? SHAPER_ECN_WAS_SET
                             : expected), "%s: second result %d", t->name,
                  result);
            check_same(packet, complete ? &after : &before, t->name);
            dp_packet_delete(packet);
        }
    }
}

/* Headers with each possible checksum: it is still the right one. */
static void
test_checksum(void)
{
    static const struct test_case t = { .header = IPV4, .tos = ECT_0 };
    struct frame f;

    frame_init(&f, &t);
    for (uint32_t id = 0; id <= UINT16_MAX; id++) {
        for (int i = 0; i < 4; i++) {
            /* All with DSCP 0, too, the value 0 among them. */
            uint8_t tos = (i & 2 ? 0xb8 : 0) | (i & 1 ? 1 : 2);
            uint8_t *ip = &f.bytes[f.ip_ofs];
            struct dp_packet *packet;
            uint16_t csum;

            ip[1] = tos;
            ip[4] = id >> 8;
            ip[5] = id;
            ip[10] = ip[11] = 0;
            csum = checksum(ip, f.ip_len);
            ip[10] = csum >> 8;
            ip[11] = csum;

            packet = packet_create(&f, LINK_ETH, f.size, 0);
            CHECK(shaper_ecn_mark(packet) == SHAPER_ECN_SET, "not marked");
            ip = (uint8_t *) dp_packet_data(packet) + f.ip_ofs;
            CHECK(ip[1] == (tos | 3), "TOS 0x%02x, not 0x%02x", ip[1],
                  tos | 3);
            CHECK(!checksum(ip, f.ip_len),
                  "id %"PRIu32", TOS 0x%02x: wrong checksum 0x%02x%02x", id,
                  tos, ip[10], ip[11]);

            /* Both zeros add up to the same, but 0xffff is not what a sender
             * would compute. */
            CHECK(ip[10] != 0xff || ip[11] != 0xff, "checksum is minus 0");
            dp_packet_delete(packet);
        }
    }
}

/* A wrong checksum stays wrong by as much: what was damaged on its way is not
 * made to look good. */
static void
test_wrong_checksum(void)
{
    static const struct test_case t = { .header = IPV4, .tos = ECT_0,
                                        .marked_tos = CE };
    struct frame before, after;
    struct dp_packet *packet;

    frame_init(&before, &t);
    after = before;
    frame_mark(&after, &t);
    before.bytes[before.ip_ofs + 10] ^= 0x40;
    after.bytes[after.ip_ofs + 10] ^= 0x40;
    packet = packet_create(&before, LINK_ETH, before.size, 0);
    OFFLOADS(packet) |= OL_IP_BAD;
    CHECK(shaper_ecn_mark(packet) == SHAPER_ECN_SET, "not marked");
    check_same(packet, &after, "wrong checksum");
    CHECK(dp_packet_ip_checksum_bad(packet), "no longer known as bad");
    dp_packet_delete(packet);
}

/* How a checksum is to be offloaded, and what becomes of it. */
struct offload_case {
    const char *name;
    enum header header;
    uint64_t flags;
    bool touched;               /* Is the outer checksum to be changed? */
};

static const struct offload_case offload_cases[] = {
    { "computed later", IPV4, OL_IP, false },
    { "known as good", IPV4, OL_IP_GOOD, true },
    { "L4 only", IPV4, OL_UDP, true },
    { "outer", VXLAN4, OL_VXLAN | OL_OUTER_IP, false },
    { "outer and inner", VXLAN4, OL_VXLAN | OL_OUTER_IP | OL_INNER_IP, false },
    { "inner", VXLAN4, OL_VXLAN | OL_INNER_IP, true },
};

/* A checksum that is to be offloaded is left alone, and right when it has been
 * computed; any other is right at once.  The inner header stays as it is. */
static void
test_offload(void)
{
    for (size_t i = 0; i < ARRAY_SIZE(offload_cases); i++) {
        const struct offload_case *o = &offload_cases[i];
        const struct test_case t = { .header = o->header, .tos = ECT_0,
                                     .marked_tos = CE };
        struct frame f, marked;
        struct dp_packet *packet;
        uint64_t flags;
        uint8_t *ip;

        frame_init(&f, &t);
        if (!o->touched) {
            memset(&f.bytes[f.ip_ofs + 10], 0, 2);
        }
        marked = f;
        frame_mark(&marked, &t);

        packet = packet_create(&f, LINK_ETH, f.size, 0);
        OFFLOADS(packet) = o->flags;
        if (f.inner_ofs) {
            packet->inner_l3_ofs = f.inner_ofs;
            packet->inner_l4_ofs = f.inner_ofs + IP_HEADER_LEN;
        }
        packet->l4_ofs = f.ip_ofs + f.ip_len;
        CHECK(shaper_ecn_mark(packet) == SHAPER_ECN_SET, "%s: not marked",
              o->name);
        flags = OFFLOADS(packet);
        CHECK(flags == o->flags, "%s: flags 0x%"PRIx64", not 0x%"PRIx64,
              o->name, flags, o->flags);
        if (!o->touched) {
            ip = (uint8_t *) dp_packet_data(packet) + f.ip_ofs;
            CHECK(!ip[10] && !ip[11], "%s: checksum touched", o->name);

            /* Without the TCP and UDP checksums, of which there are none. */
            dp_packet_ol_send_prepare(packet, 0);
        }
        check_same(packet, &marked, o->name);
        dp_packet_delete(packet);
    }
}

/* Random bytes behind random Ethernet types: nothing but the ECN field and the
 * checksum ever changes, and the address does not matter. */
static void
test_random(void)
{
    static const uint16_t types[] = {
        0x0800, 0x86dd, 0x8100, 0x88a8, 0x0806, 0x8847, 0x0000, 0x05dc
    };

    for (unsigned int n = rounds(100000); n > 0; n--) {
        size_t size = choose(2) ? choose(100) : choose_log(100);
        size_t n_changed = 0;
        struct frame f = { .size = size };
        struct dp_packet *packet;
        enum shaper_ecn result;
        const uint8_t *data;

        random_bytes(f.bytes, size);
        for (size_t ofs = 12; ofs + 2 <= size && choose(4); ofs += 4) {
            uint16_t type = types[choose(ARRAY_SIZE(types))];

            f.bytes[ofs] = type >> 8;
            f.bytes[ofs + 1] = type;
            if (choose(2) && ofs + 3 <= size) {
                f.bytes[ofs + 2] = choose(2) ? 0x45 : 0x60;
            }
        }
        f.ipv6 = choose(2);
        packet = packet_create(&f, choose(4) ? LINK_ETH : LINK_IP, size,
                               choose(4));
        result = shaper_ecn_mark(packet);
        data = dp_packet_data(packet);
        for (size_t i = 0; i < size; i++) {
            n_changed += data[i] != f.bytes[i];
        }
        CHECK(result == SHAPER_ECN_SET ? n_changed >= 1 && n_changed <= 3
              : !n_changed, "%"PRIuSIZE" bytes changed, result %d", n_changed,
              result);
        dp_packet_delete(packet);
    }
}

static const struct test tests[] = {
    { "table", test_table },
    { "checksum", test_checksum },
    { "wrong-checksum", test_wrong_checksum },
    { "offload", test_offload },
    { "random", test_random },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
