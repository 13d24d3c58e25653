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

/* A virtual machine that numbers what it sends and checks what it receives.
 *
 *     fb-vm EAL-OPTIONS -- FLOWS FRAME-BYTES [FIRST [FLOW]]
 *
 * sends from its first device UDP frames of up to FRAME-BYTES bytes, of FLOWS
 * flows in turn (or of those from number FLOW on), each with the number that
 * it has in its flow, counted from FIRST (0) on.  A frame that the device does
 * not take is offered again until it does: what counts as sent is in the
 * virtqueue.  From all devices it
 * receives such frames, and looks at whether they are whole and each flow's
 * numbers rise.
 *
 * Commands on standard input, a line each, which standard output answers with
 * one line of JSON:
 *
 *     rate PPS    sends so many frames a second from now on (0: none)
 *     lacp        is the other end of a bond of all its devices from now on,
 *                 which speaks LACP (IEEE 802.1AX), once a second
 *     report      nothing else
 *
 * It ends when its standard input does.
 *
 * It is not a load generator: it sleeps when it has nothing to do, since what
 * it tests runs on the same few cores. */

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rte_byteorder.h>
#include <rte_cycles.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_ether.h>
#include <rte_ip.h>
#include <rte_mbuf.h>
#include <rte_udp.h>

#define BURST 32
#define RING 1024
#define MBUFS 8191
#define MAX_FLOWS 65536
#define MAX_PORTS 8
#define MAGIC 0x4662566du
#define IDLE_US 50

/* A LACPDU behind its Ethernet header: where what is, and how long it is. */
#define LACP_ETHERTYPE 0x8809
#define LACP_SUBTYPE 1
#define LACP_ACTOR 4                /* System to state. */
#define LACP_PARTNER 24
#define LACP_SYSTEM 2               /* In these: MAC address, ... */
#define LACP_KEY 8
#define LACP_PORT 12
#define LACP_STATE 14
#define LACP_INFO_BYTES 15
#define LACP_COLLECTOR 42           /* What follows has zeros only. */
#define LACP_BYTES 110
/* Active, short timeout, aggregation, in sync, collecting, distributing. */
#define LACP_STATE_ALL 0x3f

/* What a frame has behind its UDP header.  The number is at its end again. */
struct payload {
    rte_be32_t magic;
    rte_be32_t flow;
    rte_be64_t seq;
} __attribute__((packed));

#define HEADER_BYTES (RTE_ETHER_HDR_LEN + sizeof(struct rte_ipv4_hdr) \
                      + sizeof(struct rte_udp_hdr))
#define MIN_BYTES (HEADER_BYTES + sizeof(struct payload) + sizeof(rte_be64_t))

struct flow {
    uint64_t next_seq;              /* To be sent. */
    uint64_t expected_seq;          /* Least that may be received. */
};

struct vm {
    struct rte_mempool *pool;
    uint16_t n_ports;
    bool lacp;
    uint64_t lacp_tsc;              /* When LACPDUs were last sent. */
    uint8_t lacp_partner[MAX_PORTS][LACP_INFO_BYTES]; /* What it last said. */
    struct flow *flows;
    uint32_t n_flows;
    uint32_t first_flow;            /* Of those that it sends. */
    uint32_t frame_bytes;

    /* Sending. */
    uint64_t pps;
    uint64_t tx_tsc;                /* Frames until then are sent, or ... */
    struct rte_mbuf *pending[BURST]; /* ... made and not yet taken. */
    uint16_t n_pending;
    uint32_t turn;                  /* Next flow. */

    /* Counters. */
    uint64_t sent;
    uint64_t received;
    uint64_t received_bytes;
    uint64_t misordered;            /* Come after a later one of its flow. */
    uint64_t duplicates;            /* Come twice, one after the other. */
    uint64_t damaged;
    uint64_t strange;               /* Frames of others. */
    uint64_t lacpdus;               /* Received. */
};

static void __attribute__((noreturn, format(printf, 1, 2)))
die(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fprintf(stderr, "fb-vm: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(EXIT_FAILURE);
}

/* Returns 'text', the argument or command word 'name', from 'min' to 'max'. */
static uint64_t
parse(const char *name, const char *text, uint64_t min, uint64_t max)
{
    char *end;

    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max) {
        die("%s=\"%s\": must be a whole number from %"PRIu64" to %"PRIu64,
            name, text, min, max);
    }
    return value;
}

