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

#include "shaper-queue.h"

/* Initializes 'queue' as one with a part in 'class' (NULL: without a rate), to
 * which it takes a reference. */
void
shaper_queue_init(struct shaper_queue *queue, struct edt_class *class,
                  uint64_t now_ns)
{
    edt_share_init(&queue->share, class, now_ns);
    edt_tags_init(&queue->ready);
    edt_tags_init(&queue->resting);
}

/* Frees what 'queue' holds.  Its FIFOs are not active in it any more. */
void
shaper_queue_destroy(struct shaper_queue *queue)
{
    edt_share_destroy(&queue->share);
}

/* Makes 'turn', which is resting or taken, leave 'queue'. */
void
shaper_queue_leave(struct shaper_queue *queue, struct shaper_turn *turn)
{
    if (turn->state == SHAPER_TURN_RESTING) {
        edt_tags_remove(&queue->resting, &turn->turn);
    }
    if (turn->state != SHAPER_TURN_NONE) {
        edt_share_leave(&queue->share, turn->turn.tag);
        turn->state = SHAPER_TURN_NONE;
    }
}

/* Makes one of 'queue' leave, whatever it has to send, and returns it, or NULL
 * if there is none.  What it was served ahead of others these make up for. */
struct shaper_turn *
shaper_queue_clear_one(struct shaper_queue *queue)
{
    struct edt_tag *first = edt_tags_first(&queue->ready);
    struct shaper_turn *turn;

    if (first) {
        turn = CONTAINER_OF(first, struct shaper_turn, turn);
        shaper_queue_take(queue, turn);
    } else {
        first = edt_tags_first(&queue->resting);
        if (!first) {
            return NULL;
        }
        turn = CONTAINER_OF(first, struct shaper_turn, turn);
    }
    shaper_queue_leave(queue, turn);
    return turn;
}
