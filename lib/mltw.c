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

#include "lazy-mem.h"
#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "slot-list.h"
#include "util.h"

/* How it works
 * ============
 *
 * Times are in nanoseconds, but slot times, the front and so on are multiples
 * of the minimum granularity.  "T" below is an entry's slot time.
 *
 * Rows.  A slot time T that is an odd multiple of 2^r is found in the wheel of
 * granularity 2^r; in all coarser wheels it would fall between two slots.  So
 * a wheel only ever uses its slots with odd numbers, except the last wheel,
 * which also takes what coarser wheels would, had they been configured.  These
 * are stored in rows of 'n_slots / 2' slots: row 'r' for the odd slots of the
 * wheel of granularity 2^r, and row 'top_row' for the even slots of the last
 * wheel, whose granularity is half of 2^top_row.  The place of any T is thus
 * row MIN(ctz(T), top_row), and two different T cannot be in the same slot at
 * a time, as long as each is less than 'n_slots' slots of its wheel ahead of
 * the front.  Which rate a flow has does not matter any more.
 *
 * The next slot.  A few neighboring rows share a ring, a bitmap with a bit for
 * each multiple of the finest of these rows' T, which is set if the slot of
 * this T, in whichever row it is, is occupied.  So the order of bits is that
 * of time, and one word of the ring of the finest rows has the slots of the
 * next 64 granularities, in order, except those few that are in coarser rings.
 * Each ring knows its first slot; 'first_from[i]' is the first one in ring 'i'
 * or any coarser ring.  With 6 rows in a ring, the first slot of a ring
 * changes 64 times as often as that of the next coarser one.
 *
 * Far entries.  A T beyond its row's horizon waits elsewhere, together with
 * its T: far level 'f' has slots that are 2^f wide, and T is in slot T >> f.
 * A far slot is emptied, its entries being moved nearer, when the front
 * reaches its "hop" time, which is a fixed number of slot widths before the
 * slot begins:
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
 * Few entries.  As long as a wheel holds no more than FEW entries, they are in
 * a small array that is sorted by T, which is cheaper than any wheel, and
 * usual: a port that has a handful of flows and only the head of each in its
 * wheel.  All are placed when there is one too many, and the array is used
 * again when nothing is left.
 *
 * Storage.  See "slot-list.h".  Far slots have chunks from a pool of their
 * own. */

#define FEW 16                  /* Entries that are kept in an array. */
#define FAR_CHUNK_ENTRIES 15

#define RING_ROWS 6             /* Rows of a ring, at most. */
#define MAX_RING_SHIFT 18       /* log2 of the bits in a ring, at most: three
                                 * steps of 64. */

#define FAR_LEVELS 64           /* Far levels, more than 64 bits can need. */
#define FAR_SLOTS 64            /* Slots of a far level: bits in a word. */
#define FAR_STEP 2              /* An entry takes every second level. */
#define FAR_AHEAD_SHIFT 4       /* A row's horizon is at most this many far
                                 * slots long (log2). */

/* What finds a slot. */
struct row {
    slot_word *slots;
    uint64_t near_ns;           /* A T less than this ahead is near, whatever
                                 * the front's offset in a far slot. */
    struct ring *ring;
    unsigned int shift;         /* log2 of the ns between slots. */
};

/* What finds the next slot in some neighboring rows. */
struct ring {
    uint64_t first;             /* First T, or UINT64_MAX. */
    uint64_t *bitmap;           /* One bit for each multiple of the finest
                                 * row's T, set if its slot is occupied. */
    uint64_t *summary;          /* One bit for each word of 'bitmap'. */
    uint64_t top;               /* One bit for each word of 'summary'. */
    uint32_t shift;             /* log2 of the ns between bits. */
    uint32_t index;             /* In 'rings'. */
};

/* What need not be fast must not slow down what must. */
#define NO_INLINE __attribute__((__noinline__))

/* An entry past the horizon, or one of few. */
struct far_entry {
    uint64_t time;              /* T. */
    void *entry;
};

/* Part of a far slot. */
struct far_chunk {
    uint32_t next;              /* Next of slot or free list, 0 if none. */
    uint32_t n;                 /* Number of entries. */
    uint64_t pad;
    struct far_entry entries[FAR_CHUNK_ENTRIES];
};

