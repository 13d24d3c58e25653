/*
 * Copyright (c) 2026 FlowBundler authors.
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

#include "mltw.h"

#include <string.h>
#include <sys/mman.h>

#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "util.h"

/* How it works
 * ============
 *
 * Times are kept in units of the minimum granularity.  "T" below is an entry's
 * slot time in units.
 *
 * Rows.  A slot time T that is an odd multiple of 2^l is found in wheel 'l',
 * in all coarser wheels it would fall between two slots.  So wheel 'l' only
 * ever uses its slots with odd numbers, except the last wheel, 'top', which
 * also takes what coarser wheels would, had they been configured.  These are
 * stored in rows of 'n_slots / 2' slots: row 'l' for the odd slots of wheel
 * 'l', and row 'top + 1' for the even slots of wheel 'top'.  The place of any
 * T is thus row MIN(ctz(T), top + 1), and two different T cannot be in the
 * same slot at a time, as long as each is less than 'n_slots' slots of its row
 * ahead of the front.  Which rate a flow has does not matter any more.
 *
 * Far entries.  A T that is further ahead than that waits elsewhere, together
 * with its T: far level 'f' has slots that are 2^f wide, and T is in slot
 * T >> f.  A far slot is emptied, its entries being moved nearer, when the
 * front reaches its "hop" time, which is a fixed number of slot widths before
 * the slot begins:
 *
 *     hop(f, T) = ((T >> f) - hop_slots) << f
 *
 * The levels that T takes depend on its row, hence on T alone: f0, f0 + 2,
 * f0 + 4, ... where f0 is chosen so that at hop(f0, T), and not much earlier,
 * T is within its row's horizon.  T is placed on the first of those levels
 * whose next coarser one's hop time has passed, or in its row if that is true
 * of f0.  Because a place is a function of T and the front only, and because
 * all places whose hop time has passed are empty, entries with the same T
 * always move together, and stay in the order in which they came.
 *
 * A far level's first occupied slot has the level's smallest T, since far
 * slots are ordered by T; so the first time that something far is due is the
 * smallest of as many numbers as there are levels.
 *
 * Storage.  A slot is a list of chunks of one cache line each from a pool.
 * There are no empty chunks, and only the last chunk of a list is not filled
 * up (except the first, while it is being taken from), so that the pool's size
 * is bounded by 'max_entries'. */

#define CHUNK_SIZE 64           /* In bytes, on any machine. */
#define CHUNK_REFS ((CHUNK_SIZE - 8) / sizeof(void *))
#define CHUNK_FARS ((CHUNK_SIZE - 8) / sizeof(struct far_entry))

#define FAR_LEVELS 64           /* Far levels, more than 64 bits can need. */
#define FAR_SLOTS 64            /* Slots of a far level: bits in a word. */
#define FAR_STEP 2              /* An entry takes every second level. */
#define FAR_AHEAD_SHIFT 4       /* A row's horizon is at most this many far
                                 * slots long (log2). */

/* An entry past the horizon. */
struct far_entry {
    uint64_t time;              /* T. */
    void *entry;
};

/* Up to CHUNK_REFS entries of a slot, or up to CHUNK_FARS of a far slot. */
struct chunk {
    uint32_t next;              /* Next of slot or of free list, 0 if none. */
    uint16_t begin;             /* First element not yet taken. */
    uint16_t end;               /* One past the last element. */
    union {
        void *refs[CHUNK_REFS];
        struct far_entry fars[CHUNK_FARS];
    };
};
BUILD_ASSERT_DECL(sizeof(struct chunk) == CHUNK_SIZE);
BUILD_ASSERT_DECL(FAR_SLOTS >= (1 << (FAR_AHEAD_SHIFT + FAR_STEP)));

struct slot {
    uint32_t head;              /* Index of first chunk, 0 if empty. */
    uint32_t tail;              /* Index of last chunk, if not empty. */
};

struct far_slot {
    uint32_t head;
    uint32_t tail;
    uint64_t min_time;          /* Smallest T in the slot, if not empty. */
};

