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

#include "shaper-key.h"

#include <string.h>

#include "openvswitch/dynamic-string.h"
#include "util.h"

/* Parses 'text' as a value of 'key' into '*value'.  Returns false if it is
 * not one. */
bool
shaper_key_parse(const struct shaper_key *key, const char *text,
                 uint64_t *value)
{
    unsigned long long int n;

    if (key->words) {
        for (uint64_t i = 0; i <= key->max; i++) {
            if (!strcmp(text, key->words[i])) {
                *value = i;
                return true;
            }
        }
        return false;
    }

    /* str_to_ullong() takes signs and wraps negative numbers. */
    if (!text[0] || text[strspn(text, "0123456789")]
        || !str_to_ullong(text, 10, &n) || n < key->min || n > key->max
        || (key->pow2 && !IS_POW2(n))) {
        return false;
    }
    *value = n;
    return true;
}

/* Stores in '*value' the value of 'key' that is nearest to 'text', a whole
 * number of any size and sign.  Returns false if 'text' is none, or 'key' has
 * words for values. */
bool
shaper_key_nearest(const struct shaper_key *key, const char *text,
                   uint64_t *value)
{
    const bool negative = text[0] == '-';
    const char *digits = text + negative;
    unsigned long long int n = 0;

    if (key->words || !digits[0] || digits[strspn(digits, "0123456789")]) {
        return false;
    }
    if (!negative && !str_to_ullong(digits, 10, &n)) {
        n = UINT64_MAX;
    }
    n = MIN(MAX(n, key->min), key->max);
    if (key->pow2 && !IS_POW2(n)) {
        uint64_t below = UINT64_C(1) << log_2_floor(n);

        n = n - below < 2 * below - n ? below : 2 * below;
    }
    *value = n;
    return true;
}

/* Appends what values 'key' can have. */
void
shaper_key_put_allowed(struct ds *s, const struct shaper_key *key)
{
    if (key->words) {
        ds_put_cstr(s, "one of");
        for (uint64_t i = 0; i <= key->max; i++) {
            ds_put_format(s, "%s \"%s\"", i ? "," : "", key->words[i]);
        }
    } else {
        ds_put_format(s, "a %s from %"PRIu64" to %"PRIu64" (%s)",
                      key->pow2 ? "power of two" : "whole number",
                      key->min, key->max, key->unit);
    }
}

/* Returns the one of the 'n' 'keys' that is called 'name', or NULL. */
const struct shaper_key *
shaper_key_find(const struct shaper_key *keys, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        if (!strcmp(name, keys[i].name)) {
            return &keys[i];
        }
    }
    return NULL;
}

/* Returns a message, which the caller must free, that 'name', which is set to
 * 'value' in other_config of 'table', is not one of the 'n' 'keys'. */
char *
shaper_key_unknown(const struct shaper_key *keys, size_t n, const char *table,
                   const char *name, const char *value)
{
    struct ds s = DS_EMPTY_INITIALIZER;

    ds_put_format(&s, "%s other_config:%s=\"%s\": unknown key, must be one "
                  "of", table, name, value);
    for (size_t i = 0; i < n; i++) {
        ds_put_format(&s, "%s %s", i ? "," : "", keys[i].name);
    }
    return ds_steal_cstr(&s);
}

/* Returns a message, which the caller must free, that 'key' must not be
 * 'value' in other_config of 'table'. */
char *
shaper_key_bad_value(const struct shaper_key *key, const char *table,
                     const char *value)
{
    struct ds s = DS_EMPTY_INITIALIZER;

    ds_put_format(&s, "%s other_config:%s=\"%s\": must be ", table, key->name,
                  value);
    shaper_key_put_allowed(&s, key);
    return ds_steal_cstr(&s);
}
