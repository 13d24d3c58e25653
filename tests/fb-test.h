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

/* What test programs for FlowBundler share: checks that print the seed to
 * repeat them with, random numbers, and the command line.  To be included by
 * one file of a program. */

#ifndef FB_TEST_H
#define FB_TEST_H 1

#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "openvswitch/compiler.h"
#include "random.h"
#include "util.h"

struct test {
    const char *name;
    void (*run)(void);
};

static uint32_t seed = 1;
static unsigned int iterations;         /* 0: the default of each test. */
static const char *test_name = "";

static void OVS_PRINTF_FORMAT(1, 2) OVS_NO_RETURN
fail(const char *format, ...)
{
    va_list args;

    fflush(stdout);
    fprintf(stderr, "%s (--seed=%"PRIu32"): ", test_name, seed);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    putc('\n', stderr);
    exit(EXIT_FAILURE);
}

#define CHECK(CONDITION, ...)           \
    do {                                \
        if (!(CONDITION)) {             \
            fail(__VA_ARGS__);          \
        }                               \
    } while (0)

/* Number of rounds of a test that does 'n' by default. */
static unsigned int
rounds(unsigned int n)
{
    return iterations ? iterations : n;
}

/* A random number, 0...n-1. */
static uint64_t
choose(uint64_t n)
{
    return random_uint64() % n;
}

/* A random number, 0...n-1, where each order of magnitude is as likely as any
 * other. */
static uint64_t
choose_log(uint64_t n)
{
    uint64_t limit = UINT64_C(1) << choose(log_2_floor(n) + 1);

    return choose(MIN(2 * limit, n));
}

/* A leaky bucket that what is sent fills, to check a rate by. */
struct leaky_bucket {
    uint64_t rate_bps;
    __int128 level;             /* Bytes times 8e9. */
    __int128 max_level;
    uint64_t last_ns;
    uint64_t bytes;
};

static inline void
leaky_bucket_add(struct leaky_bucket *b, uint64_t now_ns, uint64_t bytes)
{
    __int128 drained = (__int128) (now_ns - b->last_ns) * b->rate_bps;

    b->level = b->level > drained ? b->level - drained : 0;
    b->level += (__int128) bytes * 8000000000;
    b->max_level = MAX(b->max_level, b->level);
    b->last_ns = now_ns;
    b->bytes += bytes;
}

static inline uint64_t
leaky_bucket_max_bytes(const struct leaky_bucket *b)
{
    return b->max_level / 8000000000;
}

static void OVS_NO_RETURN
usage(FILE *stream, const char *name, int status, const struct test *tests,
      size_t n_tests)
{
    fprintf(stream, "usage: %s [--seed=N] [--iterations=N] [TEST]...\n"
            "Tests (all if none is named):\n", name);
    for (size_t i = 0; i < n_tests; i++) {
        fprintf(stream, "    %s\n", tests[i].name);
    }
    exit(status);
}

static void
run_test(const struct test *test)
{
    printf("%s\n", test->name);
    fflush(stdout);
    test_name = test->name;
    random_set_seed(seed);
    test->run();
}

/* Does what main() is to do: runs those of 'tests' that the command line
 * names, or all. */
static int
run_tests(int argc, char *argv[], const struct test *tests, size_t n_tests)
{
    static const struct option options[] = {
        { "seed", required_argument, NULL, 's' },
        { "iterations", required_argument, NULL, 'i' },
        { "help", no_argument, NULL, 'h' },
        { NULL, 0, NULL, 0 },
    };
    int option;

    while ((option = getopt_long(argc, argv, "s:i:h", options, NULL)) != -1) {
        switch (option) {
        case 's':
            seed = strtoul(optarg, NULL, 0);
            CHECK(seed, "--seed must not be 0");
            break;
        case 'i':
            iterations = strtoul(optarg, NULL, 0);
            break;
        case 'h':
            usage(stdout, argv[0], EXIT_SUCCESS, tests, n_tests);
        default:
            usage(stderr, argv[0], 2, tests, n_tests);
        }
    }

    if (optind == argc) {
        for (size_t i = 0; i < n_tests; i++) {
            run_test(&tests[i]);
        }
    }
    for (; optind < argc; optind++) {
        size_t i;

        for (i = 0; i < n_tests; i++) {
            if (!strcmp(argv[optind], tests[i].name)) {
                run_test(&tests[i]);
                break;
            }
        }
        if (i == n_tests) {
            usage(stderr, argv[0], 2, tests, n_tests);
        }
    }
    return 0;
}

#endif /* fb-test.h */
