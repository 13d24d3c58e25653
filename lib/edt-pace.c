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

#include "edt-pace.h"

#include <math.h>
#include <sched.h>

#include "edt-meter.h"
#include "util.h"

BUILD_ASSERT_DECL(sizeof(struct edt_line) + sizeof(uint64_t)
                  <= CACHE_LINE_SIZE);

/* What a class of a pace without a rate gets beyond its maximum while it has
 * some of its burst left, in bytes a ns: more than any port sends. */
#define UNLIMITED 1000.0

/* What rounding does to rates, and 11 days in ns. */
#define NEARLY 1.000000000001
#define FOR_EVER 1000000000000000.0

/* Locking.  Threads that poll only try: others may be preempted.  (Private,
 * like all of which the name ends in "__": used by "edt-share.c", too.) */

bool
edt_pace_try_lock__(struct edt_pace *pace)
{
    uint32_t unlocked = 0;

    return atomic_compare_exchange_strong_explicit(&pace->lock, &unlocked, 1,
                                                   memory_order_acquire,
                                                   memory_order_relaxed);
}

void
edt_pace_lock__(struct edt_pace *pace)
{
    while (!edt_pace_try_lock__(pace)) {
        sched_yield();
    }
}

void
edt_pace_unlock__(struct edt_pace *pace)
{
    atomic_store_explicit(&pace->lock, 0, memory_order_release);
}

/* Returns the time, not before 'now_ns', of a change of 'pace': lines never go
 * back. */
uint64_t
edt_pace_time__(struct edt_pace *pace, uint64_t now_ns)
{
    pace->changed_ns = MAX(pace->changed_ns, now_ns);
    return pace->changed_ns;
}

/* Lines. */

static double
bps_to_rate(uint64_t bps)
{
    return bps ? bps / 8e9 : INFINITY;
}

/* Returns the bytes of a burst of 'class' beyond a packet, which leaves in any
 * case. */
static double
max_tokens(const struct edt_class *class)
{
    return class->limits.burst_bytes > EDT_MTU_BYTES
           ? class->limits.burst_bytes - EDT_MTU_BYTES : 0;
}

/* Returns 'bytes' bytes for each of 'weight' flows in units of V. */
static int64_t
v_of_bytes(double bytes, uint32_t weight)
{
    return ldexp(bytes, EDT_PACE_SHIFT) / weight;
}

/* Makes 'class' have 'v' at 't_ns', and its rate from then on. */
static void
class_set_line(struct edt_class *class, uint64_t v, uint64_t t_ns)
{
    const struct edt_pace *pace = class->pace;
    struct edt_line *line = &class->line;
    uint64_t words[EDT_LINE_WORDS];
    uint32_t seq;

    line->v0 = v;
    line->t0_ns = t_ns;
    line->mult = line->shift = line->catch_up = 0;
    line->until_ns = UINT64_MAX;
    if (class->weight) {
        double full = MIN(MIN(pace->rate, class->max), UNLIMITED);
        double slope = ldexp(MIN(class->rate, UNLIMITED), EDT_PACE_SHIFT)
                       / class->weight;
        int exponent;
        double mantissa = frexp(slope, &exponent);

        /* Below 2^-31 units a ns there is less than a byte in a year. */
        if (mantissa > 0 && exponent > -31) {
            line->mult = MIN(ceil(ldexp(mantissa, 32)), UINT32_MAX);
            line->shift = 32 - exponent;
        }
        /* Without a rate of the pace, a burst raises V at once. */
        line->catch_up = v_of_bytes(full * EDT_PACE_CATCH_UP_NS
                                    + (pace->rate < INFINITY ? 0
                                       : max_tokens(class)), class->weight);
        if (class->tokens > 0 && class->rate > class->max * NEARLY) {
            double ns = class->tokens / (class->rate - class->max);

            line->until_ns = t_ns + (uint64_t) MIN(ceil(ns), FOR_EVER);
        }
    }

    /* Loads of the words that see one of these stores see the odd number,
     * too, and so does the one after them. */
    memcpy(words, line, sizeof words);
    atomic_read_relaxed(&class->seq, &seq);
    atomic_store_relaxed(&class->seq, seq + 1);
    for (size_t i = 0; i < EDT_LINE_WORDS; i++) {
        atomic_store_explicit(&class->published[i], words[i],
                              memory_order_release);
    }
    atomic_store_explicit(&class->seq, seq + 2, memory_order_release);
    class->pace->n_writes++;
}

