"""What an operator does to more than one port, thread or process while traffic runs.

Beside tests/reconfiguration.py, and counted in the same way: bonds, more threads than a
device has tx queues, TSO, and a vswitchd that is killed.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fbtest import procfs
from fbtest.controller import Controller
from fbtest.fixtures import sandbox, shared_switch
from fbtest.limiters import MeterShaper
from fbtest.ovs import Ovs, PortCounters
from fbtest.proc import wait_until
from fbtest.switch import Switch
from fbtest.testbed import Testbed
from fbtest.traffic import parse_iperf3

from oracle import (
    DST_MAC,
    FLOWS,
    OFFERED_PPS,
    PATIENCE_US,
    RATE,
    RX_LIMIT,
    TOTAL,
    Oracle,
    Sums,
)
from reconfiguration import NO_CORE, cpu_and_other, set_pmd_cpus
from shaping import MBIT, MTU, favour_pmds, run_for, second_cpu, wait_empty, write_results

#: A rate is measured as what a VM receives in a while.  That a processor was taken from
#: the VM or the switch makes it wrong, by as much as is lost or caught up: once it must
#: be right, and never far too much (twice as much is offered).
ATTEMPTS = 6
WINDOW_S = 1.0
TOLERANCE = 0.02
FAR_TOO_MUCH = 1.4
#: The shortest frame of a VM, and the most that a poll receives.
MIN_FRAME_BYTES = 66
BURST = 32


def received_bps(oracle: Oracle) -> float:
    """What comes to the second VM for a while, in bit/s."""
    first, begin = oracle.receiver.report(), time.monotonic()
    run_for(oracle.ovs, WINDOW_S)
    last, end = oracle.receiver.report(), time.monotonic()
    return (last.received_bytes - first.received_bytes) * 8 / (end - begin)


def assert_rate(oracle: Oracle, expected: float) -> None:
    """What comes is `expected` bit/s."""
    seen: list[float] = []
    while not (seen and seen[-1] == pytest.approx(expected, rel=TOLERANCE)):
        assert len(seen) < ATTEMPTS, f"{expected}: {seen}"
        seen.append(received_bps(oracle))
        assert seen[-1] <= expected * FAR_TOO_MUCH, seen


def assert_quiet(oracle: Oracle, *allowed: str) -> None:
    """Nothing is wrong in vswitchd's log."""
    # (timeval: that the main thread had to wait for a processor.)
    warnings = [line for line in oracle.log.problems()
                if not any(part in line for part in ("|timeval|", *allowed))]
    assert warnings == [], "\n".join(warnings)


# Bonds.