struct far_level {
    struct far_slot slots[FAR_SLOTS];
};

struct mltw {
    /* Read-mostly: geometry. */
    struct mltw_levels__ levels;
    uint8_t top;                /* Last wheel; rows are 0...top + 1. */
    uint8_t row_shift;          /* log2(slots in a row). */
    uint8_t word_shift;         /* log2(words in a row's bitmap). */
    uint8_t far_shift;          /* Wheel 'l' has f0 = l + far_shift. */
    uint8_t hop_slots;
    uint32_t row_mask;          /* Slots in a row, minus 1. */
    uint32_t near_slots;        /* A T is near, whatever the front's offset
                                 * to a far slot, if it is not more slots of
                                 * its wheel than this ahead. */
    uint32_t max_entries;
    uint64_t max_time;          /* No T is after this. */
    struct chunk *chunks;       /* Element 0 is not used. */
    struct slot *slots;         /* Rows, one after the other. */
    uint64_t *bitmap;           /* One bit for each slot, set if occupied. */
    uint64_t *summary;          /* One bit for each word of 'bitmap'. */
    struct far_level *far;      /* [FAR_LEVELS]. */

    /* Written for each call or entry. */
    OVS_ALIGNED_VAR(CACHE_LINE_SIZE)
    uint64_t front;
    uint64_t near_next;         /* First T in the rows, or UINT64_MAX. */
    uint64_t far_next;          /* First hop time, or UINT64_MAX. */
    uint64_t far_due;           /* First T in far slots, or UINT64_MAX. */
    uint64_t rows_used;         /* Bit for each row with an entry. */
    uint32_t n_entries;
    uint32_t free_chunk;        /* LIFO list, 0 if empty. */
    uint32_t fresh_chunk;       /* First chunk that was never used. */
    uint32_t n_chunks;          /* Chunks in the pool. */

    uint64_t row_first[64];     /* First T in each row, or UINT64_MAX. */

    /* Seldom used. */
    struct mltw_stats stats;
    uint64_t far_used;          /* Bit for each far level with an entry. */
    uint64_t far_bitmap[FAR_LEVELS];
    uint64_t flush_front;       /* Front before the flush. */
    bool flushing;
    void *memory;               /* What all pointers above point into. */
    size_t memory_bytes;
};

/* A row's bitmap of more than 64 words needs this many summary words. */
#define ROW_SUMMARY_SHIFT(WHEEL) \
    ((WHEEL)->word_shift > 6 ? (WHEEL)->word_shift - 6 : 0)

/* Configuration, creation and destruction. */

static bool
is_pow2_in_range(uint64_t value, uint64_t min, uint64_t max)
{
    return value >= min && value <= max && !(value & (value - 1));
}

const char *
mltw_config_error(const struct mltw_config *config)
{
    if (config->n_wheels < 1 || config->n_wheels > 64) {
        return "n_wheels must be 1 to 64";
    }
    if (!is_pow2_in_range(config->n_slots, 4, 65536)) {
        return "n_slots must be a power of two, 4 to 65536";
    }
    if (!is_pow2_in_range(config->min_granularity_ns, 1, 1 << 30)) {
        return "min_granularity_ns must be a power of two, 1 to 1073741824";
    }
    if (!is_pow2_in_range(config->max_granularity_ns, 1, UINT64_C(1) << 63)) {
        return "max_granularity_ns must be a power of two, 1 to "
               "9223372036854775808";
    }
    if (config->max_granularity_ns < config->min_granularity_ns) {
        return "max_granularity_ns must not be below min_granularity_ns";
    }
    if (config->max_entries < 1 || config->max_entries > 1 << 24) {
        return "max_entries must be 1 to 16777216";
    }
    return NULL;
}

/* Returns the number of chunks that 'max_entries' entries can take.  No chunk
 * is empty.  A list has at most one chunk that is not full, apart from the
 * slot that is partly taken, whose first chunk may be another one. */
