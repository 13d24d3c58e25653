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

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rte_ethdev.h>
#include <rte_telemetry.h>

#include "fb-probe-config.h"
#include "fb-probe-record.h"

/* The plug-in, for EAL's option -d
 * ================================
 *
 * Telemetry commands (docs/probe.md tells more):
 *
 *    /fbprobe/start,PORT,KEY=VALUE;KEY=VALUE...
 *    /fbprobe/stop,PORT
 *    /fbprobe/status            the ports that are being recorded
 *    /fbprobe/status,PORT
 *
 * where PORT is DPDK's name or number of a port.  What is wrong is told in
 * the reply, as "error".
 *
 * The environment variable FBPROBE, "port=PORT,KEY=VALUE..." (several,
 * separated by spaces), does the same as soon as there is such a port, for
 * applications without telemetry. */

#define POLL_US 10000

static int
reply_error(struct rte_tel_data *d, const char *error)
{
    rte_tel_data_start_dict(d);
    return rte_tel_data_add_dict_string(d, "error", error);
}

static int
reply_status(struct rte_tel_data *d, const struct fb_probe_status *status)
{
    rte_tel_data_start_dict(d);
    rte_tel_data_add_dict_string(d, "file", status->file);
    rte_tel_data_add_dict_string(d, "device", status->device);
    rte_tel_data_add_dict_int(d, "rings", status->n_rings);
    rte_tel_data_add_dict_int(d, "recorded", status->n_recorded);
    return rte_tel_data_add_dict_int(d, "tx_queues", status->n_tx_queues);
}

/* Splits PORT off 'params'.  Returns what follows, which the caller frees as
 * '*copy', or NULL if there is no such port. */
static const char *
parse_port(const char *params, uint16_t *port, char **copy, char *error)
{
    char *rest;

    *copy = rest = strdup(params ? params : "");
    if (!rest) {
        fb_probe_error(error, "out of memory");
        return NULL;
    }
    return (fb_probe_find_port(strsep(&rest, ",;"), port, error)
            ? (rest ? rest : "") : NULL);
}

static int
handle_start(const char *cmd __rte_unused, const char *params,
             struct rte_tel_data *d)
{
    char error[FB_PROBE_TEXT_MAX];
    struct fb_probe_status status;
    struct fb_probe_config config;
    const char *rest;
    uint16_t port;
    char *copy;
    bool ok;

    rest = parse_port(params, &port, &copy, error);
    ok = (rest && fb_probe_config_parse(rest, &config, error)
          && fb_probe_start(port, &config, &status, error));
    free(copy);
    return ok ? reply_status(d, &status) : reply_error(d, error);
}

static int
handle_stop(const char *cmd __rte_unused, const char *params,
            struct rte_tel_data *d)
{
    char error[FB_PROBE_TEXT_MAX];
    struct fb_probe_status status;
    uint16_t port;
    char *copy;
    bool ok;

    ok = (parse_port(params, &port, &copy, error)
          && fb_probe_stop(port, &status, error));
    free(copy);
    return ok ? reply_status(d, &status) : reply_error(d, error);
}

static int
handle_status(const char *cmd __rte_unused, const char *params,
              struct rte_tel_data *d)
{
    char error[FB_PROBE_TEXT_MAX];
    struct fb_probe_status status;
    uint16_t port;
    char *copy;
    bool ok;

    if (!params || !*params) {
        rte_tel_data_start_array(d, RTE_TEL_INT_VAL);
        for (int i = fb_probe_next(-1); i >= 0; i = fb_probe_next(i)) {
            rte_tel_data_add_array_int(d, i);
        }
        return 0;
    }
    ok = (parse_port(params, &port, &copy, error)
          && fb_probe_status(port, &status, error));
    free(copy);
    return ok ? reply_status(d, &status) : reply_error(d, error);
}

/* The environment variable.  When the plug-in is loaded there are no ports
 * yet, and DPDK cannot be asked to tell of new ones: a thread looks. */

static void
log_error(const char *error)
{
    fprintf(stderr, "fbprobe: FBPROBE: %s\n", error);
}

/* Returns true, and sets 'port', once the port called 'name' can be
 * recorded. */
static bool
port_is_there(const char *name, uint16_t *port)
{
    char device[RTE_ETH_NAME_MAX_LEN];
    struct rte_eth_dev_info info;

    /* Before DPDK is initialized there are no ports to iterate over, and
     * nothing else may be called. */
    RTE_ETH_FOREACH_DEV (*port) {
        if (!rte_eth_dev_get_name_by_port(*port, device)
            && !strcmp(device, name)) {
            return !rte_eth_dev_info_get(*port, &info) && info.nb_tx_queues;
        }
    }
    return false;
}

/* Starts one recording, "port=PORT,KEY=VALUE...". */
static void *
start_from_environment(void *text_)
{
    char *text = text_, *rest = text;
    char error[FB_PROBE_TEXT_MAX];
    struct fb_probe_config config;
    struct fb_probe_status status;
    const char *name = strsep(&rest, ",;");
    uint16_t port;

    if (strncmp(name, "port=", 5)) {
        fb_probe_error(error, "'%.32s' is not allowed: port=NAME has to come "
                       "first", name);
        log_error(error);
    } else if (!fb_probe_config_parse(rest ? rest : "", &config, error)) {
        log_error(error);
    } else {
        while (!port_is_there(name + 5, &port)) {
            usleep(POLL_US);
        }
        if (!fb_probe_start(port, &config, &status, error)) {
            log_error(error);
        }
    }
    free(text);
    return NULL;
}

static void
read_environment(void)
{
    const char *value = getenv("FBPROBE");
    char *copy = value ? strdup(value) : NULL, *rest = copy, *item;

    while (copy && (item = strsep(&rest, " "))) {
        pthread_t thread;
        char *text = *item ? strdup(item) : NULL;

        if (text) {
            if (pthread_create(&thread, NULL, start_from_environment, text)) {
                free(text);
                log_error("cannot start a thread");
            } else {
                pthread_detach(thread);
            }
        }
    }
    free(copy);
}

__attribute__((constructor)) static void
load(void)
{
    rte_telemetry_register_cmd("/fbprobe/start", handle_start,
                               "Records departures. Parameters: PORT,"
                               "KEY=VALUE;...");
    rte_telemetry_register_cmd("/fbprobe/stop", handle_stop,
                               "Ends a recording. Parameters: PORT");
    rte_telemetry_register_cmd("/fbprobe/status", handle_status,
                               "What is being recorded. Parameters: none, or "
                               "PORT");
    read_environment();
}