static void
start_port(struct vm *vm, uint16_t port)
{
    struct rte_eth_conf conf;
    int error;

    memset(&conf, 0, sizeof conf);
    /* What tells a device that the switch has gone, so that it listens for
     * the next one. */
    conf.intr_conf.lsc = 1;
    error = rte_eth_dev_configure(port, 1, 1, &conf);
    if (!error) {
        error = rte_eth_rx_queue_setup(port, 0, RING, SOCKET_ID_ANY, NULL,
                                       vm->pool);
    }
    if (!error) {
        error = rte_eth_tx_queue_setup(port, 0, RING, SOCKET_ID_ANY, NULL);
    }
    if (!error) {
        error = rte_eth_dev_start(port);
    }
    if (error) {
        die("device %u does not start: %s", port, rte_strerror(-error));
    }
}

/* Returns the next frame, or NULL if there is no buffer. */
static struct rte_mbuf *
make_frame(struct vm *vm)
{
    struct rte_mbuf *m = rte_pktmbuf_alloc(vm->pool);

    if (!m) {
        return NULL;
    }

    uint32_t number = vm->turn;
    struct flow *flow = &vm->flows[number];
    uint64_t seq = flow->next_seq++;

    vm->turn = number + 1 < vm->n_flows ? number + 1 : vm->first_flow;

    /* Lengths that vary without a pattern. */
    uint32_t spread = vm->frame_bytes - MIN_BYTES + 1;
    uint32_t bytes = MIN_BYTES + ((seq * 2654435761u + number * 40503u) >> 7)
                                 % spread;
    uint8_t *frame = (uint8_t *) rte_pktmbuf_append(m, bytes);
    struct rte_ether_hdr *eth = (struct rte_ether_hdr *) frame;
    struct rte_ipv4_hdr *ip = (struct rte_ipv4_hdr *) (eth + 1);
    struct rte_udp_hdr *udp = (struct rte_udp_hdr *) (ip + 1);
    struct payload payload = {
        .magic = rte_cpu_to_be_32(MAGIC),
        .flow = rte_cpu_to_be_32(number),
        .seq = rte_cpu_to_be_64(seq),
    };
    static const struct rte_ether_hdr ethernet = {
        .dst_addr = { { 0x02, 0xfb, 0, 0x02, 0, 0x01 } },
        .src_addr = { { 0x02, 0xfb, 0, 0x03, 0, 0x01 } },
        .ether_type = RTE_BE16(RTE_ETHER_TYPE_IPV4),
    };

    memset(frame, 0, bytes);
    *eth = ethernet;
    ip->version_ihl = RTE_IPV4_VHL_DEF;
    ip->total_length = rte_cpu_to_be_16(bytes - RTE_ETHER_HDR_LEN);
    ip->time_to_live = 64;
    ip->next_proto_id = IPPROTO_UDP;
    ip->src_addr = rte_cpu_to_be_32(RTE_IPV4(10, 72, 0, 1));
    ip->dst_addr = rte_cpu_to_be_32(RTE_IPV4(10, 73, 0, 1) + number);
    ip->hdr_checksum = rte_ipv4_cksum(ip);
    udp->src_port = rte_cpu_to_be_16(4000);
    udp->dst_port = rte_cpu_to_be_16(4001);
    udp->dgram_len = rte_cpu_to_be_16(bytes - RTE_ETHER_HDR_LEN - sizeof *ip);
    memcpy(udp + 1, &payload, sizeof payload);
    memcpy(frame + bytes - sizeof payload.seq, &payload.seq,
           sizeof payload.seq);
    return m;
}

/* Sends what is due.  Returns the number of frames that were taken. */
static uint16_t
send_frames(struct vm *vm)
{
    if (vm->pps) {
        uint64_t gap = RTE_MAX(rte_get_tsc_hz() / vm->pps, UINT64_C(1));
        uint64_t now = rte_rdtsc();

        /* What it did not send in time is not sent at once later on. */
        if (now - vm->tx_tsc > gap * 2 * BURST) {
            vm->tx_tsc = now - gap * 2 * BURST;
        }
        while (vm->n_pending < BURST && now - vm->tx_tsc >= gap) {
            struct rte_mbuf *m = make_frame(vm);

            if (!m) {
                break;
            }
            vm->pending[vm->n_pending++] = m;
            vm->tx_tsc += gap;
        }
    }
    if (!vm->n_pending) {
        return 0;
    }

    uint16_t n = rte_eth_tx_burst(0, 0, vm->pending, vm->n_pending);

    vm->n_pending -= n;
    memmove(vm->pending, &vm->pending[n],
            vm->n_pending * sizeof vm->pending[0]);
    vm->sent += n;
    return n;
}

