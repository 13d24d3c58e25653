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

#include "shaper-delay.h"

#include "edt-meter.h"
#include "openvswitch/util.h"
#include "shaper-flow-key.h"
#include "util.h"

/* Initializes '*delay' with a delay and a jitter in us.  'delay_us' is at most
 * SHAPER_MAX_DELAY_US, 'jitter_us' at most 'delay_us'. */
void
shaper_delay_init(struct shaper_delay *delay, uint64_t delay_us,
                  uint64_t jitter_us)
{
    shaper_flow_key_init();
    delay->delay_ns = delay_us * 1000;
    delay->jitter_ns = jitter_us * 1000;
    delay->epoch_shift = jitter_us ? log_2_ceil(2 * delay->jitter_ns) : 0;
}

/* Returns 64 bits that depend on all bits of 'x' (the finalizer of
 * "splitmix64": Steele, Lea and Flood, "Fast splittable pseudorandom number
 * generators", 2014). */
static uint64_t
mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* For shaper_delay_ns(), if there is jitter. */
uint64_t
shaper_delay_jittered_ns__(const struct shaper_delay *delay,
                           const struct dp_packet *packet, uint64_t when_ns)
{
    const unsigned int shift = delay->epoch_shift;
    struct shaper_flow_key key;
    uint64_t epoch, random;
    uint64_t flow;

    shaper_flow_key_extract(packet, &key);
    flow = shaper_flow_key_hash(&key);

    /* The epochs of different flows begin at different times. */
    epoch = (when_ns + (flow << 32 >> (64 - shift))) >> shift;
    random = mix(flow << 32 ^ epoch * UINT64_C(0x9e3779b97f4a7c15)
                 ^ shaper_flow_key_secret__[0]);

    /* 28 bits of it times 'jitter_ns', which has 34, and 2. */
    return (delay->delay_ns - delay->jitter_ns
            + ((random >> 36) * (2 * delay->jitter_ns + 1) >> 28));
}

/* Returns the number of packets of EDT_MTU_BYTES that are on their way at
 * 'rate_bps', at most EDT_MAX_RATE_BPS, if that takes 'delay_us', at most
 * 2 * SHAPER_MAX_DELAY_US. */
uint64_t
shaper_delay_packets(uint64_t rate_bps, uint64_t delay_us)
{
    return rate_bps * delay_us / (UINT64_C(8000000) * EDT_MTU_BYTES);
}

/* Returns the longest delay in us during which no more than 'packets' packets
 * of EDT_MTU_BYTES, at most 2^24, are on their way at 'rate_bps', which is not
 * 0. */
uint64_t
shaper_delay_us(uint64_t rate_bps, uint64_t packets)
{
    return packets * UINT64_C(8000000) * EDT_MTU_BYTES / rate_bps;
}
