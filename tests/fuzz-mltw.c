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

/* A fuzzer for the multi-level timing wheel: what it finds in the input
 * decides geometry, start time and operations, all of which are compared with
 * the reference model.  For clang's -fsanitize=fuzzer. */

#include <config.h>

#include "mltw-model.h"
#include "openvswitch/compiler.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mltw_choices choices = { .data = data, .size = size };

    mltw_model_set_context("fuzz");
    mltw_model_random_run(&choices, SIZE_MAX);
    return 0;
}
