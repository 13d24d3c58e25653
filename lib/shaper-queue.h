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

#ifndef SHAPER_QUEUE_H
#define SHAPER_QUEUE_H 1

#include <stdbool.h>
#include <stdint.h>

#include "edt-pace.h"
#include "edt-tags.h"

/* An output queue with a rate, in one thread
 * ==========================================
 *
 * Which of a queue's FIFOs is to send next, and whether the rates of the queue
 * and its port allow that: "edt-pace.h" says how much the thread may send,
 * "edt-tags.h" which FIFO has had the least.
 *
 * A FIFO joins with its first packet that is due (shaper_queue_add()), is
 * given out by shaper_queue_first(), taken (shaper_queue_take()), charged with
 * what it has sent, and added again or, if it has nothing more that is due,
 * laid to rest (shaper_queue_rest()).  There it counts until the rate has
 * carried what it was served ahead of others.
 *
 * Thread-safety: none but what "edt-pace.h" has. */

enum shaper_turn_state {
    SHAPER_TURN_NONE,               /* Is not active. */
    SHAPER_TURN_READY,              /* In 'ready'. */
    SHAPER_TURN_TAKEN,              /* Active, in neither. */
    SHAPER_TURN_RESTING,            /* In 'resting'. */
};

/* A FIFO, as a queue sees it.  Zero-initialize. */
struct shaper_turn {
    struct edt_tag turn;
    enum shaper_turn_state state;
};

struct shaper_queue {
    struct edt_share share;
    struct edt_tags ready;         /* Those with packets that are due. */
    struct edt_tags resting;       /* Active ones without. */
};

void shaper_queue_init(struct shaper_queue *, struct edt_class *,
                       uint64_t now_ns);
void shaper_queue_destroy(struct shaper_queue *);
struct shaper_turn *shaper_queue_clear_one(struct shaper_queue *);
void shaper_queue_leave(struct shaper_queue *, struct shaper_turn *);

/* Has 'queue' a rate, of its own or of its port? */
static inline bool
shaper_queue_is_paced(const struct shaper_queue *queue)
{
    return queue->share.class != NULL;
}

/* Has 'queue' nothing that others have to know, or that it has to look at? */
static inline bool
shaper_queue_is_quiet(const struct shaper_queue *queue)
{
    const struct edt_share *share = &queue->share;

    return !share->weight && !edt_share_has_news(share);
}

/* Brings 'queue' up to 'now_ns', tells others what has changed in it, and
 * forgets FIFOs that rest for long enough.  To be called at each poll unless
 * it is quiet. */
static inline void
shaper_queue_poll(struct shaper_queue *queue, uint64_t now_ns)
{
    struct edt_tag *turn;

    edt_share_poll(&queue->share, now_ns);
    while ((turn = edt_tags_first__(&queue->resting, true, queue->share.v))
           && edt_share_may_leave(&queue->share, turn->tag)) {
        shaper_queue_leave(queue, CONTAINER_OF(turn, struct shaper_turn,
                                               turn));
    }
    edt_share_publish(&queue->share, now_ns);
}

/* Makes 'turn', which is resting in 'queue', ready to be added.  It gains
 * nothing by having been idle. */
static inline void
shaper_queue_rouse(struct shaper_queue *queue, struct shaper_turn *turn,
                   uint64_t now_ns)
{
    if (queue->share.now_ns != now_ns) {
        edt_share_poll(&queue->share, now_ns);
    }
    edt_tags_remove(&queue->resting, &turn->turn);
    turn->state = SHAPER_TURN_TAKEN;
    if (edt_share_may_leave(&queue->share, turn->turn.tag)) {
        shaper_queue_leave(queue, turn);
    }
}

/* Adds 'turn', which is not ready, to those of 'queue' that may send at
 * 'now_ns'. */
static inline void
shaper_queue_add(struct shaper_queue *queue, struct shaper_turn *turn,
                 uint64_t now_ns)
{
    if (turn->state == SHAPER_TURN_RESTING) {
        shaper_queue_rouse(queue, turn, now_ns);
    }
    if (turn->state == SHAPER_TURN_NONE) {
        turn->turn.tag = edt_share_join(&queue->share, now_ns);
    }
    turn->state = SHAPER_TURN_READY;
    edt_tags_insert(&queue->ready, &turn->turn);
}

/* Returns the one of 'queue' that is to send next, or NULL. */
static inline struct shaper_turn *
shaper_queue_first(struct shaper_queue *queue)
{
    struct edt_tag *turn = edt_tags_first(&queue->ready);

    return turn ? CONTAINER_OF(turn, struct shaper_turn, turn) : NULL;
}

/* Takes 'turn', which is ready, out of 'queue', for shaper_queue_add() or
 * shaper_queue_rest() to follow. */
static inline void
shaper_queue_take(struct shaper_queue *queue, struct shaper_turn *turn)
{
    edt_tags_remove(&queue->ready, &turn->turn);
    turn->state = SHAPER_TURN_TAKEN;
}

/* Charges 'bytes' bytes to 'turn', which has been taken from 'queue'. */
static inline void
shaper_queue_charge(struct shaper_queue *queue, struct shaper_turn *turn,
                    uint32_t bytes)
{
    turn->turn.tag += edt_share_send(&queue->share, bytes);
}

/* Notes that 'turn', if it has been taken from 'queue' and not been added
 * since, has nothing more that is due. */
static inline void
shaper_queue_rest(struct shaper_queue *queue, struct shaper_turn *turn)
{
    if (turn->state == SHAPER_TURN_TAKEN) {
        turn->state = SHAPER_TURN_RESTING;
        edt_tags_insert__(&queue->resting, &turn->turn, true);
    }
}

#endif /* shaper-queue.h */
