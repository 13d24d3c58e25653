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

/* A fuzzer for what the shaper reads of packets: all that the input says is
 * checked against the reference model.  For clang's -fsanitize=fuzzer; "make
 * fuzz" runs it.  The first four bytes of the input say what kind of packet
 * the rest is, and what is changed in it. */

#include <config.h>

#include "openvswitch/compiler.h"
#include "packet-model.h"
#include "packets.h"
#include "util.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint32_t types[] = {
        PT_ETH, PT_ETH, PT_ETH, PT_IPV4, PT_IPV6, PT_MPLS, PT_NSH, PT_UNKNOWN
    };
    static struct packet_model_seen seen;
    struct packet_model_input input;

    if (size < 4) {
        return 0;
    }
    packet_model_set_context("fuzz");
    input.packet_type = htonl(types[data[0] % ARRAY_SIZE(types)]);
    input.flip = data[1];
    input.flip_ofs = data[2] * 256 + data[3];
    input.bytes = data + 4;
    input.size = MIN(size - 4, PACKET_MODEL_MAX);
    input.flip_ofs = input.size ? input.flip_ofs % input.size : 0;
    packet_model_check(&input, &seen);
    return 0;
}
