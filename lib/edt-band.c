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

#include "edt-band.h"

#include <errno.h>
#include <string.h>

#include "openvswitch/dynamic-string.h"
#include "openvswitch/ofp-meter.h"
#include "openvswitch/vlog.h"
#include "util.h"

VLOG_DEFINE_THIS_MODULE(edt_band);

static struct vlog_rate_limit rl = VLOG_RATE_LIMIT_INIT(5, 20);

/* Stores in '*limits' what 'band' of a meter with 'flags' says, with 0 for a
 * 'max_delay_us' that it does not state. */
static void
band_to_limits(const struct ofputil_meter_band *band, uint16_t flags,
               struct edt_limits *limits)
{
    const bool per_packet = flags & OFPMF13_PKTPS;

    *limits = (struct edt_limits) {
        .per_packet = per_packet,
        .rate = band->rate,
        .burst = band->burst_size,
        .max_delay_us = band->max_delay,
        .ecn_threshold_us = band->ecn_threshold,
        .fair = band->fair,
    };
    if (!per_packet) {
        limits->rate *= 1000;   /* kbit/s to bit/s. */
        limits->burst *= 125;   /* kbit to bytes. */
    }
}

/* Returns true if an EDT meter can have the rate of 'limits'. */
static bool
rate_is_valid(const struct edt_limits *limits)
{
    return limits->per_packet
           ? (limits->rate >= EDT_MIN_RATE_PPS
              && limits->rate <= EDT_MAX_RATE_PPS)
           : (limits->rate >= EDT_MIN_RATE_BPS
              && limits->rate <= EDT_MAX_RATE_BPS);
}

/* Returns true if an EDT meter can have the burst of 'limits'. */
static bool
burst_is_valid(const struct edt_limits *limits)
{
    return limits->burst <= (limits->per_packet ? EDT_MAX_BURST_PACKETS
                                                : EDT_MAX_BURST_BYTES);
}

/* Checks the shape band at the start of 'config' and stores what it says in
 * '*limits'. */
static int
parse_shape_band(const struct ofputil_meter_config *config,
                 uint64_t default_max_delay_us, struct edt_limits *limits)
{
    const struct ofputil_meter_band *band = &config->bands[0];
    const char *unit = config->flags & OFPMF13_PKTPS ? "packets" : "kbit";
    struct ds id = DS_EMPTY_INITIALIZER;
    uint64_t max_delay_us;
    int error = 0;

    band_to_limits(band, config->flags, limits);
    max_delay_us = band->max_delay ? band->max_delay : default_max_delay_us;

    ofputil_format_meter_id(&id, config->meter_id, ' ');
    if (config->n_bands > 1) {
        VLOG_WARN_RL(&rl, "%s: a meter with a shape band can have no other "
                     "band, but this one has %"PRIu16" bands", ds_cstr(&id),
                     config->n_bands);
        error = ENODEV;
    } else if (config->meter_id > OFPM13_MAX) {
        VLOG_WARN_RL(&rl, "%s: a virtual meter cannot have a shape band",
                     ds_cstr(&id));
        error = ENODEV;
    } else if (band->burst_size && !(config->flags & OFPMF13_BURST)) {
        VLOG_WARN_RL(&rl, "%s: shape band has burst_size=%"PRIu32", but the "
                     "meter lacks the flag \"burst\"", ds_cstr(&id),
                     band->burst_size);
        error = EBADF;
    } else if (!rate_is_valid(limits)) {
        VLOG_WARN_RL(&rl, "%s: shape band has rate=%"PRIu32" (%s/s), but "
                     "%"PRIu64" to %"PRIu64" is allowed", ds_cstr(&id),
                     band->rate, unit,
                     limits->per_packet ? EDT_MIN_RATE_PPS
                                        : EDT_MIN_RATE_BPS / 1000,
                     limits->per_packet ? EDT_MAX_RATE_PPS
                                        : EDT_MAX_RATE_BPS / 1000);
        error = EDOM;
    } else if (!burst_is_valid(limits)) {
        VLOG_WARN_RL(&rl, "%s: shape band has burst_size=%"PRIu32" (%s), but "
                     "0 to %"PRIu64" is allowed",
                     ds_cstr(&id), band->burst_size, unit,
                     limits->per_packet ? EDT_MAX_BURST_PACKETS
                                        : EDT_MAX_BURST_BYTES / 125);
        error = EOVERFLOW;
    } else if (band->max_delay > EDT_MAX_DELAY_US) {
        VLOG_WARN_RL(&rl, "%s: shape band has max_delay=%"PRIu32" (us), but 0 "
                     "to %"PRIu64" is allowed", ds_cstr(&id), band->max_delay,
                     EDT_MAX_DELAY_US);
        error = ERANGE;
    } else if (band->ecn_threshold >= max_delay_us) {
        VLOG_WARN_RL(&rl, "%s: shape band has ecn_threshold=%"PRIu32" (us), "
                     "but it must be less than the longest wait, %"PRIu64,
                     ds_cstr(&id), band->ecn_threshold, max_delay_us);
        error = ERANGE;
    }
    ds_destroy(&id);
    return error;
}

/* Finds out whether a meter as in 'config' shapes, for a datapath whose
 * meters let packets wait for 'default_max_delay_us' (at least 1) if they do
 * not say otherwise.
 *
 * If successful, returns 0 and stores the answer in '*band' and what an EDT
 * meter would have to obey in '*limits': nothing but 0 if the answer is
 * EDT_BAND_POLICES, and 0 for a 'max_delay_us' or false for 'fair' if 'config'
 * does not state them.
 * If a shape band says what cannot be, logs it and returns an errno value as
 * dpif's meter_set() does:
 *
 *    ENODEV     It is not the only band, or the meter is a virtual one.
 *    EBADF      There is a burst, but not the meter flag for it.
 *    EDOM       The rate is out of range.
 *    EOVERFLOW  The burst is out of range.
 *    ERANGE     The longest wait or the ECN threshold is out of range.
 *
 * Thread-safe. */
int
edt_band_parse(const struct ofputil_meter_config *config,
               uint64_t default_max_delay_us,
               enum edt_band *band, struct edt_limits *limits)
{
    *band = EDT_BAND_POLICES;
    memset(limits, 0, sizeof *limits);
    for (size_t i = 0; i < config->n_bands; i++) {
        if (config->bands[i].type == OFPMBT13_EXPERIMENTER) {
            *band = EDT_BAND_SHAPES;
        }
    }
    if (*band == EDT_BAND_SHAPES) {
        return parse_shape_band(config, default_max_delay_us, limits);
    }

    if (config->n_bands == 1 && config->meter_id <= OFPM13_MAX
        && config->bands[0].type == OFPMBT13_DROP) {
        struct edt_limits drop_limits;

        band_to_limits(&config->bands[0], config->flags, &drop_limits);
        if (rate_is_valid(&drop_limits)) {
            *limits = drop_limits;
            *band = EDT_BAND_MAY_SHAPE;
        }
    }
    return 0;
}
