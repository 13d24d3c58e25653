"""Software that is not ours, against our switch with dummy ports: what it reads and sets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller_harness import DEADLINE, Controller, Switch, wait_for
from ryu_apps import Ryu, free_port, needs_ryu

pytestmark = pytest.mark.switch

HERE = Path(__file__).resolve().parent
DROP, OF13, OF14 = 1, 4, 5


@pytest.fixture
def br0(ovs: Switch) -> Switch:
    ovs.add_bridge("br0", "vm-a", "vm-b")
    ovs.vsctl("set", "bridge", "br0", "protocols=OpenFlow13,OpenFlow14,OpenFlow15")
    return ovs


@pytest.fixture
def ryu(tmp_path: Path) -> Iterator[Callable[..., Ryu]]:
    """Start Ryu with applications."""
    running: list[Ryu] = []

    def start(*apps: str) -> Ryu:
        running.append(Ryu(tmp_path, *apps))
        return running[-1]

    yield start
    for item in running:
        item.close()


def add_meters(ovs: Switch) -> None:
    ovs.ofctl("add-meter", "br0", "meter=1 kbps stats bands=type=shape rate=100000 burst_size=200")
    ovs.ofctl("add-meter", "br0", "meter=2 kbps bands=type=shape rate=5 fair=true max_delay=9")
    ovs.ofctl("add-meter", "br0", "meter=3 kbps bands=type=drop rate=7")


@pytest.mark.parametrize("version", [OF13, OF14])
@pytest.mark.parametrize("framework", [pytest.param("ryu", marks=needs_ryu), "os_ken"])
def test_a_plain_client_reads_the_list_of_meters(
    br0: Switch, framework: str, version: int
) -> None:
    add_meters(br0)
    done = subprocess.run(
        [sys.executable, HERE / "plain_client.py", framework, br0.directory / "br0.mgmt",
         str(version)],
        capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    # (A drop band that was made without a burst is given one by the switch, as ever.)
    assert json.loads(done.stdout) == [[1, DROP, 100_000, 200], [2, DROP, 5, 0], [3, DROP, 7, 7]]


@needs_ryu
def test_ofctl_rest_reads_the_list_of_meters(br0: Switch, ryu: Callable[..., Ryu]) -> None:
    running = ryu("ryu.app.ofctl_rest")
    br0.vsctl("set-controller", "br0", running.target)
    br0.vsctl("set", "bridge", "br0", "protocols=OpenFlow13")
    running_ready(running)
    add_meters(br0)
    answer = running.ask("GET", "/stats/meterconfig/1")["1"]
    meters = {meter["meter_id"]: meter for meter in answer}
    assert meters.keys() == {1, 2, 3}
    assert meters[1]["bands"] == [{"type": "DROP", "rate": 100_000, "burst_size": 200}]
    assert sorted(meters[1]["flags"]) == ["BURST", "KBPS", "STATS"]
    assert meters[2]["bands"] == [{"type": "DROP", "rate": 5, "burst_size": 0}]
    # What it was shown takes nothing away from what they are.
    text = br0.ofctl("dump-meters", "br0")
    assert text.count("type=shape") == 2


def running_ready(running: Ryu) -> None:
    """Wait until Ryu has its switch, also if it has only just started."""
    wait_for("Ryu", lambda: running.session.get(f"{running.url}/stats/switches", timeout=5).ok, 60)
    running.knows(1)


@needs_ryu
def test_rest_qos_beside_our_controller(
    br0: Switch, controller: Callable[..., Controller]
) -> None:
    """Queues and a meter, by the OVSDB client of Ryu and by OpenFlow."""
    running = controller(
        "unknown_sources: forward\ntenants: {}\n",
        *("--ryu-app", "ryu.app.rest_qos", "--ryu-app", "ryu.app.rest_conf_switch"),
    )
    port = free_port()
    br0.run("ovs-appctl", "-t", f"{br0.directory}/ovsdb-server.ctl",
            "ovsdb-server/add-remote", f"ptcp:{port}:127.0.0.1")
    br0.vsctl("set", "bridge", "br0", "protocols=OpenFlow13")
    br0.vsctl("set-controller", "br0", running.target)
    running.in_sync(1)

    def ask(method: str, path: str, body: Any) -> Any:
        answer = running.session.request(
            method, running.url + path, json=body, timeout=DEADLINE)
        assert answer.status_code in (200, 201), (answer.status_code, answer.text)
        return answer.json() if answer.content else None

    dpid = "0000000000000001"
    ask("PUT", f"/v1.0/conf/switches/{dpid}/ovsdb_addr", f"tcp:127.0.0.1:{port}")
    queues = [{"max_rate": "500000"}, {"max_rate": "800000"}]
    wanted = {
        "port_name": "vm-b", "type": "flowbundler", "max_rate": "1000000", "queues": queues}

    def set_queues() -> Any:
        # Ryu answers the PUT before it has connected to the database.
        (answer,) = ask("POST", f"/qos/queue/{dpid}", wanted)
        assert answer["command_result"]["result"] == "success", answer
        return answer

    wait_for("the database", set_queues)
    qos = br0.vsctl("get", "port", "vm-b", "qos").strip()
    assert br0.vsctl("get", "qos", qos, "type").strip() == "flowbundler"
    shown = json.loads(br0.appctl("--format", "json", "flowbundler/show", "vm-b"))["vm-b"]
    assert shown["shaping"] and shown["config"]["max-rate"] == 1_000_000, shown
    assert "refused" not in shown, shown
    text = br0.appctl("qos/show", "vm-b")
    rates = sorted(int(rate) for rate in re.findall(r"max-rate: (\d+)", text))
    assert rates == [500_000, 800_000, 1_000_000], text
    (answer,) = ask("POST", f"/qos/meter/{dpid}", {
        "meter_id": "7", "flags": "KBPS", "bands": [{"type": "DROP", "rate": "100000"}]})
    assert answer["command_result"][0]["result"] == "success", answer
    assert br0.meters("br0")[7] == 100_000
    (answer,) = ask("POST", f"/qos/rules/{dpid}", {
        "match": {"nw_dst": "10.0.0.2", "nw_proto": "TCP"}, "actions": {"meter": "7"}})
    assert "success" in json.dumps(answer), answer
    assert any("meter:7" in flow for flow in br0.flows("br0"))


@needs_ryu
def test_ofctl_rest_beside_our_controller(
    br0: Switch, controller: Callable[..., Controller]
) -> None:
    """It reads shape bands in our process, and can show what it has a name for."""
    running = controller(
        "unknown_sources: forward\ntenants: {red: {vms: {a: {port: vm-a, rate: 300Mbps}}}}\n",
        *("--ryu-app", "ryu.app.ofctl_rest"),
    )
    br0.vsctl("set", "bridge", "br0", "protocols=OpenFlow13")
    br0.vsctl("set-controller", "br0", running.target)
    running.in_sync(1)
    (meter,) = running.get("/stats/meterconfig/1")["1"]
    (band,) = meter["bands"]
    assert (band["type"], band["rate"], band["experimenter"]) == ("EXPERIMENTER", 300_000, 0x2320)
