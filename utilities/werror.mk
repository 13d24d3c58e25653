# Read by OVS's makefiles before themselves (see OVS_MAKE in Makefile).  It is
# read by every make below OVS's, too, so it sets these variables and nothing
# more.

ours := $(notdir $(basename $(wildcard $(dir $(lastword $(MAKEFILE_LIST)))../lib/*.c)))
$(ours:%=lib/%.lo) $(ours:%=lib/%.o): CFLAGS += -Werror
