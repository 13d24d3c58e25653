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

/* Tests of chains of meters ("edt-chains.h"): random sequences of meters, and
 * the ids that they get, compared with a list of both. */

#include <config.h>
#undef NDEBUG

#include "edt-chains.h"

#include "fb-test.h"
#include "ovs-rcu.h"
#include "ovs-thread.h"
#include "util.h"

#define MAX_LENGTH 6
#define N_METERS 8
#define MAX_KNOWN 4096

/* A sequence of meters. */
struct sequence {
    size_t n;
    uint32_t meters[MAX_LENGTH];
    bool late[MAX_LENGTH];
};

/* A sequence that has been seen, and its id. */
struct known {
    struct sequence seq;
    uint32_t id;
    bool gone;                  /* Has one of its meters been removed? */
};

static struct known known[MAX_KNOWN];
static size_t n_known;

static void
choose_sequence(struct sequence *seq)
{
    size_t n_late = 0;

    memset(seq, 0, sizeof *seq);
    seq->n = 1 + choose_log(MAX_LENGTH);
    for (size_t i = 0; i < seq->n; i++) {
        /* Ports that shape what they receive have ids from 2^31 on. */
        seq->meters[i] = choose(N_METERS);
        seq->meters[i] |= choose(8) ? 0 : UINT32_C(1) << 31;
        seq->late[i] = n_late < EDT_CHAINS_LATE && !choose(4);
        n_late += seq->late[i];
    }
}

static uint32_t
sequence_id(struct edt_chains *chains, const struct sequence *seq)
{
    uint32_t id = EDT_CHAIN_NONE;

    for (size_t i = 0; i < seq->n; i++) {
        id = edt_chains_next(chains, id, seq->meters[i], seq->late[i]);
    }
    return id;
}

/* Checks what 'chains' say of 'id', that of 'seq'. */
static void
check_sequence(const struct edt_chains *chains, const struct sequence *seq,
               uint32_t id)
{
    uint32_t late[EDT_CHAINS_LATE] = { EDT_CHAIN_NONE, EDT_CHAIN_NONE };
    uint32_t meters[MAX_LENGTH] = { 0 };
    struct edt_chain_ends ends;
    size_t max = choose(MAX_LENGTH + 1);
    size_t n_late = 0;

    CHECK(edt_chains_meters(chains, id, meters, max) == seq->n
          && !memcmp(meters, seq->meters,
                     MIN(max, seq->n) * sizeof *meters),
          "wrong meters of chain %"PRIu32, id);
    for (size_t i = 0; i < seq->n; i++) {
        if (seq->late[i]) {
            late[n_late++] = seq->meters[i];
        }
    }
    edt_chains_get(chains, id, &ends);
    CHECK(ends.first_meter == seq->meters[0]
          && !memcmp(ends.late_meters, late, sizeof late),
          "wrong ends of chain %"PRIu32, id);
}

/* Different sequences have different ids, the same sequence has the same one,
 * and no id comes again, whichever meters go. */
static void
test_sequences(void)
{
    struct edt_chains *chains = edt_chains_create(EDT_CHAINS_MAX);
    struct edt_chain_ends ends;

    n_known = 0;
    edt_chains_get(chains, EDT_CHAIN_NONE, &ends);
    CHECK(ends.first_meter == EDT_CHAIN_NONE
          && !edt_chains_meters(chains, EDT_CHAIN_NONE, NULL, 0),
          "no chain has meters");
    for (unsigned int i = 0; i < rounds(4000) && n_known < MAX_KNOWN; i++) {
        struct sequence seq;
        bool found = false;
        uint32_t id;

        choose_sequence(&seq);
        id = sequence_id(chains, &seq);
        CHECK(seq.n > 1 || seq.late[0] || id == seq.meters[0],
              "chain of one meter is %"PRIu32, id);
        for (size_t j = 0; j < n_known; j++) {
            struct known *k = &known[j];
            bool same = !memcmp(&k->seq, &seq, sizeof seq) && !k->gone;

            CHECK(same == (k->id == id), "id %"PRIu32" of a sequence of "
                  "%"PRIuSIZE" and one of %"PRIuSIZE" meters", id, seq.n,
                  k->seq.n);
            found |= same;
        }
        check_sequence(chains, &seq, id);
        if (!found) {
            known[n_known++] = (struct known) { .seq = seq, .id = id };
        }

        if (!choose(40)) {
            uint32_t meter = choose(N_METERS);

            edt_chains_remove(chains, meter);
            for (size_t j = 0; j < n_known; j++) {
                struct known *k = &known[j];

                if (k->seq.n == 1 && !k->seq.late[0]) {
                    continue;
                }
                for (size_t m = 0; m < k->seq.n; m++) {
                    k->gone |= k->seq.meters[m] == meter;
                }
                if (k->gone) {
                    edt_chains_get(chains, k->id, &ends);
                    CHECK(ends.first_meter == EDT_CHAIN_NONE
                          && !edt_chains_meters(chains, k->id, NULL, 0),
                          "chain %"PRIu32" is still there", k->id);
                } else {
                    check_sequence(chains, &k->seq, k->id);
                }
            }
        }
        ovsrcu_quiesce();
    }
    edt_chains_destroy(chains);
}

