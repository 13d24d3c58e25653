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

#ifndef EDT_METER_H
#define EDT_METER_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ovs-atomic.h"
#include "ovs-rcu.h"
#include "openvswitch/util.h"

/* Virtual scheduler that assigns earliest departure times (EDT)
 * =============================================================
 *
 * An EDT meter turns a rate into departure times.  It does not hold packets:
 * each packet is told when it may leave (or that it would wait too long), and
 * something else, the shaper of an output port, keeps it until then.  The
 * algorithm is the virtual scheduling form of the generic cell rate algorithm
 * (ITU-T I.371 annex A) with bytes in place of cells: one theoretical arrival
 * time, 'tat', is all the state there is.
 *
 *    base = max(tat, now - tolerance)
 *    packet i of a batch departs at base + (bytes before i) / rate
 *    tat  = base + (bytes of the batch) / rate
 *
 * A meter whose rate is in packets per second does the same with packets in
 * place of bytes.  What a meter counts in is called its units below.
 *
 * Properties
 * ----------
 *
 *  * Exact: time is kept in ticks of 2^-10 ns and the cost of a unit with a
 *    relative error below 10^-7, so that the long-run rate is right to better
 *    than 0.1 % from 64-byte to 9-kB frames and from EDT_MIN_RATE_BPS to
 *    EDT_MAX_RATE_BPS, and up to EDT_MAX_RATE_PPS packets/s, one packet per
 *    reservation or many.
 *
 *  * Bounded burst: what departs in any window of length W is at most
 *    rate * W + max(burst, one frame).  'burst' is the depth of the
 *    equivalent token bucket.  Unset means one MTU, or one packet.
 *
 *  * Bounded waiting: a packet that would wait longer than 'max_delay' is
 *    refused *before* 'tat' moves, so it consumes nothing.  Departure times
 *    rise within a batch, hence what is refused is always the batch's tail.
 *
 *  * Never lost: changing the parameters leaves alone what is promised to
 *    packets that are waiting; later packets follow them at the new rate.
 *    (What the last of them takes beyond the longest wait, which is much at a
 *    low rate, takes as long as it does at the new rate if that is higher.)
 *
 *  * Shared: any number of threads may reserve at the same time; each
 *    reservation is one compare-and-swap of 'tat'.  No lock, no division.
 *
 * Thread-safety
 * -------------
 *
 *  edt_meter_reserve(), edt_meter_refund(), edt_meter_charge() and
 *  edt_meter_count() may be called by any number of threads.
 *  edt_meter_set_params() needs the callers to exclude each other, and readers
 *  to be RCU readers.
 *
 * Clock
 * -----
 *
 *  'now_ns' is a monotonic clock in ns that all users of one meter share.
 *  Ticks wrap around after 208 days; they are compared modulo 2^64, and a
 *  'tat' that is further ahead of 'now' than any reservation can have put it
 *  is taken for the past.  (A meter that is used again after an idle time of a
 *  multiple of 208 days, less up to 9.3 hours, takes its 'tat' for the future
 *  and refuses packets until it is past that.)
 */

/* Ticks per ns, as a power of two. */
#define EDT_TICK_SHIFT 10

/* Bytes of the frame that an unset burst admits and that the gap of a flow is
 * stated for: 1,500 bytes of payload and the Ethernet header, without FCS, as
 * OpenFlow meters count in Open vSwitch. */
#define EDT_MTU_BYTES 1514

/* Units of a batch that count: the bytes of 32 packets of 64 kB, with room to
 * spare. */
#define EDT_MAX_BATCH_UNITS (UINT32_C(1) << 22)

#define EDT_MIN_RATE_BPS UINT64_C(1000)
#define EDT_MAX_RATE_BPS UINT64_C(400000000000)
#define EDT_MIN_RATE_PPS UINT64_C(1)
#define EDT_MAX_RATE_PPS UINT64_C(4294967295)
#define EDT_MAX_DELAY_US UINT64_C(10000000)
#define EDT_MAX_BURST_BYTES (UINT64_C(1) << 32)
#define EDT_MAX_BURST_PACKETS UINT64_C(4294967295)

/* Ticks of a threshold that no wait reaches. */
#define EDT_ECN_OFF ((uint64_t) INT64_MAX)

/* A 'tat' that is further ahead than this was not put there by a reservation:
 * it is the past, seen through the wrap-around of ticks.  Twice the longest
 * wait, and the time that the longest batch takes at the lowest rate.  (32
 * packets at EDT_MIN_RATE_PPS take less.) */