struct far_slot {
    uint32_t head;              /* Index of first chunk, 0 if empty. */
    uint32_t tail;              /* Index of last chunk, if not empty. */
    uint64_t min_time;          /* Smallest T in the slot, if not empty. */
};
BUILD_ASSERT_DECL(FAR_SLOTS >= (1 << (FAR_AHEAD_SHIFT + FAR_STEP)));

struct far_level {
    struct far_slot slots[FAR_SLOTS];
};

struct mltw {
    /* Read-mostly: geometry. */
    struct mltw_levels__ levels;
    uint8_t top_row;            /* Rows are granularity_shift...top_row. */
    uint8_t far_shift;          /* f0 is the granularity's log2 and this. */
    uint8_t hop_slots;
    uint32_t row_mask;          /* Slots in a row, minus 1. */
    uint32_t ring_mask;         /* Bits in a ring, minus 1. */
    uint64_t top_row_bit;       /* 2^top_row. */
    uint64_t max_easy_edt;      /* EDTs up to this do not overflow. */
    uint64_t max_time;          /* No T is after this. */
    struct row *rows;           /* [top_row + 1]. */
    struct ring *rings;

    /* Written for each call or entry. */
    OVS_ALIGNED_VAR(CACHE_LINE_SIZE)
    uint64_t front;
    uint64_t near_next;         /* First T in the rows or of few, or
                                 * UINT64_MAX. */
    uint64_t far_next;          /* First hop time, or UINT64_MAX. */
    uint64_t far_due;           /* First T in far slots, or UINT64_MAX. */
    uint32_t n_entries;
    uint32_t place_limit;       /* Entries are placed while they are fewer:
                                 * 'max_entries', or 0 while all are in
                                 * 'few_entries'. */
    uint32_t max_entries;
    uint8_t few_head;           /* Index of the first one... */
    uint8_t few_end;            /* ...and after the last one. */
    uint8_t max_few;            /* FEW. */
    struct slot_pool pool;

    /* Twice as many as there are at a time, so that they seldom need to be
     * moved to the start. */
    struct far_entry few_entries[2 * FEW];

    uint64_t first_from[65];    /* First T in this or a coarser ring. */

    /* Seldom used. */
    struct mltw_stats stats;
    struct far_level *far;      /* [FAR_LEVELS]. */
    struct far_chunk *far_chunks; /* Element 0 is not used. */
    uint32_t free_far_chunk;
    uint32_t fresh_far_chunk;
    uint32_t n_far_chunks;
    uint64_t far_used;          /* Bit for each far level with an entry. */
    uint64_t far_bitmap[FAR_LEVELS];
    uint64_t flush_front;       /* Front before the flush. */
    bool flushing;
    void *memory;               /* What the pointers above point into. */
    size_t memory_bytes;
};

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

bool
mltw_config_equal(const struct mltw_config *a, const struct mltw_config *b)
{
    return a->n_wheels == b->n_wheels && a->n_slots == b->n_slots
           && a->min_granularity_ns == b->min_granularity_ns
           && a->max_granularity_ns == b->max_granularity_ns;
}

