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

#ifndef SHAPER_ECN_H
#define SHAPER_ECN_H 1

struct dp_packet;

/* Explicit congestion notification
 * ================================
 *
 * A packet that waits tells its sender too late that it sends too fast: only
 * when so much waits that something is dropped.  A sender that supports ECN
 * says so in the IP header of its packets, ECT(0) or ECT(1), and slows down
 * when its receiver reports that one came with CE, congestion experienced
 * (RFC 3168 section 5).  So a packet that waits for longer than a threshold is
 * marked with CE instead: meters mark in edt_stamp_batch() ("edt-stamp.h"),
 * ports in flow_shaper_drain() ("flow-shaper.h").
 *
 * The threshold is one of time and the decision one of each packet by itself,
 * which is what DCTCP (RFC 8257 section 3.1) and L4S (RFC 9331) expect, and
 * what a sender that reacts once in a round trip can live with. */

/* What shaper_ecn_mark() did. */
enum shaper_ecn {
    SHAPER_ECN_SET,             /* The packet was ECT and is now CE. */
    SHAPER_ECN_WAS_SET,         /* It was CE before. */
    SHAPER_ECN_NOT_ECT,         /* Not touched: it is not ECT, not IP, or its
                                 * IP header is not complete. */
};

enum shaper_ecn shaper_ecn_mark(struct dp_packet *);

#endif /* shaper-ecn.h */
