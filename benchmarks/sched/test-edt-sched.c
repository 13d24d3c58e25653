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

/* Tests of the schedulers behind "edt-sched.h", in simulated time.
 *
 * Most of them run a scheduler beside a model of it: a list of entries sorted
 * by slot time, which is computed by division, and order of arrival.  The
 * model knows nothing about wheels, arrays or nodes.  Everything that can be
 * observed is compared; what must hold whatever the slot time, that is that
 * nothing within the horizon leaves early, or misses a drain that came a
 * granularity after it was due, is checked for each entry by itself. */

#include <config.h>
#undef NDEBUG

#include "edt-sched.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "carousel.h"
#include "edt-sched-baselines.h"
#include "eiffel.h"
#include "fb-test.h"
#include "openvswitch/list.h"
#include "openvswitch/util.h"
#include "random.h"
#include "slot-scale.h"
#include "util.h"

#define N_OUT 4096

/* A scheduler and its model. */

struct item {
    struct ovs_list node;
    uint64_t edt_ns;
    uint64_t slot_time_ns;
    uint64_t due_ns;            /* A drain at this time must return it. */
    bool exact;                 /* Within the horizon? */
};

/* What differs between types. */
enum traits {
    HAS_LEVELS = 1 << 0,
    HAS_FRONT = 1 << 1,
    HAS_HORIZON = 1 << 2,
    CLAMPS = 1 << 3,            /* Puts what is beyond the horizon there. */
    LIMITS = 1 << 4,            /* Times up to EDT_SCHED_MAX_NS. */
    LOOKS_ON = 1 << 5,          /* A full array does not hold up the front if
                                 * nothing else is due. */
    ANY_ORDER = 1 << 6,         /* Of entries with the same slot time. */
};

struct subject {
    const struct edt_sched_class *class; /* NULL: edt_sched_create(). */
    enum edt_sched_type type;
    unsigned int traits;
};

static const struct subject subjects[] = {
    { NULL, EDT_SCHED_MLTW, HAS_LEVELS | HAS_FRONT | LOOKS_ON },
    { NULL, EDT_SCHED_CAROUSEL, HAS_FRONT | HAS_HORIZON | CLAMPS | LIMITS },
    { NULL, EDT_SCHED_EIFFEL, HAS_FRONT | HAS_HORIZON | LIMITS },
    { &heap_sched_class, 0, ANY_ORDER },
    { &tree_sched_class, 0, 0 },
};

struct model {
    struct edt_sched *sched;
    struct edt_sched_config config;
    unsigned int traits;
    struct ovs_list items;      /* In the order in which they leave. */
    size_t n_items;
    uint64_t front_ns;
    uint64_t n_enqueued;
    uint64_t n_dequeued;
    uint64_t n_beyond;
};

static void
model_init(struct model *m, const struct subject *subject,
           const struct edt_sched_config *config, uint64_t now_ns)
{
    m->config = *config;
    m->config.type = subject->type;
    m->traits = subject->traits;
    m->config.slot_by_slot &= !subject->class;
    m->sched = (subject->class
                ? edt_sched_create_class(subject->class, &m->config, now_ns)
                : edt_sched_create(&m->config, now_ns));
    ovs_list_init(&m->items);
    m->n_items = 0;
    m->n_enqueued = m->n_dequeued = m->n_beyond = 0;

    uint64_t g = (m->traits & HAS_LEVELS ? config->mltw.min_granularity_ns
                  : config->slot_ns);
    m->front_ns = now_ns / g * g;
}

static const char *
model_name(const struct model *m)
{
    return m->sched->class->name;
}

/* Granularity of a flow's entries. */
static uint64_t
model_granularity_ns(const struct model *m, unsigned int level)
{
    if (m->traits & HAS_LEVELS) {
        const struct mltw_config *c = &m->config.mltw;
        uint64_t g = c->min_granularity_ns;

        for (unsigned int i = 0; i < level && i + 1 < c->n_wheels
                                 && g < c->max_granularity_ns; i++) {
            g *= 2;
        }
        return g;
    }
    return m->traits & HAS_FRONT ? m->config.slot_ns : 1;
}

static struct item *
model_first(const struct model *m)
{
    return ovs_list_is_empty(&m->items) ? NULL
           : CONTAINER_OF(ovs_list_front(&m->items), struct item, node);
}

