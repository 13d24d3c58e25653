# Read by OVS's makefile after itself, whose variables it uses: builds the
# fuzzers, with clang's libFuzzer and AddressSanitizer, and runs each of them for
# FB_SECONDS.  FB is the project's directory, FB_FUZZ where everything goes: what
# was found to be interesting stays there for the next run.

FB_FUZZERS = fuzz-mltw fuzz-packet
FB_CORPUS_MAX_LEN = 2052
fb_fuzz_srcs_fuzz-mltw = $(FB)/tests/mltw-model.c $(FB)/lib/mltw.c
fb_fuzz_srcs_fuzz-packet = $(FB)/tests/packet-model.c \
	$(FB)/lib/shaper-ecn.c $(FB)/lib/shaper-flow-key.c
# miniflow_extract() is OVS's, and has fuzzers of its own there.
FB_FUZZ_FLAGS = -g -O1 -fsanitize=fuzzer,address,undefined \
	-fno-sanitize=alignment -fno-sanitize-recover=undefined

.PHONY: fb-fuzz
fb-fuzz: $(FB_FUZZERS:%=$(FB_FUZZ)/%)
	@set -e; for fuzzer in $(FB_FUZZERS); do \
		echo "$$fuzzer: $(FB_SECONDS) s"; \
		mkdir -p $(FB_FUZZ)/corpus-$$fuzzer; \
		$(FB_FUZZ)/$$fuzzer -max_total_time=$(FB_SECONDS) \
			-max_len=$(FB_CORPUS_MAX_LEN) -timeout=10 -print_final_stats=1 \
			-artifact_prefix=$(FB_FUZZ)/$$fuzzer- \
			$(FB_FUZZ)/corpus-$$fuzzer; \
	done

.SECONDEXPANSION:
$(FB_FUZZ)/fuzz-%: $(FB)/tests/fuzz-%.c $$(fb_fuzz_srcs_fuzz-$$*) \
		$(wildcard $(FB)/lib/*.h $(FB)/tests/*.h) lib/libopenvswitch.la
	@mkdir -p $(FB_FUZZ)
	$(LIBTOOL) --quiet --tag=CC --mode=link $(COMPILE) $(FB_FUZZ_FLAGS) \
		-I$(FB)/lib -I$(FB)/tests -o $@ $(filter %.c,$^) \
		lib/libopenvswitch.la $(LIBS)
