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

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fb-probe-config.h"

/* Further than any mbuf's own data goes, and still within a buffer of the
 * smallest size in use (2 kB). */
#define MAX_MBUF_OFFSET 1024
#define MAX_FRAME_OFFSET 1024
#define MIN_RECORDS 1024
#define MAX_RECORDS (UINT64_C(1) << 28)
#define MAX_QUEUES 1024
#define MAX_BURST_WAIT_NS 1000000
#define DEFAULT_RECORDS (UINT64_C(1) << 20)

void
fb_probe_error(char *error, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(error, FB_PROBE_TEXT_MAX, format, args);
    va_end(args);
    for (char *c = error; *c; c++) {
        if (!isprint((unsigned char) *c) || *c == '"' || *c == '\\') {
            *c = '?';
        }
    }
}

/* Sets '*number' from 'value' if that is a decimal number in the range. */
static bool
parse_number(const char *key, const char *value, uint64_t min, uint64_t max,
             uint64_t *number, char *error)
{
    char *end;

    errno = 0;
    *number = strtoull(value, &end, 10);
    if (!isdigit((unsigned char) *value) || *end || errno || *number < min
        || *number > max) {
        fb_probe_error(error, "%s: '%.32s' is not allowed: a number from "
                       "%"PRIu64" to %"PRIu64, key, value, min, max);
        return false;
    }
    return true;
}

static bool
parse_u32(const char *key, const char *value, uint32_t max, uint32_t *number,
          char *error)
{
    uint64_t n;

    if (!parse_number(key, value, 0, max, &n, error)) {
        return false;
    }
    *number = n;
    return true;
}

static bool
parse_flow(const char *value, struct fb_probe_config *config, char *error)
{
    if (!strcmp(value, "dst")) {
        config->flow = FB_PROBE_FLOW_DST;
    } else if (!strcmp(value, "src")) {
        config->flow = FB_PROBE_FLOW_SRC;
    } else if (!strncmp(value, "offset:", 7)) {
        config->flow = FB_PROBE_FLOW_OFFSET;
        return parse_u32("flow=offset", value + 7, MAX_FRAME_OFFSET - 4,
                         &config->flow_offset, error);
    } else if (!strncmp(value, "mbuf:", 5)) {
        config->flow = FB_PROBE_FLOW_MBUF;
        return parse_u32("flow=mbuf", value + 5, MAX_MBUF_OFFSET - 4,
                         &config->flow_offset, error);
    } else {
        fb_probe_error(error, "flow: '%.32s' is not allowed: dst, src, "
                       "offset:BYTES or mbuf:BYTES", value);
        return false;
    }
    return true;
}

static bool
parse_records(const char *value, struct fb_probe_config *config, char *error)
{
    uint64_t n;

    /* Nothing is recorded, but counted (and waited for). */
    if (!strcmp(value, "0")) {
        config->records = 0;
        return true;
    }
    if (!parse_number("records", value, MIN_RECORDS, MAX_RECORDS, &n,
                      error)) {
        return false;
    }
    config->records = MIN_RECORDS;
    while (config->records < n) {
        config->records *= 2;
    }
    return true;
}

static bool
parse_mode(const char *value, struct fb_probe_config *config, char *error)
{
    if (strcmp(value, "stop") && strcmp(value, "wrap")) {
        fb_probe_error(error, "mode: '%.32s' is not allowed: stop or wrap",
                       value);
        return false;
    }
    config->wrap = !strcmp(value, "wrap");
    return true;
}

static bool
parse_file(const char *value, struct fb_probe_config *config, char *error)
{
    if (*value != '/' || strlen(value) >= sizeof config->file) {
        fb_probe_error(error, "file: '%.32s' is not allowed: an absolute "
                       "path of at most %zu characters", value,
                       sizeof config->file - 1);
        return false;
    }
    strcpy(config->file, value);
    return true;
}

static bool
parse_item(const char *key, const char *value,
           struct fb_probe_config *config, char *error)
{
    if (!strcmp(key, "file")) {
        return parse_file(value, config, error);
    } else if (!strcmp(key, "records")) {
        return parse_records(value, config, error);
    } else if (!strcmp(key, "queues")) {
        return parse_u32(key, value, MAX_QUEUES, &config->queues, error);
    } else if (!strcmp(key, "flow")) {
        return parse_flow(value, config, error);
    } else if (!strcmp(key, "edt_offset")) {
        config->edt = true;
        return parse_u32(key, value, MAX_MBUF_OFFSET - 8,
                         &config->edt_offset, error);
    } else if (!strcmp(key, "edt_valid_offset")) {
        return parse_u32(key, value, MAX_MBUF_OFFSET - 1,
                         &config->edt_valid_offset, error);
    } else if (!strcmp(key, "burst_wait_ns")) {
        return parse_u32(key, value, MAX_BURST_WAIT_NS,
                         &config->burst_wait_ns, error);
    } else if (!strcmp(key, "mode")) {
        return parse_mode(value, config, error);
    }
    fb_probe_error(error, "'%.24s' is not a key: file, records, queues, flow, "
                   "edt_offset, edt_valid_offset, burst_wait_ns and mode are",
                   key);
    return false;
}

bool
fb_probe_config_parse(const char *text, struct fb_probe_config *config,
                      char *error)
{
    char *copy = strdup(text), *rest = copy, *item;
    bool ok = copy != NULL;

    if (!ok) {
        fb_probe_error(error, "out of memory");
    }
    memset(config, 0, sizeof *config);
    config->records = DEFAULT_RECORDS;
    while (ok && (item = strsep(&rest, ";,"))) {
        char *equals = strchr(item, '=');

        if (equals) {
            *equals = '\0';
            ok = parse_item(item, equals + 1, config, error);
        } else if (*item) {
            fb_probe_error(error, "'%.32s' is not allowed: KEY=VALUE", item);
            ok = false;
        }
    }
    free(copy);
    return ok;
}
