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

/* Tests of the encoding of meters with a shape band (struct
 * nx_meter_band_shape).  What is decoded ends where a page ends that no page
 * follows, so that reading past the end is fatal. */

#include <config.h>

#undef NDEBUG
#include "fb-test.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "openflow/nicira-ext.h"
#include "openvswitch/dynamic-string.h"
#include "openvswitch/list.h"
#include "openvswitch/ofp-meter.h"
#include "openvswitch/ofp-msgs.h"
#include "openvswitch/ofp-print.h"
#include "openvswitch/ofpbuf.h"
#include "openvswitch/vlog.h"

#define MAX_BANDS 20

/* The first byte after the buffer. */
static char *fence;

static void
fence_init(void)
{
    size_t page = sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 17 * page, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(pages != MAP_FAILED, "mmap: %s", ovs_strerror(errno));
    fence = pages + 16 * page;
    CHECK(!mprotect(fence, page, PROT_NONE), "mprotect: %s",
          ovs_strerror(errno));
}

/* Returns a copy of the 'size' bytes at 'data' that ends at the fence, or a
 * few bytes before, since messages are aligned.  Valid until the next call. */
static void *
fenced(const void *data, size_t size)
{
    return memcpy(fence - ROUND_UP(size, 8), data, size);
}

/* Decodes the 'size' bytes at 'data' as a message, if they are one, as all
 * that decodes meters does. */
static void
decode(const void *data, size_t size)
{
    char *s = ofp_to_string(fenced(data, size), size, NULL, NULL, 1);

    CHECK(s[0], "nothing printed");
    free(s);
}

static void
choose_band(struct ofputil_meter_band *band)
{
    memset(band, 0, sizeof *band);
    switch (choose(3)) {
    case 0:
        band->type = OFPMBT13_DROP;
        break;
    case 1:
        band->type = OFPMBT13_DSCP_REMARK;
        band->prec_level = choose(256);
        break;
    default:
        band->type = OFPMBT13_EXPERIMENTER;
        band->max_delay = choose(2) ? random_uint32() : 0;
        band->ecn_threshold = choose(2) ? random_uint32() : 0;
        band->fair = choose(2);
        break;
    }
    band->rate = choose_log(UINT32_MAX);
    band->burst_size = choose(4) ? random_uint32() : 0;
}

static void
choose_config(struct ofputil_meter_config *mc,
              struct ofputil_meter_band *bands)
{
    mc->meter_id = random_uint32();
    mc->flags = choose(4) << 2 | (choose(2) ? OFPMF13_KBPS : OFPMF13_PKTPS);
    mc->n_bands = choose(MAX_BANDS + 1);
    mc->bands = bands;
    for (size_t i = 0; i < mc->n_bands; i++) {
        choose_band(&bands[i]);
    }
}

static void
check_config(const struct ofputil_meter_config *got,
             const struct ofputil_meter_config *mc)
{
    CHECK(got->meter_id == mc->meter_id && got->flags == mc->flags
          && got->n_bands == mc->n_bands, "wrong meter");
    for (size_t i = 0; i < mc->n_bands; i++) {
        const struct ofputil_meter_band *a = &got->bands[i];
        const struct ofputil_meter_band *b = &mc->bands[i];

        CHECK(a->type == b->type && a->prec_level == b->prec_level
              && a->rate == b->rate && a->burst_size == b->burst_size
              && a->max_delay == b->max_delay
              && a->ecn_threshold == b->ecn_threshold
              && a->fair == b->fair,
              "band %"PRIuSIZE" of %"PRIu16" is wrong", i, mc->n_bands);
    }
}

static enum ofp_version
choose_version(void)
{
    return OFP13_VERSION + choose(3);
}

/* The length of 'config' on the wire. */
static size_t
config_length(const struct ofputil_meter_config *mc)
{
    size_t length = sizeof(struct ofp13_meter_config);

    for (size_t i = 0; i < mc->n_bands; i++) {
        length += mc->bands[i].type == OFPMBT13_EXPERIMENTER ? 32 : 16;
    }
    return length;
}

