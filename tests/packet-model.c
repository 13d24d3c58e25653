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
#undef NDEBUG

#include "packet-model.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "dp-packet.h"
#include "edt-late.h"
#include "flow.h"
#include "odp-util.h"
#include "openvswitch/dynamic-string.h"
#include "packets.h"
#include "shaper-ecn.h"
#include "shaper-flow-key.h"
#include "util.h"

/* Meters and queue of all packets here. */
#define CHAIN 38
#define QUEUE 5

static const char *model_context = "";

void
packet_model_set_context(const char *context)
{
    model_context = context;
}

static void OVS_PRINTF_FORMAT(2, 3) OVS_NO_RETURN
model_fail(const struct packet_model_input *input, const char *format, ...)
{
    struct ds s = DS_EMPTY_INITIALIZER;
    va_list args;

    va_start(args, format);
    ds_put_format_valist(&s, format, args);
    va_end(args);

    fflush(stdout);
    ovs_hex_dump(stderr, input->bytes, input->size, 0, false);
    ovs_abort(0, "%s: packet of type 0x%08"PRIx32", %"PRIuSIZE" bytes, byte "
              "%"PRIuSIZE" ^ 0x%02x: %s", model_context,
              ntohl(input->packet_type), input->size, input->flip_ofs,
              input->flip, ds_cstr(&s));
}

/* The reference. */

/* What tells a packet's FIFO, apart from meters and queue. */
struct ident {
    enum shaper_addr_type type;
    size_t n;
    uint8_t bytes[40];
};

static uint16_t
get_u16(const uint8_t *p)
{
    return p[0] * 256 + p[1];
}

static void
ident_add(struct ident *ident, const uint8_t *bytes, size_t n)
{
    ovs_assert(ident->n + n <= sizeof ident->bytes);
    memcpy(&ident->bytes[ident->n], bytes, n);
    ident->n += n;
}

/* Returns the Ethernet type of what is behind the Ethernet header and at most
 * two VLAN tags, and stores where it is; 0 if there is no such thing. */
static uint16_t
find_l3(const struct packet_model_input *input, const uint8_t *p, size_t *ofs)
{
    uint32_t packet_type = ntohl(input->packet_type);
    uint16_t type;

    *ofs = 0;
    if (packet_type >> 16 == 1) {
        return packet_type & 0xffff;
    }
    if (packet_type || input->size < 14) {
        return 0;
    }
    type = get_u16(p + 12);
    *ofs = 14;
    for (int i = 0; i < 2 && (type == 0x8100 || type == 0x88a8); i++) {
        if (input->size < *ofs + 4) {
            return 0;
        }
        type = get_u16(p + *ofs + 2);
        *ofs += 4;
    }
    return type;
}

/* Adds the ports at 'ofs', or zeros if protocol 'proto' has none or they are
 * cut off.  Returns true if there are ports. */
static bool
add_ports(struct ident *ident, const struct packet_model_input *input,
          const uint8_t *p, size_t ofs, uint8_t proto)
{
    static const uint8_t none[4];
    bool present = ((proto == 6 || proto == 17 || proto == 132)
                    && input->size >= ofs + 4);

    ident_add(ident, present ? p + ofs : none, 4);
    return present;
}

/* Stores in '*ident' what tells the FIFO of the packet with bytes 'p' and
 * otherwise as 'input'; of its whole flow with 'late'.  Returns true if it is
 * told by its ports. */
static bool
get_ident(const struct packet_model_input *input, const uint8_t *p, bool late,
          struct ident *ident)
{
    bool ports = false;
    size_t ofs;
    uint16_t type = find_l3(input, p, &ofs);
    const uint8_t *ip = p + ofs;

