# Read by OVS's makefile after itself, whose variables it uses: has clang check our
# files and those of OVS that we change, with the warnings that OVS's configure asks
# of clang, as errors.  Above all -Wthread-safety, which gcc has not: whether the
# lock that OVS_GUARDED or OVS_REQUIRES names is held.  FB is the project's directory.

# clang does not know some of the options that configure found gcc to know.
FB_CLANG_FLAGS = -fsyntax-only -Werror -Wthread-safety -Wno-null-pointer-arithmetic \
	-Warray-bounds-pointer-arithmetic -Wno-unknown-warning-option
FB_CLANG_FILES = $(patsubst $(FB)/%,%,$(wildcard $(FB)/lib/*.c $(FB)/tests/*.c)) \
	$(filter %.c,$(shell git diff --name-only upstream))

.PHONY: fb-clang
fb-clang:
	@set -e; for file in $(FB_CLANG_FILES); do $(COMPILE) $(FB_CLANG_FLAGS) $$file; done
	@echo 'clang: nothing to say about $(words $(FB_CLANG_FILES)) files'
