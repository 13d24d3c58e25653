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

#ifndef SHAPER_KEY_H
#define SHAPER_KEY_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ds;

/* Keys of other_config columns, and what values they can have. */

struct shaper_key {
    const char *name;
    uint64_t min;
    uint64_t max;
    uint64_t def;
    bool pow2;
    const char *unit;
    const char *const *words;       /* If not NULL, 'max' + 1 names for the
                                     * values from 0 on. */
};

bool shaper_key_parse(const struct shaper_key *, const char *text,
                      uint64_t *value);
bool shaper_key_nearest(const struct shaper_key *, const char *text,
                        uint64_t *value);
void shaper_key_put_allowed(struct ds *, const struct shaper_key *);
const struct shaper_key *shaper_key_find(const struct shaper_key *keys,
                                         size_t n, const char *name);
char *shaper_key_unknown(const struct shaper_key *keys, size_t n,
                         const char *table, const char *name,
                         const char *value);
char *shaper_key_bad_value(const struct shaper_key *, const char *table,
                           const char *value);

#endif /* shaper-key.h */