static uint32_t
chunks_needed(uint32_t max_entries, size_t n_lists)
{
    size_t full = max_entries / MIN(CHUNK_REFS, CHUNK_FARS);

    return MIN(max_entries, full + n_lists + 1);
}

static void *
take(char **p, size_t size)
{
    void *start = *p;

    *p += ROUND_UP(size, CACHE_LINE_SIZE);
    return start;
}

/* Returns 'size' bytes of zeroed memory of which no page is resident yet.
 * (calloc() would do so only as long as nothing large was ever freed, and
 * where huge pages are used whenever possible, a touched byte would cost 2 MB,
 * which is more than the rest of a wheel.) */
static void *
zalloc_lazy(size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        out_of_memory();
    }
#ifdef MADV_NOHUGEPAGE
    madvise(p, size, MADV_NOHUGEPAGE);
#endif
    return p;
}

struct mltw *
mltw_create(const struct mltw_config *config, uint64_t now_ns)
{
    ovs_assert(!mltw_config_error(config));

    struct mltw *wheel = xzalloc_cacheline(sizeof *wheel);
    unsigned int slots_shift = log_2_floor(config->n_slots);

    /* The last wheel that can be of use is the one whose horizon is the whole
     * range of 64 bits. */
    wheel->top = MIN(config->n_wheels - 1, 62);
    wheel->levels.granularity_shift = log_2_floor(config->min_granularity_ns);
    wheel->levels.max_level = MIN(
        log_2_floor(config->max_granularity_ns)
        - wheel->levels.granularity_shift, config->n_wheels - 1);
    wheel->row_shift = slots_shift - 1;
    wheel->row_mask = (1u << wheel->row_shift) - 1;
    wheel->word_shift = wheel->row_shift > 6 ? wheel->row_shift - 6 : 0;
    wheel->max_entries = config->max_entries;
    /* UINT64_MAX stands for "never". */
    wheel->max_time = MIN(UINT64_MAX >> wheel->levels.granularity_shift,
                          UINT64_MAX - 1);

    unsigned int ahead_shift = MIN(slots_shift, FAR_AHEAD_SHIFT);
    wheel->far_shift = slots_shift - ahead_shift;
    wheel->hop_slots = (1u << ahead_shift) - 1;
    wheel->near_slots = wheel->hop_slots << wheel->far_shift;

    size_t n_rows = wheel->top + 2;
    size_t n_slots = n_rows << wheel->row_shift;
    size_t n_words = n_rows << wheel->word_shift;
    size_t n_summary = n_rows << ROW_SUMMARY_SHIFT(wheel);
    size_t n_chunks = 1 + chunks_needed(config->max_entries,
                                        n_slots + FAR_LEVELS * FAR_SLOTS);
    size_t sizes[] = {
        n_slots * sizeof *wheel->slots,
        n_words * sizeof *wheel->bitmap,
        n_summary * sizeof *wheel->summary,
        FAR_LEVELS * sizeof *wheel->far,
        n_chunks * sizeof *wheel->chunks,
    };
    size_t size = 0;

    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        size += ROUND_UP(sizes[i], CACHE_LINE_SIZE);
    }

    char *p = zalloc_lazy(size);
    wheel->memory = p;
    wheel->memory_bytes = size;
    wheel->slots = take(&p, sizes[0]);
    wheel->bitmap = take(&p, sizes[1]);
    wheel->summary = take(&p, sizes[2]);
    wheel->far = take(&p, sizes[3]);
    wheel->chunks = take(&p, sizes[4]);
    wheel->fresh_chunk = 1;
    wheel->n_chunks = n_chunks;

    wheel->front = MIN(now_ns >> wheel->levels.granularity_shift,
                       wheel->max_time);
    wheel->near_next = UINT64_MAX;
    wheel->far_next = UINT64_MAX;
    wheel->far_due = UINT64_MAX;
    for (size_t i = 0; i < ARRAY_SIZE(wheel->row_first); i++) {
        wheel->row_first[i] = UINT64_MAX;
    }

    return wheel;
}

