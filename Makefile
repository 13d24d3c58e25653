# FlowBundler: OVS-DPDK with a traffic shaper.  "make help" lists what there is.

# Where everything is built; nothing outside it is touched, except that "make"
# installs missing Debian packages and "make install" installs.
B ?= build
PREFIX ?= /usr/local
DESTDIR ?=
# A tree of OVS 3.5 or 4.0 to build instead of Debian's.  It is copied.
OVS_SRC ?=
# The suite of Debian to take OVS from, if not Debian 13 (trixie): sid has 4.0.
OVS_SUITE ?=
# How OVS links DPDK; empty for OVS without it.
DPDK ?= shared
CFLAGS ?= -O2 -g -march=native

BUILD := $(abspath $(B))
OVS := $(BUILD)/ovs
STOCK := $(BUILD)/ovs-stock
# Our tools find what is built through these.
export FB_BUILD := $(BUILD)
export FB_VENV := $(BUILD)/venv
# OVS's build scripts need no more than Debian's own interpreter, which is the
# one that the packages installed here belong to.
PYTHON3 := /usr/bin/python3
CONFIGURE = ./configure -q --enable-silent-rules $(DPDK:%=--with-dpdk=%) \
	--prefix=$(PREFIX)$(if $(filter /usr,$(PREFIX)), --sysconfdir=/etc --localstatedir=/var) \
	PYTHON3=$(PYTHON3) CFLAGS="$(CFLAGS)"
# In a tree of OVS, unless it was configured so before.
CONFIGURE_IN = cd $(1) && echo '$(CONFIGURE)' | cmp -s - configured || { \
	set -e; ./boot.sh; $(CONFIGURE); echo '$(CONFIGURE)' >configured; }
# As parallel as the machine allows, unless make was told how parallel to be.
JOBS = $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(shell nproc))
# Warnings are errors in our own files, and only there.  The environment
# variable MAKEFILES is how this reaches OVS's makefiles unpatched.
OVS_MAKE = +MAKEFILES=$(CURDIR)/utilities/werror.mk $(MAKE) $(JOBS) -C $(OVS)

.PHONY: all help deps ovs ovs-stock venv probe vm guest mininet demo check check-sanitizers \
	check-asan check-asan-switch check-tsan check-clang check-nodpdk check-upstream \
	check-upstream-changed check-matrix check-full check-links soak rounds durable fuzz bench \
	bench-quick bench-mininet bench-tools peers quick mutate compile-commands install debian13 sid \
	clean root

all: ovs

help:
	@echo 'make           install packages, build OVS with our shaper into $(B)/'
	@echo 'make venv      the Python environment of the controller and the tests'
	@echo 'make compile-commands  compile_commands.json, for editors'
	@echo 'make probe     the plug-in for DPDK that records departures'
	@echo 'make vm        what sends and counts in tests of reconfiguration'
	@echo 'make guest     QEMU and what it boots, for the tests with virtual machines (root)'
	@echo 'make mininet   mininet, for its tests and to try it (root): docs/mininet.md'
	@echo 'make demo      show it: tenants, rates and real traffic (root)'
	@echo 'make quick     what a change needs first, in two minutes (FILES=)'
	@echo 'make check     run all our tests (root)'
	@echo 'make check-sanitizers  with AddressSanitizer, UBSan and ThreadSanitizer'
	@echo 'make check-clang  let clang check our code, above all its locks'
	@echo 'make check-nodpdk  build without DPDK, and what of the tests needs none'
	@echo 'make check-upstream  OVS own suites, compared with OVS without our patches (SUITES=);'
	@echo '               check-upstream-changed: the tests of what we change'
	@echo 'make check-full  all of these, and the tests that "make check" leaves out'
	@echo 'make check-links  links that are flooded for ten minutes (MINUTES=10 SEED=)'
	@echo 'make soak      random changes under traffic, every packet counted (MINUTES=30 SEED=)'
	@echo 'make rounds    guests that go as their ports do (ROUNDS=50 SEED=)'
	@echo 'make durable   the controller and its database killed, 50 times'
	@echo 'make fuzz      run the fuzzers, each for FUZZ_SECONDS=60'
	@echo 'make mutate    change single points of the code: do tests notice? (MUTANTS=300 SEED= FILES=)'
	@echo 'make bench     run all benchmarks, 1.5 hours (root); bench-quick: some, 5 minutes'
	@echo 'make bench-mininet  what links of mininet reach, TCLink beside them (root)'
	@echo 'make bench-tools  what benchmarks/run.py needs, to run single ones'
	@echo 'make ovs-stock OVS without our patches, which the benchmarks compare with'
	@echo 'make debian13  build and try it in a Debian 13 chroot (root); sid: with OVS 4.0'
	@echo 'make check-matrix  build and test with all pairs of OVS and DPDK (root)'
	@echo 'make install   install to PREFIX=$(PREFIX), below DESTDIR='
	@echo 'make clean     remove $(B)/'
	@echo 'Variables: B=DIR OVS_SRC=DIR OVS_SUITE=sid DPDK=shared CFLAGS=... PREFIX=DIR DESTDIR=DIR'