struct mltw *
mltw_create(const struct mltw_config *config, uint64_t now_ns)
{
    ovs_assert(!mltw_config_error(config));

    struct mltw *wheel = xzalloc_cacheline(sizeof *wheel);
    unsigned int min_shift = log_2_floor(config->min_granularity_ns);
    unsigned int max_shift = log_2_floor(config->max_granularity_ns);
    unsigned int slots_shift = log_2_floor(config->n_slots);

    wheel->levels.granularity_shift = min_shift;
    wheel->levels.max_level = MIN(max_shift - min_shift,
                                  config->n_wheels - 1);
    /* No more wheels than it takes for the last one's horizon to be the whole
     * range of 64 bits. */
    wheel->top_row = MIN(min_shift + config->n_wheels, 63);
    wheel->top_row_bit = UINT64_C(1) << wheel->top_row;
    wheel->max_entries = config->max_entries;
    wheel->max_easy_edt = UINT64_MAX - (UINT64_C(1) << (
        min_shift + wheel->levels.max_level));
    /* UINT64_MAX stands for "never". */
    wheel->max_time = MIN(UINT64_MAX >> min_shift << min_shift,
                          UINT64_MAX - 1);

    unsigned int ahead_shift = MIN(slots_shift, FAR_AHEAD_SHIFT);
    wheel->far_shift = slots_shift - ahead_shift;
    wheel->hop_slots = (1u << ahead_shift) - 1;

    uint32_t row_slots = config->n_slots / 2;
    wheel->row_mask = row_slots - 1;

    /* The top row's slots are no finer than those of the row before it, so it
     * fits into the ring of that one. */
    size_t n_rows = wheel->top_row - min_shift + 1;
    unsigned int ring_rows = MIN(RING_ROWS, MAX_RING_SHIFT + 1 - slots_shift);
    size_t n_rings = (n_rows - 2) / ring_rows + 1;
    uint32_t ring_bits = config->n_slots << (ring_rows - 1);
    uint32_t n_words = ring_bits / 64;
    uint32_t n_summary = DIV_ROUND_UP(n_words, 64);
    wheel->ring_mask = ring_bits - 1;

    size_t n_slots = n_rows * row_slots;
    size_t n_nodes = slot_pool_n_nodes(config->max_entries, n_slots);
    /* No far chunk is empty, except one that is being emptied, and all but a
     * slot's last one are full. */
    wheel->n_far_chunks = 1 + MIN(config->max_entries + 1,
                                  config->max_entries / FAR_CHUNK_ENTRIES
                                  + FAR_LEVELS * FAR_SLOTS + 1);

    size_t sizes[] = {
        (wheel->top_row + 1) * sizeof *wheel->rows,
        n_slots * sizeof(slot_word),
        n_rings * sizeof *wheel->rings,
        n_rings * n_words * sizeof(uint64_t),
        n_rings * n_summary * sizeof(uint64_t),
        FAR_LEVELS * sizeof *wheel->far,
        n_nodes * sizeof(struct slot_node),
        wheel->n_far_chunks * sizeof *wheel->far_chunks,
    };
    size_t size = 0;

    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        size += ROUND_UP(sizes[i], CACHE_LINE_SIZE);
    }

    char *p = lazy_zalloc(size);
    wheel->memory = p;
    wheel->memory_bytes = size;
    wheel->rows = lazy_cut(&p, sizes[0]);
    slot_word *slots = lazy_cut(&p, sizes[1]);
    wheel->rings = lazy_cut(&p, sizes[2]);
    uint64_t *bitmap = lazy_cut(&p, sizes[3]);
    uint64_t *summary = lazy_cut(&p, sizes[4]);
    wheel->far = lazy_cut(&p, sizes[5]);
    slot_pool_init(&wheel->pool, lazy_cut(&p, sizes[6]), n_nodes);
    wheel->far_chunks = lazy_cut(&p, sizes[7]);
    wheel->fresh_far_chunk = 1;

    for (unsigned int i = min_shift; i <= wheel->top_row; i++) {
        struct row *row = &wheel->rows[i];
        unsigned int granularity_shift = MIN(i, wheel->top_row - 1);
        uint64_t near_slots = wheel->hop_slots << wheel->far_shift;

        row->slots = slots;
        row->near_ns = (near_slots <= UINT64_MAX >> granularity_shift
                        ? near_slots << granularity_shift
                        : UINT64_MAX);
        row->shift = granularity_shift + 1;
        row->ring = &wheel->rings[MIN((i - min_shift) / ring_rows,
                                      n_rings - 1)];
        slots += row_slots;
    }
    for (size_t i = 0; i < n_rings; i++) {
        struct ring *ring = &wheel->rings[i];

        ring->first = UINT64_MAX;
        ring->bitmap = &bitmap[i * n_words];
        ring->summary = &summary[i * n_summary];
        ring->shift = min_shift + i * ring_rows;
        ring->index = i;
    }

    wheel->front = MIN(now_ns >> min_shift << min_shift, wheel->max_time);
    wheel->place_limit = 0;
    wheel->max_few = FEW;
    wheel->near_next = UINT64_MAX;
    wheel->far_next = UINT64_MAX;
    wheel->far_due = UINT64_MAX;
    for (size_t i = 0; i < ARRAY_SIZE(wheel->first_from); i++) {
        wheel->first_from[i] = UINT64_MAX;
    }

    return wheel;
}

