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

/* Tests of what the shaper reads of packets, with packets as a hostile sender
 * makes them: cut off, with wrong lengths, with headers that lie about what
 * follows.  "packet-model.h" says what is checked of each. */

#include <config.h>
#undef NDEBUG

#include <stdint.h>
#include <string.h>

#include "dp-packet.h"
#include "edt-late.h"
#include "fb-test.h"
#include "hash.h"
#include "packet-model.h"
#include "packets.h"
#include "shaper-flow-key.h"
#include "util.h"

#define MAX_FRAME 400

struct frame {
    ovs_be32 packet_type;
    size_t size;
    uint8_t bytes[MAX_FRAME];
};

static void
put(struct frame *f, const void *bytes, size_t n)
{
    n = MIN(n, sizeof f->bytes - f->size);
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
put_random(struct frame *f, size_t n)
{
    uint8_t bytes[MAX_FRAME];

    n = MIN(n, sizeof bytes);
    random_bytes(bytes, n);
    put(f, bytes, n);
}

/* Puts one of a few addresses of 'n' bytes, so that packets have some in
 * common.  The second is one that, where Ethernet types are looked for, is
 * taken for IPv4's. */
static void
put_addr(struct frame *f, size_t n)
{
    static const uint8_t addrs[][16] = {
        { 10, 0, 0, 1 }, { 8, 0, 0x45, 0, 8, 0, 8, 0 }, { 0x86, 0xdd, 0x60 },
        { 0xff, 0xff, 0xff, 0xff, 0xff, 0xff }, { 0 },
    };

    put(f, addrs[choose(ARRAY_SIZE(addrs))], n);
}

static void put_ip(struct frame *, bool ipv6, int depth);

static void
put_l2(struct frame *f, uint16_t eth_type, unsigned int n_tags)
{
    static const uint16_t tpids[] = { 0x8100, 0x88a8, 0x9100 };

    put_addr(f, 6);
    put_addr(f, 6);
    for (unsigned int i = 0; i < n_tags; i++) {
        put_u16(f, tpids[choose(8) ? choose(2) : 2]);
        put_u16(f, choose(65536));
    }
    put_u16(f, eth_type);
}

/* Puts what a header that says 'proto' promises, or something else. */
static void
put_l4(struct frame *f, uint8_t proto, int depth)
{
    if (proto == IPPROTO_TCP || proto == IPPROTO_UDP
        || proto == IPPROTO_SCTP) {
        put_u16(f, choose(4) ? 10000 + choose(2) : choose(65536));
        put_u16(f, choose(2) ? 4789 : choose(65536));
        put_random(f, proto == IPPROTO_TCP ? 16 : 4);
    }
    if (depth && proto == IPPROTO_UDP && choose(4) == 0) {
        put_random(f, 8);                           /* VXLAN. */
        put_l2(f, 0x0800, choose(2));
        put_ip(f, false, depth - 1);
    } else if (depth && proto == IPPROTO_GRE) {
        put_u16(f, 0);
        put_u16(f, 0x0800);
        put_ip(f, false, depth - 1);
    } else {
        put_random(f, choose_log(100));
    }
}

static uint8_t
choose_proto(void)
{
    static const uint8_t protos[] = {
        IPPROTO_TCP, IPPROTO_UDP, IPPROTO_SCTP, IPPROTO_ICMP, IPPROTO_GRE
    };

    return choose(8) ? protos[choose(ARRAY_SIZE(protos))] : choose(256);
}

static void
put_ipv4(struct frame *f, int depth)
{
    static const uint16_t frags[] = { 0, 0x4000, 0x2000, 0x2001, 0x0001 };
    uint8_t ihl = choose(4) ? 5 : choose(16);
    uint8_t proto = choose_proto();
    size_t ofs = f->size;
    uint32_t sum = 0;

    put_u8(f, (choose(16) ? 4 : choose(16)) << 4 | ihl);
    put_u8(f, choose(256));
    put_u16(f, choose(4) ? 100 : choose(65536));    /* Total length. */
    put_u16(f, choose(65536));
    put_u16(f, choose(4) ? frags[choose(ARRAY_SIZE(frags))] : choose(65536));
    put_u8(f, 64);
    put_u8(f, proto);
    put_u16(f, 0);
    put_addr(f, 4);
    put_addr(f, 4);
    if (ihl > 5) {
        put_random(f, (ihl - 5) * 4);               /* Options. */
    }
    if (choose(4) && f->size - ofs >= IP_HEADER_LEN) {
        for (size_t i = ofs; i + 1 < f->size; i += 2) {
            sum += f->bytes[i] * 256 + f->bytes[i + 1];
        }
        sum = sum % 0x10000 + sum / 0x10000;
        sum = 0xffff - (sum % 0x10000 + sum / 0x10000);
        f->bytes[ofs + 10] = sum >> 8;
        f->bytes[ofs + 11] = sum;
    }
    put_l4(f, proto, depth);
}

static void
put_ipv6(struct frame *f, int depth)
{
    /* Hop-by-hop, routing, fragment, AH, destination options, none. */
    static const uint8_t extensions[] = { 0, 43, 44, 51, 60, 59 };
    unsigned int n_extensions = choose(3) ? 0 : choose(4);
    uint8_t proto = choose_proto();
    uint8_t next = n_extensions ? extensions[choose(ARRAY_SIZE(extensions))]
                   : proto;

    put_u8(f, (choose(16) ? 6 : choose(16)) << 4 | choose(16));
    put_random(f, 3);
    put_u16(f, choose(4) ? 100 : choose(65536));
    put_u8(f, next);
    put_u8(f, 64);
    put_addr(f, 16);
    put_addr(f, 16);
    for (unsigned int i = 0; i < n_extensions; i++) {
        put_u8(f, i + 1 < n_extensions
                  ? extensions[choose(ARRAY_SIZE(extensions))] : proto);
        put_u8(f, choose(2) ? 0 : choose(256));     /* Length. */
        put_random(f, 6);
    }
    put_l4(f, proto, depth);
}

static void
put_ip(struct frame *f, bool ipv6, int depth)
{
    if (ipv6) {
        put_ipv6(f, depth);
    } else {
        put_ipv4(f, depth);
    }
}

/* Makes a frame of headers that nearly always fit together. */
static void
frame_init(struct frame *f)
{
    static const uint16_t eth_types[] = {
        0x0800, 0x0800, 0x0800, 0x86dd, 0x86dd, 0x0806, 0x8847, 0x88cc, 0x05dc
    };
    static const uint32_t other_types[] = {
        PT_IPV4, PT_IPV6, PT_MPLS, PT_NSH, PT_UNKNOWN
    };
    uint16_t type = eth_types[choose(ARRAY_SIZE(eth_types))];

    f->size = 0;
    if (choose(6)) {
        f->packet_type = htonl(PT_ETH);
        put_l2(f, type, choose(2) ? 0 : choose(4));
    } else {
        uint32_t packet_type = other_types[choose(ARRAY_SIZE(other_types))];

        f->packet_type = htonl(packet_type);
        type = packet_type & 0xffff;
    }

    if (type == 0x8847) {
        for (unsigned int i = choose(3); i < 3; i++) {
            put_random(f, 2);
            put_u8(f, i == 2);                      /* Bottom of stack. */
            put_u8(f, 64);
        }
        put_ip(f, choose(2), 1);
    } else if (type == 0x0800 || type == 0x86dd) {
        put_ip(f, type == 0x86dd, 1);
    } else {
        put_random(f, choose_log(200));
    }
}

static void
check_flip(const struct frame *f, size_t size, size_t flip_ofs, uint8_t flip,
           struct packet_model_seen *seen)
{
    const struct packet_model_input input = {
        .packet_type = f->packet_type,
        .bytes = f->bytes,
        .size = size,
        .flip_ofs = flip_ofs,
        .flip = flip,
    };

    packet_model_check(&input, seen);
}

static void
set_context(void)
{
    static char context[64];

    snprintf(context, sizeof context, "%s (--seed=%"PRIu32")", test_name,
             seed);
    packet_model_set_context(context);
}

/* Frames of all kinds, many of them cut off or with a wrong byte. */
static void
test_random(void)
{
    struct packet_model_seen seen = { .ipv4 = 0 };

    set_context();
    for (unsigned int n = rounds(500000); n > 0; n--) {
        struct frame f;

        frame_init(&f);
        if (choose(3) == 0) {
            f.size = choose(f.size + 1);
        }
        while (f.size && choose(3) == 0) {
            f.bytes[choose_log(f.size)] = choose(256);
        }
        check_flip(&f, f.size, f.size ? choose_log(f.size) : 0,
                   choose(2) ? 1 << choose(8) : choose(256), &seen);
    }

    /* All that is to be tested was there. */
    CHECK(iterations
          || (MIN(MIN(seen.ipv4, seen.ipv6), MIN(seen.other, seen.ports))
              > 1000
              && MIN(MIN(seen.same, seen.distinct), seen.marked) > 1000),
          "IPv4 %llu, IPv6 %llu, other %llu, ports %llu, same %llu, distinct "
          "%llu, marked %llu", seen.ipv4, seen.ipv6, seen.other, seen.ports,
          seen.same, seen.distinct, seen.marked);
}

/* Frames that are cut off after each of their bytes. */
static void
test_truncated(void)
{
    struct packet_model_seen seen;

    set_context();
    memset(&seen, 0, sizeof seen);
    for (unsigned int n = rounds(5000); n > 0; n--) {
        struct frame f;

        frame_init(&f);
        for (size_t size = 0; size <= f.size; size++) {
            check_flip(&f, size, size ? choose(size) : 0, 0x55, &seen);
        }
    }
}

/* Frames of which each byte is changed: nothing but the headers that tell a
 * flow tell its FIFO. */
static void
test_each_byte(void)
{
    struct packet_model_seen seen;

    set_context();
    memset(&seen, 0, sizeof seen);
    for (unsigned int n = rounds(5000); n > 0; n--) {
        struct frame f;

        frame_init(&f);
        for (size_t i = 0; i < f.size; i++) {
            check_flip(&f, f.size, i, 1 << choose(8), &seen);
        }
    }
}

/* Of a flow of IPv6 over UDP, as in packets. */
struct flow_ipv6 {
    uint64_t before;            /* Of the IPv6 header, the protocol. */
    uint64_t addr[4];           /* Source and destination. */
    uint32_t ports;
};

static uint64_t
rotate(uint64_t x, int k)
{
    return x << k | x >> (64 - k);
}

/* The inverse of 'x', which is odd, modulo 2^64. */
static uint64_t
invert(uint64_t x)
{
    uint64_t y = x;

    for (int i = 0; i < 6; i++) {
        y *= 2 - x * y;
    }
    return y;
}

/* Has 'twin' be another flow than 'flow', with the same hash_bytes128(), on
 * 64-bit processors, for seed 0.  That hash adds blocks of 16 bytes to a state
 * of as many: what the first one changes the second one can take back. */
static void
make_twin(const struct flow_ipv6 *flow, struct flow_ipv6 *twin)
{
    const uint64_t c1 = UINT64_C(0x87c37b91114253d5);
    const uint64_t c2 = UINT64_C(0x4cf5ad432745937f);
    uint64_t in[2][2], h[2][2];

    *twin = *flow;
    twin->addr[0] = random_uint64();

    for (int i = 0; i < 2; i++) {
        const struct flow_ipv6 *f = i ? twin : flow;
        uint64_t k1 = rotate(f->before * c1, 31) * c2;
        uint64_t k2 = rotate(f->addr[0] * c2, 33) * c1;

        h[i][0] = rotate(k1, 27) * 5 + 0x52dce729;
        h[i][1] = (rotate(k2, 31) + h[i][0]) * 5 + 0x38495ab5;
    }
    in[0][0] = rotate(flow->addr[1] * c1, 31) * c2 ^ h[0][0];
    in[0][1] = rotate(flow->addr[2] * c2, 33) * c1 ^ h[0][1];

    /* After the second block the states are to be the same. */
    in[1][0] = rotate(rotate(in[0][0], 27) + h[0][1] - h[1][1], 64 - 27);
    in[1][1] = in[0][1];
    twin->addr[1] = rotate((in[1][0] ^ h[1][0]) * invert(c2), 64 - 31)
                    * invert(c1);
    twin->addr[2] = rotate((in[1][1] ^ h[1][1]) * invert(c1), 64 - 33)
                    * invert(c2);
}

static void
get_key(const struct flow_ipv6 *flow, struct shaper_flow_key *key)
{
    static const uint8_t eth[ETH_HEADER_LEN] = {
        [2 * ETH_ADDR_LEN] = 0x86, [2 * ETH_ADDR_LEN + 1] = 0xdd,
    };
    struct dp_packet packet;

    dp_packet_init(&packet, 100);
    dp_packet_put(&packet, eth, sizeof eth);
    dp_packet_put(&packet, &flow->before, sizeof flow->before);
    dp_packet_put(&packet, flow->addr, sizeof flow->addr);
    dp_packet_put(&packet, &flow->ports, sizeof flow->ports);
    pkt_metadata_init(&packet.md, u32_to_odp(1));
    pkt_metadata_set_edt(&packet.md, &(struct edt_stamp) {
        .edt_ns = 1,
        .flags = EDT_LATE_FIRST,
    });
    shaper_flow_key_extract(&packet, key);
    dp_packet_uninit(&packet);
}

/* A sender who knows the code cannot have two flows of IPv6 share one turn of
 * a fair meter. */
static void
test_twins_ipv6(void)
{
    shaper_flow_key_init();
    for (unsigned int n = rounds(1000); n > 0; n--) {
        uint8_t before[8] = { [6] = IPPROTO_UDP };
        struct shaper_flow_key key, twin_key;
        struct flow_ipv6 flow, twin;

        memset(&flow, 0, sizeof flow);
        memcpy(&flow.before, before, sizeof before);
        for (size_t i = 0; i < ARRAY_SIZE(flow.addr); i++) {
            flow.addr[i] = random_uint64();
        }
        flow.ports = random_uint32();
        make_twin(&flow, &twin);

#if defined(__x86_64__) || defined(__aarch64__)
        const size_t size = offsetof(struct flow_ipv6, ports) + 4;
        ovs_u128 hash, twin_hash;

        hash_bytes128(&flow, size, 0, &hash);
        hash_bytes128(&twin, size, 0, &twin_hash);
        CHECK(ovs_u128_equals(hash, twin_hash), "these are no twins");
#endif
        get_key(&flow, &key);
        get_key(&twin, &twin_key);
        CHECK(!shaper_flow_key_equal(&key, &twin_key), "twins have one key");
        get_key(&flow, &twin_key);
        CHECK(shaper_flow_key_equal(&key, &twin_key), "one flow, two keys");
    }
}

static const struct test tests[] = {
    { "twins-ipv6", test_twins_ipv6 },
    { "random", test_random },
    { "truncated", test_truncated },
    { "each-byte", test_each_byte },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
