"""Programs with mininet; `mininet_bed.program` runs one of them by its name.

usage: mininet_programs.py NAME ARGUMENTS

ARGUMENTS and what the function returns are JSON.  Debian's Python runs this, with mininet
and nothing else: it is what users' programs are like.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "utilities"))

from flowbundler_mininet import (  # noqa: E402
    FlowBundlerController,
    FlowBundlerLink,
    FlowBundlerSwitch,
)
from mininet.link import TCLink  # noqa: E402
from mininet.net import Mininet  # noqa: E402
from mininet.node import CPULimitedHost, Host, Node  # noqa: E402
from mininet.nodelib import LinuxBridge  # noqa: E402
from mininet.topo import LinearTopo, SingleSwitchTopo  # noqa: E402

MBIT = 1e6


@contextmanager
def network(*args: Any, **params: Any) -> Iterator[Mininet]:
    """A network with our classes, stopped at the end; started if there is a topology."""
    params = {"switch": FlowBundlerSwitch, "link": FlowBundlerLink, "controller": None,
              "autoSetMacs": True, "autoStaticArp": True} | params
    net = Mininet(*args, **params)
    try:
        if net.topo:
            net.start()
        yield net
    finally:
        net.stop()


def sent_bytes(node: Node, intf: str) -> int:
    """Bytes of frames that `intf` in the namespace of `node` has sent, by the kernel."""
    for line in Path(f"/proc/{node.pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == intf:
            return int(counters.split()[8])
    raise KeyError(intf)


def retransmitted(node: Node) -> int:
    """TCP segments that `node` has sent again."""
    lines = [line.split() for line in Path(f"/proc/{node.pid}/net/snmp").read_text().splitlines()
             if line.startswith("Tcp:")]
    return int(dict(zip(*lines, strict=True))["RetransSegs"])


def tcp(client: Node, server: Node, seconds: float, warm_up: float = 1.0,
        congestion: str | None = None) -> dict[str, float]:
    """One TCP connection: goodput in Mbit/s and retransmissions after `warm_up` seconds.

    `all_retransmitted` are those of the whole transfer.  `congestion` is how it is
    controlled, by default the machine's way.
    """
    listener = server.popen(["iperf3", "-s", "-1", "--forceflush"])
    try:
        for line in listener.stdout:
            if b"listening" in line:
                break
        before = retransmitted(client)
        said, _ = client.popen(["iperf3", "-c", server.IP(), "-J", "-t", str(int(seconds)),
                                "-O", str(int(warm_up)),
                                *(["-C", congestion] if congestion else [])]).communicate()
        report = json.loads(said)
        assert "error" not in report, report["error"]
        listener.wait()
        return {"goodput": report["end"]["sum_received"]["bits_per_second"] / MBIT,
                "retransmitted": report["end"]["sum_sent"]["retransmits"],
                "all_retransmitted": retransmitted(client) - before}
    finally:
        listener.kill()
        listener.wait()


def ping(client: Node, server: Node, count: int = 20, interval: float = 0.05) -> list[float]:
    """Round-trip times in ms, in order."""
    said = client.cmd(f"ping -n -c {count} -i {interval} {server.IP()}")
    times = [float(ms) for ms in re.findall(r"time=([\d.]+)", said)]
    assert len(times) == count, said
    return times


def command_line() -> tuple[Callable[..., Any], dict[str, Any]]:
    """The program to run, and its arguments."""
    return globals()[sys.argv[1]], json.loads(sys.argv[2])


# The programs.

def rates(bw: float | None, seconds: float = 5, ours: bool = True, delay: str | None = None,
          congestion: str | None = None, dpdk: bool = True, warm_up: float = 1
          ) -> dict[str, Any]:
    """TCP between two hosts at one switch, in one direction and then in the other.

    Only the first one's link has a rate, so each direction is that of one end of a link.
    Not `ours`: TCLink on a Linux bridge.
    """
    params = ({"switch": partial(FlowBundlerSwitch, dpdk=dpdk)} if ours
              else {"switch": LinuxBridge, "link": TCLink})
    result: dict[str, Any] = {}
    with network(**params) as net:
        h1, h2, s1 = net.addHost("h1"), net.addHost("h2"), net.addSwitch("s1")
        net.addLink(h1, s1, bw=bw, delay=delay)
        net.addLink(h2, s1, delay=delay)
        net.start()
        for host in (h1, h2):
            # So that windows can be as large as the path, as mininet wants these.
            host.cmd("sysctl -qw net.ipv4.tcp_rmem='10240 87380 16777216' "
                     "net.ipv4.tcp_wmem='10240 87380 16777216'")
        for name, client, server in (("sends", h1, h2), ("receives", h2, h1)):
            result[name] = tcp(client, server, seconds, warm_up, congestion)
        result["ping"] = ping(h1, h2)
    return result


def round_trips(link: dict[str, Any], count: int = 20, busy: bool = False,
                **switch: Any) -> dict[str, Any]:
    """Pings between two hosts at one switch, idle and, if `busy`, while TCP fills the links."""
    with network(SingleSwitchTopo(2, lopts=link), switch=partial(FlowBundlerSwitch, **switch)
                 ) as net:
        h1, h2 = net["h1"], net["h2"]
        ping(h1, h2, 1)
        result: dict[str, Any] = {"idle": ping(h1, h2, count)}
        if busy:
            with filled(h1, h2):
                result["busy"] = ping(h1, h2, count)
    return result


def jitter(link: dict[str, Any], count: int = 60) -> dict[str, Any]:
    """Pings that are far apart, then UDP packets that are close: which come out of order?"""
    with network(SingleSwitchTopo(2, lopts=link)) as net:
        h1, h2 = net["h1"], net["h2"]
        ping(h1, h2, 1)
        times = ping(h1, h2, count, 0.1)
        listener = h2.popen(["iperf3", "-s", "-1", "--forceflush"])
        for line in listener.stdout:
            if b"listening" in line:
                break
        said, _ = h1.popen(["iperf3", "-u", "-b", "50M", "-l", "1400", "-t", "3", "-J",
                            "-c", h2.IP()]).communicate()
        listener.wait()
        udp = json.loads(said)["end"]["streams"][0]["udp"]
        return {"ping": times, "packets": udp["packets"], "lost": udp["lost_packets"],
                "out_of_order": udp["out_of_order"]}


def memory(bw: float, delay: str, memory: int | None = None) -> str:
    """What is said of a link in a switch with so much memory (MB); "" if nothing.

    A UDP flood fills it, and then no packet has been dropped for want of buffers.
    """
    net = Mininet(SingleSwitchTopo(2, lopts={"bw": bw, "delay": delay}), link=FlowBundlerLink,
                  switch=partial(FlowBundlerSwitch, memory=memory), controller=None)
    try:
        net.start()
        flooding = flood(net["h1"], net["h2"], bw * 0.8)
        time.sleep(1)
        flooding.kill()
        flooding.wait()
        shown = net["s1"].cmd("ovs-appctl flowbundler/show")
        dropped = [line for line in shown.splitlines() if re.search(r"budget [1-9]", line)]
        return "\n".join(dropped)
    except ValueError as error:
        return str(error)
    finally:
        net.stop()


@contextmanager
def filled(client: Node, server: Node) -> Iterator[None]:
    """TCP from `client` to `server` meanwhile, from when it has found its rate."""
    listener = server.popen(["iperf3", "-s", "-1", "--forceflush"])
    sender = None
    try:
        for line in listener.stdout:
            if b"listening" in line:
                break
        sender = client.popen(["iperf3", "-c", server.IP(), "-t", "60"])
        time.sleep(3)
        yield
    finally:
        for program in filter(None, (sender, listener)):
            program.kill()
            program.wait()


def live_change(before: float, after: float) -> dict[str, Any]:
    """The rates in Mbit/s that a host has while `link.intf1.config(bw=...)` changes them.

    Sends UDP in both directions, more than either rate, so that what comes out is the rate.
    """
    with network() as net:
        h1, h2, s1 = net.addHost("h1"), net.addHost("h2"), net.addSwitch("s1")
        link = net.addLink(h1, s1, bw=before, delay="1ms")
        net.addLink(h2, s1)
        net.start()
        floods = [flood(h1, h2, 3 * max(before, after)), flood(h2, h1, 3 * max(before, after))]
        result: dict[str, Any] = {}
        try:
            while min(measured(net, 0.2).values()) < before / 2:
                pass            # The programs begin.
            time.sleep(1)       # And fill the queues.
            result["before"] = measured(net, 1.5)
            link.intf1.config(bw=after)
            link.intf2.config(bw=after)
            time.sleep(0.5)     # What waited at the old rate leaves: 1000 frames at most.
            result["after"] = measured(net, 1.5)
            refused = []
            for params in ({"bw": -3}, {"bw": 10, "colour": "red"}):
                try:
                    link.intf1.config(**params)
                except ValueError as error:
                    refused.append(str(error))
            result["refused"] = refused
            result["still"] = measured(net, 1.0)
            link.intf2.config(bw=after, delay="20ms")
        finally:
            for program in floods:
                program.kill()
                program.wait()
        ping(h1, h2, 10)        # What the flood has left behind goes first.
        result["ping"] = ping(h1, h2, 10)
    return result


def flood(client: Node, server: Node, mbit: float, size: int = 1400) -> Any:
    """Sends UDP without end; nobody need listen."""
    return client.popen([sys.executable, "-c", FLOOD, server.IP(), str(mbit * MBIT), str(size)])


#: Sends datagrams at a rate, in bursts of a millisecond.
FLOOD = """
import socket, sys, time
to, rate, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((to, 9))
data, begin, sent = bytes(size), time.monotonic(), 0
while True:
    due = (time.monotonic() - begin) * rate / 8 / (size + 42)
    while sent < due:
        try:
            s.send(data)
        except OSError:
            pass                # Nobody listens there.
        sent += 1
    time.sleep(0.001)