void
mltw_destroy(struct mltw *wheel)
{
    if (wheel) {
        lazy_free(wheel->memory, wheel->memory_bytes);
        free_cacheline(wheel);
    }
}

void
mltw_disable_few__(struct mltw *wheel)
{
    ovs_assert(!wheel->n_entries);
    wheel->place_limit = wheel->max_entries;
    wheel->max_few = 0;
}

/* Rows. */

static inline unsigned int
time_to_row(const struct mltw *wheel, uint64_t time)
{
    return raw_ctz(time | wheel->top_row_bit);
}

/* Position of the bit for 'time' in 'ring'. */
static inline uint32_t
ring_pos(const struct mltw *wheel, const struct ring *ring, uint64_t time)
{
    return (time >> ring->shift) & wheel->ring_mask;
}

/* Marks the slot at 'pos' as occupied. */
static inline void
ring_mark(struct ring *ring, uint32_t pos)
{
    uint32_t word = pos / 64;

    if (!ring->bitmap[word]) {
        ring->summary[word / 64] |= UINT64_C(1) << (word % 64);
        ring->top |= UINT64_C(1) << (word / 64);
    }
    ring->bitmap[word] |= UINT64_C(1) << (pos % 64);
}

/* Returns the position of the first occupied slot that comes after those of
 * the word in which 'pos' is, all of which from 'pos' on are empty, going
 * round, or 'pos' if there is none. */
static uint32_t
ring_find_next__(struct ring *ring, uint32_t pos)
{
    uint32_t word = pos / 64;
    uint32_t i = word / 64;

    if (!ring->bitmap[word]) {
        ring->summary[i] &= ~(UINT64_C(1) << (word % 64));
        if (!ring->summary[i]) {
            ring->top &= ~(UINT64_C(1) << i);
        }
    }

    uint64_t bits = ring->summary[i] & ~((UINT64_C(2) << (word % 64)) - 1);
    if (!bits) {
        if (!ring->top) {
            return pos;
        }

        uint64_t after = ring->top & ~((UINT64_C(2) << i) - 1);
        i = raw_ctz(after ? after : ring->top);
        bits = ring->summary[i];
    }
    word = i * 64 + raw_ctz(bits);
    return word * 64 + raw_ctz(ring->bitmap[word]);
}

/* Makes 'time' the first one of 'ring', which it is. */
static void
ring_set_first(struct mltw *wheel, struct ring *ring, uint64_t time)
{
    ring->first = time;
    for (uint32_t i = ring->index; wheel->first_from[i] > time; i--) {
        wheel->first_from[i] = time;
        if (!i) {
            wheel->near_next = time;
            break;
        }
    }
}

/* Notes that the slot of 'ring' at 'time', which was empty, is occupied.
 * Returns true. */
static bool NO_INLINE
ring_add(struct mltw *wheel, struct ring *ring, uint64_t time)
{
    ring_mark(ring, ring_pos(wheel, ring, time));
    if (time < ring->first) {
        ring_set_first(wheel, ring, time);
    }
    return true;
}

/* Appends 'entry' to the slot at 'time', which is within the horizon of
 * 'row', which is its row.  Returns true. */
static inline bool ALWAYS_INLINE
row_append(struct mltw *wheel, const struct row *row, uint64_t time,
           void *entry)
{
    slot_word *slot = &row->slots[(time >> row->shift) & wheel->row_mask];

    if (slot_append(&wheel->pool, slot, entry)) {
        return ring_add(wheel, row->ring, time);
    }
    return true;
}

/* Moves up to 'max' entries, at least 1, from the slot at 'time' in 'row', the
 * first one of all, and from those after it that are at 'limit' or before and
 * in the same word of the ring's bitmap, to 'entries', and returns their
 * number.  Takes the front there. */
