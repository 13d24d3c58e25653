# Read by make in build/ovs after OVS's own Makefile (see c-tests in Makefile):
# builds our C test programs, tests/test-*.c, each with the models it shares
# with the others, the way OVS builds its own.

fb_dir := $(dir $(lastword $(MAKEFILE_LIST)))../tests/
fb_tests := $(basename $(notdir $(wildcard $(fb_dir)test-*.c)))
fb_models := $(basename $(notdir $(wildcard $(fb_dir)*-model.c)))

.PHONY: fb-c-tests
fb-c-tests: $(fb_tests:%=tests/%)

$(fb_tests:%=tests/%): tests/%: tests/%.o $(fb_models:%=tests/%.o) \
		lib/libopenvswitch.la
	$(AM_V_CCLD)$(LINK) $^ $(LIBS)

-include $(fb_tests:%=tests/.deps/%.Po) $(fb_models:%=tests/.deps/%.Po)
