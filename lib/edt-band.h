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

#ifndef EDT_BAND_H
#define EDT_BAND_H 1

#include <stdint.h>

#include "edt-meter.h"

struct ofputil_meter_config;

/* What the bands of an OpenFlow meter say about shaping
 * =====================================================
 *
 * A meter shapes, by an EDT meter, if it has a shape band (struct
 * nx_meter_band_shape in "openflow/nicira-ext.h"), or if the datapath is told
 * so and its band of type "drop" means the same as a shape band without
 * options. */

enum edt_band {
    EDT_BAND_POLICES,           /* Has bands that cannot shape. */
    EDT_BAND_MAY_SHAPE,         /* Has one drop band that could. */
    EDT_BAND_SHAPES,            /* Has a shape band. */
};

int edt_band_parse(const struct ofputil_meter_config *,
                   uint64_t default_max_delay_us,
                   enum edt_band *, struct edt_limits *);

#endif /* edt-band.h */
