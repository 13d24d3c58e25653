# Read by OVS's makefile after itself, whose variables it uses: builds programs
# that measure, and the test of what they compare with.  FB is the project's
# directory, FB_BENCH where they go.

FB_SCHED = $(FB)/benchmarks/sched
FB_BENCH_HDRS = $(wildcard $(FB)/lib/*.h $(FB)/tests/*.h $(FB_SCHED)/*.h)
FB_BENCH_FLAGS = -Werror -I$(FB_SCHED) -I$(FB)/lib -I$(FB)/tests
FB_BENCH_BUILD = $(LIBTOOL) --quiet --tag=CC --mode=link $(COMPILE) $(FB_BENCH_FLAGS)

# The schedulers behind one interface.
FB_SCHED_SRCS = $(addprefix $(FB_SCHED)/,carousel.c edt-sched.c eiffel.c mltw-sched.c)
# The same, and our sources compiled in, so that those need not be what the library
# in OVS's tree was built from.
FB_BENCH_SRCS = $(FB_SCHED)/edt-sched-bench.c $(FB_SCHED)/edt-sched-baselines.c \
	$(FB_SCHED_SRCS) \
	$(addprefix $(FB)/lib/,edt-chains.c edt-meter.c edt-stamp.c \
		flow-shaper.c mltw.c \
		shaper-delay.c shaper-flow-key.c shaper-thread.c)

.PHONY: fb-bench fb-peers
fb-bench: $(FB_BENCH)/edt-sched-bench $(FB_BENCH)/edt-sched-bench-callgrind
fb-peers: $(FB_BENCH)/test-edt-sched $(FB_BENCH)/peers/vswitchd/ovs-vswitchd

$(FB_BENCH)/edt-sched-bench: $(FB_BENCH_SRCS) $(FB_BENCH_HDRS) \
		lib/libopenvswitch.la
	@mkdir -p $(FB_BENCH)
	$(FB_BENCH_BUILD) -o $@ $(FB_BENCH_SRCS) lib/libopenvswitch.la $(LIBS)

# Without AVX-512, of which valgrind knows nothing.
$(FB_BENCH)/edt-sched-bench-callgrind: $(FB_BENCH_SRCS) $(FB_BENCH_HDRS) \
		lib/libopenvswitch.la
	@mkdir -p $(FB_BENCH)
	$(FB_BENCH_BUILD) -mno-avx512f -o $@ $(FB_BENCH_SRCS) \
		lib/libopenvswitch.la $(LIBS)

FB_TEST_SRCS = $(FB_SCHED)/test-edt-sched.c $(FB_SCHED)/edt-sched-baselines.c \
	$(FB_SCHED_SRCS)
$(FB_BENCH)/test-edt-sched: $(FB_TEST_SRCS) $(FB_BENCH_HDRS) lib/libopenvswitch.la
	@mkdir -p $(FB_BENCH)
	$(FB_BENCH_BUILD) -o $@ $(FB_TEST_SRCS) lib/libopenvswitch.la $(LIBS)

# An ovs-vswitchd with any of them in the wheel's place (benchmarks/sched/peers.h),
# in a directory that fb-sandbox takes for a tree.
FB_PEERS = $(FB_BENCH)/peers
FB_PEERS_OBJS = $(patsubst %.c,$(FB_PEERS)/%.o,$(notdir $(FB_SCHED_SRCS)) \
	flow-shaper.c mltw.c peers.c)
$(FB_PEERS)/vswitchd/ovs-vswitchd: $(FB_PEERS_OBJS) $(vswitchd_ovs_vswitchd_DEPENDENCIES)
	@mkdir -p $(@D)
	@ln -sfn $(CURDIR)/ovsdb $(CURDIR)/utilities $(FB_PEERS)
	@ln -sf $(CURDIR)/vswitchd/vswitch.ovsschema $(@D)
	$(vswitchd_ovs_vswitchd_LINK) $(vswitchd_ovs_vswitchd_OBJECTS) $(FB_PEERS_OBJS) \
		$(vswitchd_ovs_vswitchd_LDADD) $(LIBS)

FB_RENAME = -include $(FB_SCHED)/wheel-rename.h
$(FB_PEERS)/peers.o: FB_RENAME =
$(FB_PEERS)/flow-shaper.o: FB_RENAME = -include $(FB_SCHED)/peers.h
$(FB_PEERS)/%.o: $(FB_SCHED)/%.c $(FB_BENCH_HDRS)
	@mkdir -p $(@D)
	$(COMPILE) $(FB_BENCH_FLAGS) $(FB_RENAME) -c -o $@ $<
$(FB_PEERS)/%.o: $(FB)/lib/%.c $(FB_BENCH_HDRS)
	@mkdir -p $(@D)
	$(COMPILE) $(FB_BENCH_FLAGS) $(FB_RENAME) -c -o $@ $<
