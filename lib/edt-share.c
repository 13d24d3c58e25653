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

#include "util.h"

/* How often a thread looks whether others are away. */
#define WATCH_NS (EDT_PACE_AWAY_NS / 2)

/* Attempts to read a line that somebody is writing.  Who gives up goes on with
 * what it has read before. */
#define READ_ATTEMPTS 16

/* Initializes 'share' as what a thread has of 'class' (NULL: of nothing that
 * is limited), to which it takes a reference, with no active flow.  It must
 * not be moved. */
void
edt_share_init(struct edt_share *share, struct edt_class *class,
               uint64_t now_ns)
{
    memset(share, 0, sizeof *share);
    atomic_init(&share->polled_ns, now_ns);
    atomic_init(&share->suspended, false);
    share->class = edt_class_ref(class);
    share->line.until_ns = UINT64_MAX;
    if (class) {
        edt_pace_lock__(class->pace);
        ovs_list_push_back(&class->pace->shares, &share->node);
        edt_pace_unlock__(class->pace);
        edt_share_read__(share);
        share->watch_ns = now_ns + WATCH_NS;
    }
}

/* Frees what 'share' holds, whose flows are not active any more. */
void
edt_share_destroy(struct edt_share *share)
{
    struct edt_class *class = share->class;

    if (class) {
        edt_share_leave_all(share, share->now_ns);
        edt_pace_lock__(class->pace);
        ovs_list_remove(&share->node);
        edt_pace_unlock__(class->pace);
        edt_class_unref(class);
        share->class = NULL;
    }
}

/* Stores the line of 'class' in '*line' and its number in '*seq', or leaves
 * them if somebody is writing it. */
static void
class_read(const struct edt_class *class_, struct edt_line *line,
           uint32_t *seq)
{
    struct edt_class *class = CONST_CAST(struct edt_class *, class_);

    for (int i = 0; i < READ_ATTEMPTS; i++) {
        uint64_t words[EDT_LINE_WORDS];
        uint32_t before, after;

        atomic_read_explicit(&class->seq, &before, memory_order_acquire);
        for (size_t j = 0; j < EDT_LINE_WORDS; j++) {
            atomic_read_explicit(&class->published[j], &words[j],
                                 memory_order_acquire);
        }
        atomic_read_relaxed(&class->seq, &after);
        if (before == after && !(before & 1)) {
            memcpy(line, words, sizeof words);
            *seq = before;
            return;
        }
    }
}

/* Reads the line of the class of 'share'. */
void
edt_share_read__(struct edt_share *share)
{
    class_read(share->class, &share->line, &share->seq);
}

/* Lets 'share', which lags behind by more than a thread catches up on, miss
 * the rest. */
void
edt_share_clamp__(struct edt_share *share)
{
    uint64_t missed = edt_share_lag(share) / share->weight
                      - share->line.catch_up;

    share->offset += missed;
    share->v -= missed;
}

static void
share_forget(struct edt_share *share)
{
    share->d_weight = 0;
    share->d_left = 0;
    share->d_sum = share->d_unused = 0;
}

/* Publishes what has changed in 'share', whose pace is locked. */
static void
share_publish(struct edt_share *share, uint64_t now_ns)
{
    const struct edt_change change = {
        share->d_weight, share->d_left, share->d_sum, share->d_unused
    };

    edt_class_change__(share->class, &change, now_ns);
    share->published_weight += share->d_weight;
    share_forget(share);
    if (share->charge) {
        edt_class_charge__(share->class, share->charge, now_ns);
        share->charge = 0;
    }
}

/* Brings V in 'share' up to 'now_ns' after the line has changed. */
static void
share_refresh(struct edt_share *share, uint64_t now_ns)
{
    edt_share_read__(share);
    share->now_ns = now_ns;
    share->v = edt_line_at(&share->line, now_ns) - share->offset;
    if (edt_share_lags_too_much(share)) {
        edt_share_clamp__(share);
    }
}

/* Does what edt_share_publish() is to do.  Returns false if it has to be done
 * later. */
bool
edt_share_publish__(struct edt_share *share, uint64_t now_ns)
{
    struct edt_pace *pace = share->class->pace;
    bool suspended;

    if (!edt_pace_try_lock__(pace)) {
        return false;
    }
    atomic_read_relaxed(&share->suspended, &suspended);
    if (!suspended) {
        share_publish(share, now_ns);
    }
    edt_pace_unlock__(pace);
    if (!suspended) {
        share_refresh(share, now_ns);
    }
    return !suspended;
}

/* Takes all active flows out of 'share' at once, wherever their tags are. */
void
edt_share_leave_all(struct edt_share *share, uint64_t now_ns)
{
    struct edt_class *class = share->class;
    bool suspended;

    if (!class || (!share->weight && !share->published_weight
                   && !edt_share_has_news(share))) {
        return;
    }
    edt_pace_lock__(class->pace);
    atomic_read_relaxed(&share->suspended, &suspended);
    share->d_sum -= share->sum + share->offset * share->weight;
    share->d_weight -= share->weight;
    share->sum = 0;
    share->weight = 0;
    if (!suspended) {
        share_publish(share, now_ns);
    }
    share->published_weight = 0;
    share_forget(share);
    atomic_store_relaxed(&share->suspended, false);
    edt_pace_unlock__(class->pace);
    share_refresh(share, now_ns);
}

