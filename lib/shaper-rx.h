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

#ifndef SHAPER_RX_H
#define SHAPER_RX_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "openvswitch/types.h"
#include "shaper-thread.h"

struct dp_packet_batch;
struct ds;
struct edt_chains;
struct json;
struct netdev;
struct smap;
struct sset;

/* Shaping of what a port receives
 * ===============================
 *
 * A port of the userspace datapath can be told, by other_config of its
 * Interface, the rate and the delay of the link that its packets come by.
 * Packets then get a departure time when they are received, as they get one
 * from an OpenFlow meter that shapes: this is an EDT meter ("edt-meter.h")
 * that no OpenFlow id leads to.  They wait where they leave, in the shaper of
 * an output port ("flow-shaper.h"); of the times that they get from this and
 * from meters the latest counts; a packet that would have to wait for longer
 * than is allowed, or that shapers have no room for, is dropped on arrival,
 * and has consumed nothing.  All receive queues and threads of a port share
 * one schedule.
 *
 * The delay ("shaper-delay.h") is added to that time, and is not a part of
 * what a packet may wait.
 *
 * Stamps name the port as they name meters, so packets of two ports are not in
 * one FIFO.  When the settings are taken away, packets go on being named for
 * as long as others can be waiting, and stay behind these.
 *
 * Thread-safety: shaper_rx_stamp() and shaper_rx_delay_bytes() may be called
 * by any number of RCU readers, shaper_rx_show() and others by any thread;
 * shaper_rx_update() and shaper_rx_destroy() by one thread, the latter when
 * there are no more readers. */

/* Ids in stamps from this one on are not those of meters but of ports. */
#define SHAPER_RX_MIN_ID (UINT32_C(1) << 31)

struct shaper_rx;

struct shaper_rx *shaper_rx_update(struct shaper_rx *, struct edt_chains *,
                                   struct netdev *,
                                   const struct smap *other_config);
void shaper_rx_destroy(struct shaper_rx *);

bool shaper_rx_stamp(struct shaper_rx *, struct dp_packet_batch *,
                     odp_port_t, struct shaper_thread *, struct shaper_source,
                     uint32_t thread_id, uint64_t now_ns);
uint64_t shaper_rx_delay_bytes(const struct shaper_rx *);

void shaper_rx_get_status(const struct netdev *, struct smap *);
void shaper_rx_format_id(struct ds *, uint32_t id);
void shaper_rx_get_names(struct sset *);
void shaper_rx_show(const char *name, struct ds *, struct json *);

#endif /* shaper-rx.h */
