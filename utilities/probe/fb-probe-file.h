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

#ifndef FB_PROBE_FILE_H
#define FB_PROBE_FILE_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fb-probe-burst.h"
#include "fb-probe-config.h"

/* A file that is recorded into, see fb-probe-ring.h. */
struct fb_probe_file {
    struct fb_probe_header *header;     /* The start of the mapped file. */
    size_t size;                        /* Of the mapping. */
    struct fb_probe_ring *rings;        /* As many as 'header' says. */
};

/* Makes the file called 'name'.  What there is already is not touched.
 * Returns false and sets 'error' if that fails. */
bool fb_probe_file_create(struct fb_probe_file *, const char *name,
                          const char *device, uint16_t port,
                          uint32_t n_queues, const struct fb_probe_config *,
                          char *error);

/* Unmaps the file, which stays there. */
void fb_probe_file_unmap(struct fb_probe_file *);

/* Adds a pair to the file's clocks. */
void fb_probe_file_add_clock(struct fb_probe_file *);

/* Says in the file that nothing is written into it any more. */
void fb_probe_file_set_stopped(struct fb_probe_file *);

#endif /* fb-probe-file.h */
