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

#ifndef EDT_PACE_H
#define EDT_PACE_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "openvswitch/list.h"
#include "openvswitch/util.h"
#include "ovs-atomic.h"
#include "util.h"

/* One rate, shared by flows of many threads
 * =========================================
 *
 * A pace is a rate, that of an output port, and each of its classes, the
 * port's queues, has a part of it.  The flows of a class that have something
 * to send share what the class has equally, in bytes, in whatever threads they
 * are and however often these poll.
 *
 * All that the threads need to know is how much each flow of a class may have
 * sent so far: the class's virtual time V, in bytes (generalized processor
 * sharing, Parekh and Gallager, 1993).  As long as no flow comes or goes, V is
 * a straight line, and this line is what is shared:
 *
 *    V(t) = v0 + (t - t0) * rate / W          (W: the class's active flows)
 *
 * A thread reads the line and works out its own due.  It writes only when the
 * number of *its* active flows changes, and changes of one poll together.
 *
 *  * A flow has a tag: the V up to which it has been served.  Sending 'n'
 *    bytes adds 'n' to it.  It becomes active with the V of that moment, so
 *    that it gains nothing by having been idle.
 *
 *  * A flow that has nothing more to send stays active until V reaches its
 *    tag, so that it gains nothing by coming and going.  What V has moved on
 *    beyond the tag until it is noticed is given to the others.
 *
 *  * A thread may send while the sum of the tags of its active flows is not
 *    above V times their number (edt_share_may_send(): a comparison).  Which
 *    of them sends is its own affair: the one with the lowest tag, by which
 *    packets of different flows alternate ("edt-tags.h").
 *
 * Properties
 * ----------
 *
 *  * Equal: flows of a class that always have something to send get the same,
 *    but for a packet and what one poll allows.
 *
 *  * Exact: all together send at the rate.  In any time T they send at most
 *    rate * T, one packet for each thread and class, and what a thread that
 *    polled late catches up on: its share of the last EDT_PACE_CATCH_UP_NS.
 *    (What goes ahead of the rate, see edt_share_charge(), comes on top at
 *    first.)
 *
 *  * A thread that has not polled for EDT_PACE_AWAY_NS does not count: others
 *    have what would be its.
 *
 *  * Classes with something to send have, in this order, their 'min_bps' (if
 *    these are more than there is, the same part of each), and
 *    of what is left first those with the lowest 'priority' as much as they
 *    can use, in parts as their 'weight' says, up to 'max_bps'.  What some do
 *    not use, others have.  (By the lines' slopes, which are worked out anew
 *    when a class becomes active or idle.)
 *
 *  * A class with 'max_bps' and a burst that was idle may exceed 'max_bps',
 *    but not the pace's rate, until it has used as much of 'burst_bytes' as it
 *    has left unused before: a token bucket.
 *
 * V is in units of 2^-EDT_PACE_SHIFT bytes and wraps around; it is compared as
 * a difference.  Rates from 1 kbit/s to 400 Gbit/s and up to 2^24 active flows
 * are right to better than 10^-5.
 *
 * Thread-safety
 * -------------
 *
 *  A struct edt_share belongs to one thread at a time.  All others may be used
 *  by any thread at any time.  Readers of the line and threads that publish
 *  never wait for each other: whoever finds a class taken goes on with what he
 *  knows, and publishes at his next poll.  That nothing is lost by that, nor
 *  by a poll that is late, is by accounting: whoever changes W says by how
 *  much the tags of his flows have changed with it, and what V has moved too
 *  far, or not far enough, for the W that it should have had, is taken back.
 *
 *  Creating, destroying and configuring waits for others.
 *
 * Time is passed in by the caller, in ns on one monotonic clock. */

/* Units of V for a byte, as a power of two. */
#define EDT_PACE_SHIFT 20

/* Longest time between two polls that a thread catches up on. */
#define EDT_PACE_CATCH_UP_NS UINT64_C(10000000)