class BondOracle(Oracle):
    """The second VM is at a bond of two ports, which the QoS is for.

    When another member becomes the active one, OVS tells the VM where others are:
    frames that it does not know.
    """

    ports = ("vm", "out0", "out1")
    shaped = ("out0", "out1")

    def __init__(self, bed: Testbed, mode: str, lb_output: bool):
        self.mode, self.lb_output = mode, lb_output
        super().__init__(bed)

    def add_out(self) -> None:
        options = {"lacp-time": "fast", "bond-rebalance-interval": 1000,
                   "lb-output-action": str(self.lb_output).lower()}
        self.receiving = self.bed.vhost_bond(
            "out", *self.shaped, bond_mode=self.mode,
            lacp="active" if self.mode == "balance-tcp" else "off",
            **{f"other_config:{k}": v for k, v in options.items()})

    def set_flows(self) -> None:
        # Only NORMAL knows bonds.
        self.ovs.replace_flows(self.bed.bridge, [
            f"in_port={self.vm.number},ip,nw_dst=10.73.0.{n},actions=meter:{n},NORMAL"
            for n in range(1, FLOWS + 1)])
        self.ovs.appctl("fdb/add", self.bed.bridge, "out0", "0", DST_MAC)

    def forget(self) -> None:
        super().forget()
        while True:
            # None may be sent between these, or be on its way: the VM receives between reports.
            sent = self._lacpdus()
            self.receiver.report()
            self._received = self.receiver.report()
            self._lacpdus_before = self._lacpdus()
            if self._lacpdus_before == sent:
                return

    def sums(self) -> Sums:
        # What the switch says to the VM is sent and received, or dropped, as well.
        sums = super().sums()
        more = self._lacpdus() - self._lacpdus_before
        return replace(
            sums, sender=replace(sums.sender, sent=sums.sender.sent + more),
            receiver=replace(sums.receiver,
                             received=sums.receiver.received + sums.receiver.lacpdus))

    def _lacpdus(self, members: str = "out.") -> int:
        """LACPDUs that the switch has sent by members whose names match `members`."""
        if self.mode != "balance-tcp":
            return 0
        shown = self.ovs.appctl("lacp/show-stats", "out")
        return sum(map(int, re.findall(rf"member: {members}:\s+TX PDUs: (\d+)", shown)))

    def _member(self, member: str) -> tuple[int, PortCounters]:
        """How many LACPDUs the switch has sent by a member, and its counters at that time."""
        while True:
            sent, counters = self._lacpdus(member), self.ovs.dump_ports(self.bed.bridge)[member]
            if self._lacpdus(member) == sent:
                return sent, counters

    def bring_up(self, member: str) -> None:
        """Stop, and have a member up again that is down.

        OVS clears its drops then.  Of LACPDUs that were dropped between the last look at these
        and that moment there is no counter: it is those that have not left since that look.
        """
        self.stop()
        sent_before, before = self._member(member)
        self.ovs.ofctl("mod-port", self.bed.bridge, member, "up")
        sent, after = self._member(member)
        untold = sent - sent_before - (after.tx_packets - before.tx_packets) - after.tx_drop
        self._gone.update({f"{member} rx": before.rx_drop,
                           f"{member} tx": before.tx_drop + max(untold, 0)})

    def _drops(self) -> dict[str, int]:
        found = super()._drops()
        if self.mode == "balance-tcp":
            # The VM's LACPDUs end there.  Packets that did would be missing.
            found.pop("drop_action_of_pipeline", None)
        return found

    def sent(self) -> dict[str, int]:
        """What has left by each member."""
        counters = self.ovs.dump_ports(self.bed.bridge)
        return {member: counters[member].tx_packets for member in self.shaped}

    def wait_lacp(self) -> None:
        """Have the VM speak LACP; returns when both members are enabled."""
        self.receiver.lacp()

        def done() -> bool:
            shown = self.ovs.appctl("bond/show", "out")
            return ("lacp_status: negotiated" in shown
                    and all(f"member {member}: enabled" in shown for member in self.shaped))

        try:
            wait_until(done, "LACP is through", 15)
        except TimeoutError as exc:
            raise TimeoutError(self.ovs.appctl("bond/show", "out")
                               + self.ovs.appctl("lacp/show", "out")
                               + self.ovs.appctl("lacp/show-stats", "out")) from exc

    def wait_both(self) -> None:
        """Wait until both members are used (OVS balances them once a second)."""
        before = self.sent()
        wait_until(lambda: all(n > before[member] + 50 for member, n in self.sent().items()),
                   "packets leave by both members", 30)


@pytest.mark.parametrize("mode, lb_output", [
    # Balanced in a second table of the datapath, and in its action "lb_output".
    ("balance-tcp", False), pytest.param("balance-tcp", True, marks=pytest.mark.full),
    ("active-backup", False)])
