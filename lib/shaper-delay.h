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

#ifndef SHAPER_DELAY_H
#define SHAPER_DELAY_H 1

#include <stdint.h>

struct dp_packet;

/* The delay of a link
 * ===================
 *
 * What is added to the time at which a packet may leave: 'delay' and, with
 * jitter, a random time between '-jitter' and '+jitter', uniformly
 * distributed.
 *
 * Packets of a flow ("shaper-flow-key.h") must not overtake each other, so
 * they wait in a FIFO, each at least as long as its predecessor.  If each had
 * a random time of its own, all packets of a flow in which they are closer to
 * each other than the jitter would have to wait for the latest of many, and
 * their delay would be 'delay' + 'jitter' and no jitter at all.  So a flow's
 * random time stays the same for an epoch of 2 to 4 times 'jitter': packets
 * that are further apart have independent times, and those of a dense flow are
 * late by 'jitter' / 12 at most, in the mean, for the sake of their order.
 *
 * The random times are a function of flow and epoch that nobody outside of the
 * process can tell, rather than a state: all threads that send packets of a
 * flow agree on them.
 *
 * Thread-safety: a struct shaper_delay is constant once initialized. */

#define SHAPER_MAX_DELAY_US UINT64_C(10000000)

struct shaper_delay {
    uint64_t delay_ns;              /* 0: none. */
    uint64_t jitter_ns;             /* At most 'delay_ns'. */
    unsigned int epoch_shift;       /* Log2 of an epoch in ns. */
};

void shaper_delay_init(struct shaper_delay *, uint64_t delay_us,
                       uint64_t jitter_us);
uint64_t shaper_delay_jittered_ns__(const struct shaper_delay *,
                                    const struct dp_packet *,
                                    uint64_t when_ns);
uint64_t shaper_delay_packets(uint64_t rate_bps, uint64_t delay_us);
uint64_t shaper_delay_us(uint64_t rate_bps, uint64_t packets);

/* Returns the delay in ns of 'packet', which would leave at 'when_ns' without
 * one.  The stamp in its metadata says which meters it has passed, as for
 * shaper_flow_key_extract(). */
static inline uint64_t
shaper_delay_ns(const struct shaper_delay *delay,
                const struct dp_packet *packet, uint64_t when_ns)
{
    return (delay->jitter_ns
            ? shaper_delay_jittered_ns__(delay, packet, when_ns)
            : delay->delay_ns);
}

#endif /* shaper-delay.h */