deps:
	@utilities/install-deps

# For editors and clang's tools: how each file is compiled.
compile-commands: all
	@$(OVS_MAKE) -s -f Makefile -f $(CURDIR)/utilities/compile-commands.mk FB=$(CURDIR) \
		fb-compile-commands >compile_commands.json

# OVS's makefiles know their own dependencies: they are always asked, and it
# takes them seconds to find that there is nothing to do.
ovs: deps
	@utilities/ovs-tree --build $(BUILD) prepare $(if $(OVS_SRC),--ovs-src '$(OVS_SRC)') \
		$(if $(OVS_SUITE),--suite '$(OVS_SUITE)')
	@$(call CONFIGURE_IN,$(OVS))
	$(OVS_MAKE) all

# Without our patches, to compare with.
ovs-stock: ovs
	@utilities/ovs-tree --build $(BUILD) stock
	@$(call CONFIGURE_IN,$(STOCK))
	+$(MAKE) $(JOBS) -C $(STOCK) all

venv: deps
	@utilities/fb-venv

# What records departures, independently of the shaper (docs/probe.md).
probe: all
	@$(MAKE) -s -C utilities/probe BUILD=$(BUILD)

# A virtual machine that counts packets, for the tests.
vm: deps
	@$(MAKE) -s -C utilities/vm BUILD=$(BUILD)

# Virtual machines for the tests: nothing else needs their packages.
guest: root deps
	@utilities/install-deps --guest
	@utilities/guest-image $(BUILD)/guest

# Mininet, which our classes are for, and what its commands use.
mininet: root
	@utilities/install-deps --mininet

demo: root all venv
	@utilities/fb-demo

# With NO_SKIP a test that is skipped, for lack of something, fails.
PYTEST = $(FB_VENV)/bin/python -m pytest $(if $(NO_SKIP),--no-skip)

# pytest also runs the C tests and the autotests (tests/test_c.py), so that
# there is one list of results.
check: root all venv probe vm guest mininet peers
	@$(PYTEST) tests

# What a change needs first, in two minutes at most; FILES= if not what git says.
quick: all venv
	@$(FB_VENV)/bin/python utilities/quick $(FILES)

# Instrumented, each in a tree of its own, with -O1, so that what is in error is
# still there: with AddressSanitizer and UBSan the C programs and our autotests, and
# vswitchd under real traffic where a test does not depend on how fast it is; with
# ThreadSanitizer what threads share.  OVS's autotests look into what the sanitizers
# log (tests/atlocal.in), and so does fb-sandbox.
asan_CFLAGS = -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined
tsan_CFLAGS = -O1 -g -fno-omit-frame-pointer -fsanitize=thread
asan_TESTS = tests/test_c.py
# (In what is left out, packets have to wait for longer than PMD threads take to move.)
asan-switch_TESTS = tests/test_production_reconfiguration.py tests/test_hostile_ovsdb.py \
	tests/test_hostile_openflow.py tests/test_shaping_lifecycle.py \
	--deselect tests/test_shaping_lifecycle.py::test_pmd_threads_change
