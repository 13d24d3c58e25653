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

#include "edt-meter.h"

#include <math.h>

#include "util.h"

BUILD_ASSERT_DECL(EDT_STALE_TICKS < UINT64_MAX / 4);

/* What is written for each batch is in one cache line, also behind another
 * 8 bytes, as it is in a meter of the datapath. */
BUILD_ASSERT_DECL(offsetof(struct edt_meter, late_drops)
                  <= CACHE_LINE_SIZE - 8);

/* Creates parameters for a meter that obeys 'limits'.  Values outside of the
 * ranges stated at struct edt_limits are moved to the nearest allowed one.  A
 * burst of less than one MTU, or of one packet, admits no more than an unset
 * one.  The caller owns the result until it passes it on to edt_meter_init()
 * or edt_meter_set_params(). */
struct edt_params *
edt_params_create(const struct edt_limits *limits)
{
    struct edt_params *p = xzalloc(sizeof *p);
    const bool per_packet = limits->per_packet;
    const uint64_t min_rate = per_packet ? EDT_MIN_RATE_PPS : EDT_MIN_RATE_BPS;
    const uint64_t max_rate = per_packet ? EDT_MAX_RATE_PPS : EDT_MAX_RATE_BPS;
    const uint64_t rate = MIN(MAX(limits->rate, min_rate), max_rate);
    const uint64_t burst = MIN(limits->burst, per_packet
                                              ? EDT_MAX_BURST_PACKETS
                                              : EDT_MAX_BURST_BYTES);

    p->limits.per_packet = per_packet;
    p->limits.fair = limits->fair;
    p->limits.rate = rate;
    p->limits.burst = burst;
    p->limits.max_delay_us = MIN(limits->max_delay_us, EDT_MAX_DELAY_US);
    p->limits.ecn_threshold_us = MIN(limits->ecn_threshold_us,
                                     EDT_MAX_DELAY_US);

    /* Ticks per byte are 8e9 * 2^10 / rate, between 20.48 and 8.192e9; ticks
     * per packet are 1e9 * 2^10 / rate, between 238 and 1.024e12.  Either is a
     * fixed-point number that leaves 22 bits for the units of a batch.  The
     * shift is chosen so that the number has at most 41 bits; it has 25 at the
     * highest rate. */
    const uint64_t num = (per_packet ? UINT64_C(1000000000)
                                     : UINT64_C(8000000000)) << EDT_TICK_SHIFT;

    while (p->cost_shift < 20
           && ((num << (p->cost_shift + 1)) / rate) < UINT64_C(1) << 41) {
        p->cost_shift++;
    }
    p->unit_cost = DIV_ROUND_UP(num << p->cost_shift, rate);

    /* A burst leaves at once if the first of its frames finds the schedule
     * late by all of the others. */
    const uint32_t frame = per_packet ? 1 : EDT_MTU_BYTES;
    uint64_t extra = burst > frame ? burst - frame : 0;
    long double tolerance = extra * ((long double) num / rate);

    p->tolerance_ticks = MIN(tolerance, (long double) EDT_STALE_TICKS / 4);
    p->max_delay_ticks = (p->limits.max_delay_us * 1000) << EDT_TICK_SHIFT;
    p->ecn_threshold_ticks
        = p->limits.ecn_threshold_us
          ? (p->limits.ecn_threshold_us * 1000) << EDT_TICK_SHIFT
          : EDT_ECN_OFF;

    uint64_t gap_ns = frame * (num >> EDT_TICK_SHIFT) / rate;
    p->gap_ns = MIN(gap_ns, UINT32_MAX);
    return p;
}

/* Initializes 'meter' as one that has never been used, with 'params' (which
 * may be NULL), whose ownership it takes. */
void
edt_meter_init(struct edt_meter *meter, struct edt_params *params)
{
    ovsrcu_init(&meter->params, params);
    atomic_init(&meter->tat_ticks, 0);
    atomic_init(&meter->owner, EDT_NO_THREAD);
    atomic_init(&meter->own_counts.packets, 0);
    atomic_init(&meter->own_counts.bytes, 0);
    atomic_init(&meter->shared_counts.packets, 0);
    atomic_init(&meter->shared_counts.bytes, 0);
    atomic_init(&meter->late_drops.packets, 0);
    atomic_init(&meter->late_drops.bytes, 0);
}

/* Frees what 'meter' owns.  There must be no readers left. */
void
edt_meter_destroy(struct edt_meter *meter)
{
    free(ovsrcu_get_protected(struct edt_params *, &meter->params));
}

/* Makes 'meter' forget what has been reserved: from 'now_ns' on it is as if it
 * had been idle for long.  To be called before the first use. */