void
mltw_destroy(struct mltw *wheel)
{
    if (wheel) {
        munmap(wheel->memory, wheel->memory_bytes);
        free_cacheline(wheel);
    }
}

/* Chunks. */

/* Takes a chunk from the pool, which cannot be empty (see chunks_needed()), as
 * the only one of a list. */
static inline uint32_t
chunk_alloc(struct mltw *wheel)
{
    uint32_t index = wheel->free_chunk;
    struct chunk *chunk;

    if (OVS_LIKELY(index)) {
        chunk = &wheel->chunks[index];
        wheel->free_chunk = chunk->next;
    } else {
        index = wheel->fresh_chunk++;
        ovs_assert(index < wheel->n_chunks);
        chunk = &wheel->chunks[index];
    }
    chunk->next = 0;
    chunk->begin = 0;
    chunk->end = 0;
    return index;
}

static inline void
chunk_free(struct mltw *wheel, uint32_t index)
{
    wheel->chunks[index].next = wheel->free_chunk;
    wheel->free_chunk = index;
}

/* Returns the chunk to which the next element of a list is to be appended,
 * whose first and last chunk are in '*head' and '*tail', and each of whose
 * chunks has room for 'size' elements. */
static inline struct chunk *
list_tail(struct mltw *wheel, uint32_t *head, uint32_t *tail, size_t size)
{
    uint32_t last = *tail;

    if (!*head) {
        *head = *tail = last = chunk_alloc(wheel);
    } else if (wheel->chunks[last].end == size) {
        *tail = chunk_alloc(wheel);
        wheel->chunks[last].next = *tail;
        last = *tail;
    }
    return &wheel->chunks[last];
}

/* Rows. */

/* Row of slot time 'time'. */
static inline unsigned int
time_to_row(const struct mltw *wheel, uint64_t time)
{
    return raw_ctz(time | (UINT64_C(1) << (wheel->top + 1)));
}

/* log2 of the distance, in units, between two slots of 'row'. */
static inline unsigned int
row_to_shift(const struct mltw *wheel, unsigned int row)
{
    return MIN(row, wheel->top) + 1;
}

static void
row_mark(struct mltw *wheel, unsigned int row, uint32_t pos)
{
    size_t word = ((size_t) row << wheel->word_shift) + pos / 64;

    wheel->bitmap[word] |= UINT64_C(1) << (pos % 64);
    if (wheel->word_shift) {
        size_t base = (size_t) row << ROW_SUMMARY_SHIFT(wheel);

        word = pos / 64;
        wheel->summary[base + word / 64] |= UINT64_C(1) << (word % 64);
    }
}

/* Returns the distance, in slots, from slot 'pos' of 'row' to the next slot
 * that is occupied, going round, or 0 if there is none.  Slot 'pos' must not
 * be marked as occupied. */
static uint32_t
row_find_next(const struct mltw *wheel, unsigned int row, uint32_t pos)
{
    const uint64_t *bitmap = &wheel->bitmap[(size_t) row << wheel->word_shift];
    uint64_t rest = bitmap[pos / 64] >> (pos % 64);
    uint32_t found;

    if (rest) {
        return raw_ctz(rest);
    }
    if (!wheel->word_shift) {
        if (!bitmap[0]) {
            return 0;
        }
        found = raw_ctz(bitmap[0]);
    } else {
        /* There are at most 8 words of summary. */
        const uint64_t *summary
            = &wheel->summary[(size_t) row << ROW_SUMMARY_SHIFT(wheel)];
        uint32_t n = 1u << ROW_SUMMARY_SHIFT(wheel);
        uint32_t word = pos / 64;
        uint32_t i = word / 64;
        uint64_t bits = summary[i] & ~((UINT64_C(2) << (word % 64)) - 1);

        for (uint32_t j = 0; !bits; j++) {
            if (j == n) {
                return 0;
            }
            i = (i + 1) & (n - 1);
            bits = summary[i];
        }
        word = i * 64 + raw_ctz(bits);
        found = word * 64 + raw_ctz(bitmap[word]);
    }
    return (found - pos) & wheel->row_mask;
}