    memset(ident, 0, sizeof *ident);
    if (type == 0x0800 && input->size >= ofs + 20) {
        size_t header = MAX((ip[0] & 15) * 4, 20);
        bool fragment = get_u16(ip + 6) & 0x3fff;

        if (!late) {
            ident->type = SHAPER_ADDR_IPV4;
            ident_add(ident, ip + 16, 4);
        } else {
            ident->type = SHAPER_FLOW_IPV4;
            ident_add(ident, ip + 12, 8);
            ports = add_ports(ident, input, p, ofs + header,
                              fragment ? 0 : ip[9]);
            ident_add(ident, ip + 9, 1);
        }
    } else if (type == 0x86dd && input->size >= ofs + 40) {
        if (!late) {
            ident->type = SHAPER_ADDR_IPV6;
            ident_add(ident, ip + 24, 16);
        } else {
            ident->type = SHAPER_FLOW_IPV6;
            ident_add(ident, ip + 8, 32);
            ports = add_ports(ident, input, p, ofs + 40, ip[6]);
            ident_add(ident, ip + 6, 1);
        }
    } else {
        ident->type = late ? SHAPER_FLOW_ETH : SHAPER_ADDR_ETH;
        if (!input->packet_type && input->size >= 14) {
            ident_add(ident, p, late ? 12 : 6);
        }
    }
    return ports;
}

static bool
ident_equal(const struct ident *a, const struct ident *b)
{
    return (a->type == b->type && a->n == b->n
            && !memcmp(a->bytes, b->bytes, a->n));
}

/* Checks that 'key' is the one for 'ident'. */
static void
check_key(const struct packet_model_input *input,
          const struct shaper_flow_key *key, const struct ident *ident,
          bool late)
{
    uint8_t addr[16] = { 0 };

    if (key->addr_type != ident->type || key->chain != CHAIN
        || key->port || key->queue_id != QUEUE
        || key->late != (late ? EDT_LATE_FIRST : 0)) {
        model_fail(input, "chain %"PRIu32", port %"PRIu32", queue %"PRIu32
                   ", late %u, type %u, not %d", key->chain,
                   key->port, key->queue_id, key->late, key->addr_type,
                   ident->type);
    }
    if (ident->type == SHAPER_FLOW_IPV6) {
        return;                 /* A hash. */
    }

    if (ident->type == SHAPER_FLOW_IPV4) {
        uint32_t proto = ident->bytes[12];

        memcpy(addr, ident->bytes, 12);
        memcpy(&addr[12], &proto, 4);
    } else {
        memcpy(addr, ident->bytes, ident->n);
    }
    if (memcmp(key->addr, addr, sizeof addr)) {
        model_fail(input, "late %d: not the key that it should have", late);
    }
}

/* Returns the checksum of the 'n' bytes at 'p', an even number: 0 if they
 * contain the right one (RFC 791 section 3.1). */
static uint16_t
checksum(const uint8_t *p, size_t n)
{
    unsigned long int sum = 0;

    for (size_t i = 0; i < n; i += 2) {
        sum += get_u16(p + i);
    }
    while (sum > 0xffff) {
        sum = sum % 0x10000 + sum / 0x10000;
    }
    return 0xffff - sum;
}

/* Finds the ECN field of the packet.  Returns the offset of the byte that it
 * is in, or 0 if there is none, and stores by how much it is shifted in there,
 * and the offset and length of an IPv4 header, or 0 for the latter. */
static size_t
find_ecn(const struct packet_model_input *input, const uint8_t *p, int *shift,
         size_t *ip_ofs, size_t *ip_len)
{
    uint16_t type = find_l3(input, p, ip_ofs);
    const uint8_t *ip = p + *ip_ofs;
    size_t left = input->size - *ip_ofs;

    *ip_len = 0;
    *shift = 0;
    if (type == 0x0800 && left >= 20 && ip[0] >> 4 == 4
        && (ip[0] & 15) >= 5 && left >= (ip[0] & 15) * 4) {
        *ip_len = (ip[0] & 15) * 4;
        return *ip_ofs + 1;
    }
    if (type == 0x86dd && left >= 40 && ip[0] >> 4 == 6) {
        *shift = 4;
        return *ip_ofs + 1;
    }
    return 0;
}

/* The real thing. */

/* Returns memory for a packet, between pages that cannot be read, and stores
 * its size. */
