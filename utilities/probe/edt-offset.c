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

/* Prints where OVS keeps what the probe reads: bytes from the start of a
 * struct dp_packet, which begins with the mbuf. */

#include <config.h>

#include <stdio.h>

#include "dp-packet.h"

int
main(void)
{
    printf("{\"edt_offset\": %zu, \"edt_valid_offset\": %zu, "
           "\"chain_offset\": %zu}\n",
           offsetof(struct dp_packet, md.edt.edt_ns),
           offsetof(struct dp_packet, md.edt_valid),
           offsetof(struct dp_packet, md.edt.chain));
    return 0;
}