"""


def measured(net: Mininet, seconds: float) -> dict[str, float]:
    """What h1 and h2 receive meanwhile, in Mbit/s of frames."""
    def received() -> list[int]:
        return [int(line.split(":")[1].split()[0]) for host in (net["h1"], net["h2"])
                for line in Path(f"/proc/{host.pid}/net/dev").read_text().splitlines()
                if "-eth0" in line]

    begin, first = time.monotonic(), received()
    time.sleep(seconds)
    last, end = received(), time.monotonic()
    return {name: (b - a) * 8 / MBIT / (end - begin)
            for name, a, b in zip(("h1", "h2"), first, last, strict=True)}


def tenants(config: str) -> dict[str, Any]:
    """Two tenants with rates of their own, to a host each; blue's floods.

    `config` is the text of the file of tenants.  Returns what each gets, in Mbit/s, and what
    red has when its rate has been changed through REST.
    """
    file = Path("/tmp/tenants.yaml")
    file.write_text(config)
    c0 = FlowBundlerController("c0", config=str(file))
    with network(SingleSwitchTopo(4), controller=c0, waitConnected=True) as net:
        red, blue, web, other = (net[f"h{n}"] for n in (1, 2, 3, 4))
        result: dict[str, Any] = {"lost_percent": net.pingAll()}
        programs = [flood(blue, other, 900)]
        try:
            result["red"] = tcp(red, web, 3)
            first = sent_bytes(net["s1"], "s1-eth4"), time.monotonic()
            time.sleep(1.5)
            last = sent_bytes(net["s1"], "s1-eth4"), time.monotonic()
            result["blue"] = (last[0] - first[0]) * 8 / MBIT / (last[1] - first[1])
            c0.cmd(f"{REPO}/utilities/flowbundler-ctl set-rate red a 50Mbps")
            result["red_changed"] = tcp(red, web, 3)
        finally:
            for program in programs:
                program.kill()
                program.wait()
    return result


def two_switches(bw: float) -> dict[str, Any]:
    """TCP through the link between two switches, the only one with a rate, both ways."""
    with network() as net:
        h1, h2 = net.addHost("h1"), net.addHost("h2")
        s1, s2 = net.addSwitch("s1"), net.addSwitch("s2")
        net.addLink(h1, s1)
        net.addLink(s1, s2, bw=bw)
        net.addLink(s2, h2)
        net.start()
        return {"there": tcp(h1, h2, 3), "back": tcp(h2, h1, 3)}


def many(networks: int, hosts: int) -> dict[str, Any]:
    """Networks made and stopped one after the other, the last one with many hosts.

    The hosts are CPULimitedHosts where mininet has these: it knows cgroups of version 1 only.
    """
    lost, seconds = [], []
    host = CPULimitedHost if os.path.isdir("/sys/fs/cgroup/cpu") else Host
    for number in range(networks):
        begin = time.monotonic()
        size = hosts if number == networks - 1 else 2
        with network(SingleSwitchTopo(size, lopts={"bw": 10}), host=host) as net:
            lost.append(net.ping([net["h1"], net[f"h{size}"]]) if size > 2 else net.pingAll())
            result = net.pingFull([net["h1"], net["h2"]])
        seconds.append(time.monotonic() - begin)
    return {"lost_percent": lost, "seconds": seconds, "full": len(result)}


def another() -> None:
    """A network with names of its own."""
    with network() as net:
        net.addLink(net.addHost("h8"), net.addSwitch("s8"))
        net.start()


def ends(how: str) -> None:
    """A network of two switches that is not stopped: an exception, or worse."""
    net = Mininet(LinearTopo(2, lopts={"bw": 10}), switch=FlowBundlerSwitch,
                  link=FlowBundlerLink, controller=None)
    net.start()
    assert net.pingAll() == 0
    if how == "exception":
        raise RuntimeError("as intended")
    if how == "bad link":
        try:
            net.addLink(net["s1"], net["s2"], bw="much")
        except ValueError:
            sys.exit(3)
    if how == "mn -c":
        subprocess.run(["mn", "-c"], check=True)
        sys.exit(4)
    if how == "second":
        # Another mininet at the same time, which cannot have a datapath.
        done = subprocess.run([sys.executable, __file__, "another", "{}"],
                              capture_output=True, text=True)
        assert "another ovs-vswitchd" in done.stderr, done.stderr
        assert net.pingAll() == 0
        net.stop()
        sys.exit(5)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


def mixed() -> dict[str, Any]:
    """Ends of links that no switch of ours serves."""
    with network() as net:
        h1, h2, h3 = (net.addHost(f"h{n}") for n in (1, 2, 3))
        s1, s2 = net.addSwitch("s1"), net.addSwitch("s2", cls=LinuxBridge)
        net.addLink(h1, s1, bw=40)
        net.addLink(s1, s2, bw=20)          # ours one way, HTB the other
        net.addLink(h2, s2, bw=30)
        direct = net.addLink(h2, h3, bw=5, use_hfsc=False,
                             params1={"ip": "192.168.0.1/24"}, params2={"ip": "192.168.0.2/24"})
        net.start()
        result: dict[str, Any] = {
            "to_bridge": tcp(h1, h2, 2), "from_bridge": tcp(h2, h1, 2),
            "qdisc": h3.cmd(f"tc qdisc show dev {direct.intf2}")}
        refused = []
        for params in ({"delay": "5ms"}, {"bw": 2000}, {"flavour": 1}):
            try:
                net.addLink(h1, h3, **params)
            except ValueError as error:
                refused.append(str(error))
        result["refused"] = refused
        try:
            net.addLink(h3, s1, loss=1)
        except ValueError as error:
            result["loss"] = str(error)
        result["interfaces"] = [len(h1.intfList()), len(h3.intfList())]
    return result


if __name__ == "__main__":
    function, arguments = command_line()
    print("\n" + json.dumps(function(**arguments)))
