"""Mininet.iperf that ends with today's iperf.

mininet 2.3.0 finds out whether iperf's server listens by connecting to it, and then waits
for the server's report of that connection as well.  From 2.1 on iperf does not report a
connection without data, and mininet waits forever, with any switch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fbtest.netns import listening
from fbtest.proc import wait_until
from mininet.log import error, output
from mininet.net import Mininet
from mininet.node import Node

#: The time that the server has for its report when the client is done.
REPORT_MS = 10_000


def iperf(self: Mininet, hosts: Sequence[Node] | None = None, l4Type: str = "TCP",
          udpBw: str = "10M", fmt: str | None = None, seconds: int = 5, port: int = 5001
          ) -> list[str]:
    """Run iperf between two hosts; parameters and result are Mininet.iperf's.

    Returns what the server and the client say they reached, for UDP after `udpBw`.
    """
    if l4Type not in ("TCP", "UDP"):
        raise ValueError(f"l4Type={l4Type!r}: allowed: TCP, UDP")
    client, server = hosts or (self.hosts[0], self.hosts[-1])
    output(f"*** Iperf: testing {l4Type} bandwidth between {client} and {server}\n")
    command = f"iperf -p {port}" + (" -u" if l4Type == "UDP" else "") + (
        f" -f {fmt}" if fmt else "")
    server.sendCmd(f"{command} -s")
    said = ""
    try:
        if l4Type == "TCP":
            wait_until(lambda: listening(server.pid, port), f"iperf listens in {server}")
        else:
            while "listening" not in said:
                said += _more(server)
        bandwidth = f" -b {udpBw}" if l4Type == "UDP" else ""
        client_said = client.cmd(f"{command} -t {seconds} -c {server.IP()}{bandwidth}")
        while "/sec" not in said:
            more = _more(server)
            if not more:
                error(f"iperf's server in {server} reports nothing: {said}\n")
                break
            said += more
    finally:
        server.sendInt()
        said += server.waitOutput()
    result = [_rate(said), _rate(client_said)]
    if l4Type == "UDP":
        result.insert(0, udpBw)
    output(f"*** Results: {result}\n")
    return result


def _more(node: Node) -> str:
    """What `node` says next; nothing if it is silent for long."""
    return node.monitor(timeoutms=REPORT_MS)


def _rate(said: str) -> str:
    """The last rate in what iperf has said, such as "95.6 Mbits/sec"."""
    rates: list[Any] = re.findall(r"[\d.]+ \w+/sec", said)
    return rates[-1] if rates else ""


def replace() -> None:
    """Have Mininet.iperf be ours."""
    Mininet.iperf = iperf