/* What a packet has passed after one of its meters has gone. */
static void
test_gone_before(void)
{
    struct edt_chains *chains = edt_chains_create(10);
    uint32_t before = edt_chains_next(chains, 1, 2, false);
    uint32_t meters[MAX_LENGTH], id;

    edt_chains_remove(chains, 1);
    CHECK(!edt_chains_count(chains), "%"PRIu32" chains are left",
          edt_chains_count(chains));
    id = edt_chains_next(chains, before, 3, false);
    CHECK(id != before && edt_chains_meters(chains, id, meters, 1) == 1
          && meters[0] == 3, "wrong chain %"PRIu32, id);
    CHECK(id != edt_chains_next(chains, 2, 3, false), "one of two chains");
    edt_chains_remove(chains, 3);
    CHECK(!edt_chains_count(chains), "%"PRIu32" chains are left",
          edt_chains_count(chains));
    edt_chains_destroy(chains);
}

/* When there are as many chains as there may be, packets keep theirs, until
 * meters go. */
static void
test_full(void)
{
    enum { MAX_CHAINS = 1000 };
    struct edt_chains *chains = edt_chains_create(MAX_CHAINS);

    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < MAX_CHAINS; i++) {
            CHECK(edt_chains_next(chains, i, 5000, false) != i,
                  "chain %"PRIu32" is one too many", i);
        }
        CHECK(edt_chains_count(chains) == MAX_CHAINS, "wrong count");
        CHECK(edt_chains_next(chains, MAX_CHAINS, 5000, false) == MAX_CHAINS
              && edt_chains_next(chains, EDT_CHAIN_NONE, 1, true)
                 == EDT_CHAIN_NONE
              && edt_chains_next(chains, EDT_CHAIN_NONE, 1, false) == 1
              && edt_chains_count(chains) == MAX_CHAINS,
              "there are more than there may be");
        CHECK(edt_chains_next(chains, 7, 5000, false) != 7,
              "one that is there is not found");
        edt_chains_remove(chains, 7);
        CHECK(edt_chains_count(chains) == MAX_CHAINS - 1
              && edt_chains_next(chains, MAX_CHAINS, 5000, false)
                 != MAX_CHAINS,
              "there is no room after a meter has gone");
        edt_chains_remove(chains, 5000);
        CHECK(!edt_chains_count(chains), "%"PRIu32" chains are left",
              edt_chains_count(chains));
        ovsrcu_quiesce();
    }
    edt_chains_destroy(chains);
}

/* Threads that meet the same sequences at the same time, while others go. */

#define N_THREADS 3
#define N_SHARED 500

static struct edt_chains *shared_chains;
static struct sequence shared[N_SHARED];
static uint32_t shared_ids[N_THREADS][N_SHARED];

static void *
thread_main(void *ids_)
{
    uint32_t *ids = ids_;

    for (size_t i = 0; i < N_SHARED; i++) {
        ids[i] = sequence_id(shared_chains, &shared[i]);
        for (size_t j = 0; j <= i; j += 50) {
            uint32_t id = sequence_id(shared_chains, &shared[j]);

            ovs_assert(id == ids[j]);
        }
        /* And some that only this thread has, and that go. */
        uint32_t mine = 1000 + (ids - shared_ids[0]) + i % 4;

        edt_chains_next(shared_chains, 100, mine, false);
        edt_chains_remove(shared_chains, mine);
        ovsrcu_quiesce();
    }
    return NULL;
}

static void
test_threads(void)
{
    for (unsigned int round = 0; round < rounds(20); round++) {
        pthread_t threads[N_THREADS];

        shared_chains = edt_chains_create(EDT_CHAINS_MAX);
        for (size_t i = 0; i < N_SHARED; i++) {
            choose_sequence(&shared[i]);
        }
        for (int t = 0; t < N_THREADS; t++) {
            threads[t] = ovs_thread_create("chains", thread_main,
                                           shared_ids[t]);
        }
        for (int t = 0; t < N_THREADS; t++) {
            xpthread_join(threads[t], NULL);
            CHECK(!memcmp(shared_ids[0], shared_ids[t],
                          sizeof shared_ids[0]),
                  "threads have different ids");
        }
        for (size_t i = 0; i < N_SHARED; i++) {
            check_sequence(shared_chains, &shared[i], shared_ids[0][i]);
        }
        edt_chains_destroy(shared_chains);
    }
}

static const struct test tests[] = {
    { "sequences", test_sequences },
    { "gone-before", test_gone_before },
    { "full", test_full },
    { "threads", test_threads },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
