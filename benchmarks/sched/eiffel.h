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

#ifndef EIFFEL_H
#define EIFFEL_H 1

#include "edt-sched.h"

/* Eiffel's circular queue
 * =======================
 *
 * The circular find-first-set queue, cFFS, of Eiffel (Saeed et al., NSDI
 * 2019), ranked by departure time, to compare others with.  Buckets 'slot_ns'
 * apart form two arrays, each of which covers 'horizon_ns': a primary one, in
 * whose range the front is, and a secondary one for the range after it.  When
 * the front leaves the primary's range, which is then empty, they change
 * roles.  Each has a hierarchy of bitmaps of its occupied buckets, 64 times
 * smaller at each step, of which "find first set" instructions find the first
 * occupied bucket.  The contract is that of "edt-sched.h"; what is its own:
 *
 *  * Cost: O(log64(slots)), that is at most 5 steps, for each bucket that
 *    becomes occupied or empty, O(1) for each entry.  Nothing is scanned, and
 *    next_due() is a load.
 *
 *  * Beyond both ranges an entry goes to one more bucket after the secondary's
 *    last, and is placed again when the arrays change roles; so it is neither
 *    early nor late.  With 'drop_beyond_horizon' an entry is refused that is
 *    more than 'horizon_ns' ahead of the front, as it is by "carousel.h".
 *
 *  * Memory: 8 bytes and a little more than a bit for each bucket, hence twice
 *    what Carousel's wheel takes for the same horizon, all of which is touched
 *    in the course of twice 'horizon_ns' in constant use; 64 bytes for each 7
 *    entries of a bucket that has more than one; 16 for each entry beyond.
 *
 * Differences from the paper's: EDTs are rounded up, not down, so nothing is
 * early.  What is beyond the ranges keeps its EDT, apart from the buckets, and
 * is placed again when the ranges move, not when the bucket it was put in is
 * reached; so it does not come after entries with the same slot time that were
 * added later. */
extern const struct edt_sched_class eiffel_class;

#endif /* eiffel.h */