def test_bond_members_come_and_go(testbed: Testbed, mode: str, lb_output: bool) -> None:
    """A bond with QoS: a shaper for each member, and the meters' rates for all together."""
    oracle = BondOracle(testbed, mode, lb_output)
    favour_pmds(testbed)
    ovs, balanced = testbed.ovs, mode == "balance-tcp"
    if balanced:
        oracle.wait_lacp()
    oracle.start()
    assert set(ovs.flowbundler_show()) == {"out0", "out1"}
    if balanced:
        oracle.wait_both()
    assert_rate(oracle, TOTAL)

    # Out of use, but up: what waits there leaves there, so nothing is lost.  What is sent
    # by the other one meanwhile may overtake that.
    for member in oracle.shaped:
        ovs.appctl("bond/disable-member", "out", member)
        oracle.wait_traffic()
        ovs.appctl("bond/enable-member", "out", member)
        if not balanced:
            ovs.appctl("bond/set-active-member", "out", member)
        oracle.wait_traffic()
        oracle.check_counters()
    if balanced:
        oracle.wait_both()
    oracle.check(may_reorder=True, may_be_strange=True)
    oracle.forget()

    # Down: what leaves for it is lost, and counted.
    for member in oracle.shaped:
        oracle.start()
        ovs.ofctl("mod-port", testbed.bridge, member, "down")
        oracle.wait_traffic()
        oracle.bring_up(member)
        oracle.check_counters(oracle.shaped)
    oracle.start()
    if balanced:
        oracle.wait_both()
    assert_rate(oracle, TOTAL)
    oracle.check(may_drop=("out0 tx", "out1 tx", "drop_action_of_pipeline"), may_reorder=True,
                 may_be_strange=True)
    oracle.forget()

    # The QoS is each member's.
    rate = TOTAL // 6
    oracle.set_qos(**{"max-rate": rate})
    assert {ovs.flowbundler_show(member)[member]["config"]["max-rate"]
            for member in oracle.shaped} == {rate}
    oracle.start()
    if balanced:
        oracle.wait_both()
    rates: list[float] = []
    for _ in range(ATTEMPTS):
        before, begin = ovs.dump_ports(testbed.bridge), time.monotonic()
        run_for(ovs, WINDOW_S)
        after, seconds = ovs.dump_ports(testbed.bridge), time.monotonic() - begin
        rates = [(after[member].tx_bytes - before[member].tx_bytes) * 8 / seconds
                 for member in oracle.shaped]
        print(mode, rates)
        if max(rates) == pytest.approx(rate, rel=0.03):
            break
    assert max(rates) == pytest.approx(rate, rel=0.03)
    if balanced:
        assert sum(rates) > rate * 1.05, "one of them only"
    oracle.check(may_reorder=True, may_be_strange=True)
    assert_quiet(oracle, "bond", "lacp")


# Threads and queues.


class TwoThreadOracle(Oracle):
    """Two VMs send by a port with one tx queue, each from a thread of its own.

    Each meter is for a flow of the one and for one of the other.
    """

    ports = ("vm", "vm2", "out")

    def add_out(self) -> None:
        self.vm2 = self.bed.vhost_port("vm2")
        super().add_out()

    def add_vms(self) -> None:
        self.sender = self._new_vm(self.vm)
        self.second = self._new_vm(self.vm2, flows=2 * FLOWS, flow=FLOWS)
        self.receiver = self._new_vm(self.out, flows=2 * FLOWS)

    def set_flows(self) -> None:
        self.ovs.replace_flows(self.bed.bridge, [
            f"in_port={vm.number},ip,nw_dst=10.73.0.{n + first},"
            f"actions=meter:{n},output:{self.out.number}"
            for first, vm in ((0, self.vm), (FLOWS, self.vm2)) for n in range(1, FLOWS + 1)])

    def start(self) -> None:
        self.second.rate(OFFERED_PPS)
        super().start()

    def stop(self) -> Sums:
        self.second.rate(0)
        wait_until(lambda: self.second.report().pending == 0, "the second VM has sent all", 20)
        return super().stop()

    def forget(self) -> None:
        super().forget()
        self._second_sent = self.second.report()

    def sums(self) -> Sums:
        sums = super().sums()
        return replace(sums, sender=sums.sender.plus(
            self.second.report().since(self._second_sent)))


def pin(oracle: Oracle, **cpus: int) -> None:
    """Have the ports polled on these processors, of all that are polled."""
    oracle.ovs.vsctl(*(word for port, cpu in cpus.items() for word in (
        "--", "set", "Interface", port, f"other_config:pmd-rxq-affinity=0:{cpu}")))