/* Marks slot 'pos' of 'row', which was occupied and the first of its row, as
 * empty, and finds the one that is then the first. */
static void
row_unmark_first(struct mltw *wheel, unsigned int row, uint32_t pos)
{
    size_t word = ((size_t) row << wheel->word_shift) + pos / 64;

    wheel->bitmap[word] &= ~(UINT64_C(1) << (pos % 64));
    if (wheel->word_shift && !wheel->bitmap[word]) {
        size_t base = (size_t) row << ROW_SUMMARY_SHIFT(wheel);

        word = pos / 64;
        wheel->summary[base + word / 64] &= ~(UINT64_C(1) << (word % 64));
    }

    uint32_t distance = row_find_next(wheel, row, pos);
    if (distance) {
        wheel->row_first[row]
            += (uint64_t) distance << row_to_shift(wheel, row);
    } else {
        wheel->row_first[row] = UINT64_MAX;
        wheel->rows_used &= ~(UINT64_C(1) << row);
    }
}

/* Appends 'entry' to the slot at 'time', which is within the horizon of its
 * row, 'row'. */
static inline void
row_append(struct mltw *wheel, unsigned int row, uint64_t time, void *entry)
{
    uint32_t pos = (time >> row_to_shift(wheel, row)) & wheel->row_mask;
    struct slot *slot
        = &wheel->slots[((size_t) row << wheel->row_shift) + pos];
    struct chunk *chunk;

    if (!slot->head) {
        row_mark(wheel, row, pos);
        wheel->rows_used |= UINT64_C(1) << row;
        wheel->row_first[row] = MIN(wheel->row_first[row], time);
        wheel->near_next = MIN(wheel->near_next, time);
    }
    chunk = list_tail(wheel, &slot->head, &slot->tail, CHUNK_REFS);
    chunk->refs[chunk->end++] = entry;
}

/* Moves up to 'max' entries from the slot at 'time', the first one that is
 * occupied, to 'entries', and returns their number. */
static size_t
row_take(struct mltw *wheel, uint64_t time, void **entries, size_t max)
{
    unsigned int row = time_to_row(wheel, time);
    uint32_t pos = (time >> row_to_shift(wheel, row)) & wheel->row_mask;
    struct slot *slot
        = &wheel->slots[((size_t) row << wheel->row_shift) + pos];
    uint32_t index = slot->head;
    size_t n = 0;

    wheel->stats.n_slots_visited++;
    do {
        struct chunk *chunk = &wheel->chunks[index];
        size_t n_refs = chunk->end - chunk->begin;
        void **refs = &chunk->refs[chunk->begin];

        OVS_PREFETCH(&wheel->chunks[chunk->next]);
        if (OVS_LIKELY(max - n >= CHUNK_REFS && !chunk->begin)) {
            /* A copy of constant size is faster than one of the right size. */
            memcpy(&entries[n], refs, sizeof chunk->refs);
        } else {
            n_refs = MIN(n_refs, max - n);
            memcpy(&entries[n], refs, n_refs * sizeof *refs);
        }
        for (size_t i = 0; i < n_refs; i++) {
            OVS_PREFETCH(entries[n + i]);
        }
        n += n_refs;

        chunk->begin += n_refs;
        if (chunk->begin < chunk->end) {
            break;
        }

        uint32_t next = chunk->next;
        chunk_free(wheel, index);
        index = next;
    } while (index && n < max);

    slot->head = index;
    if (!index) {
        row_unmark_first(wheel, row, pos);

        uint64_t first = UINT64_MAX;
        for (uint64_t rows = wheel->rows_used; rows;
             rows = zero_rightmost_1bit(rows)) {
            first = MIN(first, wheel->row_first[raw_ctz(rows)]);
        }
        wheel->near_next = first;
    }
    wheel->n_entries -= n;
    return n;
}

/* Far levels. */

