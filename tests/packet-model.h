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

#ifndef PACKET_MODEL_H
#define PACKET_MODEL_H 1

#include <stddef.h>
#include <stdint.h>

#include "openvswitch/types.h"

/* What the shaper reads of packets, beside a reference
 * ====================================================
 *
 * The reference says which bytes of a packet tell which FIFO it belongs to
 * ("shaper-flow-key.h"), and what the packet is to be after it was marked with
 * CE ("shaper-ecn.h").  It is written anew, byte by byte, from what these two
 * promise.
 *
 * The packets lie directly before a page that cannot be read, and behind one,
 * so that the program ends with a signal at the first byte that is read beyond
 * them, with a sanitizer or without. */

/* The longest packet that the model takes, in bytes. */
#define PACKET_MODEL_MAX 2048

/* A packet, and another one that differs in one byte. */
struct packet_model_input {
    ovs_be32 packet_type;       /* PT_*. */
    const uint8_t *bytes;
    size_t size;                /* 0 to PACKET_MODEL_MAX. */
    size_t flip_ofs;            /* This byte of it, if there is one, is... */
    uint8_t flip;               /* ...changed by an exclusive or with this. */
};

/* What the model made of packets, to see that a test tried what it is for. */
struct packet_model_seen {
    unsigned long long int ipv4;
    unsigned long long int ipv6;
    unsigned long long int other;
    unsigned long long int ports;       /* Flows told by their ports. */
    unsigned long long int marked;      /* With CE. */
    unsigned long long int same;        /* One byte differs, same FIFO. */
    unsigned long long int distinct;    /* One byte differs, another FIFO. */
};

/* Checks all that is to hold of a packet, and counts in '*seen' what it was.
 * If something does not, prints the packet and, after the context, what is
 * wrong, and calls abort().  Not thread-safe.
 *
 *   - The key of its FIFO depends on the packet's bytes only: not on where it
 *     lies and not on offsets that were found in it before, or are wrong.
 *   - It is the one that the reference gives.
 *   - Two packets have the same key if, and only if, the reference says that
 *     they belong to the same FIFO.
 *   - Marking changes the ECN field and the checksum, as the reference does,
 *     and no other byte; a right checksum stays right and a wrong one wrong;
 *     the key stays the same, and marking again does nothing. */
void packet_model_check(const struct packet_model_input *,
                        struct packet_model_seen *seen);

/* What to print before an error, such as the seed.  Not copied. */
void packet_model_set_context(const char *);

#endif /* PACKET_MODEL_H */
