/*
 * Copyright (c) 2026 FlowBundler authors.
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
#undef NDEBUG

#include "mltw-model.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "openvswitch/util.h"
#include "util.h"

typedef unsigned __int128 wide;

struct model_entry {
    uint64_t slot_ns;           /* When it is due. */
    uint64_t edt_ns;
    uint64_t granularity_ns;
};

struct model_op {
    enum { OP_ENQUEUE, OP_DEQUEUE, OP_FLUSH } type;
    uint64_t time_ns;
    uint64_t arg;               /* Level or maximum. */
    uint64_t result;
};

#define N_LOG 24

struct mltw_model {
    struct mltw *wheel;
    struct mltw_config config;
    uint64_t front_ns;          /* An EDT before this is taken as this. */
    uint64_t now_ns;            /* Latest time seen. */
    uint64_t start_ns;

    struct model_entry **list;  /* Sorted by 'slot_ns', then by arrival. */
    size_t n;
    size_t allocated;

    void **out;                 /* Output array and its size. */
    size_t n_out;

    struct model_op log[N_LOG];
    uint64_t n_ops;
};

static const char *model_context = "";

void
mltw_model_set_context(const char *context)
{
    model_context = context;
}

void
mltw_model_fail(const struct mltw_model *model, const char *format, ...)
{
    va_list args;

    fflush(stdout);
    fprintf(stderr, "%s: ", model_context);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);

    if (model) {
        const struct mltw_config *c = &model->config;

        fprintf(stderr, "%"PRIu32" wheels of %"PRIu32" slots, granularity "
                "%"PRIu64" to %"PRIu64" ns, %"PRIu32" entries, start %"PRIu64
                " ns, front %"PRIu64" ns\n",
                c->n_wheels, c->n_slots, c->min_granularity_ns,
                c->max_granularity_ns, c->max_entries, model->start_ns,
                model->front_ns);
        fprintf(stderr, "last of %"PRIu64" operations:\n", model->n_ops);
        for (uint64_t i = model->n_ops > N_LOG ? model->n_ops - N_LOG : 0;
             i < model->n_ops; i++) {
            const struct model_op *op = &model->log[i % N_LOG];

            fprintf(stderr, "    %s %"PRIu64" ns, %s %"PRIu64": %"PRIu64"\n",
                    (op->type == OP_ENQUEUE ? "enqueue"
                     : op->type == OP_DEQUEUE ? "dequeue" : "flush"),
                    op->time_ns, op->type == OP_ENQUEUE ? "level" : "max",
                    op->arg, op->result);
        }
    }
    exit(EXIT_FAILURE);
}

#define CHECK(MODEL, CONDITION, ...)                    \
    do {                                                \
        if (!(CONDITION)) {                             \
            mltw_model_fail(MODEL, __VA_ARGS__);        \
        }                                               \
    } while (0)

static struct model_op *
model_log(struct mltw_model *model, int type, uint64_t time_ns, uint64_t arg)
{
    struct model_op *op = &model->log[model->n_ops++ % N_LOG];

    op->type = type;
    op->time_ns = time_ns;
    op->arg = arg;
    op->result = UINT64_MAX;
    return op;
}

/* The last time at which anything can be due. */
static uint64_t
model_end_ns(const struct mltw_model *model)
{
    uint64_t g = model->config.min_granularity_ns;

    return g > 1 ? UINT64_MAX / g * g : UINT64_MAX - 1;
}

/* Slot distance of a flow on 'level'. */
static uint64_t
model_granularity_ns(const struct mltw_model *model, unsigned int level)
{
    uint64_t g = model->config.min_granularity_ns;

    for (unsigned int i = 0; i < level; i++) {
        if (i + 1 >= model->config.n_wheels
            || g >= model->config.max_granularity_ns) {
            break;
        }
        g *= 2;
    }
    return g;
}

struct mltw_model *
mltw_model_create(const struct mltw_config *config, uint64_t now_ns)
{
    struct mltw_model *model = xzalloc(sizeof *model);

    model->wheel = mltw_create(config, now_ns);
    model->config = *config;
    model->start_ns = model->now_ns = now_ns;
    model->front_ns = MIN(now_ns / config->min_granularity_ns
                          * config->min_granularity_ns, model_end_ns(model));
    return model;
}

void
mltw_model_destroy(struct mltw_model *model)
{
    mltw_destroy(model->wheel);
    for (size_t i = 0; i < model->n; i++) {
        free(model->list[i]);
    }
    free(model->list);
    free(model->out);
    free(model);
}

struct mltw *
mltw_model_wheel(struct mltw_model *model)
{
    return model->wheel;
}

uint64_t
mltw_model_now(const struct mltw_model *model)
{
    return model->now_ns;
}

