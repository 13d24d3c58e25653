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

#include "edt-sched.h"

#include <string.h>

#include "carousel.h"
#include "eiffel.h"
#include "mltw.h"
#include "openvswitch/util.h"
#include "util.h"

/* Types. */

static const struct edt_sched_class *const classes[EDT_SCHED_N_TYPES] = {
    [EDT_SCHED_MLTW] = &mltw_class,
    [EDT_SCHED_CAROUSEL] = &carousel_class,
    [EDT_SCHED_EIFFEL] = &eiffel_class,
};

const char *
edt_sched_type_name(enum edt_sched_type type)
{
    return classes[type]->name;
}

bool
edt_sched_type_from_name(const char *name, enum edt_sched_type *type)
{
    for (int i = 0; i < EDT_SCHED_N_TYPES; i++) {
        if (!strcmp(name, classes[i]->name)) {
            *type = i;
            return true;
        }
    }
    return false;
}

const char *
edt_sched_config_error(const struct edt_sched_config *config)
{
    if (config->type < 0 || config->type >= EDT_SCHED_N_TYPES) {
        return "type must be mltw, carousel or eiffel";
    }
    if (config->max_entries < 1 || config->max_entries > 1 << 24) {
        return "max_entries must be 1 to 16777216";
    }
    if (config->type == EDT_SCHED_MLTW) {
        struct mltw_config mltw = config->mltw;

        mltw.max_entries = config->max_entries;
        return mltw_config_error(&mltw);
    }
    if (config->slot_ns < 1 || config->slot_ns > 1 << 30) {
        return "slot_ns must be 1 to 1073741824";
    }
    if (config->horizon_ns < config->slot_ns) {
        return "horizon_ns must not be below slot_ns";
    }
    if (config->horizon_ns / config->slot_ns
        + !!(config->horizon_ns % config->slot_ns) > (1 << 30) - 2) {
        return "horizon_ns must be at most 1073741822 slots of slot_ns";
    }
    return NULL;
}

struct edt_sched *
edt_sched_create(const struct edt_sched_config *config, uint64_t now_ns)
{
    ovs_assert(!edt_sched_config_error(config));

    return edt_sched_create_class((config->type == EDT_SCHED_MLTW
                                   && config->slot_by_slot
                                   ? &mltw_slots_class
                                   : classes[config->type]), config, now_ns);
}

struct edt_sched *
edt_sched_create_class(const struct edt_sched_class *class,
                       const struct edt_sched_config *config, uint64_t now_ns)
{
    struct edt_sched *sched = xmalloc(sizeof *sched);

    sched->class = class;
    sched->impl = class->create(config, now_ns);
    return sched;
}
