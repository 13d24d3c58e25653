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

#ifndef CAROUSEL_H
#define CAROUSEL_H 1

#include "edt-sched.h"

/* Carousel's timing wheel
 * =======================
 *
 * The timing wheel of Carousel (Saeed et al., SIGCOMM 2017, section 5.1.2 and
 * algorithm 1), to compare others with: one wheel with slots 'slot_ns' apart
 * that reaches 'horizon_ns' ahead, and a pool of nodes that hold several
 * references each.  Its contract is that of "edt-sched.h"; what is its own:
 *
 *  * Cost: carousel_class.enqueue() is O(1).  dequeue() looks at each slot
 *    between the front and 'now_ns', whether there is anything in it or not,
 *    since that is what algorithm 1 does: after a pause of 1 s, with slots
 *    100 ns apart, at 10 million of them.  (It looks at 8 at once, and when
 *    nothing is held at none.)
 *
 *  * next_due() looks at each slot up to the first one that is occupied, once:
 *    neither another next_due() nor a dequeue() looks at these slots again.
 *    So its cost, too, is proportional to the time until something is due.
 *
 *  * Beyond the horizon an entry goes to the wheel's last slot, and hence
 *    leaves early, or is refused ('drop_beyond_horizon').  These are the
 *    paper's two options.
 *
 *  * Memory: 8 bytes a slot, all of which the wheel touches in the course of
 *    'horizon_ns' if it is in constant use, and 64 bytes for each 7 entries of
 *    a slot that has more than one.
 *
 * Differences from algorithm 1: it rounds EDTs down, so that entries leave up
 * to 'slot_ns' early; here they are rounded up, as everywhere in this project.
 * It moves the front past the slot of 'now', so that what is late waits for
 * the next slot; here, it leaves at once.  It takes a single packet from the
 * slot that belongs to 'now', which must mean the slot at the front. */
extern const struct edt_sched_class carousel_class;

#endif /* carousel.h */