static void
model_check_state(const struct model *m)
{
    const struct item *first = model_first(m);
    uint64_t due_ns = first ? first->slot_time_ns : UINT64_MAX;

    CHECK(edt_sched_count(m->sched) == m->n_items,
          "%s: count is %"PRIuSIZE", should be %"PRIuSIZE, model_name(m),
          edt_sched_count(m->sched), m->n_items);
    CHECK(edt_sched_next_due(m->sched) == due_ns,
          "%s: next due at %"PRIu64", should be %"PRIu64, model_name(m),
          edt_sched_next_due(m->sched), due_ns);
}

static bool
model_enqueue(struct model *m, uint64_t edt_ns, unsigned int level)
{
    uint64_t g = model_granularity_ns(m, level);
    uint64_t limited = (m->traits & LIMITS ? MIN(edt_ns, EDT_SCHED_MAX_NS)
                        : edt_ns);
    uint64_t time = limited / g * g;
    bool exact = true;
    bool expected = m->n_items < m->config.max_entries;

    if (time < limited) {
        time += g;
    }
    if (m->traits & HAS_FRONT) {
        time = MAX(time, m->front_ns);
    }
    if (m->traits & HAS_HORIZON) {
        /* At least this many slots ahead. */
        uint64_t n_slots = DIV_ROUND_UP(m->config.horizon_ns, g) + 2;

        if (time - m->front_ns >= n_slots * g) {
            m->n_beyond++;
            if (m->config.drop_beyond_horizon) {
                expected = false;
            } else if (m->traits & CLAMPS) {
                exact = false;
                time = m->front_ns + (n_slots - 1) * g;
            }
            CHECK(limited > m->front_ns + g + m->config.horizon_ns,
                  "%s: horizon is too short", model_name(m));
        }
    }

    struct item *item = xmalloc(sizeof *item);
    bool result = edt_sched_enqueue(m->sched, item, edt_ns, level);
    CHECK(result == expected, "%s: enqueue returns %s with %"PRIuSIZE
          " entries of %"PRIu32", EDT %"PRIu64", front %"PRIu64,
          model_name(m), result ? "true" : "false", m->n_items,
          m->config.max_entries, edt_ns, m->front_ns);
    if (!result) {
        free(item);
        return false;
    }

    struct item *prev;
    LIST_FOR_EACH_REVERSE (prev, node, &m->items) {
        if (prev->slot_time_ns <= time) {
            break;
        }
    }
    item->edt_ns = edt_ns;
    item->slot_time_ns = time;
    item->exact = exact && edt_ns == limited;
    item->due_ns = limited + g - 1 >= limited ? limited + g - 1 : UINT64_MAX;
    ovs_list_insert(prev ? prev->node.next : m->items.next, &item->node);
    m->n_items++;
    m->n_enqueued++;
    return true;
}

/* Checks that 'entry' is right to leave next, and removes it. */
static void
model_remove(struct model *m, void *entry)
{
    struct item *expected = model_first(m);

    CHECK(expected, "%s: an entry from nowhere", model_name(m));
    if (m->traits & ANY_ORDER) {
        struct item *item;

        LIST_FOR_EACH (item, node, &m->items) {
            if (item->slot_time_ns != expected->slot_time_ns) {
                break;
            } else if (item == entry) {
                expected = item;
                break;
            }
        }
    }
    CHECK(expected == entry, "%s: not the entry with EDT %"PRIu64
          " and slot time %"PRIu64, model_name(m), expected->edt_ns,
          expected->slot_time_ns);
    ovs_list_remove(&expected->node);
    free(expected);
    m->n_items--;
    m->n_dequeued++;
}