/* What is encoded is decoded to the same, as a request and in a reply. */
static void
test_round_trip(void)
{
    for (unsigned int i = 0; i < rounds(20000); i++) {
        struct ofputil_meter_band bands[3][MAX_BANDS];
        enum ofp_version version = choose_version();
        struct ofputil_meter_mod mm, got;
        struct ofpbuf decoded, *msg;

        mm.command = choose(2) ? OFPMC13_ADD : OFPMC13_MODIFY;
        choose_config(&mm.meter, bands[0]);
        msg = ofputil_encode_meter_mod(version, &mm);
        CHECK(msg->size == sizeof(struct ofp_header)
                           + config_length(&mm.meter),
              "meter_mod has %"PRIu32" bytes", msg->size);
        ofpbuf_init(&decoded, 0);
        enum ofperr error
            = ofputil_decode_meter_mod(fenced(msg->data, msg->size), &got,
                                       &decoded);
        CHECK(!error, "meter_mod does not decode: %s",
              ofperr_to_string(error));
        CHECK(got.command == mm.command, "wrong command");
        check_config(&got.meter, &mm.meter);
        ofpbuf_delete(msg);

        /* Several meters in a reply. */
        struct ofputil_meter_config configs[3];
        struct ovs_list replies;
        size_t n = 0;

        msg = ofputil_encode_meter_request(version, OFPUTIL_METER_CONFIG,
                                           OFPM13_ALL);
        ofpmp_init(&replies, msg->data);
        ofpbuf_delete(msg);
        for (size_t j = 0; j < ARRAY_SIZE(configs); j++) {
            choose_config(&configs[j], bands[j]);
            ofputil_append_meter_config(&replies, &configs[j]);
        }
        LIST_FOR_EACH_POP (msg, list_node, &replies) {
            struct ofputil_meter_config mc;
            struct ofpbuf b;
            int retval;

            ofpmsg_update_length(msg);
            ofpbuf_use_const(&b, fenced(msg->data, msg->size), msg->size);
            while (!(retval = ofputil_decode_meter_config(&b, &mc,
                                                          &decoded))) {
                CHECK(n < ARRAY_SIZE(configs), "more meters than were put in");
                check_config(&mc, &configs[n++]);
            }
            CHECK(retval == EOF, "reply does not decode");
            ofpbuf_delete(msg);
        }
        CHECK(n == ARRAY_SIZE(configs), "fewer meters than were put in");
        ofpbuf_uninit(&decoded);
    }
}

/* Of all flags that a shape band could have, those are taken that exist, and
 * for what they mean; any other is refused and not ignored. */
static void
test_flags(void)
{
    struct ofputil_meter_band band = {
        .type = OFPMBT13_EXPERIMENTER,
        .rate = 1,
    };
    const struct ofputil_meter_mod mm = {
        .command = OFPMC13_ADD,
        .meter = { 1, OFPMF13_KBPS, 1, &band },
    };

    for (enum ofp_version version = OFP13_VERSION; version <= OFP15_VERSION;
         version++) {
        struct ofpbuf *msg = ofputil_encode_meter_mod(version, &mm);
        struct nx_meter_band_shape *nmbs
            = ALIGNED_CAST(struct nx_meter_band_shape *,
                           (char *) msg->data + msg->size - sizeof *nmbs);
        struct ofpbuf decoded;

        ofpbuf_init(&decoded, 0);
        for (int flags = 0; flags <= UINT16_MAX; flags++) {
            struct ofputil_meter_mod got;
            enum ofperr error;

            nmbs->flags = htons(flags);
            ofpbuf_clear(&decoded);
            error = ofputil_decode_meter_mod(fenced(msg->data, msg->size),
                                             &got, &decoded);
            if (flags > 1) {
                CHECK(error == OFPERR_OFPMMFC_BAD_FLAGS, "flags 0x%04x: %s",
                      flags, error ? ofperr_to_string(error) : "no error");
            } else {
                CHECK(!error && got.meter.bands[0].fair == flags,
                      "flags 0x%04x are not decoded", flags);
            }
        }
        ofpbuf_uninit(&decoded);
        ofpbuf_delete(msg);
    }
}

