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

#ifndef FB_PROBE_RECORD_H
#define FB_PROBE_RECORD_H 1

#include <stdbool.h>
#include <stdint.h>

#include "fb-probe-config.h"

/* Recordings
 * ==========
 *
 * At most one a port.  Any thread may call these functions, while other
 * threads send, and the application reconfigures or closes the port:
 *
 *   - A port's tx callbacks, and so its recording, survive a reconfiguration.
 *     Queues that the port gets later are recorded, from at most 100 ms after
 *     that on, if there are rings left ('queues' in the configuration).
 *
 *   - A port that is closed ends its recording.
 *
 *   - Stopping removes the callbacks and waits until no thread is in one.
 *     Only then is the file unmapped.  (Where the kernel lacks membarrier(2),
 *     or a thread does not leave within a second, it stays mapped for good.)
 *     DPDK's own record of a callback, some 40 bytes, is never freed: there
 *     is no way to know that no thread walks the list it was in. */

struct fb_probe_status {
    char file[FB_PROBE_TEXT_MAX];
    char device[64];
    uint32_t n_rings;               /* In the file. */
    uint32_t n_recorded;            /* Queues that have one. */
    uint32_t n_tx_queues;           /* That the port has now. */
};

/* All return false and set 'error' (FB_PROBE_TEXT_MAX bytes) if they fail. */
bool fb_probe_find_port(const char *name, uint16_t *port, char *error);
bool fb_probe_start(uint16_t port, const struct fb_probe_config *,
                    struct fb_probe_status *, char *error);
bool fb_probe_stop(uint16_t port, struct fb_probe_status *, char *error);
bool fb_probe_status(uint16_t port, struct fb_probe_status *, char *error);

/* Returns the next port after 'port' that is being recorded, -1 if there is
 * none.  The first is that after -1. */
int fb_probe_next(int port);

#endif /* fb-probe-record.h */
