"""What an operator may change while traffic runs, one `Change` each.

Each is a generator of steps: between them traffic runs for a while.  What it
changed is as before when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fbtest.proc import wait_until

from oracle import FLOWS, RATE, RX_LIMIT, Oracle
from shaping import pmd_threads

Steps = Iterator[None]


@dataclass(frozen=True)
class Change:
    """Something that is changed, and what it may explain.

    `may_drop` are beginnings of names in `Oracle.drops`, `may_restart` of those in
    `Oracle.counters` (because what has them is made anew), `may_warn` parts of warnings
    in the log.  `may_reorder`: docs/design.md names it under known limits.
    """

    name: str
    run: Callable[[Oracle], Steps]
    may_drop: tuple[str, ...] = ()
    may_restart: tuple[str, ...] = ()
    may_warn: tuple[str, ...] = ()
    may_reorder: bool = False


CHANGES: list[Change] = []


def change(*may_drop: str, may_restart: tuple[str, ...] = (), may_warn: tuple[str, ...] = (),
           may_reorder: bool = False
           ) -> Callable[[Callable[[Oracle], Steps]], Callable[[Oracle], Steps]]:
    """Put a function into `CHANGES`."""
    def add(function: Callable[[Oracle], Steps]) -> Callable[[Oracle], Steps]:
        CHANGES.append(Change(function.__name__, function, may_drop, may_restart, may_warn,
                              may_reorder))
        return function

    return add


#: Counters of queues, which go with the QoS.
QUEUES = ("queue ",)


@change(may_restart=QUEUES)
def qos_cleared_and_set(o: Oracle) -> Steps:
    o.ovs.clear_qos("out")
    yield
    o.set_qos()
    yield


@change(may_restart=QUEUES)
def qos_keys_changed(o: Oracle) -> Steps:
    for keys in ({"max-granularity": 4096}, {"min-granularity": 1024}, {"max-backlog": 10_000},
                 {"overhead": 24}, {"max-flows": 1000}):
        o.set_qos(**keys)
        yield
    o.ovs.clear_qos("out")
    o.set_qos()
    yield


@change(may_restart=QUEUES)
def port_rate_changed(o: Oracle) -> Steps:
    for rate in (20_000_000, 10_000_000, 100_000_000):
        o.set_qos(**{"max-rate": rate})
        yield
    o.ovs.clear_qos("out")
    o.set_qos()
    yield


@change(may_restart=QUEUES)
def qos_type_switched(o: Oracle) -> Steps:
    o.ovs.set_qos("out", "egress-policer", cir=125_000_000, cbs=1_000_000)
    yield
    o.set_qos()
    yield


@change(may_warn=("must be a power of two",))
def invalid_qos(o: Oracle) -> Steps:
    # What ran before keeps running.
    qos = o.ovs.get("Port", "out", "qos")
    o.ovs.vsctl("set", "QoS", qos, "other_config:min-granularity=63")
    yield
    o.ovs.vsctl("remove", "QoS", qos, "other_config", "min-granularity")
    yield


def set_pmd_cpus(o: Oracle, cpus: set[int]) -> None:
    """Have PMD threads on these processors, others than now; returns when they are."""
    before = pmd_threads(o.ovs)
    o.ovs.set_config(pmd_cpu_mask=f"{sum(1 << cpu for cpu in cpus):#x}")
    wait_until(lambda: len(now := pmd_threads(o.ovs)) == len(cpus) and now != before,
               f"PMD threads on {cpus}")


def cpu_and_other(o: Oracle) -> tuple[int, int]:
    """The PMD thread's processor, and one without a PMD thread."""
    cpu, = o.ovs.pmd_cpus()
    return cpu, min(o.bed.cpus - {cpu})


#: With all cores polled by PMD threads the receiving VM may not get one in time, and
#: its virtqueue fills.
NO_CORE = ("out tx",)


@change(*NO_CORE)
def other_pmd_core(o: Oracle) -> Steps:
    cpu, other = cpu_and_other(o)
    for one in (other, cpu):
        set_pmd_cpus(o, {one})
        yield


@change(*NO_CORE, may_reorder=True)
def second_pmd_thread(o: Oracle) -> Steps:
    cpu, other = cpu_and_other(o)
    for cpus in ({cpu, other}, {cpu}):
        set_pmd_cpus(o, cpus)
        yield


