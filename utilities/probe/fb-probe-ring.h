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

#ifndef FB_PROBE_RING_H
#define FB_PROBE_RING_H 1

#include <stdint.h>

/* The file that fb-probe records departures into
 * ==============================================
 *
 * One file a recording, mapped by the application that sends and by whoever
 * reads.  All numbers are in the machine's byte order, all offsets are bytes
 * from the start of the file.
 *
 *    struct fb_probe_header
 *    struct fb_probe_queue   queues[n_queues]      at 'queues_offset'
 *    struct fb_probe_clock   clocks[max_clocks]    at 'clocks_offset'
 *    records of queue 0                            at 'records_offset'
 *    records of queue 1 ...
 *
 * Each tx queue has a ring of 'n_records' records, a power of two, or none if
 * 'n_records' is 0.  A record is a struct fb_probe_record and, with
 * FB_PROBE_EDT, 8 bytes more: struct fb_probe_edt_record.
 *
 * The thread that sends on a queue is the only writer of its ring.  It stores
 * 'claimed' before it overwrites records, and 'written' after all records of
 * a burst are complete.  A reader loads 'written', copies the records
 * max(0, written - n_records) to written - 1 (record i is at index
 * i % n_records), and then loads 'claimed': those below claimed - n_records
 * may have been overwritten meanwhile and are void.
 *
 * With FB_PROBE_WRAP the oldest records are overwritten.  Without, the first
 * burst that does not fit ends the recording: from then on packets are only
 * counted ('lost'). */

#define FB_PROBE_MAGIC "FBPROBE"        /* With its terminating zero byte. */
#define FB_PROBE_VERSION 1

/* Bits of 'flags'. */
#define FB_PROBE_WRAP    (1u << 0)
#define FB_PROBE_EDT     (1u << 1)
#define FB_PROBE_STOPPED (1u << 2)      /* Nothing is written any more. */

/* What identifies a flow. */
enum fb_probe_flow {
    FB_PROBE_FLOW_DST,      /* Destination IP address, see below. */
    FB_PROBE_FLOW_SRC,      /* Source IP address. */
    FB_PROBE_FLOW_OFFSET,   /* 4 bytes of the frame, in network order. */
    FB_PROBE_FLOW_MBUF,     /* 4 bytes of the mbuf, in the machine's order. */
};

struct fb_probe_header {
    char magic[8];
    uint32_t version;
    uint32_t header_size;           /* Of this structure. */
    uint32_t flags;
    uint32_t record_size;
    uint32_t n_queues;
    uint32_t queue_size;            /* Of a struct fb_probe_queue. */
    uint64_t n_records;             /* For each queue. */
    uint64_t queues_offset;
    uint64_t clocks_offset;
    uint64_t records_offset;
    uint64_t tsc_hz;                /* As DPDK believes; clocks[] is better. */
    uint32_t max_clocks;
    uint32_t n_clocks;              /* The pairs there are. */
    uint32_t pid;
    uint32_t port_id;               /* DPDK's. */
    uint32_t flow;                  /* An enum fb_probe_flow. */
    uint32_t flow_offset;
    uint32_t edt_offset;            /* From the start of the mbuf. */
    uint32_t burst_wait_ns;
    char device[64];                /* DPDK's name of the port. */
};

/* What a queue's writer publishes, once a burst. */
struct fb_probe_queue {
    uint64_t claimed;               /* Records that may be begun so far. */
    uint64_t written;               /* Records that are complete. */
    uint64_t bursts;                /* Counted, recorded or not. */
    uint64_t packets;
    uint64_t bytes;
    uint64_t lost;                  /* Packets that were not recorded. */
    uint64_t pad[2];
};

/* CLOCK_MONOTONIC against the TSC, every 100 ms: when the clock showed
 * 'mono_ns', the TSC was 'tsc', give or take 'error_tsc'.  Once there are
 * 'max_clocks', the last one is replaced. */
struct fb_probe_clock {
    uint64_t tsc;
    uint64_t mono_ns;
    uint64_t error_tsc;
};

/* A departure.  The packets of a burst have the same 'tsc', that at which the
 * application gave them to the driver, and positions 0, 1, 2...  So a burst
 * begins at each record with position 0.
 *
 * 'flow' is, for FB_PROBE_FLOW_DST and _SRC, an IPv4 address as a number
 * (10.0.0.1 is 0x0a000001), the four words of an IPv6 address combined by
 * exclusive or, 0 for other packets; behind up to two VLAN tags. */
struct fb_probe_record {
    uint64_t tsc;
    uint32_t flow;
    uint16_t bytes;                 /* Without FCS; 65535 if more. */
    uint16_t position;
};

struct fb_probe_edt_record {
    struct fb_probe_record record;
    uint64_t edt_ns;                /* CLOCK_MONOTONIC; 0 if it has none. */
};

_Static_assert(sizeof(struct fb_probe_header) == 168, "the layout is fixed");
_Static_assert(sizeof(struct fb_probe_queue) == 64, "the layout is fixed");
_Static_assert(sizeof(struct fb_probe_clock) == 24, "the layout is fixed");
_Static_assert(sizeof(struct fb_probe_record) == 16, "the layout is fixed");
_Static_assert(sizeof(struct fb_probe_edt_record) == 24,
               "the layout is fixed");

#endif /* fb-probe-ring.h */