static void
model_check_idle(const struct mltw_model *model)
{
    uint64_t due_ns = model->n ? model->list[0]->slot_ns : UINT64_MAX;
    uint64_t wheel_ns = mltw_next_due(model->wheel);
    size_t count = mltw_count(model->wheel);

    CHECK(model, wheel_ns == due_ns, "next due at %"PRIu64", should be "
          "%"PRIu64, wheel_ns, due_ns);
    CHECK(model, count == model->n, "count is %"PRIuSIZE", should be "
          "%"PRIuSIZE, count, model->n);
}

bool
mltw_model_enqueue(struct mltw_model *model, uint64_t edt_ns,
                   unsigned int level)
{
    struct model_op *op = model_log(model, OP_ENQUEUE, edt_ns, level);
    uint64_t granularity_ns = model_granularity_ns(model, level);
    struct model_entry *entry = xmalloc(sizeof *entry);
    wide slot_ns = ((wide) edt_ns + granularity_ns - 1) / granularity_ns
                   * granularity_ns;

    if (slot_ns > model_end_ns(model)) {
        slot_ns = model_end_ns(model);
    }
    if (slot_ns < model->front_ns) {
        slot_ns = model->front_ns;
    }
    entry->slot_ns = slot_ns;
    entry->edt_ns = edt_ns;
    entry->granularity_ns = granularity_ns;

    op->result = mltw_enqueue(model->wheel, entry, edt_ns, level);
    CHECK(model, op->result == (model->n < model->config.max_entries),
          "enqueue with %"PRIuSIZE" held returned %"PRIu64, model->n,
          op->result);
    if (!op->result) {
        free(entry);
        model_check_idle(model);
        return false;
    }

    /* Find the first one that is due later. */
    size_t low = 0;
    size_t high = model->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (model->list[middle]->slot_ns <= entry->slot_ns) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (model->n == model->allocated) {
        model->list = x2nrealloc(model->list, &model->allocated,
                                 sizeof *model->list);
    }
    memmove(&model->list[low + 1], &model->list[low],
            (model->n - low) * sizeof *model->list);
    model->list[low] = entry;
    model->n++;

    model_check_idle(model);
    return true;
}

/* Compares the 'n' entries in the output array with the start of the list, and
 * removes them. */
static void
model_accept(struct mltw_model *model, size_t n)
{
    CHECK(model, n <= model->n, "got %"PRIuSIZE" entries of %"PRIuSIZE,
          n, model->n);
    for (size_t i = 0; i < n; i++) {
        const struct model_entry *entry = model->list[i];

        if (model->out[i] != entry) {
            size_t j;

            for (j = 0; j < model->n && model->out[i] != model->list[j]; j++) {
                continue;
            }
            CHECK(model, j < model->n, "entry %"PRIuSIZE" of output is not "
                  "held", i);
            mltw_model_fail(model, "entry %"PRIuSIZE" of output has EDT "
                            "%"PRIu64" and slot %"PRIu64", should be EDT "
                            "%"PRIu64" and slot %"PRIu64, i,
                            model->list[j]->edt_ns, model->list[j]->slot_ns,
                            entry->edt_ns, entry->slot_ns);
        }
    }
    for (size_t i = 0; i < n; i++) {
        free(model->list[i]);
    }
    model->n -= n;
    if (n) {
        memmove(model->list, &model->list[n], model->n * sizeof *model->list);
    }
}

static void
model_reserve(struct mltw_model *model, size_t max)
{
    if (max > model->n_out) {
        model->n_out = max;
        model->out = xrealloc(model->out, max * sizeof *model->out);
    }
    /* Whatever is left of an earlier call must not look like a result. */
    memset(model->out, 0, max * sizeof *model->out);
}

size_t
mltw_model_dequeue(struct mltw_model *model, uint64_t now_ns, size_t max)
{
    struct model_op *op = model_log(model, OP_DEQUEUE, now_ns, max);
    size_t due = 0;
    size_t n;

    while (due < model->n && model->list[due]->slot_ns <= now_ns) {
        due++;
    }

    model_reserve(model, max);
    op->result = n = mltw_dequeue(model->wheel, now_ns, model->out, max);
    CHECK(model, n == MIN(due, max), "got %"PRIuSIZE" entries, should be "
          "%"PRIuSIZE, n, MIN(due, max));

    /* What must hold for each entry, whatever its slot. */
    uint64_t end_ns = model_end_ns(model);
    for (size_t i = 0; i < n; i++) {
        const struct model_entry *entry = model->list[i];

        CHECK(model, MIN(entry->edt_ns, end_ns) <= now_ns,
              "EDT %"PRIu64" is early", entry->edt_ns);
    }
    if (n < max && now_ns >= model->now_ns) {
        for (size_t i = n; i < model->n; i++) {
            const struct model_entry *entry = model->list[i];

            CHECK(model, (wide) entry->edt_ns + entry->granularity_ns > now_ns,
                  "EDT %"PRIu64" is left behind", entry->edt_ns);
        }
    }

    uint64_t last_ns = n ? model->list[n - 1]->slot_ns : model->front_ns;
    model_accept(model, n);
    if (model->n && model->list[0]->slot_ns <= now_ns) {
        /* Not all that is due: the front is where we stopped. */
        model->front_ns = MAX(model->front_ns, last_ns);
    } else {
        uint64_t g = model->config.min_granularity_ns;
        uint64_t front_ns = MIN(now_ns / g * g, end_ns);

        model->front_ns = MAX(model->front_ns, front_ns);
    }
    model->now_ns = MAX(model->now_ns, now_ns);
    model_check_idle(model);
    return n;
}

