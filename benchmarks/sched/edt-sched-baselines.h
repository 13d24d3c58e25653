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

#ifndef EDT_SCHED_BASELINES_H
#define EDT_SCHED_BASELINES_H 1

#include "edt-sched.h"

/* Schedulers that sort
 * ====================
 *
 * For tests and measurements only: what one would take without wheels and
 * buckets.  Their contract is that of "edt-sched.h", with these differences:
 *
 *  * Entries leave in the order of their EDTs, in which there are neither
 *    slots nor a horizon nor a front: an EDT in the past is what it is.
 *
 *  * Of 'struct edt_sched_config' only 'max_entries' is used.
 *
 *  * Each operation is O(log(n)) in the number of entries, except next_due(),
 *    which is a load. */

/* An implicit 4-ary heap.  Entries that have the same EDT leave in any
 * order. */
extern const struct edt_sched_class heap_sched_class;

/* A red-black tree with a node for each entry, as sch_fq of Linux has for
 * flows.  Entries that have the same EDT leave in the order in which they
 * came. */
extern const struct edt_sched_class tree_sched_class;

#endif /* edt-sched-baselines.h */