tsan_TESTS = tests/test_c.py -k 'test_unit and threads'
export ASAN_OPTIONS ?= detect_leaks=1
export LSAN_OPTIONS ?= print_suppressions=0:suppressions=$(CURDIR)/tests/lsan.supp
export UBSAN_OPTIONS ?= print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS ?= halt_on_error=1:suppressions=$(CURDIR)/tests/tsan.supp
SANITIZED = check-asan check-tsan

check-sanitizers: $(SANITIZED) check-asan-switch

$(SANITIZED): check-%: root venv $(BUILD)/%/apt-trixie
	+@$(MAKE) B=$(BUILD)/$* CFLAGS='$($*_CFLAGS)' ovs peers
	@FB_BUILD=$(BUILD)/$* $(PYTEST) $($*_TESTS)

check-asan-switch: root venv $(BUILD)/asan/apt-trixie
	+@$(MAKE) B=$(BUILD)/asan CFLAGS='$(asan_CFLAGS)' ovs probe vm
	@FB_BUILD=$(BUILD)/asan $(PYTEST) $(asan-switch_TESTS)

# OVS without DPDK, as Debian's package builds it beside the one with: the C programs
# and our autotests, neither of which needs DPDK.
check-nodpdk: venv $(BUILD)/nodpdk/apt-trixie
	+@$(MAKE) B=$(BUILD)/nodpdk DPDK= ovs peers
	@FB_BUILD=$(BUILD)/nodpdk $(PYTEST) tests/test_c.py

# OVS's source is downloaded once.
$(BUILD)/asan/apt-trixie $(BUILD)/nodpdk/apt-trixie $(BUILD)/tsan/apt-trixie:
	@mkdir -p $(@D) $(BUILD)/apt-trixie
	@ln -sfn ../apt-trixie $@

# gcc does not know which lock belongs to what (OVS_GUARDED); clang does.
check-clang: all
	@utilities/install-deps --clang
	@$(OVS_MAKE) -s -f Makefile -f $(CURDIR)/utilities/clang.mk CC=clang FB=$(CURDIR) fb-clang

# Random changes under traffic; every packet is counted.
soak: root all venv vm
	@utilities/fb-sandbox run -- $(FB_VENV)/bin/python tests/soak.py --minutes $(or $(MINUTES),30) \
		$(if $(SEED),--seed $(SEED))

# LACP, BFD and others over links that are flooded; docs/results/runs.csv adds up.
check-links: root all venv vm
	@utilities/fb-sandbox run -- $(FB_VENV)/bin/python tests/links.py --minutes $(or $(MINUTES),10) \
		$(if $(SEED),--seed $(SEED))

# Guests that go as their ports do, over and over; docs/results/runs.csv adds up.
ROUNDS ?= 50
rounds: root all venv
	@$(FB_VENV)/bin/python tests/rounds.py --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

# OVS's own tests: whole suites, also those with real interfaces and with DPDK, or
# those of what the series changes, by their keywords.  What does not pass is compared
# with OVS without our patches.
SUITES = check check-system-userspace check-dpdk
CHANGED = dpif-netdev pmd lacp ofproto-dpif ofp-print ovs-ofctl meter meters qos queue

check-upstream: root all
	@utilities/install-deps --upstream
	@utilities/upstream-check $(SUITES)

check-upstream-changed: root all
	@utilities/upstream-check $(CHANGED:%=-k %)

# The controller and its database killed right after a confirmed change.
durable: root all venv
	@FB_ROUNDS=50 $(PYTEST) tests/test_controller_store.py -k killed

check-full: PYTEST += --full
check-full: check check-sanitizers check-clang check-upstream rounds check-links durable

# Longer than "make check" does it: docs/testing.md.  The library is built
# before, with the compiler that it is always built with.
FUZZ_SECONDS ?= 60
fuzz: all
	@utilities/install-deps --clang
	@$(OVS_MAKE) -s -f Makefile -f $(CURDIR)/tests/fuzz.mk CC=clang FB=$(CURDIR) \
		FB_FUZZ=$(BUILD)/fuzz FB_SECONDS=$(FUZZ_SECONDS) fb-fuzz