void
edt_meter_reset(struct edt_meter *meter, uint64_t now_ns)
{
    /* Half of the range that counts as the past before now. */
    atomic_store_relaxed(&meter->tat_ticks, (now_ns << EDT_TICK_SHIFT)
                         - (UINT64_MAX / 2 - EDT_STALE_TICKS) / 2);
}

/* Takes what 'meter' has reserved beyond any EDT that 'old' can have given at
 * 'now_ns', which is for the last packets themselves, at the rate of 'new' if
 * that is higher.  Otherwise a packet that takes a second at the old rate
 * would keep others away for that second. */
static void
reprice(struct edt_meter *meter, const struct edt_params *old,
        const struct edt_params *new, uint64_t now_ns)
{
    const uint64_t limit = (now_ns << EDT_TICK_SHIFT) + old->max_delay_ticks;
    uint64_t tat, excess, cost;

    if (old->limits.per_packet != new->limits.per_packet) {
        return;
    }
    atomic_read_relaxed(&meter->tat_ticks, &tat);
    do {
        excess = tat - limit;
        if (excess > EDT_STALE_TICKS) {
            return;             /* There is none. */
        }
        cost = ceil(ldexp((double) excess * new->unit_cost / old->unit_cost,
                          (int) old->cost_shift - (int) new->cost_shift));
        if (cost >= excess) {
            return;
        }
    } while (!atomic_compare_exchange_weak_relaxed(&meter->tat_ticks, &tat,
                                                   limit + cost));
}

/* Makes 'meter' follow 'params' (NULL to assign no EDTs) from 'now_ns' on and
 * takes ownership.  What has been promised to packets stays as it is. */
void
edt_meter_set_params(struct edt_meter *meter, struct edt_params *params,
                     uint64_t now_ns)
{
    struct edt_params *old
        = ovsrcu_get_protected(struct edt_params *, &meter->params);

    /* Reprice before anyone reserves at the new rate: what is reserved at it
     * is paid for. */
    if (old && params) {
        reprice(meter, old, params, now_ns);
    }
    ovsrcu_set(&meter->params, params);
    if (old) {
        ovsrcu_postpone(free, old);
    }
}

/* Stores what edt_meter_count() has counted at 'meter' in '*packets' and
 * '*bytes'.  Thread-safe. */
void
edt_meter_get_counts(const struct edt_meter *meter_,
                     uint64_t *packets, uint64_t *bytes)
{
    struct edt_meter *meter = CONST_CAST(struct edt_meter *, meter_);
    uint64_t shared;

    atomic_read_relaxed(&meter->own_counts.packets, packets);
    atomic_read_relaxed(&meter->shared_counts.packets, &shared);
    *packets += shared;
    atomic_read_relaxed(&meter->own_counts.bytes, bytes);
    atomic_read_relaxed(&meter->shared_counts.bytes, &shared);
    *bytes += shared;
}

/* Makes 'thread_id' the one that counts in 'own_counts' of 'meter', unless
 * another thread has come first.  Returns true if successful. */
bool
edt_meter_own__(struct edt_meter *meter, uint32_t thread_id)
{
    uint32_t owner = EDT_NO_THREAD;

    /* What the owner before has counted must be seen: edt_meter_disown(). */
    return atomic_compare_exchange_strong_explicit(&meter->owner, &owner,
                                                   thread_id,
                                                   memory_order_acquire,
                                                   memory_order_relaxed);
}

/* Lets the next thread that counts at 'meter' own its counts if 'thread_id'
 * does, which must have ended: what it has counted last must have happened
 * before.  Thread-safe. */
void
edt_meter_disown(struct edt_meter *meter, uint32_t thread_id)
{
    uint32_t owner = thread_id;

    atomic_compare_exchange_strong_explicit(&meter->owner, &owner,
                                            EDT_NO_THREAD,
                                            memory_order_release,
                                            memory_order_relaxed);
}

/* Reserves time on 'meter' for the packets of a batch at 'now_ns'.  'ends[i]'
 * is the number of units of packets 0 to i ('ends[n - 1]' at most
 * EDT_MAX_BATCH_UNITS, 'n' at least 1); 'p' are the meter's parameters.
 *
 * Returns how many packets, from the first on, were admitted, and the time
 * reserved for them in '*r'.  The others would wait longer than the meter
 * allows and have consumed nothing. */
size_t
edt_meter_reserve(struct edt_meter *meter, const struct edt_params *p,
                  uint64_t now_ns, const uint32_t *ends, size_t n,
                  struct edt_reservation *r)
{
    const uint64_t now = now_ns << EDT_TICK_SHIFT;
    const uint64_t floor = now - p->tolerance_ticks;
    const uint64_t limit = now + p->max_delay_ticks;
    uint64_t tat, base, end;
    size_t admitted;