/* Returns the time at which a far slot of 'level' is emptied in which 'time'
 * is, or 0 if that is before time began. */
static inline uint64_t
hop_time(const struct mltw *wheel, unsigned int level, uint64_t time)
{
    uint64_t slot = level < 64 ? time >> level : 0;

    return slot > wheel->hop_slots ? (slot - wheel->hop_slots) << level : 0;
}

/* Puts 'entry' in its place for slot time 'time', which is in 'row' and not
 * before the front. */
static void
place_far(struct mltw *wheel, unsigned int row, uint64_t time, void *entry)
{
    unsigned int level = MIN(row, wheel->top) + wheel->far_shift;
    uint64_t hop = hop_time(wheel, level, time);

    if (hop <= wheel->front) {
        row_append(wheel, row, time, entry);
        return;
    }
    for (;;) {
        uint64_t next_hop = hop_time(wheel, level + FAR_STEP, time);

        if (next_hop <= wheel->front) {
            break;
        }
        level += FAR_STEP;
        hop = next_hop;
    }

    unsigned int pos = (time >> level) % FAR_SLOTS;
    struct far_slot *slot = &wheel->far[level].slots[pos];

    if (!slot->head) {
        wheel->far_used |= UINT64_C(1) << level;
        wheel->far_bitmap[level] |= UINT64_C(1) << pos;
        slot->min_time = time;
    } else {
        slot->min_time = MIN(slot->min_time, time);
    }
    wheel->far_next = MIN(wheel->far_next, hop);
    wheel->far_due = MIN(wheel->far_due, time);
    wheel->stats.n_far++;

    struct chunk *chunk = list_tail(wheel, &slot->head, &slot->tail,
                                    CHUNK_FARS);
    chunk->fars[chunk->end++] = (struct far_entry) { time, entry };
}

static inline void
place(struct mltw *wheel, uint64_t time, void *entry)
{
    unsigned int row = time_to_row(wheel, time);
    unsigned int shift = row_to_shift(wheel, row) - 1;

    if (OVS_LIKELY((time - wheel->front) >> shift < wheel->near_slots)) {
        row_append(wheel, row, time, entry);
    } else {
        place_far(wheel, row, time, entry);
    }
}

/* Returns the number, that is time >> level, of the first slot of far level
 * 'level' that is occupied.  There must be one. */
static uint64_t
far_first_slot(const struct mltw *wheel, unsigned int level)
{
    /* All hop times are after the front, hence: */
    uint64_t min = (wheel->front >> level) + wheel->hop_slots + 1;
    unsigned int pos = min % FAR_SLOTS;
    uint64_t bits = wheel->far_bitmap[level];

    bits = bits >> pos | bits << (-pos % FAR_SLOTS);
    return min + raw_ctz(bits);
}

/* Takes the front to 'wheel->far_next' and moves the entries of all far slots
 * with this hop time nearer. */
