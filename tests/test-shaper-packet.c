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

#include "fb-test.h"
#include "packet-model.h"
#include "packets.h"
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

static const struct test tests[] = {
    { "random", test_random },
    { "truncated", test_truncated },
    { "each-byte", test_each_byte },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