@change(*NO_CORE, may_reorder=True)
def queue_moved(o: Oracle) -> Steps:
    cpu, other = cpu_and_other(o)
    set_pmd_cpus(o, {cpu, other})
    for where in (other, cpu, other):
        o.ovs.vsctl("set", "Interface", "vm", f"other_config:pmd-rxq-affinity=0:{where}")
        yield
    o.ovs.vsctl("remove", "Interface", "vm", "other_config", "pmd-rxq-affinity")
    set_pmd_cpus(o, {cpu})
    yield


@change()
def queues_rebalanced(o: Oracle) -> Steps:
    for how in ("roundrobin", "cycles", "group"):
        o.ovs.set_config(pmd_rxq_assign=how)
        o.ovs.appctl("dpif-netdev/pmd-rxq-rebalance")
        yield
    for isolate in (False, None):
        o.ovs.set_config(pmd_rxq_isolate=isolate)
        yield
    o.ovs.set_config(pmd_rxq_assign=None)
    yield


#: What a driver cannot do, and that it takes long to set up.
DRIVERS = ("is not supported on port", "not enough memory")


@change(may_warn=DRIVERS)
def other_port_with_queues(o: Oracle) -> Steps:
    # Each of these stops all PMD threads.
    o.bed.sink("other")
    o.ovs.set_qos("other", "flowbundler")
    yield
    for n in (2, 1):
        o.ovs.vsctl("set", "Interface", "other", f"options:n_rxq={n}")
        yield
    o.ovs.vsctl("set", "Interface", "other", "mtu_request=9000")
    yield
    o.bed.delete_port("other")
    yield


#: OVS begins to count anew where it sets a vhost port up anew, or it comes up.
VHOST = ("vm ", "out ")


@change("datapath_drop_invalid_port", "meter ", may_restart=VHOST, may_warn=DRIVERS)
def mtu_changed(o: Oracle) -> Steps:
    # While OVS sets a port up anew, packets for it are dropped.  (What waits at it
    # waits on.)
    for mtu in (1600, 1500):
        for port in ("out", "vm"):
            o.keep(f"{port} ")
            o.ovs.vsctl("set", "Interface", port, f"mtu_request={mtu}")
            yield


@change()
def tx_flush_interval(o: Oracle) -> Steps:
    for us in (1000, 100):
        o.ovs.set_config(tx_flush_interval=us)
        yield
    o.ovs.set_config(tx_flush_interval=None)
    yield


@change()
def pmd_sleep(o: Oracle) -> Steps:
    o.ovs.set_config(pmd_sleep_max=500)
    yield
    o.ovs.set_config(pmd_sleep_max=None)
    yield


@change()
def tx_steering(o: Oracle) -> Steps:
    for how in ("hash", "thread"):
        o.ovs.vsctl("set", "Interface", "out", f"other_config:tx-steering={how}")
        yield
    o.ovs.vsctl("remove", "Interface", "out", "other_config", "tx-steering")
    yield