/* Adds what 'share' has published to W ('sign' 1), or takes it out (-1), when
 * V is 'v'. */
static void
share_count(struct edt_share *share, int sign, uint64_t v, uint64_t now_ns)
{
    const struct edt_change change = {
        .d_weight = sign * (int32_t) share->published_weight,
        .d_left = sign < 0 ? share->published_weight : 0,
        .d_sum = sign * (share->published_weight * v),
    };

    edt_class_change__(share->class, &change, now_ns);
}

/* Takes what 'share' has published out of W, its pace being locked. */
static void
share_suspend(struct edt_share *share, uint64_t now_ns)
{
    struct edt_class *class = share->class;

    share->suspended_v = edt_line_at(&class->line,
                                     edt_pace_time__(class->pace, now_ns));
    share_count(share, -1, share->suspended_v, now_ns);
    atomic_store_relaxed(&share->suspended, true);
}

/* Lets others have what 'share' has, until its next poll. */
void
edt_share_suspend(struct edt_share *share, uint64_t now_ns)
{
    struct edt_class *class = share->class;
    bool suspended;

    if (class && share->weight) {
        edt_pace_lock__(class->pace);
        atomic_read_relaxed(&share->suspended, &suspended);
        if (!suspended) {
            share_publish(share, now_ns);
            share_suspend(share, now_ns);
        }
        edt_pace_unlock__(class->pace);
    }
}

/* Makes 'share', whose thread was away, count again, unless somebody else is
 * changing its pace.  What others have had meanwhile is theirs. */
bool
edt_share_resume__(struct edt_share *share, uint64_t now_ns)
{
    struct edt_class *class = share->class;
    uint64_t v, missed;

    if (!edt_pace_try_lock__(class->pace)) {
        return false;
    }
    v = edt_line_at(&class->line, edt_pace_time__(class->pace, now_ns));
    missed = v - share->suspended_v;
    share->offset += missed;
    share->d_sum += share->d_weight * missed;
    share_count(share, 1, v, now_ns);
    atomic_store_relaxed(&share->polled_ns, now_ns);
    atomic_store_relaxed(&share->suspended, false);
    edt_pace_unlock__(class->pace);
    edt_share_read__(share);
    return true;
}

/* Suspends the shares of threads that have not polled for long. */
void
edt_share_watch__(struct edt_share *share, uint64_t now_ns)
{
    struct edt_pace *pace = share->class->pace;
    struct edt_share *other;

    if (!edt_pace_try_lock__(pace)) {
        return;
    }
    share->watch_ns = now_ns + WATCH_NS;
    LIST_FOR_EACH (other, node, &pace->shares) {
        uint64_t polled_ns;
        bool suspended;

        atomic_read_relaxed(&other->polled_ns, &polled_ns);
        atomic_read_relaxed(&other->suspended, &suspended);
        if (other != share && other->published_weight && !suspended
            && now_ns > polled_ns + EDT_PACE_AWAY_NS) {
            share_suspend(other, now_ns);
        }
    }
    edt_pace_unlock__(pace);
}

/* Returns the first time, not before 'now_ns', at which an active flow of
 * 'share' may send if nothing changes, or a few ns before that, UINT64_MAX if
 * there is none. */
uint64_t
edt_share_next_ns(const struct edt_share *share, uint64_t now_ns)
{
    struct edt_line line = share->line;
    uint64_t need, dt_ns;
    int64_t ahead;
    uint32_t seq;

    if (!share->weight) {
        return UINT64_MAX;
    }
    class_read(share->class, &line, &seq);
    ahead = share->sum - (line.v0 - share->offset) * share->weight;
    if ((int64_t) (share->sum - (edt_line_at(&line, now_ns) - share->offset)
                                * share->weight) <= 16 * share->weight
        || edt_share_has_news(share)) {
        return now_ns;
    }
    if (!line.mult) {
        return UINT64_MAX;
    }
    /* When flows leave V may be rounded up by a unit for each. */
    need = ahead / share->weight;
    need -= MIN(need, 64);
    dt_ns = need >> (64 - line.shift) ? UINT32_MAX
            : (need << line.shift) / line.mult;

    /* The line is to be published anew by then. */
    return MAX(now_ns + 1, line.t0_ns + MIN(dt_ns, UINT32_MAX));
}

/* Returns for how long, in ns, a flow of 'share' that may send now could have
 * done so already. */
uint64_t
edt_share_lag_ns(const struct edt_share *share)
{
    int64_t lag = edt_share_lag(share);
    double slope = ldexp(share->line.mult, -(int) share->line.shift);

    if (lag <= 0 || !share->weight) {
        return 0;
    }
    return slope > 0 ? MIN(lag / slope / share->weight,
                           (double) EDT_PACE_CATCH_UP_NS)
                     : EDT_PACE_CATCH_UP_NS;
}
