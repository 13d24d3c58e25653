# Read by OVS's makefiles before themselves (see OVS_MAKE in Makefile): makes
# warnings errors in our own files.  It is read by every make below OVS's, too,
# so it sets these variables and nothing more.

fb_top := $(dir $(lastword $(MAKEFILE_LIST)))../
fb_ours := $(patsubst $(fb_top)%.c,%,$(wildcard $(fb_top)lib/*.c $(fb_top)tests/*.c))
$(fb_ours:%=%.lo) $(fb_ours:%=%.o): CFLAGS += -Werror