/* Calls dequeue once. */
static size_t
model_dequeue(struct model *m, uint64_t now_ns, size_t max)
{
    void *out[N_OUT];
    size_t n = edt_sched_dequeue(m->sched, now_ns, out, max);
    uint64_t g = (m->traits & HAS_LEVELS ? m->config.mltw.min_granularity_ns
                  : m->config.slot_ns);
    struct item *item;
    uint64_t last_ns = 0;
    size_t n_due = 0;

    CHECK(n <= max, "%s: %"PRIuSIZE" of %"PRIuSIZE" entries", model_name(m),
          n, max);
    LIST_FOR_EACH (item, node, &m->items) {
        if (item->slot_time_ns > now_ns
            || (m->config.slot_by_slot && n_due
                && item->slot_time_ns != last_ns)) {
            break;
        }
        last_ns = n_due < max ? item->slot_time_ns : last_ns;
        n_due++;
    }
    CHECK(n == MIN(n_due, max), "%s: %"PRIuSIZE" entries at %"PRIu64
          ", should be %"PRIuSIZE, model_name(m), n, now_ns, MIN(n_due, max));

    for (size_t i = 0; i < n; i++) {
        item = out[i];
        CHECK(item->edt_ns <= now_ns || !item->exact,
              "%s: EDT %"PRIu64" leaves early at %"PRIu64, model_name(m),
              item->edt_ns, now_ns);
        model_remove(m, item);
    }

    bool all = m->config.slot_by_slot ? !n : n < max;
    if (all && now_ns >= m->front_ns) {
        LIST_FOR_EACH (item, node, &m->items) {
            CHECK(item->due_ns > now_ns, "%s: EDT %"PRIu64" missed %"PRIu64,
                  model_name(m), item->edt_ns, now_ns);
        }
    }
    if (all || (m->traits & LOOKS_ON && n == n_due
                && !m->config.slot_by_slot)) {
        m->front_ns = MAX(m->front_ns, now_ns / g * g);
    } else {
        m->front_ns = last_ns;
    }
    model_check_state(m);
    return n;
}

/* Takes all that is due at 'now_ns'. */
static size_t
model_drain(struct model *m, uint64_t now_ns, size_t max)
{
    size_t total = 0;

    for (;;) {
        size_t n = model_dequeue(m, now_ns, max);

        total += n;
        if (m->config.slot_by_slot ? !n : n < max) {
            return total;
        }
    }
}

static void
model_flush(struct model *m, size_t max)
{
    void *out[N_OUT];
    size_t n;

    while ((n = edt_sched_flush(m->sched, out, max)) != 0) {
        CHECK(n <= max, "%s: too many flushed", model_name(m));
        for (size_t i = 0; i < n; i++) {
            model_remove(m, out[i]);
        }
        CHECK(edt_sched_count(m->sched) == m->n_items,
              "%s: wrong count while flushing", model_name(m));
    }
    CHECK(!m->n_items, "%s: flush left entries behind", model_name(m));
    model_check_state(m);
}

/* Takes everything by going to each due time in turn. */
static void
model_run_dry(struct model *m, size_t max)
{
    while (m->n_items) {
        uint64_t due_ns = edt_sched_next_due(m->sched);

        if (due_ns > m->front_ns) {
            CHECK(!model_dequeue(m, due_ns - 1, max), "%s: early",
                  model_name(m));
        }
        CHECK(model_drain(m, due_ns, max), "%s: nothing is due at %"PRIu64,
              model_name(m), due_ns);
    }
}

/* Flushes what is left. */
static void
model_destroy(struct model *m)
{
    model_flush(m, 100);
    CHECK(m->n_dequeued == m->n_enqueued, "%s: %"PRIu64" of %"PRIu64
          " entries left", model_name(m), m->n_dequeued, m->n_enqueued);
    edt_sched_destroy(m->sched);
}

/* Configuration. */

