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

#ifndef MLTW_MODEL_H
#define MLTW_MODEL_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mltw.h"

/* A wheel under test beside its reference
 * =======================================
 *
 * The reference is a list of entries that is kept sorted by slot time and
 * order of arrival.  It knows nothing about wheels, slots or units: it works
 * in nanoseconds, with division and 128-bit numbers where the wheel shifts.
 *
 * Every operation below is done on both, and everything that can be observed
 * is compared.  In addition, what must hold whatever the slot time is checked
 * for each entry by itself: it does not leave before its EDT, and it does not
 * miss a drain that came a granularity after it.  The first difference is
 * reported together with the operations that led to it, and ends the program
 * with exit status 1. */

struct mltw_model;

/* Config must be valid. */
struct mltw_model *mltw_model_create(const struct mltw_config *,
                                     uint64_t now_ns);
void mltw_model_destroy(struct mltw_model *);

/* What to print before an error, such as the seed.  Not copied. */
void mltw_model_set_context(const char *);

/* Prints the message after the context, and the last operations on 'model', if
 * it is nonnull, and exits with status 1. */
void mltw_model_fail(const struct mltw_model *model, const char *format, ...)
    OVS_PRINTF_FORMAT(2, 3) OVS_NO_RETURN;

/* Adds a new entry and returns true, or returns false if the wheel refuses
 * rightly. */
bool mltw_model_enqueue(struct mltw_model *, uint64_t edt_ns,
                        unsigned int level);

/* Drains at most 'max' entries and returns their number. */
size_t mltw_model_dequeue(struct mltw_model *, uint64_t now_ns, size_t max);

/* Drains everything, 'max' entries at a time, by going to each due time in
 * turn, after checking that nothing leaves 1 ns earlier. */
void mltw_model_run_dry(struct mltw_model *, size_t max);

/* Flushes everything, 'max' entries at a time. */
void mltw_model_flush(struct mltw_model *, size_t max);

struct mltw *mltw_model_wheel(struct mltw_model *);

/* Latest time given to mltw_model_dequeue() or mltw_model_create(). */
uint64_t mltw_model_now(const struct mltw_model *);

/* A random run
 * ============ */

/* Numbers that decide what a run does: from a seed, or from a fuzzer. */
struct mltw_choices {
    const uint8_t *data;        /* If nonnull, take choices from here... */
    size_t size;                /* ...as long as this is not 0. */
    uint64_t state;             /* If 'data' is null. */
};

/* Returns a choice, 0...n-1 (any 64-bit number if 'n' is 0). */
uint64_t mltw_choose(struct mltw_choices *, uint64_t n);

/* Creates a wheel with a random geometry and start time and does 'n_ops'
 * random operations on it, or fewer if the choices are used up. */
void mltw_model_random_run(struct mltw_choices *, size_t n_ops);

#endif /* mltw-model.h */