/* A meter_mod of which the end is missing, and whose header says so, is
 * refused unless what is left ends with a band. */
static void
test_truncated(void)
{
    for (unsigned int i = 0; i < rounds(500); i++) {
        struct ofputil_meter_band bands[MAX_BANDS];
        struct ofputil_meter_mod mm, got;
        struct ofpbuf decoded, *msg;
        size_t n_whole = 0;

        mm.command = OFPMC13_ADD;
        choose_config(&mm.meter, bands);
        msg = ofputil_encode_meter_mod(choose_version(), &mm);
        ofpbuf_init(&decoded, 0);

        size_t length = sizeof(struct ofp_header)
                        + sizeof(struct ofp13_meter_mod);
        size_t next = length;
        for (; length <= msg->size; length++) {
            struct ofp_header *oh = fenced(msg->data, length);

            oh->length = htons(length);
            ofpbuf_clear(&decoded);

            /* The first looks at the header and whether all is in units of 8
             * bytes. */
            enum ofptype type;
            enum ofperr error = ofptype_decode(&type, oh);
            if (!error) {
                error = ofputil_decode_meter_mod(oh, &got, &decoded);
            }
            if (length == next) {
                CHECK(!error && got.meter.n_bands == n_whole,
                      "%"PRIuSIZE" whole bands are refused: %s", n_whole,
                      ofperr_to_string(error));
                if (n_whole < mm.meter.n_bands) {
                    next += bands[n_whole++].type == OFPMBT13_EXPERIMENTER
                            ? 32 : 16;
                }
            } else {
                CHECK(error == OFPERR_OFPBRC_BAD_LEN,
                      "%"PRIuSIZE" bytes of %"PRIu32" are taken", length,
                      msg->size);
            }
            decode(oh, length);
        }
        ofpbuf_uninit(&decoded);
        ofpbuf_delete(msg);
    }
}

/* Messages in which bytes have changed do no harm, be they requests or
 * replies. */
static void
test_mutated(void)
{
    for (unsigned int i = 0; i < rounds(100000); i++) {
        struct ofputil_meter_band bands[MAX_BANDS];
        enum ofp_version version = choose_version();
        struct ofpbuf *msg;

        if (choose(2)) {
            struct ofputil_meter_mod mm = { .command = OFPMC13_ADD };

            choose_config(&mm.meter, bands);
            msg = ofputil_encode_meter_mod(version, &mm);
        } else {
            struct ofputil_meter_config mc;
            struct ovs_list replies;

            msg = ofputil_encode_meter_request(version, OFPUTIL_METER_CONFIG,
                                               OFPM13_ALL);
            ofpmp_init(&replies, msg->data);
            ofpbuf_delete(msg);
            for (int j = choose(3); j >= 0; j--) {
                choose_config(&mc, bands);
                ofputil_append_meter_config(&replies, &mc);
            }
            msg = ofpbuf_from_list(ovs_list_pop_back(&replies));
            CHECK(ovs_list_is_empty(&replies), "reply has several messages");
            ofpmsg_update_length(msg);
        }

        struct ofp_header *header = msg->data;
        uint8_t *data = msg->data;

        for (int j = choose(8); j >= 0; j--) {
            /* Not the header: then it would be another message. */
            size_t ofs = sizeof(struct ofp_header)
                         + choose(msg->size - sizeof(struct ofp_header));

            data[ofs] = choose(2) ? random_uint8()
                        : choose(2) ? data[ofs] ^ (1 << choose(8))
                        : choose(2) * 0xff;
        }
        size_t size = choose(2) ? msg->size
                      : 8 + choose(msg->size - 7);
        header->length = htons(size);
        decode(data, size);
        ofpbuf_delete(msg);
    }
}

int
main(int argc, char *argv[])
{
    static const struct test tests[] = {
        { "round-trip", test_round_trip },
        { "flags", test_flags },
        { "truncated", test_truncated },
        { "mutated", test_mutated },
    };

    vlog_set_levels(NULL, VLF_ANY_DESTINATION, VLL_OFF);
    fence_init();
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
