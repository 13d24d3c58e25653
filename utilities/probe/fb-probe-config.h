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

#ifndef FB_PROBE_CONFIG_H
#define FB_PROBE_CONFIG_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fb-probe-ring.h"

/* Telemetry's limit for a string, with its terminating zero byte. */
#define FB_PROBE_TEXT_MAX 128

/* What to record, and how. */
struct fb_probe_config {
    char file[FB_PROBE_TEXT_MAX];   /* Empty: one that names the port. */
    uint64_t records;               /* For each queue; a power of two or 0. */
    uint32_t queues;                /* Rings to make; 0: as many as needed. */
    enum fb_probe_flow flow;
    uint32_t flow_offset;
    bool edt;                       /* Read an EDT at 'edt_offset'? */
    uint32_t edt_offset;
    uint32_t edt_valid_offset;      /* Byte that is 0 if there is none; 0: there
                                     * always is one. */
    uint32_t burst_wait_ns;
    bool wrap;
};

/* Sets 'config' from 'text', "KEY=VALUE;KEY=VALUE...", commas do as well.
 * What 'text' does not say has its default.  Returns false and sets 'error'
 * (of FB_PROBE_TEXT_MAX bytes) to what is wrong, with key, value and what is
 * allowed, if 'text' is not valid. */
bool fb_probe_config_parse(const char *text, struct fb_probe_config *,
                           char *error);

/* Formats an error.  The message is made of what telemetry, which does not
 * escape in every version, can put in JSON. */
void fb_probe_error(char *error, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif /* fb-probe-config.h */
