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

/* Measures what a packet costs to send, for bursts of several sizes.
 *
 *     tx-burst EAL-OPTIONS -- WAIT-NS SECONDS BURST...
 *
 * Sends to port 0 as fast as it can, for SECONDS with each burst size, and
 * prints "BURST PACKETS CYCLES HZ" of each.  The cycles are those of the whole
 * loop: buffers from the pool, rte_eth_tx_burst(), and WAIT-NS of waiting after
 * each burst, which models what a device without a doorbell lacks. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rte_cycles.h>
#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <rte_pause.h>

#define MAX_BURST 256
#define FRAME_SIZE 1514
#define PORT 0

static void
die(const char *what)
{
    fprintf(stderr, "tx-burst: %s\n", what);
    exit(1);
}

static struct rte_mempool *
open_port(void)
{
    struct rte_eth_conf conf = { 0 };
    struct rte_mempool *pool;

    pool = rte_pktmbuf_pool_create("pool", 8192, 512, 0,
                                   RTE_MBUF_DEFAULT_BUF_SIZE,
                                   (int) rte_socket_id());
    if (!pool) {
        die("no memory for packets");
    }
    if (!rte_eth_dev_is_valid_port(PORT)
        || rte_eth_dev_configure(PORT, 1, 1, &conf)
        || rte_eth_rx_queue_setup(PORT, 0, 512, 0, NULL, pool)
        || rte_eth_tx_queue_setup(PORT, 0, 512, 0, NULL)
        || rte_eth_dev_start(PORT)) {
        die("the port does not start");
    }
    return pool;
}

/* Sends 'n' packets from 'pool'. */
static void
send_burst(struct rte_mempool *pool, uint16_t n, uint64_t wait_cycles)
{
    struct rte_mbuf *mbufs[MAX_BURST];
    uint16_t sent = 0;

    if (rte_pktmbuf_alloc_bulk(pool, mbufs, n)) {
        die("no packets left in the pool");
    }
    for (uint16_t i = 0; i < n; i++) {
        mbufs[i]->data_len = mbufs[i]->pkt_len = FRAME_SIZE;
    }
    while (sent < n) {
        sent += rte_eth_tx_burst(PORT, 0, mbufs + sent, n - sent);
        if (wait_cycles) {
            uint64_t end = rte_rdtsc() + wait_cycles;

            while (rte_rdtsc() < end) {
                rte_pause();
            }
        }
    }
}

int
main(int argc, char *argv[])
{
    int used = rte_eal_init(argc, argv);
    struct rte_mempool *pool;
    uint64_t wait_cycles, hz;
    double seconds;

    argc -= used;
    argv += used;
    if (used < 0 || argc < 4) {
        die("usage: tx-burst EAL-OPTIONS -- WAIT-NS SECONDS BURST...");
    }
    hz = rte_get_tsc_hz();
    wait_cycles = strtod(argv[1], NULL) * hz / 1e9;
    seconds = strtod(argv[2], NULL);
    pool = open_port();
    for (int i = 3; i < argc; i++) {
        int burst = atoi(argv[i]);
        uint64_t packets = 0, start, now, end;

        if (burst < 1 || burst > MAX_BURST) {
            die("a burst has 1 to 256 packets");
        }
        start = rte_rdtsc();
        end = start + seconds * hz;
        do {
            for (int turn = 0; turn < 64; turn++) {
                send_burst(pool, burst, wait_cycles);
            }
            packets += 64 * burst;
            now = rte_rdtsc();
        } while (now < end);
        printf("%d %"PRIu64" %"PRIu64" %"PRIu64"\n",
               burst, packets, now - start, hz);
        fflush(stdout);
    }
    rte_eth_dev_stop(PORT);
    rte_eal_cleanup();
    return 0;
}