#define EDT_STALE_TICKS                                             \
    (((EDT_MAX_DELAY_US * 2000)                                     \
      + EDT_MAX_BATCH_UNITS * UINT64_C(8) * (1000000000 / EDT_MIN_RATE_BPS)) \
     << EDT_TICK_SHIFT)

/* What a meter is told to do. */
struct edt_limits {
    bool per_packet;            /* Does it count packets rather than bytes? */
    uint64_t rate;              /* In bit/s, or in packets/s if 'per_packet':
                                 * EDT_MIN_RATE_BPS to EDT_MAX_RATE_BPS, or
                                 * EDT_MIN_RATE_PPS to EDT_MAX_RATE_PPS. */
    uint64_t burst;             /* In bytes, or in packets if 'per_packet': at
                                 * most EDT_MAX_BURST_BYTES or
                                 * EDT_MAX_BURST_PACKETS; 0 if unset.  What
                                 * takes longer than 2.3 hours at the rate
                                 * counts as that. */
    uint64_t max_delay_us;      /* Longest wait, at most EDT_MAX_DELAY_US. */
    uint64_t ecn_threshold_us;  /* Wait above which packets are to be marked,
                                 * at most EDT_MAX_DELAY_US; 0 for none. */
    bool fair;                  /* Does it reserve when packets are about to
                                 * leave?  See "edt-late.h". */
};

/* The same in the form that packets need.  Immutable once published. */
struct edt_params {
    uint64_t unit_cost;         /* Ticks per unit << 'cost_shift'. */
    uint32_t cost_shift;
    uint32_t gap_ns;            /* EDT_MTU_BYTES or a packet at the rate,
                                 * saturated. */
    uint64_t tolerance_ticks;   /* Time 'tat' may lag behind now. */
    uint64_t max_delay_ticks;   /* Longest wait. */
    uint64_t ecn_threshold_ticks; /* EDT_ECN_OFF for none. */
    struct edt_limits limits;
};

/* What some packets amount to in either unit. */
struct edt_amount {
    uint32_t bytes;
    uint32_t packets;
};

/* Identity of no thread.  (UINT32_MAX is that of threads that poll nothing,
 * NON_PMD_CORE_ID.) */
#define EDT_NO_THREAD (UINT32_MAX - 1)

/* What has passed a meter. */
struct edt_counts {
    atomic_uint64_t packets;
    atomic_uint64_t bytes;
};

/* A meter.  'params' is NULL while the meter does not assign EDTs.
 *
 * Most meters are used by one thread.  It counts in 'own_counts', without
 * atomic operations; others, if there are any, share 'shared_counts'. */
struct edt_meter {
    OVSRCU_TYPE(struct edt_params *) params;
    atomic_uint64_t tat_ticks;
    atomic_uint32_t owner;      /* First thread to count, until it ends. */
    struct edt_counts own_counts;
    struct edt_counts shared_counts;
    struct edt_counts late_drops;   /* See edt_meter_count_drop(). */
};

/* Time reserved for a batch: packet with 'u' units before it in the batch has
 * its EDT at 'base_ticks' + cost of 'u'. */
struct edt_reservation {
    uint64_t base_ticks;
    uint64_t end_ticks;
};

struct edt_params *edt_params_create(const struct edt_limits *);

void edt_meter_init(struct edt_meter *, struct edt_params *);
void edt_meter_destroy(struct edt_meter *);
void edt_meter_set_params(struct edt_meter *, struct edt_params *,
                          uint64_t now_ns);
void edt_meter_reset(struct edt_meter *, uint64_t now_ns);

void edt_meter_get_counts(const struct edt_meter *,
                          uint64_t *packets, uint64_t *bytes);
bool edt_meter_own__(struct edt_meter *, uint32_t thread_id);
void edt_meter_disown(struct edt_meter *, uint32_t thread_id);

size_t edt_meter_reserve(struct edt_meter *, const struct edt_params *,
                         uint64_t now_ns, const uint32_t *ends, size_t n,
                         struct edt_reservation *);
bool edt_meter_reserve_late(struct edt_meter *, const struct edt_params *,
                            uint64_t since_ns, uint64_t arrival_ns,
                            uint32_t units, struct edt_reservation *);
void edt_meter_count_drop(struct edt_meter *, uint32_t bytes);
void edt_meter_get_late_drops(const struct edt_meter *,
                              uint64_t *packets, uint64_t *bytes);