/* Brings the tokens of 'class' up to 't_ns' and returns V.  If its burst has
 * been used up before, stores in '*unused' by how many bytes its line has been
 * too high. */
static uint64_t
class_settle(struct edt_class *class, uint64_t t_ns, double *unused)
{
    uint64_t v = edt_line_at(&class->line, t_ns);

    *unused = 0;
    if (class->max < INFINITY) {
        class->tokens += (class->max - class->rate)
                         * (t_ns - class->tokens_ns);
        if (class->tokens > max_tokens(class)) {
            class->tokens = max_tokens(class);
        } else if (class->tokens < 0 && class->rate > class->max) {
            *unused = -class->tokens;
            class->tokens = 0;
            v -= v_of_bytes(*unused, class->weight);
        }
    } else {
        class->tokens = 0;
    }
    class->tokens_ns = t_ns;
    return v;
}

/* Rates of classes. */

static double
class_max(const struct edt_class *class)
{
    return class->tokens > 0 ? INFINITY : class->max;
}

static struct edt_class *
next_class(const struct edt_class *class)
{
    return CONTAINER_OF(class->node.next, struct edt_class, node);
}

/* Is 'c', which 'first' of the active classes of 'pace' or one after it leads
 * to, a class, and of the priority of 'first'? */
static bool
same_level(const struct edt_pace *pace, const struct edt_class *first,
           const struct edt_class *c)
{
    return (&c->node != &pace->active
            && c->limits.priority == first->limits.priority);
}

/* Gives 'left' bytes a ns to the active classes of 'pace' from 'first' on that
 * have its priority, as their weights say.  Returns what is left. */
static double
divide_level(struct edt_pace *pace, struct edt_class *first, double left)
{
    for (;;) {
        double weights = 0, step = INFINITY;
        struct edt_class *c;

        for (c = first; same_level(pace, first, c); c = next_class(c)) {
            double room = class_max(c) - c->rate;

            if (room > c->rate * (NEARLY - 1)) {
                weights += c->limits.weight;
                step = MIN(step, room / c->limits.weight);
            }
        }
        if (!weights || left <= 0) {
            return MAX(left, 0);
        }
        step = MIN(step, left / weights);
        for (c = first; same_level(pace, first, c); c = next_class(c)) {
            double room = class_max(c) - c->rate;

            if (room > c->rate * (NEARLY - 1)) {
                double more = step * c->limits.weight;

                c->rate = more >= room * (2 - NEARLY) ? class_max(c)
                                                     : c->rate + more;
            }
        }
        left -= step * weights;
    }
}

/* Works out the rates of the active classes of 'pace'. */
static void
divide(struct edt_pace *pace)
{
    double left = MIN(pace->rate, UNLIMITED * UNLIMITED);
    struct edt_class *c, *level = NULL;
    double minima = 0;

    LIST_FOR_EACH (c, node, &pace->active) {
        double min = c->limits.min_bps ? bps_to_rate(c->limits.min_bps) : 0;

        c->old_rate = c->rate;
        c->rate = MIN(min, class_max(c));
        minima += c->rate;
    }
    if (minima > left) {
        LIST_FOR_EACH (c, node, &pace->active) {
            c->rate *= left / minima;
        }
        minima = left;
    }
    left -= minima;
    LIST_FOR_EACH (c, node, &pace->active) {
        if (!level || c->limits.priority != level->limits.priority) {
            level = c;
            left = divide_level(pace, c, left);
        }
    }
}