static void
test_config(void)
{
    const struct edt_sched_config good = EDT_SCHED_CONFIG_DEFAULT;
    struct edt_sched_config c;
    enum edt_sched_type type;
    const char *error;

    CHECK(!edt_sched_config_error(&good), "default is refused");

#define REFUSED(TYPE, FIELD, VALUE, RANGE)                              \
    c = good;                                                           \
    c.type = TYPE;                                                      \
    c.FIELD = VALUE;                                                    \
    error = edt_sched_config_error(&c);                                 \
    CHECK(error && strstr(error, RANGE),                                \
          #FIELD " = " #VALUE ": %s", error ? error : "accepted")
#define ACCEPTED(TYPE, FIELD, VALUE)                                    \
    c = good;                                                           \
    c.type = TYPE;                                                      \
    c.FIELD = VALUE;                                                    \
    error = edt_sched_config_error(&c);                                 \
    CHECK(!error, #FIELD " = " #VALUE ": %s", error);                   \
    edt_sched_destroy(edt_sched_create(&c, 12345))

    REFUSED(EDT_SCHED_MLTW, type, EDT_SCHED_N_TYPES, "mltw");
    REFUSED(EDT_SCHED_MLTW, max_entries, 0, "1 to 16777216");
    REFUSED(EDT_SCHED_MLTW, mltw.n_slots, 3, "power of two");
    ACCEPTED(EDT_SCHED_MLTW, max_entries, 1);
    ACCEPTED(EDT_SCHED_MLTW, mltw.max_entries, 0);
    ACCEPTED(EDT_SCHED_MLTW, slot_ns, 0);
    for (type = EDT_SCHED_CAROUSEL; type <= EDT_SCHED_EIFFEL; type++) {
        uint64_t limit = good.slot_ns * ((1 << 30) - 2);

        REFUSED(type, max_entries, 0, "1 to 16777216");
        REFUSED(type, max_entries, (1 << 24) + 1, "1 to 16777216");
        ACCEPTED(type, max_entries, 1);
        ACCEPTED(type, max_entries, 1 << 24);
        REFUSED(type, slot_ns, 0, "1 to 1073741824");
        REFUSED(type, slot_ns, (1 << 30) + 1, "1 to 1073741824");
        ACCEPTED(type, slot_ns, 1000);
        ACCEPTED(type, slot_ns, 1 << 30);
        REFUSED(type, horizon_ns, 0, "not be below slot_ns");
        REFUSED(type, horizon_ns, 99, "not be below slot_ns");
        REFUSED(type, horizon_ns, limit + 1, "at most 1073741822 slots");
        REFUSED(type, horizon_ns, UINT64_MAX, "at most 1073741822 slots");
        ACCEPTED(type, horizon_ns, 100);
        ACCEPTED(type, horizon_ns, limit);
        ACCEPTED(type, mltw.n_slots, 3);
    }

    for (int i = 0; i < EDT_SCHED_N_TYPES; i++) {
        CHECK(edt_sched_type_from_name(edt_sched_type_name(i), &type)
              && type == i, "type %d is not found by name", i);
    }
    CHECK(!edt_sched_type_from_name("heap", &type), "heap is a type");
    edt_sched_destroy(NULL);
}

/* Division by multiplication is exact. */
static void
test_division(void)
{
    unsigned int n = rounds(1000000);

    for (unsigned int i = 0; i < n; i++) {
        uint64_t slot_ns = 1 + (i < 4096 ? i : choose_log(1 << 30));
        uint64_t limit = UINT64_C(1) << 63;
        uint64_t ns = choose_log(limit - slot_ns);
        struct slot_scale scale;

        slot_scale_init(&scale, slot_ns);
        for (int j = -1; j <= 1; j++) {
            uint64_t times[] = {
                ns / slot_ns * slot_ns + j,
                limit / slot_ns * slot_ns - slot_ns + j,
                limit - slot_ns - 1 + j,
                ns + j,
            };

            for (size_t k = 0; k < ARRAY_SIZE(times); k++) {
                uint64_t t = times[k];

                if (t < limit - slot_ns) {
                    CHECK(slot_scale_floor(&scale, t) == t / slot_ns,
                          "%"PRIu64" / %"PRIu64, t, slot_ns);
                    CHECK(slot_scale_ceil(&scale, t)
                          == t / slot_ns + !!(t % slot_ns),
                          "%"PRIu64" / %"PRIu64" rounded up", t, slot_ns);
                }
            }
        }
    }
}

/* Random sequences on all kinds of geometry. */

static void
choose_config(struct edt_sched_config *c)
{
    static const uint64_t slots_ns[] = { 1, 2, 3, 7, 64, 100, 1000, 1 << 30 };
    unsigned int shift = choose(12);

    *c = EDT_SCHED_CONFIG_DEFAULT;
    c->max_entries = 1 + (choose(4) ? choose(500) : choose(12));
    c->slot_by_slot = choose(2);
    c->drop_beyond_horizon = choose(2);
    c->slot_ns = choose(2) ? slots_ns[choose(ARRAY_SIZE(slots_ns))]
                 : 1 + choose_log(1 << 30);
    c->horizon_ns = c->slot_ns * (1 + choose_log(choose(4) ? 300 : 300000))
                    + choose(2) * choose(c->slot_ns);
    c->mltw.n_wheels = 1 + choose(20);
    c->mltw.n_slots = 4 << choose(8);
    c->mltw.min_granularity_ns = UINT64_C(1) << shift;
    c->mltw.max_granularity_ns = UINT64_C(1) << (shift + choose(12));
}

/* A time less than 'n' ns before 'now_ns'. */
static uint64_t
before(uint64_t now_ns, uint64_t n)
{
    uint64_t ns = choose_log(n);

    return now_ns - MIN(now_ns, ns);
}

static uint64_t
choose_start(void)
{
    switch (choose(4)) {
    case 0:
        return 0;
    case 1:
        return choose_log(UINT64_C(1) << 62);
    case 2:
        return (UINT64_C(1) << 62) - choose_log(UINT64_C(1) << 40);
    default:
        return UINT64_C(1700000000000000000) + choose(UINT64_C(1) << 50);
    }
}

static void
random_run(const struct subject *subject, unsigned int n_ops)
{
    enum { N_FLOWS = 8 };
    struct flow {
        uint64_t gap_ns;
        uint64_t edt_ns;
        unsigned int level;
    } flows[N_FLOWS];
    struct edt_sched_config config;
    struct model m;

    choose_config(&config);
    uint64_t now_ns = choose_start();
    model_init(&m, subject, &config, now_ns);

    uint64_t g = (m.traits & HAS_LEVELS ? config.mltw.min_granularity_ns
                  : config.slot_ns);
    uint64_t n_slots = config.horizon_ns / config.slot_ns;
    unsigned int habit = choose(4);
    uint64_t pace = 1 + choose_log(n_slots) * g;

    for (size_t i = 0; i < N_FLOWS; i++) {
        flows[i].gap_ns = choose_log(n_slots * g);
        flows[i].edt_ns = now_ns;
        flows[i].level = edt_sched_level(m.sched, flows[i].gap_ns);
        CHECK(flows[i].level == 0 || m.traits & HAS_LEVELS, "%s has levels",
              model_name(&m));
    }
    for (unsigned int i = 0; i < n_ops; i++) {
        struct flow *flow = &flows[choose(N_FLOWS)];
        unsigned int what = choose(32);
        size_t max = choose(2) ? 1 + choose(9) : N_OUT;
        uint64_t edt_ns;

        if (what < 18) {
            switch (habit && choose(4) ? 0 : choose(9)) {
            default:
                /* A flow's next packet. */
                if (!choose(8)) {
                    flow->edt_ns = MAX(flow->edt_ns, now_ns);
                }
                edt_ns = flow->edt_ns;
                flow->edt_ns += flow->gap_ns;
                break;
            case 1:
                /* In the past. */
                edt_ns = before(now_ns, UINT64_C(1) << 40);
                break;
            case 2:
            case 3:
                /* At the edge of the horizon, or twice as far. */
                edt_ns = now_ns + (1 + choose(2)) * config.horizon_ns
                         + choose(8 * g);
                edt_ns -= MIN(edt_ns, 4 * g);
                break;
            case 4:
                edt_ns = now_ns + choose_log(UINT64_C(1) << 61);
                break;
            case 5:
            case 6:
                /* Anywhere within it. */
                edt_ns = now_ns + choose(config.horizon_ns);
                break;
            case 7:
                edt_ns = choose(4) || m.traits & HAS_LEVELS
                         ? now_ns + choose(4 * config.horizon_ns)
                         : UINT64_MAX - choose(3);
                break;
            }
            model_enqueue(&m, edt_ns, flow->level);
            model_check_state(&m);
        } else if (what < 31) {
            uint64_t due_ns = edt_sched_next_due(m.sched);

            switch (choose(8)) {
            case 0:
                /* A stall. */
                now_ns += choose(3 * config.horizon_ns);
                break;
            case 1:
                if (due_ns < UINT64_C(1) << 62) {
                    now_ns = MAX(now_ns, due_ns);
                }
                break;
            case 2:
                if (due_ns < UINT64_C(1) << 62 && due_ns > now_ns) {
                    now_ns = due_ns - 1;
                }
                break;
            case 3:
                /* Time goes backwards. */
                model_dequeue(&m, before(now_ns, 1 << 30), max);
                continue;
            case 4:
                /* No time passes. */
                break;
            default:
                now_ns += choose(pace);
                break;
            }
            if (choose(4)) {
                model_drain(&m, now_ns, max);
            } else {
                model_dequeue(&m, now_ns, max);
            }
        } else if (!choose(16)) {
            model_flush(&m, 1 + choose(300));
        }
    }
    if (choose(2)) {
        model_run_dry(&m, 1 + choose(20));
    }
    model_destroy(&m);
}

static void
test_random(void)
{
    unsigned int n = rounds(1500);
    uint32_t first_seed = seed;

    for (unsigned int i = 0; i < n; i++) {
        for (size_t j = 0; j < ARRAY_SIZE(subjects); j++) {
            /* What is printed on failure repeats this run as the first. */
            seed = first_seed + i;
            random_set_seed(seed);
            random_run(&subjects[j], i % 16 ? 500 : 5000);
        }
    }
    seed = first_seed;
}

/* Flows at a constant rate on the papers' geometries: 10 s, of which a wheel's
 * end is passed, in slots of 100 ns and 1 us. */
static void
test_papers_geometry(void)
{
    static const uint64_t slots_ns[] = { 100, 1000 };

    for (size_t i = 0; i < ARRAY_SIZE(slots_ns); i++) {
        for (size_t j = 0; j < ARRAY_SIZE(subjects); j++) {
            struct edt_sched_config c = EDT_SCHED_CONFIG_DEFAULT;
            uint64_t now_ns = UINT64_C(1700000000000000001);
            struct model m;

            c.slot_ns = slots_ns[i];
            c.drop_beyond_horizon = i;
            model_init(&m, &subjects[j], &c, now_ns);
            for (unsigned int k = 0; k < 3000; k++) {
                model_enqueue(&m, now_ns + k * 120, 0);
                model_enqueue(&m, now_ns + k * 12345, 3);
                model_enqueue(&m, now_ns + choose(12000000000), 30);
            }
            for (unsigned int k = 0; k < 2000; k++) {
                now_ns += 1000;
                model_drain(&m, now_ns, 32);
                model_enqueue(&m, now_ns + choose(1000000), 3);
            }
            while (m.n_items > 50) {
                model_enqueue(&m, now_ns + 100000, 3);
                now_ns += 20000000;
                model_drain(&m, now_ns, 1 + choose(2 * c.max_entries) % N_OUT);
            }
            model_run_dry(&m, 5);
            model_destroy(&m);
        }
    }
}

/* What becomes of an EDT beyond the horizon. */
static void
test_beyond_horizon(void)
{
    for (size_t i = 0; i < ARRAY_SIZE(subjects); i++) {
        for (int drop = 0; drop < 2; drop++) {
            struct edt_sched_config c = EDT_SCHED_CONFIG_DEFAULT;
            uint64_t start_ns = 777777;
            struct model m;

            c.slot_ns = 100;
            c.horizon_ns = 100000;
            c.drop_beyond_horizon = drop;
            model_init(&m, &subjects[i], &c, start_ns);

            bool has_horizon = m.traits & HAS_HORIZON;
            for (unsigned int j = 0; j < 10; j++) {
                /* The end of the horizon is within it. */
                CHECK(model_enqueue(&m, start_ns + c.horizon_ns, 0),
                      "%s refuses", model_name(&m));
                CHECK(model_enqueue(&m, start_ns + (j + 2) * c.horizon_ns, 0)
                      == !(drop && has_horizon), "%s", model_name(&m));
                CHECK(model_enqueue(&m, start_ns + UINT64_C(1000000000000), 0)
                      == !(drop && has_horizon), "%s", model_name(&m));
            }
            CHECK(m.n_beyond == (has_horizon ? 20 : 0), "%s: %"PRIu64
                  " beyond", model_name(&m), m.n_beyond);
            if (m.traits & CLAMPS && !drop) {
                /* In the last slot: early. */
                CHECK(model_drain(&m, start_ns + c.horizon_ns + 2 * c.slot_ns,
                                  7) == 30, "%s", model_name(&m));
            } else {
                CHECK(model_drain(&m, start_ns + c.horizon_ns + 2 * c.slot_ns,
                                  7) == 10, "%s", model_name(&m));
            }
            model_run_dry(&m, 3);
            model_destroy(&m);
        }
    }
}

/* A slot at a time, and all at once. */
static void
test_slot_by_slot(void)
{
    for (size_t i = 0; i < EDT_SCHED_N_TYPES; i++) {
        for (int slot_by_slot = 0; slot_by_slot < 2; slot_by_slot++) {
            struct edt_sched_config c = EDT_SCHED_CONFIG_DEFAULT;
            struct model m;

            c.slot_ns = 128;
            c.mltw.min_granularity_ns = 128;
            c.mltw.max_granularity_ns = 128;
            c.slot_by_slot = slot_by_slot;
            model_init(&m, &subjects[i], &c, 0);
            for (unsigned int j = 0; j < 100; j++) {
                model_enqueue(&m, 128 * (j % 10), 0);
            }

            if (slot_by_slot) {
                for (unsigned int j = 0; j < 10; j++) {
                    CHECK(model_dequeue(&m, 10000, 32) == 10, "%s",
                          model_name(&m));
                    /* Late, and part of the slot at the front. */
                    model_enqueue(&m, 0, 0);
                    CHECK(model_dequeue(&m, 10000, 32) == 1, "%s",
                          model_name(&m));
                }
            } else {
                CHECK(model_dequeue(&m, 10000, 95) == 95, "%s",
                      model_name(&m));
                CHECK(model_dequeue(&m, 10000, 95) == 5, "%s",
                      model_name(&m));
            }
            CHECK(model_dequeue(&m, 10000, 32) == 0, "%s", model_name(&m));
            model_destroy(&m);
        }
    }
}

/* Returns the resident size of this process in bytes, or 0 if that cannot be
 * known. */
static size_t
resident_bytes(void)
{
    static const char file_name[] = "/proc/self/smaps_rollup";
    FILE *stream = fopen(file_name, "r");
    unsigned long int kilobytes = 0;
    char line[256];

    if (stream) {
        while (fgets(line, sizeof line, stream)
               && sscanf(line, "Rss: %lu", &kilobytes) != 1) {
            continue;
        }
        fclose(stream);
    }
    return kilobytes * 1024;
}

/* Nothing is touched that is not needed. */
static void
test_memory(void)
{
    static const struct {
        uint64_t slot_ns;
        size_t carousel;        /* Bytes allocated, at most. */
        size_t eiffel;
    } cases[] = {
        { 1000, 81000000, 164000000 },
        { 100, 801000000, 1640000000 },
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        for (int type = 0; type < EDT_SCHED_N_TYPES; type++) {
            struct edt_sched_config c = EDT_SCHED_CONFIG_DEFAULT;
            size_t before = resident_bytes();

            c.type = type;
            c.slot_ns = cases[i].slot_ns;
            struct edt_sched *sched = edt_sched_create(&c, 0);
            size_t allocated = edt_sched_memory_bytes(sched);
            size_t created = resident_bytes() - before;

            printf("%s, slots of %"PRIu64" ns: %"PRIuSIZE" bytes, %"PRIuSIZE
                   " resident when created\n", sched->class->name, c.slot_ns,
                   allocated, created);
#if !defined(__SANITIZE_ADDRESS__)
            CHECK(created < 100000, "%"PRIuSIZE" bytes resident", created);
#endif
            edt_sched_destroy(sched);

            c.max_entries = 1;
            sched = edt_sched_create(&c, 0);
            allocated = edt_sched_memory_bytes(sched);
            CHECK(allocated <= (type == EDT_SCHED_CAROUSEL ? cases[i].carousel
                                : type == EDT_SCHED_EIFFEL ? cases[i].eiffel
                                : 1100000), "%"PRIuSIZE" bytes", allocated);
            edt_sched_destroy(sched);
        }
    }
}

static const struct test tests[] = {
    { "config", test_config },
    { "division", test_division },
    { "random", test_random },
    { "papers-geometry", test_papers_geometry },
    { "beyond-horizon", test_beyond_horizon },
    { "slot-by-slot", test_slot_by_slot },
    { "memory", test_memory },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
