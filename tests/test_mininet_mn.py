"""The command mn with our file: what a user types, and what comes out."""

from __future__ import annotations

import re

import pytest

from mininet_bed import mn, run

#: Other work on the machine can take from a rate, and never gives it any.
ATTEMPTS = 3
OURS = ("--switch", "fb", "--link")


def iperf_mbit(said: str) -> float:
    """What iperf's server has received, in Mbit/s."""
    match = re.search(r"Results: \['([\d.]+) Mbits/sec'", said)
    assert match, said
    return float(match[1])


@pytest.mark.parametrize("topology", [[], ["--topo", "linear,3"], ["--topo", "tree,2"]], ids=str)
def test_a_shaped_network_is_two_words_away(topology: list[str]) -> None:
    for _ in range(ATTEMPTS):
        outcome = mn(*OURS, "fb,bw=100", *topology, "--test", "pingall",
                     "--test", "iperf,seconds=3")
        assert outcome.status == 0
        assert "0% dropped" in outcome.said
        assert iperf_mbit(outcome.said) <= 100
        if iperf_mbit(outcome.said) >= 93:
            break
    assert iperf_mbit(outcome.said) >= 93


def test_a_slow_network_answers() -> None:
    outcome = mn(*OURS, "fb,bw=10,delay=15ms", "--test", "pingall")
    assert "0% dropped (2/2 received)" in outcome.said


@pytest.mark.parametrize(("link", "message"), [
    ("fb,bw=fast", "bw='fast': is no number; allowed: Mbit/s"),
    ("fb,bandwidth=10", "bandwidth=10: unknown parameter of a link"),
    ("fb,bw=10,use_hfsc=1", "use_hfsc=1: the shaper is neither HTB nor HFSC"),
    ("fb,bw=1000,delay=10s", "buffers for"),
])
def test_what_cannot_be_gets_a_message(link: str, message: str) -> None:
    # mn ends with 0 whatever happens.
    assert message in mn(*OURS, link, "--test", "pingall").said


def test_a_controller_without_a_file_gets_a_message() -> None:
    said = mn(*OURS, "fb", "--controller", "fb", "--test", "pingall").said
    assert "config is needed" in said
    said = mn(*OURS, "fb", "--controller", "fb,config=/nowhere.yaml", "--test", "pingall").said
    assert "config=/nowhere.yaml: there is no such file" in said


def test_without_privileges_there_is_a_message() -> None:
    outcome = run("setpriv", "--reuid", "65534", "--clear-groups", "mn", "--version")
    assert outcome.status == 0
    outcome = run("setpriv", "--reuid", "65534", "--clear-groups", "mn", "--switch", "lxbr",
                  "--test", "pingall")
    assert "must run as root" in outcome.said