/* Does 'c' have a use for what 'class' has not used, though no rate has risen?
 * Then returns its priority, otherwise UINT64_MAX. */
static uint64_t
may_have(const struct edt_class *c, const struct edt_class *class)
{
    return (c != class && c->rate < class_max(c) ? c->limits.priority
            : UINT64_MAX);
}

/* Works out the rates of 'pace' anew at 't_ns'.  'class', if not NULL, has
 * just been given its V, 'v', by the caller.  'unused' bytes of it are for the
 * classes whose rates rise, or else for others of the first priority. */
static void
pace_divide(struct edt_pace *pace, struct edt_class *class, uint64_t v,
            double unused, uint64_t t_ns)
{
    uint64_t first = UINT64_MAX;
    struct edt_class *c;
    double gain = 0;

    /* What bursts have had too much is unused, too. */
    LIST_FOR_EACH (c, node, &pace->active) {
        double more = 0;

        c->line.v0 = c == class ? v : class_settle(c, t_ns, &more);
        unused += more;
    }
    divide(pace);
    LIST_FOR_EACH (c, node, &pace->active) {
        c->gain = c == class ? 0 : MAX(c->rate - c->old_rate, 0);
        gain += c->gain;
    }
    if (unused > 0 && !gain) {
        LIST_FOR_EACH (c, node, &pace->active) {
            first = MIN(first, may_have(c, class));
        }
        LIST_FOR_EACH (c, node, &pace->active) {
            if (may_have(c, class) <= first && first < UINT64_MAX) {
                c->gain = c->limits.weight;
                gain += c->gain;
            }
        }
    }
    LIST_FOR_EACH (c, node, &pace->active) {
        uint64_t v0 = c->line.v0;

        if (c->tokens < 0) {
            /* What it has had too much it waits for at its own rate. */
            v0 -= v_of_bytes(-c->tokens * MIN(c->rate / c->max, 1),
                             c->weight);
            c->tokens = 0;
        }
        if (unused > 0 && c->gain > 0) {
            v0 += v_of_bytes(unused * (c->gain / gain), c->weight);
        }
        class_set_line(c, v0, t_ns);
    }
}

/* Changes of W. */

/* Puts 'class' among the active ones of its pace. */
static void
class_insert(struct edt_class *class)
{
    struct ovs_list *before = &class->pace->active;
    struct edt_class *c;

    LIST_FOR_EACH (c, node, &class->pace->active) {
        if (c->limits.priority > class->limits.priority) {
            before = &c->node;
            break;
        }
    }
    ovs_list_insert(before, &class->node);
}

/* Returns what is left at 't_ns' of 'bytes' bytes to be made up for at 'rate'
 * since 'since_ns'. */
static double
still_owed(double bytes, double rate, uint64_t since_ns, uint64_t t_ns)
{
    return t_ns > since_ns ? MAX(bytes - rate * (t_ns - since_ns), 0) : bytes;
}

/* Makes the active classes of 'pace' send 'bytes' bytes less from 't_ns' on
 * or, if there is none, the first that will be. */
static void
pace_owe(struct edt_pace *pace, double bytes, uint64_t t_ns)
{
    struct edt_class *c;
    double sum = 0;

    if (pace->rate == INFINITY) {
        return;
    }
    LIST_FOR_EACH (c, node, &pace->active) {
        sum += c->rate;
    }
    if (sum <= 0) {
        pace->debt = still_owed(pace->debt, pace->rate, pace->debt_ns, t_ns)
                     + bytes;
        pace->debt_ns = t_ns;
        return;
    }
    LIST_FOR_EACH (c, node, &pace->active) {
        double unused;
        uint64_t v = class_settle(c, t_ns, &unused);

        class_set_line(c, v - v_of_bytes(bytes * (c->rate / sum), c->weight),
                       t_ns);
    }
}

