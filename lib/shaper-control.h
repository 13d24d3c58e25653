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


#ifndef SHAPER_CONTROL_H
#define SHAPER_CONTROL_H 1

#include <stdbool.h>
#include <stdint.h>

#include "dp-packet.h"
#include "edt-meter.h"
#include "openvswitch/compiler.h"
#include "ovs-atomic.h"
#include "packets.h"

/* Which packets go ahead of the rates of ports and queues
 * =======================================================
 *
 * A port that is offered more than its rate makes packets wait and drops some
 * of them.  If those were what keeps a link alive, the port would cut off all
 * that uses it rather than what exceeds its rate.  So two kinds of packets do
 * not wait for the rate of a port or queue:
 *
 *  * What the switch itself sends: LACP, BFD, CFM, STP and what a controller
 *    tells it to send.  Known by who sends it, so that nobody can forge it: a
 *    tenant's own LACP, BFD or CFM is traffic like any other.
 *
 *  * Address resolution that it forwards: ARP, and IPv6 neighbor discovery
 *    except redirects.  Anybody can send that, so only a part of the rate is
 *    ahead of others: SHAPER_CONTROL_PORT_PARTS-th for each receiving port and
 *    SHAPER_CONTROL_ALL_PARTS-th for all of them, and SHAPER_CONTROL_BURST
 *    bytes of each port at once.  What exceeds that is traffic like any other.
 *    The rate is the slower one of those that a packet goes ahead of.
 *
 * Both count: what goes ahead is charged, and others leave later for it.  They
 * go ahead of rates, not of time: a packet with an EDT has that kept, since
 * the meter that gave it is its sender's, not the port's.
 *
 * Each port has its part in each thread that receives from it.  That of all
 * ports is one for all threads.
 *
 * Thread-safety: a struct shaper_control belongs to one thread at a time.  The
 * 'all_ticks' of a rate may be shared. */

/* What part of a rate address resolution may use ahead of others: 1 % for
 * each receiving port, 10 % for all of them. */
#define SHAPER_CONTROL_PORT_PARTS 100
#define SHAPER_CONTROL_ALL_PARTS 10

/* Bytes that a receiving port may use of its part at once, as a meter without
 * a burst of its own may. */
#define SHAPER_CONTROL_BURST EDT_MTU_BYTES

/* What receiving ports have used of their parts.  Zero-initialize. */
struct shaper_control {
    uint64_t *ticks_by_port;        /* Times until which parts are used. */
    uint32_t n_ports;               /* Elements in 'ticks_by_port'. */
};

/* A rate that a packet goes ahead of. */
struct shaper_control_rate {
    const struct edt_params *params;
    atomic_uint64_t *all_ticks;     /* As in struct shaper_control, for all
                                     * ports together. */
};

void shaper_control_destroy(struct shaper_control *);
bool shaper_control_admit(struct shaper_control *,
                          const struct shaper_control_rate *rates,
                          size_t n_rates, uint16_t port, uint32_t bytes,
                          uint64_t now_ns);
bool shaper_control_is_resolution__(const struct dp_packet *);

/* Is 'packet' ARP or neighbor discovery (RFC 4861, but no redirect), behind
 * up to FLOW_MAX_VLAN_HEADERS tags?  Reads no further than 'packet' goes.
 * Takes one comparison for IPv4. */
static inline bool
shaper_control_is_resolution(const struct dp_packet *packet)
{
    const struct eth_header *eth = dp_packet_data(packet);

    return !OVS_LIKELY(dp_packet_size(packet) >= ETH_HEADER_LEN
                       && eth->eth_type == htons(ETH_TYPE_IP)
                       && dp_packet_is_eth(packet))
           && shaper_control_is_resolution__(packet);
}

#endif /* shaper-control.h */