void edt_meter_refund(struct edt_meter *, const struct edt_params *,
                      const struct edt_reservation *,
                      uint32_t kept_units, uint32_t refunded_units,
                      bool tail);

/* Returns the parameters of 'meter', or NULL if it does not assign EDTs.
 * Valid until the caller next quiesces. */
static inline const struct edt_params *
edt_meter_params(const struct edt_meter *meter)
{
    return ovsrcu_get(struct edt_params *, &meter->params);
}

/* Counts 'packets' packets of 'bytes' bytes that came to 'meter' in thread
 * 'thread_id', a number that no other thread that uses the meter at the same
 * time has, and not EDT_NO_THREAD. */
static inline void
edt_meter_count(struct edt_meter *meter, uint32_t thread_id,
                uint32_t packets, uint32_t bytes)
{
    uint32_t owner;
    uint64_t old;

    atomic_read_relaxed(&meter->owner, &owner);
    if (OVS_LIKELY(owner == thread_id
                   || (owner == EDT_NO_THREAD
                       && edt_meter_own__(meter, thread_id)))) {
        atomic_read_relaxed(&meter->own_counts.packets, &old);
        atomic_store_relaxed(&meter->own_counts.packets, old + packets);
        atomic_read_relaxed(&meter->own_counts.bytes, &old);
        atomic_store_relaxed(&meter->own_counts.bytes, old + bytes);
    } else {
        atomic_add_relaxed(&meter->shared_counts.packets, packets, &old);
        atomic_add_relaxed(&meter->shared_counts.bytes, bytes, &old);
    }
}

/* Returns 'amount' in the units that a meter with parameters 'p' counts in. */
static inline uint32_t
edt_units(const struct edt_params *p, const struct edt_amount *amount)
{
    return p->limits.per_packet ? amount->packets : amount->bytes;
}

/* Returns the time in ticks, rounded up, that 'units' take at the rate of 'p'.
 * 'units' is at most EDT_MAX_BATCH_UNITS. */
static inline uint64_t
edt_cost(const struct edt_params *p, uint32_t units)
{
    return (units * p->unit_cost + (UINT64_C(1) << p->cost_shift) - 1)
           >> p->cost_shift;
}

/* Returns the EDT in ns, rounded up, of a packet in reservation 'r' that has
 * 'units_before' units before it, at least 1.  'now_ns' is what
 * edt_meter_reserve() was given; an EDT may lie before it, by the tolerance at
 * most (which may be longer than the clock has run). */
static inline uint64_t
edt_reservation_edt_ns(const struct edt_reservation *r,
                       const struct edt_params *p, uint64_t now_ns,
                       uint32_t units_before)
{
    uint64_t t = r->base_ticks + edt_cost(p, units_before);
    int64_t wait = t - (now_ns << EDT_TICK_SHIFT);
    int64_t wait_ns = (wait + (1 << EDT_TICK_SHIFT) - 1) >> EDT_TICK_SHIFT;

    return OVS_LIKELY(wait_ns > -(int64_t) now_ns) ? now_ns + wait_ns : 1;
}

/* Pacing at departure
 * ===================
 *
 * A port or a queue with a rate decides when packets leave rather than when
 * they arrive: ask for edt_meter_pace_start(), send while the time it returned
 * is not after now, advancing it by edt_cost() for each packet, and charge
 * what was sent with edt_meter_charge().  Two threads that do so at once may
 * together send one batch too early; the charge makes the next wait longer. */

/* Returns the time in ticks from which 'meter' allows a packet to depart.
 * 'catch_up_ns' is how far the schedule may lag behind 'now_ns' without
 * forfeiting rate, where the meter's own tolerance is less: callers that have
 * had packets waiting for the meter since they last charged it state the
 * longest time between two of their visits. */
static inline uint64_t
edt_meter_pace_start(const struct edt_meter *meter,
                     const struct edt_params *p, uint64_t now_ns,
                     uint64_t catch_up_ns)
{
    uint64_t lag = MAX(p->tolerance_ticks, catch_up_ns << EDT_TICK_SHIFT);
    uint64_t floor = (now_ns << EDT_TICK_SHIFT) - lag;
    uint64_t tat;

    atomic_read_relaxed(&CONST_CAST(struct edt_meter *, meter)->tat_ticks,
                        &tat);
    return tat - floor <= EDT_STALE_TICKS ? tat : floor;
}

void edt_meter_charge(struct edt_meter *, uint64_t start_ticks,
                      uint64_t cost_ticks);

#endif /* edt-meter.h */