/* Time without a poll after which others have a thread's share. */
#define EDT_PACE_AWAY_NS UINT64_C(5000000)

/* How a class's line is published, all in one cache line. */
struct edt_line {
    uint64_t v0;
    uint64_t t0_ns;
    uint64_t mult;                  /* Slope: units of V a ns, times... */
    uint64_t shift;                 /* ...two to the power of this. */
    uint64_t until_ns;              /* When the slope is to be worked out
                                     * anew. */
    uint64_t catch_up;              /* Most that a flow may lag behind V. */
};
#define EDT_LINE_WORDS (sizeof(struct edt_line) / sizeof(uint64_t))

/* The part of a class in a pace. */
struct edt_class_limits {
    uint32_t priority;              /* 0 first. */
    uint32_t weight;                /* Among those of a priority, at least
                                     * 1. */
    uint64_t min_bps;               /* Before all priorities. */
    uint64_t max_bps;               /* 0: none. */
    uint64_t burst_bytes;           /* Of 'max_bps'; at least an MTU. */
};
#define EDT_CLASS_LIMITS_DEFAULT ((struct edt_class_limits) { .weight = 1 })

/* A rate.  All members but 'ahead_ticks' are protected by 'lock'. */
struct edt_pace {
    struct ovs_refcount ref_cnt;
    atomic_uint32_t lock;
    double rate;                    /* Bytes a ns; INFINITY if unlimited. */
    uint64_t changed_ns;
    struct ovs_list active;         /* Of struct edt_class, by priority. */
    struct ovs_list shares;         /* Of struct edt_share, all. */
    double debt;                    /* Bytes that went ahead while no class
                                     * was active, at 'debt_ns'. */
    uint64_t debt_ns;
    double owed;                    /* Bytes that went ahead and are not made
                                     * up for, at 'owed_ns'. */
    uint64_t owed_ns;
    uint64_t n_writes;              /* Lines published, for tests. */

    /* For who lets packets go ahead: struct shaper_control_rate. */
    atomic_uint64_t ahead_ticks;
};

/* A class of a pace. */
struct edt_class {
    /* Written when W or the rate changes, read by all threads. */
    PADDED_MEMBERS(CACHE_LINE_SIZE,
        atomic_uint32_t seq;        /* Odd while being written. */
        atomic_uint64_t published[EDT_LINE_WORDS];
    );

    /* Protected by the pace's lock. */
    struct edt_pace *pace;
    struct ovs_refcount ref_cnt;
    struct edt_line line;           /* What is published. */
    struct ovs_list node;           /* In 'active' of 'pace' if 'weight'. */
    struct edt_class_limits limits;
    uint32_t weight;                /* W. */
    double rate;                    /* That it has now, in bytes a ns. */
    double old_rate, gain;          /* Within pace_divide(). */
    double max;                     /* In bytes a ns; INFINITY if none. */
    double tokens;                  /* Bytes of its burst that are left, at
                                     * 'tokens_ns'.  If idle, less than 0 is
                                     * what it has had too much. */
    uint64_t tokens_ns;

    atomic_uint64_t ahead_ticks;    /* As in struct edt_pace. */
};

/* What a thread has of a class.  To be read with the functions below. */
struct edt_share {
    /* The thread's. */
    struct edt_class *class;        /* NULL: no limit. */
    struct edt_line line;           /* As of 'seq'. */
    uint32_t seq;
    uint32_t weight;                /* Active flows. */
    uint64_t sum;                   /* Of their tags. */
    uint64_t v;                     /* V at 'now_ns', less 'offset'. */
    uint64_t now_ns;
    uint64_t offset;                /* Tags are less than V by this, which the
                                     * thread has missed. */
    int32_t d_weight;               /* Not published: change of 'weight', */
    uint32_t d_left;                /* flows that have left, */
    uint64_t d_sum;                 /* change of 'sum' by both, */
    uint64_t d_unused;              /* what V had passed the tags of these by
                                     * (which 'd_sum' has not), */
    uint64_t charge;                /* bytes that went ahead. */
    uint64_t watch_ns;              /* When to look after other threads. */

