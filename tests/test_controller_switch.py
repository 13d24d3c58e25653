"""A controller as users start it, with a real ovs-vswitchd.

The datapath is OVS's dummy one, which is the userspace datapath without devices: what
is tested is control, not speed.  Traffic through rates is the business of the demo and
of the system tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from controller_harness import ROOT, Controller, Switch, wait_for
from fbrates import config, plan

pytestmark = pytest.mark.switch

FILE = """
resync_interval: 1
tenants:
  red:
    destinations: [{to: 10.2.0.0/16, rate: 70Mbps, burst: 120kbit}]
    vms:
      a:
        port: vm-a
        rate: 300Mbps
        destinations: [{to: 10.0.0.9, rate: 50Mbps}, {to: "2001:db8::/32", rate: 60Mbps}]
      m: {mac: 02:00:00:00:00:0a, rate: 10Mbps}
  blue:
    vms:
      b: {port: vm-b, mac: 02:00:00:00:00:0b, ip: [10.0.0.2, "fd00::2"], rate: 100Mbps}
      i: {ip: 10.0.0.3, rate: 400Gbps}
"""
# The same without the audits that would repair things by the way.
QUIET = FILE.replace("resync_interval: 1", "resync_interval: 0")
Start = Callable[..., Controller]


def numbers(text: str = FILE) -> dict[str, int]:
    return plan.Numbers.of(config.parse(text)).meters


def wanted(text: str = FILE) -> dict[int, int]:
    parsed = config.parse(text)
    given = numbers(text)
    return {given[item.key]: item.rate // 1000 for item in parsed.limits() if item.rate}


def ctl(controller: Controller, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "utilities" / "flowbundler-ctl"), *arguments],
        env={**os.environ, "FLOWBUNDLER_URL": controller.url},
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.fixture
def br0(ovs: Switch) -> Switch:
    ovs.add_bridge("br0", "vm-a", "vm-b", "up")
    return ovs


def attach(ovs: Switch, controller: Controller, bridge: str = "br0") -> None:
    ovs.vsctl("set-controller", bridge, controller.target)
    controller.in_sync(int(ovs.vsctl("get", "bridge", bridge, "datapath_id").strip('"\n'), 16))


def described(ovs: Switch) -> list[str]:
    """What ovs-ofctl says of each meter, in an order of the text."""
    return sorted(text.strip() for text in ovs.ofctl("dump-meters", "br0").split("meter=")[1:])


def quiet_audit(controller: Controller) -> None:
    """Wait for one more audit, which must find nothing to repair."""
    before = controller.get("/v1/status")["switches"]["0000000000000001"]

    def audited() -> bool:
        now = controller.get("/v1/status")["switches"]["0000000000000001"]
        assert now["repairs"] == before["repairs"], now
        return bool(now["audits"] > before["audits"] and now["in_sync"])

    wait_for("another audit", audited)


def sources_of(trace: str) -> list[int]:
    return [int(number) for number in re.findall(r"meter:(\d+)", trace.split("Datapath")[0])]


def test_meters_and_flows_appear_and_stay(br0: Switch, controller: Start) -> None:
    running = controller(FILE)
    attach(br0, running)
    assert br0.meters("br0") == wanted()
    given = numbers()
    text = br0.ofctl("dump-meters", "br0")
    # The burst only where the file has one: unset is the switch's own default.
    shared = text[text.index(f"meter={given['red->10.2.0.0/16']} ") :]
    assert shared.startswith(f"meter={given['red->10.2.0.0/16']} kbps burst")
    assert text.count("burst_size") == 1
    flows = br0.flows("br0")
    assert all("cookie=0xfb1d" in flow for flow in flows)

    a, b = given["red/a"], given["blue/b"]
    ip = "ip,dl_src=02:00:00:00:00:01,dl_dst=02:00:00:00:00:02"
    hits = sources_of(br0.trace("br0", f"in_port=vm-a,{ip},nw_src=1.2.3.4,nw_dst=10.0.0.9"))
    assert hits == [a, given["red/a->10.0.0.9"]]
    hits = sources_of(br0.trace("br0", f"in_port=vm-a,{ip},nw_src=1.2.3.4,nw_dst=10.2.0.9"))
    assert hits == [a, given["red->10.2.0.0/16"]]
    six = "ipv6,dl_src=02:00:00:00:00:01,ipv6_src=fd00::1,ipv6_dst=2001:db8::5"
    assert sources_of(br0.trace("br0", f"in_port=vm-a,{six}")) == [a, given["red/a->2001:db8::/32"]]
    good = "ip,dl_src=02:00:00:00:00:0b,nw_src=10.0.0.2,nw_dst=10.0.0.9"
    assert sources_of(br0.trace("br0", f"in_port=vm-b,{good}")) == [b]
    spoofed = br0.trace("br0", f"in_port=vm-b,{good.replace('10.0.0.2', '10.0.0.3')}")
    assert "Datapath actions: drop" in spoofed
    ours = "icmp6,dl_src=02:00:00:00:00:0b,ipv6_src=fd00::2,ipv6_dst=ff02::1"
    own = br0.trace("br0", f"in_port=vm-b,{ours},icmpv6_type=136,icmpv6_code=0,nd_target=fd00::2")
    assert sources_of(own) == [b]
    assert "Datapath actions: drop" not in own
    for forged in ("136,icmpv6_code=0,nd_target=fd00::9", "134", "137"):
        trace = br0.trace("br0", f"in_port=vm-b,{ours},icmpv6_type={forged}")
        assert "Datapath actions: drop" in trace
    arp = "arp,dl_src=02:00:00:00:00:0b,dl_dst=ff:ff:ff:ff:ff:ff,arp_spa=10.0.0.2"
    through = br0.trace("br0", f"in_port=vm-b,{arp}")
    assert sources_of(through) == [b]
    assert "Datapath actions: drop" not in through
    assert sources_of(br0.trace("br0", f"in_port=up,{ip},nw_src=10.0.0.77,nw_dst=10.0.0.9")) == []
    # What the switch tells us of our own flows is what we sent: nothing to repair.
    quiet_audit(running)


@pytest.mark.parametrize("text", [QUIET, QUIET.replace("tenants:", "forwarding: static\ntenants:")])
def test_a_reconnection_disturbs_nothing(br0: Switch, controller: Start, text: str) -> None:
    running = controller(text)
    attach(br0, running)
    before = br0.flows("br0")
    durations = br0.ofctl("dump-flows", "br0")
    oldest = max(float(x) for x in re.findall(r"duration=([0-9.]+)s", durations))
    # Not del-controller: without any controller OVS empties its tables.
    br0.vsctl("set-controller", "br0", "tcp:127.0.0.1:1")
    wait_for(
        "disconnection",
        lambda: not running.get("/v1/status")["switches"]["0000000000000001"]["connected"],
    )
    attach(br0, running)
    assert br0.flows("br0") == before
    tagged = "in_port=vm-a,dl_vlan=5,dl_src=02:00:00:00:00:01,dl_dst=ff:ff:ff:ff:ff:ff"
    dropped = "Datapath actions: drop" in br0.trace("br0", tagged)
    assert dropped == ("static" in text)
    # The same entries as before, not new ones: none is younger than they were.
    durations = br0.ofctl("dump-flows", "br0")
    youngest = min(float(x) for x in re.findall(r"duration=([0-9.]+)s", durations))
    assert youngest >= oldest - 1
    assert youngest > 0


def test_a_controller_restarted_disturbs_nothing(br0: Switch, controller: Start) -> None:
    first = controller(QUIET)
    attach(br0, first)
    before = (br0.meters("br0"), br0.flows("br0"))
    text_before = described(br0)
    assert all("type=shape" in meter for meter in text_before)
    assert first.stop() == 0
    assert (br0.meters("br0"), br0.flows("br0")) == before
    # The same file again changes no meter: it reads shape bands as what they are.  All that is
    # sent of meters is the trial.
    br0.appctl("vlog/set", "vconn:file:dbg")
    again = controller(QUIET)
    attach(br0, again)
    assert again.stop() == 0
    br0.appctl("vlog/set", "vconn:file:info")
    log = (br0.directory / "ovs-vswitchd.log").read_text()
    sent = re.findall(r"received: OFPT_METER_MOD .*: (\w+) meter=(\d+)", log)
    assert [command for command, _ in sent] == ["ADD", "DEL"], sent
    assert not {int(number) for _, number in sent} & before[0].keys()
    assert described(br0) == text_before
    # A file with a VM more, above the others: those keep their meters.
    text = QUIET.replace("      a:\n", "      new: {port: up, rate: 1Mbps}\n      a:\n")
    second = controller(text)
    attach(br0, second)
    assert br0.meters("br0") == wanted(text)
    assert set(before[1]) <= set(br0.flows("br0"))


def test_what_was_deleted_comes_back(br0: Switch, controller: Start) -> None:
    running = controller(FILE)
    attach(br0, running)
    before = br0.flows("br0")
    br0.ofctl("del-meters", "br0")
    br0.ofctl("del-flows", "br0")
    assert br0.meters("br0") == {}
    wait_for("meters and flows", lambda: br0.meters("br0") == wanted())
    wait_for("flows", lambda: br0.flows("br0") == before)
    running.in_sync(1)
    br0.ofctl("del-meter", "br0", f"meter={numbers()['red/a']}")
    br0.ofctl("mod-meter", "br0", f"meter={numbers()['blue/b']},kbps,band=type=drop,rate=77")
    wait_for("the right rates", lambda: br0.meters("br0") == wanted())
    wait_for("flows", lambda: br0.flows("br0") == before)


def test_others_meters_and_flows_are_left_alone(br0: Switch, controller: Start) -> None:
    # With the first controller OVS empties its tables, so one comes before ours.
    br0.vsctl("set-controller", "br0", "tcp:127.0.0.1:1")
    br0.ofctl("add-meter", "br0", "meter=99999,kbps,band=type=drop,rate=5")
    br0.ofctl("add-flow", "br0", "cookie=0x7,table=0,priority=0,actions=drop")
    br0.ofctl("add-flow", "br0", "cookie=0x7,table=7,actions=drop")
    running = controller(FILE)
    attach(br0, running)
    quiet_audit(running)
    assert br0.meters("br0") == {**wanted(), 99999: 5}
    assert sum("cookie=0x7" in flow for flow in br0.flows("br0")) == 2


def test_what_the_readme_makes_survives(br0: Switch, controller: Start) -> None:
    """A meter that somebody made by hand, and the flow that uses it."""
    br0.vsctl("set-controller", "br0", "tcp:127.0.0.1:1")
    br0.ofctl("add-meter", "br0", "meter=1 kbps stats bands=type=shape rate=100000")
    br0.ofctl("add-flow", "br0", "in_port=vm-a,actions=meter:1,output:up")
    running = controller(FILE)
    attach(br0, running)
    quiet_audit(running)
    assert br0.meters("br0") == {**wanted(), 1: 100_000}
    assert sum("meter:1,output" in flow for flow in br0.flows("br0")) == 1


def test_an_id_of_somebody_else_is_left_until_it_is_adopted(
    br0: Switch, controller: Start
) -> None:
    a = numbers()["red/a"]
    br0.vsctl("set-controller", "br0", "tcp:127.0.0.1:1")
    br0.ofctl("add-meter", "br0", f"meter={a},kbps,band=type=drop,rate=5")
    br0.ofctl("add-flow", "br0", f"in_port=vm-b,actions=meter:{a},output:up")
    before = (br0.meters("br0"), br0.flows("br0"))
    running = controller(FILE)
    br0.vsctl("set-controller", "br0", running.target)
    name = "0000000000000001"
    wait_for("refusal", lambda: running.get("/v1/status")["switches"][name]["blocked"])
    assert (br0.meters("br0"), br0.flows("br0")) == before
    done = ctl(running, "status")
    assert done.returncode == 1
    assert f"{name}: left alone: others have meters with ids that are wanted here: {a} (red/a)" \
        in done.stdout
    assert ctl(running, "adopt", name).returncode == 0
    running.in_sync(1)
    assert br0.meters("br0") == wanted()


def test_vswitchd_restarted(br0: Switch, controller: Start) -> None:
    running = controller(QUIET)
    attach(br0, running)
    before = br0.flows("br0")
    assert running.put_rate("tenants/red/vms/a", {"rate": "77Mbps"}).status_code == 200
    br0.stop_vswitchd()
    wait_for(
        "disconnection",
        lambda: not running.get("/v1/status")["switches"]["0000000000000001"]["connected"],
    )
    answer = running.put_rate("tenants/red/vms/m", {"rate": "11Mbps"})
    assert (answer.status_code, answer.json()["applied"]) == (503, False)
    br0.start_vswitchd()
    running.in_sync(1)
    # Rates set live survive, also the one set while there was no switch.
    given = numbers()
    live = {given["red/a"]: 77_000, given["red/m"]: 11_000}
    assert br0.meters("br0") == {**wanted(), **live}
    assert br0.flows("br0") == before


def test_a_port_comes_moves_and_goes(br0: Switch, controller: Start) -> None:
    br0.vsctl("del-port", "vm-a")
    running = controller(QUIET)
    attach(br0, running)
    status = running.get("/v1/status")["switches"]["0000000000000001"]
    assert status["missing_ports"] == ["vm-a"]
    a = numbers()["red/a"]
    assert a not in br0.meters("br0")
    for number in (17, 23):
        br0.add_port("br0", "vm-a", number)
        wait_for(
            f"port {number}",
            lambda n=number: any(f"in_port={n} actions=meter:{a}," in f for f in br0.flows("br0")),
        )
        br0.vsctl("del-port", "vm-a")
        wait_for("no meter", lambda: a not in br0.meters("br0"))
    running.in_sync(1)


def test_rates_are_changed_live(br0: Switch, controller: Start) -> None:
    running = controller(QUIET)
    attach(br0, running)
    given = numbers()
    flows = br0.flows("br0")
    answer = running.put_rate("tenants/red/vms/a", {"rate": "50Mbps"})
    body = answer.json()
    assert (answer.status_code, body["applied"]) == (200, True)
    assert (body["old_rate_bps"], body["new_rate_bps"]) == (300_000_000, 50_000_000)
    assert body["meter_id"] == given["red/a"]
    # Confirmed is in force: no polling.
    assert br0.meters("br0")[given["red/a"]] == 50_000
    quoted = "tenants/red/vms/a/destinations/2001%3Adb8%3A%3A%2F32"
    assert running.put_rate(quoted, {"rate_bps": "5000000"}).status_code == 200
    assert br0.meters("br0")[given["red/a->2001:db8::/32"]] == 5_000
    assert running.put_rate("tenants/red/vms/a", {"rate": 12}).status_code == 400
    assert br0.meters("br0")[given["red/a"]] == 50_000

    done = ctl(running, "set-rate", "red", "a", "1.5Gbps")
    assert (done.returncode, done.stderr) == (0, "")
    assert "red/a: 50Mbps -> 1.5Gbps (meter" in done.stdout
    assert br0.meters("br0")[given["red/a"]] == 1_500_000
    done = ctl(running, "--json", "set-rate", "red", "a", "6Mbps", "--to", "10.0.0.9")
    assert json.loads(done.stdout)["applied"] is True
    done = ctl(running, "set-rate", "red", "-", "7Mbps", "--to", "10.2.0.0/16")
    assert done.returncode == 0, done.stderr
    assert br0.meters("br0") == {
        **wanted(),
        given["red/a"]: 1_500_000,
        given["red/a->10.0.0.9"]: 6_000,
        given["red/a->2001:db8::/32"]: 5_000,
        given["red->10.2.0.0/16"]: 7_000,
    }
    # Meters were modified, never replaced: a deleted meter takes its flows along.
    assert br0.flows("br0") == flows
    text = br0.ofctl("dump-flows", "br0")
    assert min(float(x) for x in re.findall(r"duration=([0-9.]+)s", text)) > 0


def test_metrics(br0: Switch, controller: Start) -> None:
    running = controller(QUIET)
    attach(br0, running)
    assert running.put_rate("tenants/red/vms/a", {"rate": "50Mbps"}).status_code == 200
    answer = running.session.get(f"{running.url}/metrics", timeout=20)
    assert answer.headers["Content-Type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'flowbundler_rate_bits_per_second{owner="red/a"} 5e+07' in lines
    assert 'flowbundler_switch_in_sync{switch="0000000000000001"} 1.0' in lines
    assert "flowbundler_rate_changes_total 1.0" in lines


def test_ctl_says_what_is_wrong(br0: Switch, controller: Start) -> None:
    running = controller(QUIET)
    attach(br0, running)
    done = ctl(running, "set-rate", "red", "zz", "5Mbps")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "flowbundler-ctl: vm 'zz': unknown vm zz; allowed: a, m\n"
    done = ctl(running, "set-rate", "red", "a", "5mbps")
    assert done.returncode == 1
    assert "rate '5mbps': not a rate; allowed: 1kbps to 400Gbps" in done.stderr
    done = ctl(running, "set-rate", "red", "a", "5Mbps", "--to", "10.0.0.1/8")
    assert "did you mean 10.0.0.0/8?" in done.stderr
    assert ctl(running, "set-rate", "red", "a").returncode == 2
    assert ctl(running, "--url", "http://127.0.0.1:1", "status").returncode == 1
    assert ctl(running, "--url", "nonsense", "status").returncode == 1
    done = ctl(running, "show")
    assert re.search(r"^red +a +10\.0\.0\.9 +50Mbps +\d+ +1$", done.stdout, re.MULTILINE)
    assert "blue" not in ctl(running, "show", "red").stdout
    done = ctl(running, "status")
    assert done.returncode == 0
    row = r"^0000000000000001 +in sync +shape +7 "
    assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    assert json.loads(ctl(running, "status", "--json").stdout)["in_sync"] is True


def test_two_hundred_changes_a_second(br0: Switch, controller: Start) -> None:
    running = controller(FILE)
    attach(br0, running)
    flows = br0.flows("br0")
    seconds = float(os.environ.get("FB_CHANGES_SECONDS", "10"))
    count = int(200 * seconds)
    # Each waits until the disk has it: others that write there can take the time.
    for _ in range(3):
        started = time.monotonic()
        slowest = 0.0
        for i in range(count):
            due = started + i / 200
            # Pacing, not waiting for a state: the load is 200 a second.
            time.sleep(max(0.0, due - time.monotonic()))
            answer = running.put_rate("tenants/red/vms/a", {"rate_bps": 1_000_000 + 1000 * i})
            assert answer.status_code == 200, answer.text
            slowest = max(slowest, answer.json()["elapsed_ms"])
        took = time.monotonic() - started
        if took < seconds * 1.1:
            break
    assert took < seconds * 1.1, f"{count} changes took {took:.1f} s"
    assert br0.meters("br0")[numbers()["red/a"]] == 1000 + count - 1
    assert br0.flows("br0") == flows
    quiet_audit(running)
    status = running.get("/v1/status")["switches"]["0000000000000001"]
    assert status["errors"] == []
    assert status["repairs"] == 0
    print(f"{count} changes in {took:.2f} s, slowest confirmation {slowest:.1f} ms")


@pytest.mark.parametrize("how", ["rest", "ctl", "SIGHUP"])
def test_reload(br0: Switch, controller: Start, how: str) -> None:
    running = controller(QUIET)
    attach(br0, running)
    assert running.process is not None

    def reload() -> int:
        if how == "rest":
            return running.session.post(f"{running.url}/v1/reload", timeout=20).status_code
        if how == "ctl":
            return {0: 200, 1: 400}[ctl(running, "reload").returncode]
        os.kill(running.process.pid, signal.SIGHUP)
        return 0

    before = (br0.meters("br0"), br0.flows("br0"))
    running.config.write_text("tenants:\n  red: {vms: {a: {port: vm-a, rtae: 1Mbps}}}\n")
    assert reload() in (0, 400)
    said = wait_for("an error", lambda: running.get("/v1/status")["last_reload_error"])
    assert "tenants.red.vms.a.rtae: unknown key, did you mean rate?" in said
    assert (br0.meters("br0"), br0.flows("br0")) == before
    assert "rtae" in running.log.read_text()

    text = QUIET.replace("rate: 300Mbps", "rate: 301Mbps").replace("      m: {", "      n: {")
    running.config.write_text(text)
    assert reload() in (0, 200)
    wait_for("the new rates", lambda: br0.meters("br0") == wanted(text))
    running.in_sync(1)
    assert running.get("/v1/status")["last_reload_error"] is None


@pytest.mark.parametrize("rate", ['"\\U00110000"', "0x" + "f" * 4000])
def test_signals_are_heard_after_a_reload_of_anything(controller: Start, rate: str) -> None:
    running = controller(QUIET)
    assert running.process is not None
    running.config.write_text(f"tenants: {{red: {{vms: {{a: {{port: p, rate: {rate}}}}}}}}}\n")
    running.process.send_signal(signal.SIGHUP)
    wait_for("an error", lambda: running.get("/v1/status")["last_reload_error"])
    running.config.write_text(QUIET)
    running.process.send_signal(signal.SIGHUP)
    wait_for("another reload", lambda: running.get("/v1/status")["reloads"] == 1)
    assert running.stop(signal.SIGTERM) == 0
    assert "Traceback" not in running.log.read_text()


def test_signals_are_heard_after_a_reload_that_breaks(
    controller: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text(
        "from ryu.base import app_manager\n"
        "import ryu_rates\n"
        "class App(app_manager.RyuApp):\n"
        "    pass\n"
        "def reload(self):\n"
        "    raise RuntimeError('what nobody has thought of')\n"
        "ryu_rates.RyuRates.reload = reload\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    running = controller(QUIET, "--ryu-app", "breaks")
    assert running.process is not None
    for count in (1, 2):
        running.process.send_signal(signal.SIGHUP)
        wait_for(
            "it in the log",
            lambda n=count: running.log.read_text().count("RuntimeError: what nobody") == n,
        )
    assert "reload failed" in running.log.read_text()
    assert running.stop(signal.SIGTERM) == 0


def test_a_bad_file_at_the_start(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("tenants:\n  red:\n    vms:\n      a: {port: p, rate: 5 furlongs, x: 1}\n")
    for options in ([], ["--check"]):
        result = subprocess.run(
            [str(ROOT / "utilities" / "fb-controller"), "--config", str(bad), *options],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 1
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert lines[0].startswith(
            f"{bad}:4: tenants.red.vms.a.rate: '5 furlongs': not a rate; allowed: 1kbps to 400Gbps"
        )
        assert lines[1].startswith(f"{bad}:4: tenants.red.vms.a.x: unknown key; allowed: port, ")
        assert lines[2] == f"fb-controller: {bad}: 2 errors"
    good = ROOT / "controller" / "examples" / "two-tenants.yaml"
    result = subprocess.run(
        [str(ROOT / "utilities" / "fb-controller"), "--config", str(good), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0
    assert "good: 2 tenants, 3 VMs, 2 destinations" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end(br0: Switch, controller: Start, number: int) -> None:
    running = controller(QUIET)
    attach(br0, running)
    before = (br0.meters("br0"), br0.flows("br0"))
    started = time.monotonic()
    assert running.stop(number) == 0
    assert time.monotonic() - started < 3
    log = running.log.read_text()
    assert "Traceback" not in log
    assert re.search(r"^\d{4}-\d\d-\d\d \S+ INFO switch 0000000000000001: in sync,", log, re.M), log
    # What the switch enforces, it goes on to enforce.
    assert (br0.meters("br0"), br0.flows("br0")) == before


def test_only_the_switches_of_the_file(br0: Switch, controller: Start) -> None:
    br0.add_bridge("br1", "other", datapath_id=2)
    running = controller("switches: [0x2]\n" + QUIET)
    br0.vsctl("set-controller", "br0", running.target)
    attach(br0, running, "br1")
    wait_for("br0 ignored", lambda: running.get("/v1/status")["ignored_switches"])
    assert br0.flows("br0") == []
    assert br0.meters("br0") == {}
    # Only those VMs whose packets may come here.
    assert set(br0.meters("br1")) == {
        numbers()[key] for key in ("red/m", "red->10.2.0.0/16", "blue/i")
    }
    # The file may take a switch on later.
    running.config.write_text(QUIET)
    assert running.session.post(f"{running.url}/v1/reload", timeout=20).status_code == 200
    running.in_sync(1, 2)
    assert br0.meters("br0") == wanted()


def test_two_connections_of_one_switch_do_not_fight(br0: Switch, controller: Start) -> None:
    # As when a switch comes back before its old connection is known to be dead.
    br0.add_bridge("br1", "other", datapath_id=1)
    running = controller(FILE)
    attach(br0, running)
    br0.vsctl("set-controller", "br1", running.target)
    wait_for("the newer one", lambda: br0.meters("br1"))

    def audits() -> bool:
        # A connection that loses the switch starts to count anew.
        return bool(running.in_sync(1)["switches"]["0000000000000001"]["audits"] >= 3)

    wait_for("audits", audits)
    assert running.log.read_text().count(": connected") == 2


def test_a_switch_that_refuses_is_told(br0: Switch, controller: Start) -> None:
    running = controller(QUIET)
    attach(br0, running)
    a = numbers()["red/a"]
    br0.ofctl("del-meter", "br0", f"meter={a}")
    answer = running.put_rate("tenants/red/vms/a", {"rate": "5Mbps"})
    assert (answer.status_code, answer.json()["applied"]) == (502, False)
    what = f"modify meter {a} of red/a 5Mbps"
    why = "OFPET_METER_MOD_FAILED OFPMMFC_UNKNOWN_METER"
    assert answer.json()["switches"]["0000000000000001"]["errors"] == [f"{what}: {why}"]
    errors = running.get("/v1/status")["switches"]["0000000000000001"]["errors"]
    assert [(item["about"], item["error"]) for item in errors] == [(what, why)]
    done = ctl(running, "status")
    assert re.search(rf"^\S+: \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d: {what}: {why}$", done.stdout, re.M)
    # And then it is repaired, with the new rate.
    running.in_sync(1)
    assert br0.meters("br0") == {**wanted(), a: 5_000}
    assert any(f"actions=meter:{a}," in flow for flow in br0.flows("br0"))


def test_shape_bands(br0: Switch, controller: Start) -> None:
    """The switch has them, so the meters do; and drop bands if the file says so."""
    running = controller("shaping: {max_delay: 20ms, ecn_threshold: 5ms}\n" + FILE)
    attach(br0, running)

    def bands() -> set[str]:
        text = br0.ofctl("dump-meters", "br0")
        return set(re.findall(r"type=\w+|max_delay=\d+|ecn_threshold=\d+|fair=\w+", text))

    def band() -> str:
        return str(running.get("/v1/status")["switches"]["0000000000000001"]["band"])

    shape = {"type=shape", "max_delay=20000", "ecn_threshold=5000"}
    assert (bands(), band()) == (shape, "shape")
    # The trial's meter is gone, and what is read back is what was sent.
    assert br0.meters("br0") == wanted()
    quiet_audit(running)
    assert "switch 0000000000000001: has the shape band" in running.log.read_text()
    assert running.get("/v1/status")["switches"]["0000000000000001"]["errors"] == []

    # Someone else's idea of a meter of ours.
    br0.ofctl("mod-meter", "br0", f"meter={numbers()['blue/b']},kbps,band=type=drop,rate=100000")
    wait_for("the shape band", lambda: bands() == shape)

    flows = br0.flows("br0")
    running.config.write_text(
        "shaping: {max_delay: 20ms, ecn_threshold: 5ms, fair: true}\n" + FILE
    )
    assert ctl(running, "reload").returncode == 0
    wait_for("fair meters", lambda: bands() == shape | {"fair=true"})
    running.in_sync(1)
    quiet_audit(running)
    (meters,) = running.get("/v1/meters").values()
    assert all(band["fair"] is True for meter in meters for band in meter["bands"])

    running.config.write_text("shaping: {band: drop}\n" + FILE)
    assert ctl(running, "reload").returncode == 0
    wait_for("drop bands", lambda: bands() == {"type=drop"})
    running.in_sync(1)
    assert band() == "drop"
    assert (br0.meters("br0"), br0.flows("br0")) == (wanted(), flows)
