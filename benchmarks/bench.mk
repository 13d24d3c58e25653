# Read by OVS's makefile after itself, whose variables it uses: builds programs
# that measure.  FB is the project's directory, FB_BENCH where they go.  They
# have our sources compiled in, so that those need not be what the library in
# OVS's tree was built from.

FB_BENCH_SRCS = $(FB)/benchmarks/edt-sched-bench.c \
	$(addprefix $(FB)/tests/,edt-sched-baselines.c) \
	$(addprefix $(FB)/lib/,carousel.c edt-meter.c edt-sched.c edt-stamp.c \
		eiffel.c flow-shaper.c mltw.c shaper-delay.c \
		shaper-flow-key.c shaper-thread.c)
FB_BENCH_HDRS = $(wildcard $(FB)/lib/*.h $(FB)/tests/*.h)
FB_BENCH_BUILD = $(LIBTOOL) --quiet --tag=CC --mode=link $(COMPILE) -Werror \
	-I$(FB)/lib -I$(FB)/tests

.PHONY: fb-bench
fb-bench: $(FB_BENCH)/edt-sched-bench $(FB_BENCH)/edt-sched-bench-callgrind

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