    atomic_read_relaxed(&meter->tat_ticks, &tat);
    do {
        base = tat - floor <= EDT_STALE_TICKS ? tat : floor;

        /* Packet i departs at base + cost(ends[i - 1]). */
        admitted = n;
        if (OVS_UNLIKELY((int64_t) (base + edt_cost(p, n > 1 ? ends[n - 2] : 0)
                                    - limit) > 0)) {
            for (admitted = 0; admitted < n; admitted++) {
                uint32_t before = admitted ? ends[admitted - 1] : 0;

                if ((int64_t) (base + edt_cost(p, before) - limit) > 0) {
                    break;
                }
            }
            if (!admitted) {
                r->base_ticks = r->end_ticks = base;
                return 0;
            }
        }
        end = base + edt_cost(p, ends[admitted - 1]);
    } while (!atomic_compare_exchange_weak_relaxed(&meter->tat_ticks, &tat,
                                                   end));
    r->base_ticks = base;
    r->end_ticks = end;
    return admitted;
}

/* Reserves time on 'meter', with parameters 'p', for 'units' units (at most
 * EDT_MAX_BATCH_UNITS) that may leave from 'since_ns' on, and of which the
 * first packet came at 'arrival_ns'.  Returns false, having consumed nothing,
 * if that packet would have waited longer than the meter allows when it
 * left. */
bool
edt_meter_reserve_late(struct edt_meter *meter, const struct edt_params *p,
                       uint64_t since_ns, uint64_t arrival_ns, uint32_t units,
                       struct edt_reservation *r)
{
    const uint64_t floor = (since_ns << EDT_TICK_SHIFT) - p->tolerance_ticks;
    const uint64_t limit = (arrival_ns << EDT_TICK_SHIFT) + p->max_delay_ticks;
    uint64_t tat;

    atomic_read_relaxed(&meter->tat_ticks, &tat);
    do {
        r->base_ticks = tat - floor <= EDT_STALE_TICKS ? tat : floor;
        if ((int64_t) (r->base_ticks - limit) > 0) {
            return false;
        }
        r->end_ticks = r->base_ticks + edt_cost(p, units);
    } while (!atomic_compare_exchange_weak_relaxed(&meter->tat_ticks, &tat,
                                                   r->end_ticks));
    return true;
}

/* Counts a packet of 'bytes' bytes that passed 'meter' and was dropped because
 * of it later, where it waited.  Thread-safe. */
void
edt_meter_count_drop(struct edt_meter *meter, uint32_t bytes)
{
    uint64_t orig;

    atomic_add_relaxed(&meter->late_drops.packets, 1, &orig);
    atomic_add_relaxed(&meter->late_drops.bytes, bytes, &orig);
}

/* Stores what edt_meter_count_drop() has counted at 'meter' in '*packets' and
 * '*bytes'.  Thread-safe. */
void
edt_meter_get_late_drops(const struct edt_meter *meter_,
                         uint64_t *packets, uint64_t *bytes)
{
    struct edt_meter *meter = CONST_CAST(struct edt_meter *, meter_);

    atomic_read_relaxed(&meter->late_drops.packets, packets);
    atomic_read_relaxed(&meter->late_drops.bytes, bytes);
}

/* Gives back time of reservation 'r' that its packets will not use because
 * something after 'meter' dropped them: 'refunded_units' of the
 * 'kept_units' + 'refunded_units' units that were reserved for.  'tail' says
 * that the dropped packets are the last ones of the batch: then, unless
 * another thread has reserved meanwhile, the schedule is exactly what it would
 * have been without them.  Otherwise the rate is still exact, and packets that
 * were given later times than they need keep those. */
void
edt_meter_refund(struct edt_meter *meter, const struct edt_params *p,
                 const struct edt_reservation *r, uint32_t kept_units,
                 uint32_t refunded_units, bool tail)
{
    uint64_t tat = r->end_ticks;

    if (tail
        && atomic_compare_exchange_strong_relaxed(
            &meter->tat_ticks, &tat,
            r->base_ticks + edt_cost(p, kept_units))) {
        return;
    }

    uint64_t orig;
    uint64_t refund = edt_cost(p, kept_units + refunded_units)
                      - edt_cost(p, kept_units);

    atomic_sub_relaxed(&meter->tat_ticks, refund, &orig);
}

/* Books 'cost_ticks' on 'meter' for packets that departed from 'start_ticks'
 * on, which is what edt_meter_pace_start() returned. */
void
edt_meter_charge(struct edt_meter *meter, uint64_t start_ticks,
                 uint64_t cost_ticks)
{
    uint64_t tat, end;

    atomic_read_relaxed(&meter->tat_ticks, &tat);
    do {
        uint64_t from = tat - start_ticks <= EDT_STALE_TICKS
                        ? tat : start_ticks;

        end = from + cost_ticks;
    } while (!atomic_compare_exchange_weak_relaxed(&meter->tat_ticks, &tat,
                                                   end));
}
