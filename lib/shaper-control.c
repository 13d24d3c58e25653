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

#include "shaper-control.h"

#include <netinet/icmp6.h>
#include <netinet/in.h>
#include <netinet/ip6.h>

#include "shaper-l3.h"
#include "shaper-thread.h"
#include "util.h"

/* See shaper_control_is_resolution(), which knows IPv4 itself. */
bool
shaper_control_is_resolution__(const struct dp_packet *packet)
{
    struct {
        struct ovs_16aligned_ip6_hdr ip6;
        uint8_t icmp_type;
    } nd;
    size_t ofs;
    ovs_be16 type = shaper_l3_find(packet, &ofs);

    if (type != htons(ETH_TYPE_IPV6)) {
        return type == htons(ETH_TYPE_ARP);
    }
    if (dp_packet_size(packet) < ofs + IPV6_HEADER_LEN + 1) {
        return false;
    }
    memcpy(&nd, (const char *) dp_packet_data(packet) + ofs,
           IPV6_HEADER_LEN + 1);
    /* A router would have lowered the hop limit. */
    return nd.ip6.ip6_nxt == IPPROTO_ICMPV6 && nd.ip6.ip6_hlim == 255
           && nd.icmp_type >= ND_ROUTER_SOLICIT
           && nd.icmp_type <= ND_NEIGHBOR_ADVERT;
}

/* Frees what 'control' holds. */
void
shaper_control_destroy(struct shaper_control *control)
{
    free_cacheline(control->ticks_by_port);
}

/* Returns the time from which on a part that is used until 'ticks' lacks
 * something at 'now': neither before that nor, since the rate may have been
 * lower when it was used, more than 'depth' after it. */
static uint64_t
used_until(uint64_t ticks, uint64_t now, uint64_t depth)
{
    int64_t ahead = ticks - now;

    return now + (ahead < 0 ? 0 : MIN((uint64_t) ahead, depth));
}

/* Uses 'cost' of what all ports have of a rate, in '*all_ticks'.  Returns
 * false, having used nothing, if there is less than that. */
static bool
use_part_of_all(atomic_uint64_t *all_ticks, uint64_t now, uint64_t cost,
                uint64_t depth)
{
    uint64_t ticks, used, end;
    bool room;

    atomic_read_relaxed(all_ticks, &ticks);
    do {
        used = used_until(ticks, now, depth);
        room = used + cost - now <= depth;
        end = room ? used + cost : used;
        if (!room && used == ticks) {
            break;
        }
    } while (!atomic_compare_exchange_weak_relaxed(all_ticks, &ticks, end));
    return room;
}

/* May a packet of 'bytes' bytes, address resolution that 'port' has received,
 * go ahead of the 'n_rates' (at least 1) 'rates' at 'now_ns'?  If so, it uses
 * what it takes of the port's and all ports' parts of them. */
bool
shaper_control_admit(struct shaper_control *control,
                     const struct shaper_control_rate *rates, size_t n_rates,
                     uint16_t port, uint32_t bytes, uint64_t now_ns)
{
    const uint64_t now = now_ns << EDT_TICK_SHIFT;
    uint64_t cost = 0, depth = 0;

    for (size_t i = 0; i < n_rates; i++) {
        const struct edt_params *p = rates[i].params;

        cost = MAX(cost, edt_cost(p, bytes) * SHAPER_CONTROL_PORT_PARTS);
        depth = MAX(depth, (edt_cost(p, SHAPER_CONTROL_BURST)
                            * SHAPER_CONTROL_PORT_PARTS));
    }
    if (OVS_UNLIKELY(port >= control->n_ports)) {
        control->ticks_by_port = shaper_grow(
            control->ticks_by_port, &control->n_ports, port,
            sizeof *control->ticks_by_port);
    }

    uint64_t *ticks = &control->ticks_by_port[port];

    *ticks = used_until(*ticks, now, depth);
    if (*ticks + cost - now > depth) {
        return false;
    }
    for (size_t i = 0; i < n_rates; i++) {
        const struct edt_params *p = rates[i].params;

        /* As many ports as have a part in all may use their bursts. */
        if (!use_part_of_all(rates[i].all_ticks, now,
                             edt_cost(p, bytes) * SHAPER_CONTROL_ALL_PARTS,
                             edt_cost(p, SHAPER_CONTROL_BURST)
                             * SHAPER_CONTROL_PORT_PARTS)) {
            return false;
        }
    }
    *ticks += cost;
    return true;
}
