"""The demo's report says what was measured, and fails when it should."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from fbtest import demo, netns, report
from fbtest.analysis import CounterSeries
from fbtest.proc import wait_until

MBIT = 1_000_000


def a_report(achieved=(300.0, 150.0, 100.0, 200.0), key="shaper"):
    """A report with one limiter and what the two VMs got in Mbit/s."""
    vms = demo.scenario()
    result = report.LimiterResult(key, key, "as it is", 10.0)
    rates = iter(achieved)
    for vm in vms:
        result.phases[vm.label] = [
            report.Phase(configured=rate, achieved=next(rates) * MBIT,
                         start_s=10.0 * n + 2, end_s=10.0 * n + 10,
                         offered=400e6, retransmits=1234, drops=5, port_drops=1,
                         goodput=1e6 if vm.traffic == "TCP" else None)
            for n, rate in enumerate(vm.rates)]
        result.series[vm.label] = report.Series([0.0, 10.0, 20.0], [1e6, 2e6, 3e6])
    return report.Report({"ovs": "3.5.0"}, vms, 0.01, [result])


def test_within_tolerance():
    assert a_report((302.9, 148.6, 99.1, 201.9)).failures("shaper") == []


@pytest.mark.parametrize("wrong, name", [
    ((303.1, 150, 100, 200), "red/web at 300"), ((300, 148.4, 100, 200), "red/web at 150"),
    ((300, 150, 0, 200), "blue/bulk at 100"), ((300, 150, 100, 202.1), "blue/bulk at 200")])
def test_out_of_tolerance(wrong, name):
    found = a_report(wrong).failures("shaper")
    assert len(found) == 1 and name in found[0]


@pytest.mark.parametrize("good, status", [(True, 0), (False, 1)])
def test_exit_status(good, status, capsys):
    result = a_report() if good else a_report((300, 120, 100, 200))
    assert demo.main([], run=lambda *_: result) == status
    assert ("out of tolerance" in capsys.readouterr().out) is not good


def test_only_the_shaper_is_judged():
    assert demo.main([], run=lambda *_: a_report((300, 42, 100, 200), "policer")) == 0


def test_files(tmp_path):
    report.write(a_report(), tmp_path / "new")
    data = json.loads((tmp_path / "new/report.json").read_text())
    phases = data["results"][0]["phases"]["red/web"]
    assert [p["configured"] for p in phases] == [300 * MBIT, 150 * MBIT]
    assert phases[0]["ratio"] == 1.0
    text = (tmp_path / "new/report.txt").read_text()
    assert "150.00" in text and "1,234" in text and "…" not in text
    assert (tmp_path / "new/report.png").read_bytes().startswith(b"\x89PNG")


def counter(rates, step=0.025):
    """A counter that grows at each of `rates` for a second."""
    each = np.repeat(rates, round(1 / step)) * step / 8
    return CounterSeries(np.arange(len(each) + 1) * step, np.r_[0, np.cumsum(each)])


def test_in_force_at_once():
    assert demo.first_in_force(counter([100e6, 200e6, 200e6]), 1, 200 * MBIT, 3) <= 0.05


def test_in_force_later():
    series = counter([100e6, 100e6, 200e6, 200e6, 200e6])
    assert demo.first_in_force(series, 1, 200 * MBIT, 5) == pytest.approx(1, abs=0.06)


def test_in_force_despite_a_dip_much_later():
    series = counter([200e6, 200e6, 200e6, 0, 200e6])
    assert demo.first_in_force(series, 1, 200 * MBIT, 5) == 0


def test_never_in_force():
    assert demo.first_in_force(counter([100e6, 100e6, 150e6]), 1, 200 * MBIT, 3) is None


@pytest.mark.parametrize("argv, message", [
    (["--limiters", "policer,nonsense"], "'nonsense' is none of"),
    (["--seconds", "0"], "--seconds: at least 1")])
def test_bad_options(argv, message, capsys):
    with pytest.raises(SystemExit):
        demo.parse(argv)
    assert message in capsys.readouterr().err


def test_config_for_the_controller():
    class Bed:
        pass

    run = demo.ShaperRun(Bed(), demo.scenario(), demo.parse([]))
    assert run.config()["tenants"]["red"]["vms"]["web"] == {"port": "web", "rate": "300Mbps"}
    assert demo._rate(1_500_000) == "1500kbps"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ended_by_a_signal_it_leaves_nothing(ovs_env, tmp_path, how):
    before = netns.our_names()
    parent = os.path.dirname(os.path.dirname(demo.__file__))
    process = subprocess.Popen(
        [sys.executable, "-m", "fbtest.demo", "--limiters", "htb", "--output", str(tmp_path)],
        env={**ovs_env, "PYTHONPATH": parent}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
        # Who runs the tests in the background may have them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        # The load runs when there are senders in the namespaces.
        wait_until(lambda: len(set(netns.our_names()) - set(before)) >= 8,
                        "hosts", 20)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(how)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + how
    assert netns.our_names() == before