static uint8_t *
get_area(size_t *size)
{
    size_t page = get_page_size();
    static uint8_t *area;

    *size = ROUND_UP(PACKET_MODEL_MAX, page);
    if (!area) {
        uint8_t *p = mmap(NULL, *size + 2 * page, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        ovs_assert(p != MAP_FAILED);
        area = p + page;
        ovs_assert(!mprotect(area, *size, PROT_READ | PROT_WRITE));
    }
    return area;
}

/* Returns where in the 'area' of 'area_size' bytes a packet of 'size' bytes
 * ends where nothing can be read any more. */
static uint8_t *
get_end(uint8_t *area, size_t area_size, size_t size)
{
#ifdef __SANITIZE_ADDRESS__
    /* UBSan wants headers at even addresses; AddressSanitizer itself watches
     * the byte that this may leave. */
    __asan_unpoison_memory_region(area, area_size);
    if (size & 1) {
        area_size--;
        __asan_poison_memory_region(area + area_size, 1);
    }
#endif
    return area + area_size - size;
}

/* Where a packet lies, and what is known of it beforehand. */
enum placement {
    AT_END,                     /* At the end of what can be read. */
    AT_START,                   /* At its start, with wrong offsets. */
    PREPARED,                   /* As the datapath has it, which looks up flows
                                 * first. */
    N_PLACEMENTS
};

/* Makes 'packet' one that has the bytes 'p'.  It need not be freed, and the
 * next one takes its place. */
static void
packet_place(struct dp_packet *packet, const struct packet_model_input *input,
             const uint8_t *p, enum placement placement, bool late)
{
    /* miniflow_extract() expects headers at even addresses, as all that OVS
     * receives has them. */
    bool at_start = placement == AT_START || (placement == PREPARED
                                              && input->size & 1);
    size_t area_size;
    uint8_t *to = get_area(&area_size);

    if (!at_start) {
        to = get_end(to, area_size, input->size);
    }
    memcpy(to, p, input->size);
    dp_packet_use_stub(packet, to, input->size);
    dp_packet_set_size(packet, input->size);
    packet->packet_type = input->packet_type;
    pkt_metadata_init(&packet->md, ODPP_NONE);
    packet->md.skb_priority = QUEUE;
    pkt_metadata_set_edt(&packet->md, &(struct edt_stamp) {
        .edt_ns = 1,
        .chain = CHAIN,
        .flags = late ? EDT_LATE_FIRST : EDT_PROMISED,
    });
    if (placement == AT_START) {
        packet->l2_5_ofs = 1;
        packet->l3_ofs = input->size;
        packet->l4_ofs = UINT16_MAX - 1;
    } else if (placement == PREPARED) {
        struct {
            struct miniflow mf;
            uint64_t buf[FLOW_U64S];
        } m;

        miniflow_extract(packet, &m.mf);
    }
}

/* Stores the key of the packet with bytes 'p', wherever it lies. */
static void
get_key(const struct packet_model_input *input, const uint8_t *p, bool late,
        struct shaper_flow_key *key)
{
    for (int i = 0; i < N_PLACEMENTS; i++) {
        struct shaper_flow_key other;
        struct dp_packet packet;

        packet_place(&packet, input, p, i, late);
        memset(&other, i, sizeof other);
        shaper_flow_key_extract(&packet, &other);
        if (memcmp(dp_packet_data(&packet), p, input->size)) {
            model_fail(input, "the packet is not what it was");
        }
        if (!i) {
            *key = other;
        } else if (!shaper_flow_key_equal(key, &other)) {
            model_fail(input, "late %d: another key in place %d", late, i);
        }
    }
}

static void
check_keys(const struct packet_model_input *input, bool late,
           struct packet_model_seen *seen)
{
    struct shaper_flow_key key, flipped_key;
    uint8_t flipped[PACKET_MODEL_MAX];
    struct ident ident, flipped_ident;
    bool same;

    seen->ports += get_ident(input, input->bytes, late, &ident);
    seen->ipv4 += ident.type == SHAPER_ADDR_IPV4;
    seen->ipv6 += ident.type == SHAPER_ADDR_IPV6;
    seen->other += ident.type == SHAPER_ADDR_ETH;
    get_key(input, input->bytes, late, &key);
    check_key(input, &key, &ident, late);

    if (input->flip_ofs >= input->size) {
        return;
    }
    memcpy(flipped, input->bytes, input->size);
    flipped[input->flip_ofs] ^= input->flip;
    get_ident(input, flipped, late, &flipped_ident);
    get_key(input, flipped, late, &flipped_key);
    same = ident_equal(&ident, &flipped_ident);
    if (same != shaper_flow_key_equal(&key, &flipped_key)) {
        model_fail(input, "late %d: %s FIFO with this byte changed", late,
                   same ? "another" : "still the same");
    }
    seen->same += same;
    seen->distinct += !same;
}

static void
check_mark(const struct packet_model_input *input,
           struct packet_model_seen *seen)
{
    uint8_t before[PACKET_MODEL_MAX], after[PACKET_MODEL_MAX];
    int shift;
    size_t ip_ofs, ip_len;
    size_t ofs = find_ecn(input, input->bytes, &shift, &ip_ofs, &ip_len);
    uint8_t ecn = ofs ? input->bytes[ofs] >> shift & 3 : 0;
    enum shaper_ecn expected = !ecn ? SHAPER_ECN_NOT_ECT
                               : ecn == 3 ? SHAPER_ECN_WAS_SET
                               : SHAPER_ECN_SET;
    uint16_t sum = ip_len ? checksum(input->bytes + ip_ofs, ip_len) : 0;

    /* The expected bytes, but for the checksum. */
    memcpy(before, input->bytes, input->size);
    if (ecn) {
        before[ofs] |= 3 << shift;
    }
    if (ip_len) {
        before[ip_ofs + 10] = before[ip_ofs + 11] = 0;
    }

    for (int i = 0; i < N_PLACEMENTS; i++) {
        struct shaper_flow_key key, key_after;
        struct dp_packet packet;
        enum shaper_ecn result;
        uint8_t *data;

        packet_place(&packet, input, input->bytes, i, true);
        shaper_flow_key_extract(&packet, &key);
        result = shaper_ecn_mark(&packet);
        if (result != expected) {
            model_fail(input, "marking gives %d, not %d", result, expected);
        }

        data = dp_packet_data(&packet);
        memcpy(after, data, input->size);
        if (ip_len) {
            uint16_t sum_after = checksum(after + ip_ofs, ip_len);

            if (!sum != !sum_after) {
                model_fail(input, "the checksum was off by 0x%04x, and by "
                           "0x%04x after marking", sum, sum_after);
            }
            if (expected != SHAPER_ECN_SET
                && memcmp(data + ip_ofs + 10, input->bytes + ip_ofs + 10, 2)) {
                model_fail(input, "checksum touched without need");
            }
            after[ip_ofs + 10] = after[ip_ofs + 11] = 0;
        }
        if (memcmp(before, after, input->size)
            || dp_packet_size(&packet) != input->size) {
            model_fail(input, "marking changed something else");
        }

        memcpy(after, data, input->size);
        shaper_flow_key_extract(&packet, &key_after);
        if (!shaper_flow_key_equal(&key, &key_after)) {
            model_fail(input, "marking has changed the key");
        }
        result = shaper_ecn_mark(&packet);
        if (result != (ecn ? SHAPER_ECN_WAS_SET : SHAPER_ECN_NOT_ECT)
            || memcmp(after, data, input->size)) {
            model_fail(input, "marking again gives %d", result);
        }
    }
    seen->marked += expected == SHAPER_ECN_SET;
}

void
packet_model_check(const struct packet_model_input *input,
                   struct packet_model_seen *seen)
{
    ovs_assert(input->size <= PACKET_MODEL_MAX);
    shaper_flow_key_init();
    check_keys(input, false, seen);
    check_keys(input, true, seen);
    check_mark(input, seen);
}