def test_more_threads_than_tx_queues(testbed: Testbed) -> None:
    """Two PMD threads and the main thread take turns at one tx queue (XPS)."""
    second_cpu(testbed)
    oracle, ovs = TwoThreadOracle(testbed), testbed.ovs
    # What waits of a VM lasts for 0.1 s, in which it may get no processor.
    ovs.set_config(shaper_rx_limit=10 * RX_LIMIT)
    cpu, other = cpu_and_other(oracle)
    set_pmd_cpus(oracle, {cpu, other})
    pin(oracle, vm=cpu, vm2=other, out=other)
    assert ovs.get("Interface", "out", "status")["n_txq"] == "1"
    favour_pmds(testbed)
    oracle.start()

    def holding() -> set[int]:
        threads = ovs.flowbundler_show("out")["out"]["threads"]
        return {thread["core"] for thread in threads if thread["backlog"]}

    wait_until(lambda: holding() == {cpu, other}, "packets wait in both threads")
    assert_rate(oracle, TOTAL)
    # A thread comes and goes.
    pin(oracle, vm=cpu, vm2=cpu, out=cpu)
    set_pmd_cpus(oracle, {cpu})
    oracle.wait_traffic()
    set_pmd_cpus(oracle, {cpu, other})
    pin(oracle, vm=cpu, vm2=other, out=other)
    oracle.wait_traffic()
    assert_rate(oracle, TOTAL)
    print(oracle.check(may_drop=NO_CORE, may_reorder=True))
    pin(oracle, vm=cpu, vm2=cpu, out=cpu)
    set_pmd_cpus(oracle, {cpu})
    assert_quiet(oracle)


# TSO.

#: As in test_backpressure_guest.
TCP_RATE = 100 * MBIT
TCP_LIMIT = 262144
TCP_WARM_UP, TCP_SECONDS = 1.5, 3.0


@pytest.fixture(scope="module")
def tso_switch() -> Iterator[Switch]:
    """A vswitchd with TSO."""
    yield from shared_switch("--memory", "1024", "--set", "userspace-tso-enable=true")


@pytest.fixture
def tso_env(tso_switch: Switch) -> Iterator[dict[str, str]]:
    """The environment of a vswitchd with TSO."""
    with tso_switch.watched() as env:
        yield env


def test_packets_are_counted_with_tso(tso_env: dict[str, str]) -> None:
    """The same as without: buffers are other ones then."""
    with Testbed(tso_env) as bed:
        oracle = Oracle(bed)
        favour_pmds(bed)
        oracle.start()
        assert_rate(oracle, TOTAL)
        bed.ovs.clear_qos("out")
        oracle.run(0.1)
        oracle.set_qos()
        oracle.wait_traffic()
        oracle.check()
        assert_quiet(oracle)


def test_tcp_of_a_guest_with_tso(tso_env: dict[str, str]) -> None:
    """A guest's TSO packets leave at their rate, in segments, and none is lost."""
    with Testbed(tso_env) as bed:
        ovs, web, vm = bed.ovs, bed.host("web"), bed.vhost_port("vm")
        guest = bed.guest(vm)
        shaper = MeterShaper(ovs, bed.bridge, "web", 1)
        shaper.set_rate(TCP_RATE)
        ovs.set_config(shaper_rx_limit=TCP_LIMIT)
        ovs.replace_flows(bed.bridge, [
            f"in_port={vm.number},actions=meter:1,output:{web.port.number}",
            f"in_port={web.port.number},actions=output:{vm.number}"])
        favour_pmds(bed)
        rates = []
        for _ in range(ATTEMPTS):
            server = bed._keep(web.ns.spawn("iperf3", "--server", "--one-off", "--json",
                                            name="iperf3 server", cpus=web.cpus))
            wait_until(lambda: web.ns.listening(5201), "iperf3 listens")
            seconds = TCP_WARM_UP + TCP_SECONDS + 0.5
            with bed.sampler(0.1) as sampler:
                begin = time.monotonic()
                client = guest.run(f"iperf3 -c {web.ip} -J -i 0.5 -t {seconds:.0f}",
                                   timeout=seconds + 20)
            server.wait(5)
            result = parse_iperf3(client, server.stdout())
            assert not result.error, result.error
            rates.append(sampler.series("web.tx_bytes").rate(
                begin + TCP_WARM_UP, begin + TCP_WARM_UP + TCP_SECONDS))
            # On the wire, headers of all segments included.
            assert rates[-1] <= (1 + TOLERANCE) * TCP_RATE
            assert result.retransmits == 0
            if rates[-1] >= (1 - TOLERANCE) * TCP_RATE:
                break
        wait_empty(ovs, "web")
        port = ovs.dump_ports(bed.bridge)["vm"]
        mean = port.rx_bytes / port.rx_packets
        write_results("tso", {"rates": rates, "mean_packet_bytes": mean})
        print(rates, mean)
        assert rates[-1] >= (1 - TOLERANCE) * TCP_RATE
        assert mean > 2 * MTU, "these are no TSO packets"
        assert port.rx_drop == shaper.drops() == 0
        assert ovs.flowbundler_show("web")["web"]["drop_segment"] == 0