static void
far_hop(struct mltw *wheel)
{
    uint64_t n_far = wheel->stats.n_far;
    uint64_t now = wheel->far_next;
    uint64_t due_levels = 0;
    uint8_t due_pos[FAR_LEVELS];

    /* Find the slots before the front changes. */
    for (uint64_t levels = wheel->far_used; levels;
         levels = zero_rightmost_1bit(levels)) {
        unsigned int level = raw_ctz(levels);
        uint64_t number = far_first_slot(wheel, level);

        if ((number - wheel->hop_slots) << level == now) {
            due_levels |= UINT64_C(1) << level;
            due_pos[level] = number % FAR_SLOTS;
        }
    }

    wheel->front = now;
    for (; due_levels; due_levels = zero_rightmost_1bit(due_levels)) {
        unsigned int level = raw_ctz(due_levels);
        unsigned int pos = due_pos[level];
        struct far_slot *slot = &wheel->far[level].slots[pos];
        uint32_t index = slot->head;

        slot->head = 0;
        wheel->far_bitmap[level] &= ~(UINT64_C(1) << pos);
        if (!wheel->far_bitmap[level]) {
            wheel->far_used &= ~(UINT64_C(1) << level);
        }
        wheel->stats.n_slots_visited++;

        while (index) {
            /* Free the chunk first, so that it can be used at once. */
            struct chunk chunk = wheel->chunks[index];

            chunk_free(wheel, index);
            index = chunk.next;
            OVS_PREFETCH(&wheel->chunks[index]);
            for (unsigned int i = 0; i < chunk.end; i++) {
                place(wheel, chunk.fars[i].time, chunk.fars[i].entry);
            }
            wheel->stats.n_moves += chunk.end;
        }
    }

    wheel->stats.n_far = n_far; /* Moving does not count. */

    wheel->far_next = UINT64_MAX;
    wheel->far_due = UINT64_MAX;
    for (uint64_t levels = wheel->far_used; levels;
         levels = zero_rightmost_1bit(levels)) {
        unsigned int level = raw_ctz(levels);
        uint64_t number = far_first_slot(wheel, level);
        uint64_t hop = (number - wheel->hop_slots) << level;
        uint64_t due = wheel->far[level].slots[number % FAR_SLOTS].min_time;

        wheel->far_next = MIN(wheel->far_next, hop);
        wheel->far_due = MIN(wheel->far_due, due);
    }
}

/* The public functions that hold and give out entries. */

bool
mltw_enqueue(struct mltw *wheel, void *entry, uint64_t edt_ns,
             unsigned int level)
{
    unsigned int unit_shift = wheel->levels.granularity_shift;
    unsigned int shift = unit_shift + MIN(level, wheel->levels.max_level);
    uint64_t mask = (UINT64_C(1) << shift) - 1;
    uint64_t time = edt_ns + mask;

    if (OVS_UNLIKELY(wheel->n_entries >= wheel->max_entries)) {
        return false;
    }
    wheel->n_entries++;

    if (OVS_LIKELY(time >= edt_ns)) {
        time = MIN((time & ~mask) >> unit_shift, wheel->max_time);
    } else {
        time = wheel->max_time;
    }
    place(wheel, MAX(time, wheel->front), entry);
    return true;
}

static size_t
dequeue__(struct mltw *wheel, uint64_t now, void **entries, size_t max)
{
    size_t n = 0;

    for (;;) {
        if (n == max && MIN(wheel->near_next, wheel->far_due) <= now) {
            return n;
        } else if (wheel->far_next <= MIN(wheel->near_next, now)) {
            far_hop(wheel);
        } else if (wheel->near_next > now) {
            wheel->front = MAX(wheel->front, now);
            return n;
        } else {
            wheel->front = wheel->near_next;
            n += row_take(wheel, wheel->near_next, &entries[n], max - n);
        }
    }
}

size_t
mltw_dequeue(struct mltw *wheel, uint64_t now_ns,
             void **entries, size_t max_entries)
{
    return dequeue__(wheel, MIN(now_ns >> wheel->levels.granularity_shift,
                                wheel->max_time), entries, max_entries);
}

uint64_t
mltw_next_due(const struct mltw *wheel)
{
    uint64_t due = MIN(wheel->near_next, wheel->far_due);

    return (due != UINT64_MAX
            ? due << wheel->levels.granularity_shift
            : UINT64_MAX);
}

size_t
mltw_flush(struct mltw *wheel, void **entries, size_t max_entries)
{
    if (!wheel->flushing) {
        wheel->flushing = true;
        wheel->flush_front = wheel->front;
    }

    size_t n = dequeue__(wheel, wheel->max_time, entries, max_entries);
    if (!wheel->n_entries) {
        wheel->flushing = false;
        wheel->front = wheel->flush_front;
    }
    return n;
}

size_t
mltw_count(const struct mltw *wheel)
{
    return wheel->n_entries;
}

size_t
mltw_memory_bytes(const struct mltw *wheel)
{
    return sizeof *wheel + wheel->memory_bytes;
}

const struct mltw_stats *
mltw_get_stats(const struct mltw *wheel)
{
    return &wheel->stats;
}
