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

#ifndef PEERS_H
#define PEERS_H 1

#include <stdbool.h>

/* Other schedulers in the wheel's place
 * =====================================
 *
 * The ovs-vswitchd that benchmarks compare schedulers with is the product's
 * own but for two files: "peers.c" is linked in the place of lib/mltw.c, and
 * lib/flow-shaper.c is compiled with this header in front.  So all of them are
 * behind the same FIFOs, in one process, and cost the same indirect call.
 *
 * Which scheduler ports have that are configured from then on is said by
 *
 *     ovs-appctl benchmark/scheduler mltw
 *     ovs-appctl benchmark/scheduler carousel|eiffel SLOT_NS all|slot
 *
 * With "slot" what is in one slot leaves by itself, as in the papers. */

struct mltw;

/* Does what stands for 'wheel' hand out one slot at a time? */
bool peers_slot_by_slot(const struct mltw *wheel);

#define SLOT_BY_SLOT(S) peers_slot_by_slot((S)->wheel)

#endif /* peers.h */
