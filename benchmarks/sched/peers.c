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

/* The functions of "mltw.h", by whichever scheduler has been asked for: see
 * "peers.h".  For what they do see "mltw.h" and "edt-sched.h". */

#include <config.h>

#include "peers.h"

#include <string.h>

#include "edt-sched.h"
#include "mltw.h"
#include "openvswitch/compiler.h"
#include "openvswitch/thread.h"
#include "ovs-thread.h"
#include "unixctl.h"
#include "util.h"

struct mltw {
    struct mltw_levels__ levels;    /* Of which flow-shaper.c reads. */
    bool slot_by_slot;
    struct edt_sched *sched;
};

static struct ovs_mutex mutex = OVS_MUTEX_INITIALIZER;

/* What the next scheduler is to be. */
static struct edt_sched_config wanted OVS_GUARDED_BY(mutex);
static bool has_wanted OVS_GUARDED_BY(mutex);

static void
peers_set(struct unixctl_conn *conn, int argc, const char *argv[],
          void *aux OVS_UNUSED)
{
    struct edt_sched_config config = EDT_SCHED_CONFIG_DEFAULT;
    const char *error;
    int slot_ns = 0;

    if (!edt_sched_type_from_name(argv[1], &config.type)) {
        unixctl_command_reply_error(conn, "no such scheduler");
        return;
    }
    if ((config.type == EDT_SCHED_MLTW) != (argc == 2)) {
        unixctl_command_reply_error(conn, "SLOT_NS and all or slot go with "
                                    "carousel and eiffel");
        return;
    }
    if (argc > 2) {
        if (argc != 4 || !str_to_int(argv[2], 10, &slot_ns)
            || (strcmp(argv[3], "slot") && strcmp(argv[3], "all"))) {
            unixctl_command_reply_error(conn, "must be SLOT_NS all|slot");
            return;
        }
        config.slot_ns = MAX(slot_ns, 0);
        config.slot_by_slot = !strcmp(argv[3], "slot");
    }
    error = edt_sched_config_error(&config);
    if (error) {
        unixctl_command_reply_error(conn, error);
        return;
    }

    ovs_mutex_lock(&mutex);
    wanted = config;
    has_wanted = true;
    ovs_mutex_unlock(&mutex);
    unixctl_command_reply(conn, NULL);
}

OVS_CONSTRUCTOR(peers_init) {
    unixctl_command_register("benchmark/scheduler",
                             "NAME [SLOT_NS all|slot]", 1, 3, peers_set,
                             NULL);
}

bool
peers_slot_by_slot(const struct mltw *wheel)
{
    return wheel->slot_by_slot;
}

/* No two configurations are equal: who asks would keep the scheduler there
 * is. */
bool
mltw_config_equal(const struct mltw_config *a OVS_UNUSED,
                  const struct mltw_config *b OVS_UNUSED)
{
    return false;
}

struct mltw *
mltw_create(const struct mltw_config *mltw, uint64_t now_ns)
{
    struct mltw *wheel = xzalloc_cacheline(sizeof *wheel);
    struct edt_sched_config config = EDT_SCHED_CONFIG_DEFAULT;

    ovs_mutex_lock(&mutex);
    if (has_wanted) {
        config = wanted;
    }
    ovs_mutex_unlock(&mutex);

    config.mltw = *mltw;
    config.max_entries = mltw->max_entries;
    if (config.type == EDT_SCHED_MLTW) {
        wheel->levels.granularity_shift
            = log_2_floor(mltw->min_granularity_ns);
        wheel->levels.max_level
            = MIN(log_2_floor(mltw->max_granularity_ns)
                  - wheel->levels.granularity_shift, mltw->n_wheels - 1);
    }
    wheel->slot_by_slot = config.slot_by_slot;
    wheel->sched = edt_sched_create(&config, now_ns);
    return wheel;
}

void
mltw_destroy(struct mltw *wheel)
{
    if (wheel) {
        edt_sched_destroy(wheel->sched);
        free_cacheline(wheel);
    }
}

bool
mltw_enqueue(struct mltw *wheel, void *entry, uint64_t edt_ns,
             unsigned int level)
{
    return edt_sched_enqueue(wheel->sched, entry, edt_ns, level);
}

size_t
mltw_dequeue(struct mltw *wheel, uint64_t now_ns, void **entries,
             size_t max_entries)
{
    return edt_sched_dequeue(wheel->sched, now_ns, entries, max_entries);
}

uint64_t
mltw_next_due(const struct mltw *wheel)
{
    return edt_sched_next_due(wheel->sched);
}

size_t
mltw_flush(struct mltw *wheel, void **entries, size_t max_entries)
{
    return edt_sched_flush(wheel->sched, entries, max_entries);
}

size_t
mltw_count(const struct mltw *wheel)
{
    return edt_sched_count(wheel->sched);
}

size_t
mltw_memory_bytes(const struct mltw *wheel)
{
    return edt_sched_memory_bytes(wheel->sched);
}