static inline size_t
ring_take(struct mltw *wheel, const struct row *row, uint64_t time,
          uint64_t limit, void **entries, size_t max)
{
    struct ring *ring = row->ring;
    const unsigned int shift = ring->shift;
    const uint32_t pos = ring_pos(wheel, ring, time);
    uint64_t *word = &ring->bitmap[pos / 64];
    uint64_t before = *word & ((UINT64_C(1) << (pos % 64)) - 1);
    uint64_t bits = *word ^ before;
    /* Of the word's first bit. */
    uint64_t word_time = time - ((uint64_t) (pos % 64) << shift);
    unsigned int n_slots = 0;
    size_t n = 0;

    /* The addresses of the slots follow from 'bits' alone, so that the
     * processor need not wait for one slot to find the next. */
    for (;;) {
        slot_word *slot = &row->slots[(time >> row->shift) & wheel->row_mask];

        n_slots++;
        n += slot_take(&wheel->pool, slot, &entries[n], max - n);
        if (OVS_UNLIKELY(*slot)) {
            break;
        }
        bits = zero_rightmost_1bit(bits);
        if (!bits || n >= max) {
            break;
        }

        uint64_t next = word_time + ((uint64_t) raw_ctz(bits) << shift);
        if (next > limit) {
            break;
        }
        time = next;
        row = &wheel->rows[time_to_row(wheel, time)];
    }
    wheel->front = time;
    wheel->stats.n_slots_visited += n_slots;

    *word = bits | before;
    if (OVS_LIKELY(bits)) {
        ring->first = word_time + ((uint64_t) raw_ctz(bits) << shift);
    } else {
        uint32_t next = ring_find_next__(ring, pos);

        if (next == pos) {
            ring->first = UINT64_MAX;
        } else {
            ring->first += (uint64_t) ((next - pos) & wheel->ring_mask)
                           << shift;
        }
    }

    /* This ring and all finer ones. */
    uint32_t i = ring->index;
    uint64_t first = MIN(wheel->first_from[i + 1], ring->first);
    wheel->first_from[i] = first;
    while (OVS_UNLIKELY(i)) {
        i--;
        first = MIN(first, wheel->rings[i].first);
        wheel->first_from[i] = first;
    }
    wheel->near_next = first;
    return n;
}

/* Moves up to 'max' entries, at least 1, from the slot at 'wheel->near_next',
 * and from some of those after it that are at 'limit' or before, to 'entries',
 * and returns their number.  Takes the front there. */
static inline size_t
near_take(struct mltw *wheel, uint64_t limit, void **entries, size_t max)
{
    uint64_t time = wheel->near_next;
    const struct row *row = &wheel->rows[time_to_row(wheel, time)];

    /* Slots of coarser rings, which are few, may be between those of a finer
     * one; those of finer ones between any two of a coarser one. */
    if (row->ring->index) {
        limit = time;
    } else if (limit >= wheel->first_from[1]) {
        limit = wheel->first_from[1] - 1;
    }
    return ring_take(wheel, row, time, limit, entries, max);
}

/* Far levels. */

/* Returns the time at which the slot of far level 'level' is emptied in which
 * 'time' is, or 0 if that is before time began. */
static inline uint64_t
hop_time(const struct mltw *wheel, unsigned int level, uint64_t time)
{
    uint64_t slot = level < 64 ? time >> level : 0;

    return slot > wheel->hop_slots ? (slot - wheel->hop_slots) << level : 0;
}

/* Returns the chunk to which the next entry of 'slot' is to be appended. */
static struct far_chunk *
far_slot_tail(struct mltw *wheel, struct far_slot *slot)
{
    struct far_chunk *chunk = &wheel->far_chunks[slot->tail];

    if (slot->head && chunk->n < FAR_CHUNK_ENTRIES) {
        return chunk;
    }

    uint32_t index = wheel->free_far_chunk;

    if (index) {
        wheel->free_far_chunk = wheel->far_chunks[index].next;
    } else {
        index = wheel->fresh_far_chunk++;
        ovs_assert(index < wheel->n_far_chunks);
    }
    if (slot->head) {
        chunk->next = index;
    } else {
        slot->head = index;
    }
    slot->tail = index;

    chunk = &wheel->far_chunks[index];
    chunk->next = 0;
    chunk->n = 0;
    return chunk;
}

/* Puts 'entry' in its place for slot time 'time', which is in row number
 * 'row_no' and not before the front. */