/* Sends a LACPDU from 'port', as one who agrees to everything. */
static void
send_lacp(struct vm *vm, uint16_t port)
{
    static const struct rte_ether_hdr ethernet = {
        .dst_addr = { { 0x01, 0x80, 0xc2, 0, 0, 0x02 } },
        .src_addr = { { 0x02, 0xfb, 0, 0x03, 0, 0x02 } },
        .ether_type = RTE_BE16(LACP_ETHERTYPE),
    };
    uint8_t pdu[LACP_BYTES] = { 0 };
    uint8_t *actor = pdu + LACP_ACTOR;

    pdu[0] = LACP_SUBTYPE;
    pdu[1] = 1;                     /* Version. */
    pdu[LACP_ACTOR - 2] = 1;        /* Types and lengths. */
    pdu[LACP_ACTOR - 1] = 20;
    pdu[LACP_PARTNER - 2] = 2;
    pdu[LACP_PARTNER - 1] = 20;
    pdu[LACP_COLLECTOR] = 3;
    pdu[LACP_COLLECTOR + 1] = 16;
    memcpy(actor + LACP_SYSTEM, &ethernet.src_addr, sizeof ethernet.src_addr);
    actor[LACP_KEY + 1] = 1;
    actor[LACP_PORT + 1] = port + 1;
    actor[LACP_STATE] = LACP_STATE_ALL;
    memcpy(pdu + LACP_PARTNER, vm->lacp_partner[port], LACP_INFO_BYTES);

    struct rte_mbuf *m = rte_pktmbuf_alloc(vm->pool);
    char *frame = m ? rte_pktmbuf_append(m, sizeof ethernet + sizeof pdu)
                    : NULL;

    if (!frame) {
        rte_pktmbuf_free(m);
        return;
    }
    memcpy(frame, &ethernet, sizeof ethernet);
    memcpy(frame + sizeof ethernet, pdu, sizeof pdu);
    if (!rte_eth_tx_burst(port, 0, &m, 1)) {
        rte_pktmbuf_free(m);
    }
}

/* Sends LACPDUs if a second has passed since the last ones. */
static void
run_lacp(struct vm *vm)
{
    uint64_t now = rte_rdtsc();

    if (vm->lacp && now - vm->lacp_tsc >= rte_get_tsc_hz()) {
        vm->lacp_tsc = now;
        for (uint16_t port = 0; port < vm->n_ports; port++) {
            send_lacp(vm, port);
        }
    }
}

/* Takes 'm', which came from 'port', if it is a LACPDU.  Returns whether. */
static bool
receive_lacp(struct vm *vm, uint16_t port, const struct rte_mbuf *m)
{
    const struct rte_ether_hdr *eth
        = rte_pktmbuf_mtod(m, const struct rte_ether_hdr *);
    const uint8_t *pdu = (const uint8_t *) (eth + 1);

    if (rte_pktmbuf_data_len(m) < sizeof *eth + LACP_BYTES
        || eth->ether_type != RTE_BE16(LACP_ETHERTYPE)
        || pdu[0] != LACP_SUBTYPE) {
        return false;
    }
    vm->lacpdus++;
    memcpy(vm->lacp_partner[port], pdu + LACP_ACTOR, LACP_INFO_BYTES);
    if (vm->lacp) {
        send_lacp(vm, port);
    }
    return true;
}

static void
check_frame(struct vm *vm, uint16_t port, struct rte_mbuf *m)
{
    if (receive_lacp(vm, port, m)) {
        return;
    }

    struct payload payload;
    rte_be64_t trailer;
    uint8_t copy[UINT16_MAX];
    uint32_t bytes = rte_pktmbuf_pkt_len(m);
    const uint8_t *frame;

    if (bytes < MIN_BYTES || bytes > sizeof copy
        || !(frame = rte_pktmbuf_read(m, 0, bytes, copy))) {
        vm->strange++;
        return;
    }
    memcpy(&payload, frame + HEADER_BYTES, sizeof payload);
    memcpy(&trailer, frame + bytes - sizeof trailer, sizeof trailer);

    uint32_t number = rte_be_to_cpu_32(payload.flow);
    uint64_t seq = rte_be_to_cpu_64(payload.seq);

    if (payload.magic != rte_cpu_to_be_32(MAGIC) || number >= vm->n_flows) {
        vm->strange++;
        return;
    }
    vm->received++;
    vm->received_bytes += bytes;
    if (trailer != payload.seq) {
        vm->damaged++;
    }

    struct flow *flow = &vm->flows[number];

    if (seq >= flow->expected_seq) {
        flow->expected_seq = seq + 1;
    } else if (seq + 1 == flow->expected_seq) {
        vm->duplicates++;
    } else {
        vm->misordered++;
    }
}