    /* Shared. */
    atomic_uint64_t polled_ns;      /* By the thread, if it counts in W. */
    atomic_bool suspended;          /* Does it not, though it has flows? */

    /* Protected by the pace's lock. */
    struct ovs_list node;           /* In 'shares' of the pace. */
    uint32_t published_weight;      /* Part of W, unless 'suspended'. */
    uint64_t suspended_v;           /* V when it was suspended. */
};

/* What changes in the active flows of a class. */
struct edt_change {
    int32_t d_weight;               /* Added to W. */
    uint32_t d_left;                /* Flows that are no longer in it. */
    uint64_t d_sum;                 /* Added to the sum of tags by that. */
    uint64_t d_unused;              /* Was set aside for flows that left. */
};

struct edt_pace *edt_pace_create(uint64_t rate_bps);
struct edt_pace *edt_pace_ref(struct edt_pace *);
void edt_pace_unref(struct edt_pace *);
void edt_pace_set_rate(struct edt_pace *, uint64_t rate_bps, uint64_t now_ns);
uint64_t edt_pace_n_writes(struct edt_pace *);

struct edt_class *edt_class_create(struct edt_pace *,
                                   const struct edt_class_limits *);
struct edt_class *edt_class_ref(struct edt_class *);
void edt_class_unref(struct edt_class *);
void edt_class_set_limits(struct edt_class *, const struct edt_class_limits *,
                          uint64_t now_ns);

/* Private: for "edt-share.c". */
bool edt_pace_try_lock__(struct edt_pace *);
void edt_pace_lock__(struct edt_pace *);
void edt_pace_unlock__(struct edt_pace *);
uint64_t edt_pace_time__(struct edt_pace *, uint64_t now_ns);
void edt_class_change__(struct edt_class *, const struct edt_change *,
                        uint64_t now_ns);
void edt_class_charge__(struct edt_class *, double bytes, uint64_t now_ns);

void edt_share_init(struct edt_share *, struct edt_class *, uint64_t now_ns);
void edt_share_destroy(struct edt_share *);
void edt_share_leave_all(struct edt_share *, uint64_t now_ns);
void edt_share_suspend(struct edt_share *, uint64_t now_ns);
bool edt_share_resume__(struct edt_share *, uint64_t now_ns);
void edt_share_read__(struct edt_share *);
void edt_share_clamp__(struct edt_share *);
bool edt_share_publish__(struct edt_share *, uint64_t now_ns);
void edt_share_watch__(struct edt_share *, uint64_t now_ns);
uint64_t edt_share_next_ns(const struct edt_share *, uint64_t now_ns);
uint64_t edt_share_lag_ns(const struct edt_share *);

/* Returns V at 'now_ns' by 'line'. */
static inline uint64_t
edt_line_at(const struct edt_line *line, uint64_t now_ns)
{
    uint64_t dt = now_ns > line->t0_ns ? now_ns - line->t0_ns : 0;

    return line->v0 + (MIN(dt, UINT32_MAX) * line->mult >> line->shift);
}

/* Has anything changed in 'share' that others do not know of?  Then V may be
 * wrong by that, too. */
static inline bool
edt_share_has_news(const struct edt_share *share)
{
    return share->d_weight || share->d_left || share->d_sum || share->charge;
}

/* Returns by how much 'share' lags behind V, negative if it is ahead. */
static inline int64_t
edt_share_lag(const struct edt_share *share)
{
    return share->v * share->weight - share->sum;
}

static inline bool
edt_share_lags_too_much(const struct edt_share *share)
{
    return edt_share_lag(share) > (int64_t) (share->line.catch_up
                                             * share->weight);
}