static void
place_far(struct mltw *wheel, unsigned int row_no, uint64_t time, void *entry)
{
    unsigned int level = MIN(row_no, wheel->top_row - 1) + wheel->far_shift;
    uint64_t hop = hop_time(wheel, level, time);

    if (hop <= wheel->front) {
        row_append(wheel, &wheel->rows[row_no], time, entry);
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

    struct far_chunk *chunk = far_slot_tail(wheel, slot);
    chunk->entries[chunk->n++] = (struct far_entry) { time, entry };
}

/* Puts 'entry' in its place for slot time 'time', which is not before the
 * front.  Returns true. */
static inline bool ALWAYS_INLINE
place(struct mltw *wheel, uint64_t time, void *entry)
{
    unsigned int row_no = time_to_row(wheel, time);
    const struct row *row = &wheel->rows[row_no];

    if (OVS_LIKELY(time - wheel->front < row->near_ns)) {
        return row_append(wheel, row, time, entry);
    }
    place_far(wheel, row_no, time, entry);
    return true;
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

/* Moves the entries of 'slot', which is then empty, nearer. */
static void
far_slot_move(struct mltw *wheel, struct far_slot *slot)
{
    uint32_t index = slot->head;

    slot->head = 0;
    wheel->stats.n_slots_visited++;
    while (index) {
        struct far_chunk *chunk = &wheel->far_chunks[index];
        const struct far_chunk *next = &wheel->far_chunks[chunk->next];

        for (size_t i = 0; i < sizeof *next; i += CACHE_LINE_SIZE) {
            OVS_PREFETCH((const char *) next + i);
        }
        for (unsigned int i = 0; i < chunk->n; i++) {
            place(wheel, chunk->entries[i].time, chunk->entries[i].entry);
        }
        wheel->stats.n_moves += chunk->n;

        uint32_t freed = index;
        index = chunk->next;
        chunk->next = wheel->free_far_chunk;
        wheel->free_far_chunk = freed;
    }
}

/* Takes the front to 'wheel->far_next' and moves the entries of all far slots
 * with this hop time nearer. */
static void NO_INLINE
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

        wheel->far_bitmap[level] &= ~(UINT64_C(1) << pos);
        if (!wheel->far_bitmap[level]) {
            wheel->far_used &= ~(UINT64_C(1) << level);
        }
        far_slot_move(wheel, &wheel->far[level].slots[pos]);
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

/* Few entries. */

static inline bool
entries_are_few(const struct mltw *wheel)
{
    return !wheel->place_limit;
}

/* Does what place() does, where this need not be fast. */
static void NO_INLINE
place_seldom(struct mltw *wheel, uint64_t time, void *entry)
{
    place(wheel, time, entry);
}

/* Places all entries, and 'entry' with slot time 'time', since they are not
 * few any more. */
static bool
few_end(struct mltw *wheel, uint64_t time, void *entry)
{
    unsigned int end = wheel->few_end;

    wheel->place_limit = wheel->max_entries;
    wheel->few_end = 0;
    wheel->near_next = UINT64_MAX;
    for (unsigned int i = wheel->few_head; i < end; i++) {
        place_seldom(wheel, wheel->few_entries[i].time,
                     wheel->few_entries[i].entry);
    }
    wheel->few_head = 0;
    place_seldom(wheel, time, entry);
    return true;
}

/* Does what mltw_enqueue() does with 'entry' and its slot time if entries are
 * few, or the wheel is full.  (Functions that mltw_enqueue() ends with a call
 * of return what it does, so that it need not save registers for them.) */
static bool NO_INLINE
few_place(struct mltw *wheel, uint64_t time, void *entry)
{
    struct far_entry *entries = wheel->few_entries;
    unsigned int i = wheel->few_end;

    if (OVS_UNLIKELY(wheel->n_entries >= wheel->max_entries)) {
        return false;
    }
    wheel->n_entries++;
    if (OVS_UNLIKELY(wheel->n_entries > wheel->max_few)) {
        return few_end(wheel, time, entry);
    }
    if (OVS_UNLIKELY(i == ARRAY_SIZE(wheel->few_entries))) {
        i -= wheel->few_head;
        memmove(entries, &entries[wheel->few_head], i * sizeof *entries);
        wheel->few_head = 0;
    }
    wheel->few_end = i + 1;
    for (; i > wheel->few_head && entries[i - 1].time > time; i--) {
        entries[i] = entries[i - 1];
    }
    entries[i] = (struct far_entry) { time, entry };
    wheel->near_next = MIN(wheel->near_next, time);
    return true;
}

/* Does what dequeue__() does when entries are few. */
static size_t
few_dequeue(struct mltw *wheel, uint64_t now, void **entries, size_t max)
{
    const struct far_entry *few = wheel->few_entries;
    unsigned int i = wheel->few_head;
    uint64_t time = 0;
    size_t n = 0;

    for (; i < wheel->few_end && few[i].time <= now && n < max; i++) {
        entries[n] = few[i].entry;
        OVS_PREFETCH(entries[n]);
        n++;
        wheel->stats.n_slots_visited += n == 1 || few[i].time != time;
        time = few[i].time;
    }
    if (i == wheel->few_end) {
        wheel->few_head = wheel->few_end = 0;
        wheel->near_next = UINT64_MAX;
        time = now;
    } else {
        wheel->few_head = i;
        wheel->near_next = few[i].time;
        time = few[i].time > now ? now : time;
    }
    wheel->front = MAX(wheel->front, time);
    wheel->n_entries -= n;
    return n;
}

/* The public functions that hold and give out entries. */

bool
mltw_enqueue(struct mltw *wheel, void *entry, uint64_t edt_ns,
             unsigned int level)
{
    unsigned int shift = (wheel->levels.granularity_shift
                          + MIN(level, wheel->levels.max_level));
    uint64_t mask = (UINT64_C(1) << shift) - 1;
    uint64_t time = (edt_ns + mask) & ~mask;

    if (OVS_UNLIKELY(edt_ns > wheel->max_easy_edt)) {
        /* 'time' may have wrapped. */
        time = time >= edt_ns ? MIN(time, wheel->max_time) : wheel->max_time;
    }
    time = MAX(time, wheel->front);
    if (OVS_UNLIKELY(wheel->n_entries >= wheel->place_limit)) {
        return few_place(wheel, time, entry);
    }
    wheel->n_entries++;
    return place(wheel, time, entry);
}

/* Does what mltw_dequeue() does, at slot time 'now'. */
static size_t
dequeue__(struct mltw *wheel, uint64_t now, void **entries, size_t max)
{
    size_t n = 0;

    for (;;) {
        if (n == max && mltw_next_due(wheel) <= now) {
            break;
        } else if (OVS_UNLIKELY(wheel->far_next <= now
                                && wheel->far_next <= wheel->near_next)) {
            far_hop(wheel);
        } else if (wheel->near_next > now) {
            if (wheel->front < now) {
                wheel->front = now;
            }
            break;
        } else {
            n += near_take(wheel, MIN(now, wheel->far_next - 1), &entries[n],
                           max - n);
        }
    }
    wheel->n_entries -= n;
    if (OVS_UNLIKELY(!wheel->n_entries) && wheel->max_few) {
        wheel->place_limit = 0;
    }
    return n;
}

size_t
mltw_dequeue(struct mltw *wheel, uint64_t now_ns,
             void **entries, size_t max_entries)
{
    unsigned int shift = wheel->levels.granularity_shift;
    uint64_t now = now_ns >> shift << shift;

    if (OVS_UNLIKELY(now > wheel->max_time)) {
        now = wheel->max_time;
    }
    /* Most polls of a thread that has nothing else to do find nothing. */
    if (wheel->near_next > now && wheel->far_next > now) {
        if (wheel->front < now) {
            wheel->front = now;
        }
        return 0;
    }
    return (entries_are_few(wheel)
            ? few_dequeue(wheel, now, entries, max_entries)
            : dequeue__(wheel, now, entries, max_entries));
}

uint64_t
mltw_next_due(const struct mltw *wheel)
{
    return MIN(wheel->near_next, wheel->far_due);
}

size_t
mltw_flush(struct mltw *wheel, void **entries, size_t max_entries)
{
    if (!wheel->flushing) {
        wheel->flushing = true;
        wheel->flush_front = wheel->front;
    }

    size_t n = (entries_are_few(wheel)
                ? few_dequeue(wheel, wheel->max_time, entries, max_entries)
                : dequeue__(wheel, wheel->max_time, entries, max_entries));
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