/* Makes 'class' change by 'change' at 'now_ns'. */
void
edt_class_change__(struct edt_class *class, const struct edt_change *change,
             uint64_t now_ns)
{
    struct edt_pace *pace = class->pace;
    const uint64_t t_ns = edt_pace_time__(pace, now_ns);
    const bool was_active = class->weight != 0;
    double excess, unused = 0;
    uint64_t v = class_settle(class, t_ns, &excess);

    /* What V has moved too far since flows have come and, if there are flows
     * that stayed, not far enough for those that left.  (If there are none,
     * nobody could have used that.) */
    int64_t extra = change->d_weight * v - change->d_sum;

    if (class->weight > change->d_left) {
        extra -= change->d_unused;
    } else {
        unused = ldexp(change->d_unused, -EDT_PACE_SHIFT);
        if (class->max < INFINITY) {
            /* It can be a part of a burst. */
            class->tokens = MIN(class->tokens + unused, max_tokens(class));
        }
    }

    class->weight += change->d_weight;
    if (class->weight) {
        v -= extra / (int64_t) class->weight;
        if (pace->rate == INFINITY) {
            v += v_of_bytes(class->tokens, class->weight);
            class->tokens = 0;
        }
    }
    if (class->weight && was_active) {
        if (!unused && class->line.until_ns > t_ns) {
            class_set_line(class, v, t_ns);
        } else {
            pace_divide(pace, class, v, unused + excess, t_ns);
        }
    } else if (class->weight) {
        if (ovs_list_is_empty(&pace->active)) {
            v -= v_of_bytes(still_owed(pace->debt, pace->rate, pace->debt_ns,
                                       t_ns), class->weight);
            pace->debt = 0;
        }
        class->rate = 0;
        class_insert(class);
        pace_divide(pace, class, v, 0, t_ns);
    } else if (was_active) {
        double left = ldexp(-extra, -EDT_PACE_SHIFT);

        ovs_list_remove(&class->node);
        class->rate = 0;
        class_set_line(class, v, t_ns);
        if (class->max < INFINITY) {
            class->tokens = MIN(class->tokens + left, max_tokens(class));
        }
        if (left < 0) {
            pace_owe(pace, -left, t_ns);
        }
        pace_divide(pace, NULL, 0, MAX(left, 0) + unused + excess, t_ns);
    } else if (extra > 0) {
        /* Flows have come and left unnoticed: what they have sent. */
        double bytes = ldexp(extra, -EDT_PACE_SHIFT);

        class->tokens -= class->max < INFINITY ? bytes : 0;
        pace_owe(pace, bytes, t_ns);
    }
}

/* Makes the classes of 'pace' make up for 'bytes' bytes of 'class' that went
 * ahead, unless they have too much to make up for already. */
void
edt_class_charge__(struct edt_class *class, double bytes, uint64_t now_ns)
{
    struct edt_pace *pace = class->pace;
    const uint64_t t_ns = edt_pace_time__(pace, now_ns);
    const double full = MIN(pace->rate, class->max);

    pace->owed = still_owed(pace->owed, full, pace->owed_ns, t_ns);
    pace->owed_ns = t_ns;
    if (full == INFINITY
        || pace->owed >= full * EDT_PACE_CATCH_UP_NS + 10 * EDT_MTU_BYTES) {
        return;
    }
    pace->owed += bytes;

    if (class->weight && class->rate >= class->max) {
        /* Others have as much as without. */
        class_set_line(class, edt_line_at(&class->line, t_ns)
                              - v_of_bytes(bytes, class->weight), t_ns);
        return;
    }
    if (!class->weight && class->max < INFINITY) {
        double unused;

        class_settle(class, t_ns, &unused);
        class->tokens -= bytes;
    }
    pace_owe(pace, bytes, t_ns);
}

/* Paces and classes. */

/* Returns a new pace of 'rate_bps' bit/s, 0 for one without a limit, owned by
 * the caller. */