static uint16_t
receive_frames(struct vm *vm)
{
    struct rte_mbuf *burst[BURST];
    uint16_t total = 0;

    for (uint16_t port = 0; port < vm->n_ports; port++) {
        uint16_t n = rte_eth_rx_burst(port, 0, burst, BURST);

        for (uint16_t i = 0; i < n; i++) {
            check_frame(vm, port, burst[i]);
        }
        rte_pktmbuf_free_bulk(burst, n);
        total += n;
    }
    return total;
}

static void
report(const struct vm *vm)
{
    printf("{\"sent\": %"PRIu64", \"pending\": %u, \"received\": %"PRIu64", "
           "\"received_bytes\": %"PRIu64", \"misordered\": %"PRIu64", "
           "\"duplicates\": %"PRIu64", "
           "\"damaged\": %"PRIu64", \"strange\": %"PRIu64", "
           "\"lacpdus\": %"PRIu64"}\n",
           vm->sent, vm->n_pending, vm->received, vm->received_bytes,
           vm->misordered, vm->duplicates, vm->damaged, vm->strange,
           vm->lacpdus);
    fflush(stdout);
}

static void
command(struct vm *vm, char *line)
{
    char *save;
    const char *word = strtok_r(line, " ", &save);

    if (word && !strcmp(word, "rate")) {
        const char *pps = strtok_r(NULL, " ", &save);

        vm->pps = parse("rate", pps ? pps : "", 0, 100000000);
        vm->tx_tsc = rte_rdtsc();
    } else if (word && !strcmp(word, "lacp")) {
        vm->lacp = true;
    } else if (!word || strcmp(word, "report")) {
        die("\"%s\": must be \"rate\", \"lacp\" or \"report\"",
            word ? word : "");
    }
    report(vm);
}

/* Does what whole lines on standard input say.  Returns false at its end. */
static bool
commands(struct vm *vm)
{
    static char buffer[256];
    static size_t used;
    struct pollfd fd = { .fd = STDIN_FILENO, .events = POLLIN };

    while (poll(&fd, 1, 0) > 0) {
        ssize_t n = read(STDIN_FILENO, buffer + used,
                         sizeof buffer - 1 - used);
        char *end;

        if (n <= 0) {
            return false;
        }
        used += n;
        buffer[used] = '\0';
        while ((end = strchr(buffer, '\n')) != NULL) {
            *end++ = '\0';
            command(vm, buffer);
            used -= end - buffer;
            memmove(buffer, end, used + 1);
        }
        if (used == sizeof buffer - 1) {
            die("a command is too long");
        }
    }
    return true;
}

int
main(int argc, char *argv[])
{
    struct vm vm;
    int n_eal;

    /* The switch may go while it is written to. */
    signal(SIGPIPE, SIG_IGN);
    n_eal = rte_eal_init(argc, argv);
    if (n_eal < 0 || argc - n_eal < 3 || argc - n_eal > 5) {
        die("usage: fb-vm EAL-OPTIONS -- "
            "FLOWS FRAME-BYTES [FIRST [FLOW]]");
    }
    memset(&vm, 0, sizeof vm);
    vm.n_flows = parse("FLOWS", argv[n_eal + 1], 1, MAX_FLOWS);
    vm.frame_bytes = parse("FRAME-BYTES", argv[n_eal + 2], MIN_BYTES, 1514);
    vm.flows = calloc(vm.n_flows, sizeof *vm.flows);
    if (argc - n_eal > 4) {
        vm.first_flow = parse("FLOW", argv[n_eal + 4], 0, vm.n_flows - 1);
        vm.turn = vm.first_flow;
    }
    if (vm.flows && argc - n_eal > 3) {
        uint64_t first = parse("FIRST", argv[n_eal + 3], 0, UINT64_MAX / 2);

        for (uint32_t i = 0; i < vm.n_flows; i++) {
            vm.flows[i].next_seq = first;
        }
    }
    vm.pool = rte_pktmbuf_pool_create("fb-vm", MBUFS, 0, 0,
                                      RTE_MBUF_DEFAULT_BUF_SIZE,
                                      SOCKET_ID_ANY);
    vm.n_ports = rte_eth_dev_count_avail();
    if (!vm.flows || !vm.pool || !vm.n_ports) {
        die("no memory, or no device");
    }
    if (vm.n_ports > MAX_PORTS) {
        die("%u devices: must be at most %d", vm.n_ports, MAX_PORTS);
    }
    for (uint16_t port = 0; port < vm.n_ports; port++) {
        start_port(&vm, port);
    }
    report(&vm);

    while (commands(&vm)) {
        uint16_t n = receive_frames(&vm);

        n += send_frames(&vm);
        run_lacp(&vm);
        if (!n) {
            usleep(IDLE_US);
        }
    }
    return EXIT_SUCCESS;
}