# Its own environment: nothing else needs what makes the mutants.
MUTATOR = universalmutator==1.14.1
$(BUILD)/mutate/venv/bin/mutate:
	@$(PYTHON3) -m venv $(BUILD)/mutate/venv
	@$(BUILD)/mutate/venv/bin/python -m pip --disable-pip-version-check install -q $(MUTATOR)

mutate: all venv $(BUILD)/mutate/venv/bin/mutate
	@$(BUILD)/mutate/venv/bin/python tests/mutate.py --mutants $(or $(MUTANTS),300) \
		$(if $(SEED),--seed $(SEED)) $(FILES)

# What the wheel is compared with, behind the same FIFOs, and its test.
BENCH_MAKE = $(OVS_MAKE) -s -f Makefile -f $(CURDIR)/benchmarks/bench.mk FB=$(CURDIR) \
	FB_BENCH=$(BUILD)/bench
peers: all
	$(BENCH_MAKE) fb-peers

# What is measured, and how: docs/results.md.
bench-tools: root all ovs-stock venv probe
	@utilities/install-deps --bench
	$(BENCH_MAKE) fb-bench fb-peers

bench bench-quick: bench-tools
	@$(FB_VENV)/bin/python benchmarks/run.py all $(if $(findstring quick,$@),--quick)

bench-mininet: root all venv mininet
	@$(FB_VENV)/bin/python benchmarks/mininet_tables.py

root:
	@[ "$$(id -u)" -eq 0 ] || { echo 'this needs root: sudo make' >&2; exit 1; }

# OVS as its own makefiles install it, and ours beside it.
DATA = $(DESTDIR)$(PREFIX)/share/flowbundler
TOOLS = fb-controller flowbundler-ctl
# What mininet's classes use of the testbed's library.
MININET_USES = __init__ netns ovs proc

install: all
	$(OVS_MAKE) install DESTDIR=$(DESTDIR)
	install -d $(DATA)/utilities $(DESTDIR)$(PREFIX)/bin
	install -m 644 requirements.txt requirements-test.txt $(DATA)
	install -m 755 utilities/fb-venv utilities/fb-sandbox utilities/mininet-tenants \
		$(TOOLS:%=utilities/%) $(DATA)/utilities
	find controller utilities/flowbundler_mininet.py utilities/fbmininet \
		$(MININET_USES:%=utilities/fbtest/%.py) \( -name '*.py' -o -name '*.ovsschema' \) \
		-exec install -D -m 644 {} $(DATA)/{} \;
	install -d $(DESTDIR)$(PREFIX)/share/man/man8 $(DESTDIR)$(PREFIX)/share/man/man1 \
		$(DESTDIR)$(PREFIX)/lib/systemd/system
	PYTHONPATH=controller PYTHONDONTWRITEBYTECODE=1 $(PYTHON3) -m fbrates.manual $(BUILD)/man
	install -m 644 $(BUILD)/man/*.8 $(DESTDIR)$(PREFIX)/share/man/man8
	install -m 644 $(BUILD)/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1
	sed 's,@PREFIX@,$(PREFIX),' controller/systemd/flowbundler-controller.service \
		>$(DESTDIR)$(PREFIX)/lib/systemd/system/flowbundler-controller.service
	for tool in $(TOOLS); do \
		printf '#!/bin/sh\nexec %s/%s "$$@"\n' \
			$(PREFIX)/share/flowbundler/utilities $$tool \
			>$(DESTDIR)$(PREFIX)/bin/$$tool && \
		chmod 755 $(DESTDIR)$(PREFIX)/bin/$$tool || exit; \
	done

# Built and tried in a chroot: Debian 13, sid.
debian13: root deps
	@utilities/chroot-build trixie $(BUILD)/debian13

sid: root deps
	@utilities/chroot-build sid $(BUILD)/sid

# What builds with which OVS and DPDK, and passes: docs/testing.md.
check-matrix: root deps
	@utilities/check-matrix $(BUILD)

clean:
	rm -rf $(BUILD)
