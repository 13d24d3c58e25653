"""Which processors vswitchd's threads run on, and that a guest's connect needs no PMD thread's.

docs/operating.md says it for operators.
"""

from __future__ import annotations

import os
import re
import time
from datetime import datetime

from fbtest import procfs
from fbtest.proc import parse_cpu_mask
from fbtest.testbed import Testbed

from shaping import Log, favour_pmds, pmd_threads, second_cpu

#: From the log's line of a connect on, in s.
MOST_S = 1.0
CONNECTED = re.compile(r"^(\S+)Z\|.*VHOST_CONFIG: .* connected$")
READY = "virtio is now ready for processing."
VHOST_THREAD = re.compile(r"vhost[-_]ev")
INTR_THREAD = re.compile(r"(eal|dpdk)-intr")


def test_only_pmd_threads_are_on_their_processors(testbed: Testbed) -> None:
    """All others are where --lcore-mask of fb-sandbox has the main thread."""
    second_cpu(testbed)
    ovs = testbed.ovs
    # DPDK starts some when they are needed first.
    testbed.vm(testbed.vhost_port("vm"))
    config, pid = ovs.get("Open_vSwitch", ".", "other_config"), ovs.pid()
    main, polled = (parse_cpu_mask(config[key]) for key in ("dpdk-lcore-mask", "pmd-cpu-mask"))
    names, pmds, found = procfs.threads(pid), pmd_threads(ovs), procfs.affinities(pid)
    for pattern in (VHOST_THREAD, INTR_THREAD):
        assert [name for name in names.values() if pattern.match(name)], names
    assert {cpu for tid in pmds for cpu in found[tid]} == polled
    elsewhere = {names.get(tid, tid): cpus for tid, cpus in found.items()
                 if tid not in pmds and not cpus <= main}
    assert elsewhere == {}


def test_link_is_up_soon(testbed: Testbed) -> None:
    """While a PMD thread polls that comes before all others on its processor."""
    port = testbed.vhost_port("vm")
    testbed.sink("other")
    favour_pmds(testbed)
    took = []
    for _ in range(5):
        log = Log(testbed.ovs)
        vm = testbed.vm(port)
        up = time.time()
        connect, = (match[1] for line in log.lines() if (match := CONNECTED.match(line)))
        took.append(up - datetime.fromisoformat(connect + "+00:00").timestamp())
        vm.kill()
    print(took)
    assert max(took) < MOST_S, took


def test_a_vm_is_ready_when_the_switch_has_said_all(testbed: Testbed) -> None:
    """However late the threads are that hear of it."""
    second_cpu(testbed)
    ovs, port = testbed.ovs, testbed.vhost_port("vm")
    favour_pmds(testbed)
    testbed.vm(port).kill()
    pid = ovs.pid()
    late = [tid for tid, name in procfs.threads(pid).items() if VHOST_THREAD.match(name)]
    assert late
    before = {tid: os.sched_getaffinity(tid) for tid in late}
    # (Of what DPDK says OVS logs only so much a minute.)
    ovs.appctl("vlog/disable-rate-limit", "dpdk")
    try:
        for tid in late:
            # They get what the PMD thread leaves of its processor.
            os.sched_setaffinity(tid, ovs.pmd_cpus())
        for _ in range(3):
            log = Log(ovs)
            vm = testbed.vm(port)
            # (Of what may be wrong OVS tells before it has the link up.)
            ready = [line for line in log.lines() if line.endswith(READY)]
            assert len(ready) == 1, log.lines()
            vm.kill()
    finally:
        ovs.appctl("vlog/enable-rate-limit", "dpdk")
        for tid, cpus in before.items():
            os.sched_setaffinity(tid, cpus)


