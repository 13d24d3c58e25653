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

#ifndef SLOT_SCALE_H
#define SLOT_SCALE_H 1

#include <stdint.h>

#include "util.h"

/* Slot numbers
 * ============
 *
 * Slot 'i' is at i * slot_ns.  Division is by multiplication, and exact for
 * all times below 2^63: with l = log2(slot_ns), rounded up, and
 * m = 2^(63 + l) / slot_ns, rounded up, m exceeds the true quotient by less
 * than 2^l / slot_ns, and n * m / 2^(63 + l) the true quotient n / slot_ns by
 * less than 1 / slot_ns. */
struct slot_scale {
    uint64_t multiplier;        /* m */
    uint32_t shift;             /* l */
    uint32_t round_up;          /* slot_ns - 1 */
};

static inline void
slot_scale_init(struct slot_scale *scale, uint64_t slot_ns)
{
    unsigned int shift = log_2_ceil(slot_ns);
    uint64_t quotient = 0;
    uint64_t rest = 1;

    /* Long division: the numerator has 64 + l bits. */
    for (unsigned int i = 0; i < 63 + shift; i++) {
        rest *= 2;
        quotient = 2 * quotient + (rest >= slot_ns);
        rest -= rest >= slot_ns ? slot_ns : 0;
    }
    scale->multiplier = slot_ns > 1 ? quotient + (rest > 0)
                        : UINT64_C(1) << 63;
    scale->shift = shift;
    scale->round_up = slot_ns - 1;
}

/* Returns the upper half of the product of 'a' and 'b'. */
static inline uint64_t
slot_mul_high__(uint64_t a, uint64_t b)
{
#ifdef __SIZEOF_INT128__
    return (unsigned __int128) a * b >> 64;
#else
    uint64_t low = (a & UINT32_MAX) * (b & UINT32_MAX);
    uint64_t mid1 = (a >> 32) * (b & UINT32_MAX) + (low >> 32);
    uint64_t mid2 = (a & UINT32_MAX) * (b >> 32) + (mid1 & UINT32_MAX);

    return (a >> 32) * (b >> 32) + (mid1 >> 32) + (mid2 >> 32);
#endif
}

/* Returns the number of the slot that is at 'ns', which is less than 2^63, or
 * the last one before it. */
static inline uint64_t
slot_scale_floor(const struct slot_scale *scale, uint64_t ns)
{
    return slot_mul_high__(2 * ns, scale->multiplier) >> scale->shift;
}

/* Returns the number of the slot that is at 'ns', which is less than
 * 2^63 - slot_ns, or the first one after it. */
static inline uint64_t
slot_scale_ceil(const struct slot_scale *scale, uint64_t ns)
{
    return slot_scale_floor(scale, ns + scale->round_up);
}

#endif /* slot-scale.h */