# A vswitchd that is killed.

TENANTS = {
    "unknown_sources": "forward",
    "shaping": {"max_delay": f"{PATIENCE_US}us"},
    "tenants": {"red": {"vms": {"a": {"port": "vm", "rate": TOTAL, "destinations": [
        {"to": f"10.73.0.{n}", "rate": RATE} for n in range(1, FLOWS + 1)]}}}},
}


def kill_and_restart(ovs: Ovs) -> None:
    """Have vswitchd end without a word, and start it again as it was started."""
    pid = ovs.pid()
    process = Path(f"/proc/{pid}")
    argv = process.joinpath("cmdline").read_text().split("\0")[:-1]
    env = dict(line.split("=", 1)
               for line in process.joinpath("environ").read_text().split("\0") if line)
    cpus = os.sched_getaffinity(pid)

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.sched_setaffinity(0, cpus)

    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not procfs.alive(pid), "vswitchd is gone")
    subprocess.run(argv, env=env, check=True, timeout=60, stdin=subprocess.DEVNULL,
                   preexec_fn=prepare)
    wait_until(ovs.alive, "vswitchd answers", 30)
    assert ovs.pid() != pid


@pytest.fixture
def doomed_env() -> Iterator[dict[str, str]]:
    """The environment of a vswitchd that may be killed."""
    yield from sandbox("--memory", "1024", crashed=True)


def test_vswitchd_killed(doomed_env: dict[str, str], tmp_path: Path) -> None:
    """QoS, meters, VMs are all back; nothing is unlimited meanwhile."""
    with Testbed(doomed_env) as bed:
        oracle, ovs = Oracle(bed), bed.ovs
        file = tmp_path / "tenants.yaml"
        file.write_text(yaml.safe_dump(TENANTS))
        controller = bed._keep(Controller(file, ovs, bed.bridge, bed.cpus))
        ovs.del_meters(bed.bridge)
        controller.connect()
        favour_pmds(bed)
        oracle.start()
        assert_rate(oracle, TOTAL)
        # Changed live, so it is in no file.
        controller.set_rate("red", "a", str(TOTAL // 2))
        oracle.run(0.2)
        oracle.wait_traffic()

        first, begin = oracle.receiver.report(), time.monotonic()
        kill_and_restart(ovs)
        wait_until(lambda: controller.get("/v1/status")["in_sync"],
                   "the controller has restored meters and flows", 30, 0.1)
        oracle.wait_traffic()
        last, seconds = oracle.receiver.report(), time.monotonic() - begin
        bits = (last.received_bytes - first.received_bytes) * 8
        print(f"away for {seconds:.1f} s, {bits / seconds / MBIT:.1f} Mbit/s meanwhile")
        assert bits <= TOTAL // 2 * seconds + RX_LIMIT * 8
        assert ovs.get("Port", "out", "qos") and ovs.flowbundler_show("out")["out"]["shaping"]
        assert_rate(oracle, TOTAL // 2)

        # Gone with it is what waited, and what came before there were flows; nothing
        # that had been received comes again.
        oracle.sender.rate(0)
        wait_until(lambda: oracle.sender.report().pending == 0 and oracle.backlog() == 0,
                   "all has left", 20)
        lost = lambda: (oracle.sender.report().sent - oracle.receiver.report().received  # noqa: E731
                        - sum(oracle._drops().values()))
        most = RX_LIMIT // MIN_FRAME_BYTES + BURST
        wait_until(lambda: 0 <= lost() <= most, f"at most {most} are lost", 5)
        got = oracle.receiver.report()
        assert (got.misordered, got.duplicates, got.damaged) == (0, 0, 0)

        oracle.forget()
        oracle.start()
        oracle.run(0.3)
        oracle.check()
        controller.close()