struct edt_pace *
edt_pace_create(uint64_t rate_bps)
{
    struct edt_pace *pace = xzalloc_cacheline(sizeof *pace);

    ovs_refcount_init(&pace->ref_cnt);
    pace->rate = bps_to_rate(rate_bps);
    ovs_list_init(&pace->active);
    ovs_list_init(&pace->shares);
    return pace;
}

/* Returns 'pace' (which may be NULL) with another reference. */
struct edt_pace *
edt_pace_ref(struct edt_pace *pace)
{
    if (pace) {
        ovs_refcount_ref(&pace->ref_cnt);
    }
    return pace;
}

/* Drops a reference to 'pace' (which may be NULL). */
void
edt_pace_unref(struct edt_pace *pace)
{
    if (pace && ovs_refcount_unref(&pace->ref_cnt) == 1) {
        free_cacheline(pace);
    }
}

/* Makes the rate of 'pace' 'rate_bps' bit/s, 0 for no limit, from 'now_ns'
 * on. */
void
edt_pace_set_rate(struct edt_pace *pace, uint64_t rate_bps, uint64_t now_ns)
{
    double rate = bps_to_rate(rate_bps);

    edt_pace_lock__(pace);
    if (rate != pace->rate) {
        pace->rate = rate;
        pace_divide(pace, NULL, 0, 0, edt_pace_time__(pace, now_ns));
    }
    edt_pace_unlock__(pace);
}

/* Returns how many lines have been published for the classes of 'pace'. */
uint64_t
edt_pace_n_writes(struct edt_pace *pace)
{
    uint64_t n;

    edt_pace_lock__(pace);
    n = pace->n_writes;
    edt_pace_unlock__(pace);
    return n;
}

static void
class_set_limits(struct edt_class *class,
                 const struct edt_class_limits *limits)
{
    class->limits = *limits;
    class->limits.weight = MAX(limits->weight, 1);
    class->max = bps_to_rate(limits->max_bps);
}

/* Returns a new class of 'pace', to which it takes a reference, owned by the
 * caller.  It begins with its whole burst. */
struct edt_class *
edt_class_create(struct edt_pace *pace, const struct edt_class_limits *limits)
{
    struct edt_class *class = xzalloc_cacheline(sizeof *class);

    ovs_refcount_init(&class->ref_cnt);
    class->pace = edt_pace_ref(pace);
    class_set_limits(class, limits);
    class->tokens = max_tokens(class);
    class->line.until_ns = UINT64_MAX;
    edt_pace_lock__(pace);
    class->tokens_ns = pace->changed_ns;
    class_set_line(class, 0, pace->changed_ns);
    edt_pace_unlock__(pace);
    return class;
}

/* Returns 'class' (which may be NULL) with another reference. */
struct edt_class *
edt_class_ref(struct edt_class *class)
{
    if (class) {
        ovs_refcount_ref(&class->ref_cnt);
    }
    return class;
}

/* Drops a reference to 'class' (which may be NULL). */
void
edt_class_unref(struct edt_class *class)
{
    if (class && ovs_refcount_unref(&class->ref_cnt) == 1) {
        edt_pace_unref(class->pace);
        free_cacheline(class);
    }
}

/* Makes 'class' follow 'limits' from 'now_ns' on. */
void
edt_class_set_limits(struct edt_class *class,
                     const struct edt_class_limits *limits, uint64_t now_ns)
{
    struct edt_pace *pace = class->pace;

    edt_pace_lock__(pace);
    if (class->weight) {
        const uint64_t t_ns = edt_pace_time__(pace, now_ns);
        double unused;
        uint64_t v = class_settle(class, t_ns, &unused);

        ovs_list_remove(&class->node);
        class_set_limits(class, limits);
        class_insert(class);
        pace_divide(pace, class, v, unused, t_ns);
    } else {
        class_set_limits(class, limits);
    }
    class->tokens = MIN(class->tokens, max_tokens(class));
    edt_pace_unlock__(pace);
}
