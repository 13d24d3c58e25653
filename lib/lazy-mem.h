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

#ifndef LAZY_MEM_H
#define LAZY_MEM_H 1

#include <stddef.h>
#include <sys/mman.h>

#include "util.h"

/* Large zeroed memory of which no page is resident before it is touched.
 *
 * calloc() would give such memory only as long as nothing large was ever
 * freed, and where huge pages are used whenever possible, a touched byte would
 * cost 2 MB.  Nor does it count against the limit that the kernel may put on
 * memory that could be touched (MAP_NORESERVE): a wheel of 10 s in slots of
 * 100 ns reserves much more than most ever need. */

/* Returns 'size' bytes.  To be freed by lazy_free(). */
static inline void *
lazy_zalloc(size_t size)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void *p;

#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    p = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) {
        out_of_memory();
    }
#ifdef MADV_NOHUGEPAGE
    madvise(p, size, MADV_NOHUGEPAGE);
#endif
    return p;
}

/* Frees 'p', that lazy_zalloc() has returned for 'size'. */
static inline void
lazy_free(void *p, size_t size)
{
    munmap(p, size);
}

/* Cuts the next 'size' bytes, rounded up to whole cache lines, off memory of
 * which '*p' is what is left, and returns them. */
static inline void *
lazy_cut(char **p, size_t size)
{
    void *start = *p;

    *p += ROUND_UP(size, CACHE_LINE_SIZE);
    return start;
}

#endif /* lazy-mem.h */