void
mltw_model_run_dry(struct mltw_model *model, size_t max)
{
    while (model->n) {
        uint64_t due_ns = mltw_next_due(model->wheel);

        if (due_ns) {
            mltw_model_dequeue(model, due_ns - 1, max);
        }
        CHECK(model, mltw_model_dequeue(model, due_ns, max) > 0,
              "nothing at the due time, %"PRIu64, due_ns);
    }
}

void
mltw_model_flush(struct mltw_model *model, size_t max)
{
    model_reserve(model, max);
    for (;;) {
        struct model_op *op = model_log(model, OP_FLUSH, 0, max);
        size_t n = mltw_flush(model->wheel, model->out, max);

        op->result = n;
        CHECK(model, n == MIN(model->n, max), "flushed %"PRIuSIZE" of "
              "%"PRIuSIZE, n, model->n);
        if (!n) {
            break;
        }
        model_accept(model, n);
        CHECK(model, mltw_count(model->wheel) == model->n,
              "wrong count while flushing");
    }
    model_check_idle(model);
}

/* Random runs. */

uint64_t
mltw_choose(struct mltw_choices *choices, uint64_t n)
{
    uint64_t value = 0;

    if (choices->data) {
        unsigned int n_bytes = n == 0 || n > UINT32_MAX ? 8 : n > 255 ? 4 : 1;

        while (n_bytes-- && choices->size) {
            value = value << 8 | *choices->data++;
            choices->size--;
        }
    } else {
        /* splitmix64. */
        value = choices->state += UINT64_C(0x9e3779b97f4a7c15);
        value = (value ^ value >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        value = (value ^ value >> 27) * UINT64_C(0x94d049bb133111eb);
        value ^= value >> 31;
    }
    return n ? value % n : value;
}

/* A number whose order of magnitude is random: below 2^'bits'. */
static uint64_t
choose_magnitude(struct mltw_choices *choices, unsigned int bits)
{
    unsigned int shift = mltw_choose(choices, bits + 1);

    return shift ? mltw_choose(choices, 0) >> (64 - shift) : 0;
}

static uint64_t
add_saturating(uint64_t a, uint64_t b)
{
    return a + b >= a ? a + b : UINT64_MAX;
}

static void
choose_config(struct mltw_choices *choices, struct mltw_config *config)
{
    static const uint32_t n_wheels[] = { 1, 2, 3, 4, 8, 16, 32, 63, 64 };
    unsigned int shift = mltw_choose(choices, 3)
                         ? mltw_choose(choices, 11)
                         : mltw_choose(choices, 31);
    unsigned int max_shift = shift + mltw_choose(choices, 64 - shift);

    config->n_wheels = n_wheels[mltw_choose(choices, ARRAY_SIZE(n_wheels))];
    config->n_slots = 4u << (mltw_choose(choices, 8)
                             ? mltw_choose(choices, 9)
                             : mltw_choose(choices, 15));
    config->min_granularity_ns = UINT64_C(1) << shift;
    config->max_granularity_ns = UINT64_C(1) << max_shift;
    config->max_entries = 1 + (mltw_choose(choices, 3)
                               ? mltw_choose(choices, 1000)
                               : mltw_choose(choices, 12));
}

void
mltw_model_random_run(struct mltw_choices *choices, size_t n_ops)
{
    enum { N_FLOWS = 8 };
    struct flow {
        uint64_t gap_ns;
        uint64_t edt_ns;
        unsigned int level;
    } flows[N_FLOWS];
    struct mltw_config config;
    uint64_t now_ns;

    choose_config(choices, &config);
    switch (mltw_choose(choices, 5)) {
    case 0:
        now_ns = 0;
        break;
    case 1:
        now_ns = choose_magnitude(choices, 64);
        break;
    case 2:
        now_ns = (UINT64_C(1) << 63) - choose_magnitude(choices, 40);
        break;
    case 3:
        now_ns = -choose_magnitude(choices, 40);
        break;
    default:
        now_ns = UINT64_C(1700000000000000000) + mltw_choose(choices, 0) / 64;
        break;
    }

    struct mltw_model *model = mltw_model_create(&config, now_ns);
    if (mltw_choose(choices, 2)) {
        mltw_disable_few__(model->wheel);
    }

    uint64_t g = config.min_granularity_ns;
    unsigned int top = config.n_wheels - 1;
    /* Mostly one way to go on, so that runs differ in kind. */
    unsigned int habit = mltw_choose(choices, 4);
    unsigned int pace = mltw_choose(choices, 20);

    for (size_t i = 0; i < N_FLOWS; i++) {
        flows[i].gap_ns = choose_magnitude(choices, 34);
        flows[i].edt_ns = now_ns;
        flows[i].level = mltw_level(model->wheel, flows[i].gap_ns);
    }

    for (size_t i = 0; i < n_ops && (!choices->data || choices->size); i++) {
        unsigned int what = mltw_choose(choices, 16);
        struct flow *flow = &flows[mltw_choose(choices, N_FLOWS)];
        unsigned int level = flow->level;
        uint64_t edt_ns;

        if (what < 9) {
            unsigned int wheel_shift = mltw_choose(choices, top + 1);
            wide reach;

            switch (habit && mltw_choose(choices, 4)
                    ? 0 : mltw_choose(choices, 8)) {
            default:
                /* A flow's next packet; the first after a while has an EDT in
                 * the past or now. */
                if (!mltw_choose(choices, 8)) {
                    flow->edt_ns = MAX(flow->edt_ns, now_ns);
                }
                edt_ns = flow->edt_ns;
                flow->edt_ns = add_saturating(flow->edt_ns, flow->gap_ns);
                break;
            case 1:
                /* In the past. */
                edt_ns = now_ns - MIN(now_ns, choose_magnitude(choices, 40));
                break;
            case 2:
            case 3:
                /* At the edge of some wheel's horizon. */
                reach = ((wide) config.n_slots * g << wheel_shift)
                        + mltw_choose(choices, 5) * (g / 2 + 1);
                edt_ns = reach <= UINT64_MAX
                         ? add_saturating(now_ns, (uint64_t) reach - g)
                         : UINT64_MAX;
                if (mltw_choose(choices, 2)) {
                    level = mltw_choose(choices, 64);
                }
                break;
            case 4:
                edt_ns = add_saturating(now_ns, choose_magnitude(choices, 64));
                level = mltw_choose(choices, top + 1);
                break;
            case 5:
                /* Within some wheel's horizon. */
                reach = (wide) config.n_slots * g << wheel_shift;
                reach = MIN(reach, (wide) UINT64_MAX);
                edt_ns = add_saturating(now_ns, mltw_choose(choices, reach));
                break;
            case 6:
                edt_ns = UINT64_MAX - mltw_choose(choices, 3 * g);
                break;
            case 7:
                /* The flow's rate changes. */
                flow->gap_ns = choose_magnitude(choices, 34);
                flow->level = mltw_level(model->wheel, flow->gap_ns);
                edt_ns = now_ns;
                break;
            }
            mltw_model_enqueue(model, edt_ns, level);
        } else if (what < 15) {
            size_t max = mltw_choose(choices, 2)
                         ? 1 + mltw_choose(choices, 9) : 2000;
            uint64_t due_ns = mltw_next_due(model->wheel);

            switch (mltw_choose(choices, 8)) {
            case 0:
                now_ns = add_saturating(now_ns, 1000000000);
                break;
            case 1:
                if (due_ns != UINT64_MAX) {
                    now_ns = MAX(now_ns, due_ns);
                }
                break;
            case 2:
                if (due_ns != UINT64_MAX && due_ns > now_ns) {
                    now_ns = due_ns - 1;
                }
                break;
            case 3:
                /* Time goes backwards. */
                mltw_model_dequeue(model, now_ns - MIN(now_ns,
                                       choose_magnitude(choices, 30)), max);
                continue;
            case 4:
                /* No time passes. */
                break;
            default:
                now_ns = add_saturating(now_ns, choose_magnitude(choices,
                                                                 2 * pace));
                break;
            }
            mltw_model_dequeue(model, now_ns, max);
        } else if (!mltw_choose(choices, 64)) {
            mltw_model_flush(model, 1 + mltw_choose(choices, 300));
        }
    }

    if (mltw_choose(choices, 2)) {
        mltw_model_run_dry(model, 1 + mltw_choose(choices, 20));
    } else {
        mltw_model_flush(model, 1 + mltw_choose(choices, 20));
    }
    mltw_model_destroy(model);
}