/* Brings 'share' up to 'now_ns'.  To be called before the others of these
 * functions with the same time, and, while it has active flows, at least
 * each EDT_PACE_AWAY_NS. */
static inline void
edt_share_poll(struct edt_share *share, uint64_t now_ns)
{
    bool suspended;
    uint32_t seq;

    atomic_read_explicit(&share->class->seq, &seq, memory_order_acquire);
    if (OVS_UNLIKELY(seq != share->seq)) {
        edt_share_read__(share);
    }
    atomic_read_relaxed(&share->suspended, &suspended);
    if (OVS_UNLIKELY(suspended) && !edt_share_resume__(share, now_ns)) {
        return;
    }
    share->now_ns = now_ns;
    share->v = edt_line_at(&share->line, now_ns) - share->offset;
    if (share->weight) {
        atomic_store_relaxed(&share->polled_ns, now_ns);
        if (OVS_UNLIKELY(edt_share_lags_too_much(share))
            && !edt_share_has_news(share)) {
            edt_share_clamp__(share);
        }
        if (OVS_UNLIKELY(now_ns >= share->watch_ns)) {
            edt_share_watch__(share, now_ns);
        }
    }
}

/* Adds a flow to the active ones of 'share', polled at 'now_ns' (if it was not
 * yet, it is now), and returns its tag. */
static inline uint64_t
edt_share_join(struct edt_share *share, uint64_t now_ns)
{
    if (share->now_ns != now_ns) {
        edt_share_poll(share, now_ns);
        atomic_store_relaxed(&share->polled_ns, now_ns);
    }
    share->weight++;
    share->sum += share->v;
    share->d_weight++;
    share->d_sum += share->v + share->offset;
    return share->v;
}

/* May an active flow with 'tag' that has nothing to send cease to be one? */
static inline bool
edt_share_may_leave(const struct edt_share *share, uint64_t tag)
{
    return (int64_t) (share->v - tag) >= 0;
}

/* Takes an active flow with 'tag' out of 'share'. */
static inline void
edt_share_leave(struct edt_share *share, uint64_t tag)
{
    uint64_t unused = edt_share_may_leave(share, tag) ? share->v - tag : 0;

    share->weight--;
    share->sum -= tag;
    share->d_weight--;
    share->d_left++;
    share->d_sum -= tag + unused + share->offset;
    share->d_unused += unused;
}

/* May one of the active flows of 'share' send a packet?  (What V has been
 * rounded down by when lines changed, a unit each time, is not to make it wait
 * for a clock that goes in steps.) */
static inline bool
edt_share_may_send(const struct edt_share *share)
{
    return edt_share_lag(share) + 16 * (int64_t) share->weight >= 0;
}

/* Notes that an active flow of 'share' has sent 'bytes' bytes and returns by
 * what to raise its tag. */
static inline uint64_t
edt_share_send(struct edt_share *share, uint32_t bytes)
{
    uint64_t service = (uint64_t) bytes << EDT_PACE_SHIFT;

    share->sum += service;
    return service;
}

/* Notes that 'bytes' bytes of the class of 'share' have left without being
 * due: all active flows of the pace make up for them. */
static inline void
edt_share_charge(struct edt_share *share, uint32_t bytes)
{
    share->charge += bytes;
}

/* Lets others know of what has changed in 'share' by edt_share_join() and
 * others, if anything has.  To be called once a poll, before sending; it may
 * put that off to the next call. */
static inline void
edt_share_publish(struct edt_share *share, uint64_t now_ns)
{
    if (OVS_UNLIKELY(edt_share_has_news(share)
                     || now_ns >= share->line.until_ns
                     || (share->weight && now_ns > share->line.t0_ns
                                                   + UINT32_MAX / 2))) {
        edt_share_publish__(share, now_ns);
    }
}

#endif /* edt-pace.h */