@change()
def meters_modified(o: Oracle) -> Steps:
    for rate in (2 * RATE, RATE // 2, RATE):
        for meter in range(1, FLOWS + 1):
            o.ovs.set_meter(o.bed.bridge, meter, rate, modify=True)
        yield


#: Packets without a flow, or with one of the datapath that is about to go.
NO_FLOW = ("datapath_drop_upcall_error", "datapath_drop_userspace_action_error",
           "drop_action_of_pipeline", "datapath_drop_lock_error")


#: Counters of meters that are deleted.
METERS = ("meter ",)


@change(*NO_FLOW, may_restart=METERS)
def meters_deleted(o: Oracle) -> Steps:
    # Their flows go with them: packets without a flow are dropped.
    o.ovs.del_meters(o.bed.bridge)
    o.run(0.1)
    o.set_meters_and_flows()
    yield


@change()
def flows_replaced(o: Oracle) -> Steps:
    for _ in range(3):
        o.set_flows()
        yield


@change()
def rx_limit_changed(o: Oracle) -> Steps:
    for limit in (1, 100_000, RX_LIMIT):
        o.ovs.set_config(shaper_rx_limit=limit)
        yield


@change(may_reorder=True)
def stamping_fair(o: Oracle) -> Steps:
    o.ovs.set_config(meter_shaping_fair=True)
    yield
    o.ovs.set_config(meter_shaping_fair=None)
    yield


@change(*NO_FLOW, may_restart=METERS, may_warn=("Connection refused",), may_reorder=True)
def controller_lost(o: Oracle) -> Steps:
    # OVS flushes flows and meters when a bridge gets its first controller, or loses
    # its last one; what a controller has set stays when that is lost (fail_mode
    # secure).
    o.ovs.vsctl("set-controller", o.bed.bridge, "tcp:127.0.0.1:9")
    o.set_meters_and_flows()
    yield
    o.ovs.vsctl("set-controller", o.bed.bridge, "tcp:127.0.0.1:10")
    o.wait_traffic()
    o.ovs.vsctl("del-controller", o.bed.bridge)
    o.set_meters_and_flows()
    yield


@change("out tx", "drop_action_of_pipeline", may_restart=VHOST)
def port_down_and_up(o: Oracle) -> Steps:
    o.ovs.ofctl("mod-port", o.bed.bridge, str(o.out.number), "down")
    yield
    # OVS clears the counters of a port that comes up.
    o.settle("out ")
    o.ovs.ofctl("mod-port", o.bed.bridge, str(o.out.number), "up")
    o.start()
    yield


#: What waits when its port is deleted, what OVS sends to it before its flows know,
#: and what comes without a flow.
GONE = ("drop_removed", "datapath_drop_invalid_port", *NO_FLOW)
#: That a virtual machine is not there (yet).  The counters of its port are then those
#: of the next one.
NO_VM = ("VHOST_CONFIG", "vHost")
#: That packets come from a port whose bridge is gone.
NO_BRIDGE = ("xlate_key failed",)


@change(*GONE, "out tx", "no port", may_restart=("out ", "shaper ", *QUEUES), may_warn=NO_VM)
def shaped_port_deleted(o: Oracle) -> Steps:
    deleted = o.delete_out()
    yield
    o.add_out_again(*deleted)
    yield


@change(may_restart=QUEUES)
def shaped_port_replaced(o: Oracle) -> Steps:
    # Deleted and added in one transaction: to OVS the port has been there all the time.
    old = o.ovs.get("Port", "out", "qos")
    o.ovs.vsctl("--", "del-port", o.bed.bridge, "out", "--", "add-port", o.bed.bridge, "out",
                "--", "set", "Interface", "out", "type=dpdkvhostuserclient",
                f"options:vhost-server-path={o.out.path}", f"ofport_request={o.out.number}",
                "--", "set", "Port", "out", f"qos={old}")
    yield


@change(*GONE, may_restart=("vm ",), may_warn=(*NO_VM, *NO_BRIDGE))
def sending_port_deleted(o: Oracle) -> Steps:
    o.keep("vm ")
    o.ovs.vsctl("del-port", o.bed.bridge, "vm")
    # What waits of it leaves all the same.
    wait_until(lambda: o.backlog() == 0, "nothing waits")
    yield
    o.vm = o.add_port("vm")
    o.wait_traffic()
    yield


@change(*GONE, "out tx", may_restart=("vm ", "out ", "shaper ", *QUEUES, *METERS),
        may_warn=(*NO_VM, *NO_BRIDGE))
def bridge_deleted(o: Oracle) -> Steps:
    for prefix in ("vm ", "out ", "meter "):
        o.keep(prefix)
    qos = o.ovs.get("Port", "out", "qos")
    o.bed.remake_bridge()
    o.vm = o.add_port("vm")
    o.add_out_again(qos)
    yield


@change("out tx", "out flushed", may_restart=("out ",), may_warn=NO_VM)
def receiver_killed(o: Oracle) -> Steps:
    o.kill_receiver()
    yield
    o.new_receiver()
    yield


@change(may_restart=("vm ",), may_warn=NO_VM)
def sender_killed(o: Oracle) -> Steps:
    o.kill_sender()
    yield
    o.new_sender()
    yield


@change(may_warn=NO_VM)
def database_restored(o: Oracle) -> Steps:
    o.set_qos(overhead=4)
    backup = o.ovs.backup()
    o.set_qos(overhead=8)
    yield
    o.ovs.restore(backup)
    wait_until(lambda: o.ovs.flowbundler_show("out")["out"]["config"]["overhead"] == 4,
               "the QoS of the backup is in force")
    yield
    o.set_qos(overhead=0)
