"""The file of tenants: units, YAML, what is refused and how that is said."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbrates import config, loader, units
from fbrates.loader import InvalidConfig

ROOT = Path(__file__).resolve().parent.parent


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        config.parse(text)
    return [problem.text("f.yaml") for problem in caught.value.problems]


def vm(body: str, above: str = "") -> str:
    return f"{above}\ntenants: {{red: {{vms: {{a: {{port: p, rate: 1Mbps, {body}}}}}}}}}"


# Units.


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("1kbps", 1_000),
        ("1000bps", 1_000),
        ("300Mbps", 300_000_000),
        ("300 Mbps", 300_000_000),
        ("1.5Gbps", 1_500_000_000),
        ("0.001Mbps", 1_000),
        ("400Gbps", 400_000_000_000),
        ("50000000", 50_000_000),
        (50_000_000, 50_000_000),
        (1000, 1000),
    ],
)
def test_rates_that_are_rates(text: object, bps: int) -> None:
    assert units.parse_rate(text) == bps


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (0, "range"),
        ("0", "range"),
        ("0Mbps", "range"),
        (-5, "range"),
        ("-5Mbps", "not a rate"),
        (999, "range"),
        ("401Gbps", "range"),
        ("400.000001Gbps", "range"),
        (400_000_000_001, "range"),
        ("9" * 30, "range"),
        ("9" * 31, "not a rate"),
        (10**100, "range"),
        (1500, "whole number of kbit/s"),
        ("1.0005kbps", "whole number of kbit/s"),
        ("300M", "not a rate"),
        ("300mbps", "not a rate"),
        ("300MBps", "not a rate"),
        ("300 Mbps ", "not a rate"),
        ("1e9", "not a rate"),
        ("", "not a rate"),
        ("fast", "not a rate"),
        ("٣Mbps", "not a rate"),
        ("nan", "not a rate"),
        (1e9, "not a rate"),
        (True, "not a rate"),
        (None, "not a rate"),
        ([1], "not a rate"),
    ],
)
def test_rates_that_are_not(value: object, what: str) -> None:
    with pytest.raises(units.UnitError, match=what) as caught:
        units.parse_rate(value)
    assert "1kbps to 400Gbps" in caught.value.allowed


@given(st.integers(1, units.MAX_RATE // 1000))
def test_a_rate_shown_is_the_rate(kbps: int) -> None:
    shown = units.format_rate(kbps * 1000)
    assert units.parse_rate(shown) == kbps * 1000
    assert len(shown) <= len("399999.999Mbps")


@pytest.mark.parametrize(
    ("text", "kbit"), [("120kbit", 120), ("15kB", 120), ("1MB", 8000), ("1000bit", 1), ("125B", 1)]
)
def test_bursts(text: str, kbit: int) -> None:
    assert units.parse_burst(text) == kbit


@pytest.mark.parametrize("value", [0, 15, "0kbit", "15", "1500B1", "1bit", "9999999Mbit", None])
def test_bursts_that_are_not(value: object) -> None:
    with pytest.raises(units.UnitError):
        units.parse_burst(value)


# What a good file means.


@pytest.mark.parametrize("example", sorted((ROOT / "controller" / "examples").glob("*.yaml")))
def test_examples_are_good(example: Path) -> None:
    assert config.load(str(example)).tenants


def test_everything_is_understood() -> None:
    parsed = config.load(str(ROOT / "controller" / "examples" / "everything.yaml"))
    assert parsed.switches == {1, 0x2B2C3D4E5F6}
    assert (parsed.first_meter, parsed.last_meter) == (1000, 1999)
    assert (parsed.unknown_sources, parsed.unknown_rate) == ("rate", 10_000_000)
    assert parsed.uplinks == ("uplink",)
    assert parsed.tenants["red"].total == config.Total("red", 5_000_000_000, 24)
    assert parsed.tenants["red"].vms["remote"].vni == 5001
    red = parsed.tenants["red"]
    web = red.vms["web"]
    assert web.ips == (ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("2001:db8::1"))
    assert (web.rate, web.burst) == (2_500_000_000, 24)
    rates = {text: (item.rate, item.burst) for text, item in web.destinations.items()}
    assert rates == {
        "10.0.0.9": (50_000_000, 24),
        "2001:db8:1::/48": (100_000_000, 120),
        "10.9.0.0/16": (None, 120),
    }
    assert red.destinations["203.0.113.0/24"].key == "red->203.0.113.0/24"
    assert red.vms["batch"].rate == 1_000_000_000
    assert parsed.tenants["blue"].vms["legacy"].rate == 64_000
    # A VM with a port and addresses is forwarded to without being asked for.
    forwarded = {str(entry.to): entry.port for entry in parsed.forwarding.entries}
    assert forwarded["02:00:00:00:00:01"] == "vhu-web"
    assert forwarded["10.0.0.1/32"] == "vhu-web"
    assert forwarded["0.0.0.0/0"] == "uplink"


def test_yaml_has_no_surprises() -> None:
    parsed = config.parse(
        """
        tenants:
          no:                                  # text, not false
            vms:
              on: {port: off, mac: 52:54:00:12:34:56, rate: 0x3e8}
              1: {port: 1e3, rate: 1000}
        """
    )
    assert parsed.tenants["no"].vms["on"].mac == "52:54:00:12:34:56"
    assert parsed.tenants["no"].vms["on"].port == "off"
    assert parsed.tenants["no"].vms["1"].port == "1e3"


def test_anchors_and_merges_work() -> None:
    parsed = config.parse(
        """
        tenants:
          red:
            vms:
              a: &small {port: a, rate: 5Mbps, burst: 1kB}
              b: {<<: *small, port: b}
        """
    )
    b = parsed.tenants["red"].vms["b"]
    assert (b.port, b.rate, b.burst) == ("b", 5_000_000, 8)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("0x10", 16), ("0000000000000010", 16), ('"0000000000000010"', 16)],
)
def test_datapath_ids(text: str, number: int) -> None:
    assert config.parse(f"switches: [{text}]\ntenants: {{}}").switches == {number}


# What a bad file is told.

NO_CHARACTER = (
    "not YAML: while scanning a quoted scalar found an escape that is not a Unicode character"
)
HUGE = "0x" + "f" * 4000  # More decimal digits than Python shows.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (vm("rtae: 3"), "tenants.red.vms.a.rtae: unknown key, did you mean rate?; allowed: port,"),
        (vm("mac: 5"), "tenants.red.vms.a.mac: 5: not a unicast MAC address; allowed: "),
        (vm("mac: 01:00:5e:00:00:01"), "not a unicast MAC address"),
        (vm("mac: 02-00-00-00-00-01"), "not a unicast MAC address"),
        (vm("ip: 10.0.0.256"), "tenants.red.vms.a.ip: '10.0.0.256': '10.0.0.256' is not an IP"),
        (vm("ip: 10.0.0.0/24"), "is not an IP address"),
        (vm("ip: []"), "tenants.red.vms.a.ip: []: the list is empty"),
        (vm("ip: 224.0.0.1"), "is not the address of one host"),
        (vm("ip: [10.0.0.1, 10.0.0.1]"), "is listed twice"),
        (vm("burst: 7"), "tenants.red.vms.a.burst: 7: not a burst size"),
        (vm("destinations: 7"), "tenants.red.vms.a.destinations: 7: must be a list"),
        (vm("destinations: [7]"), "tenants.red.vms.a.destinations[0]: 7: must be a mapping"),
        (vm("destinations: [{to: 1.2.3.4}]"), "destinations[0].rate: is missing, and defaults.des"),
        (vm("destinations: [{rate: 1Mbps}]"), "destinations[0].to: is missing"),
        (
            vm("destinations: [{to: 10.0.0.1/8, rate: 1Mbps}]"),
            "destinations[0].to: '10.0.0.1/8': prefix has host bits set; did you mean 10.0.0.0/8?",
        ),
        (
            vm("destinations: [{to: 10.0.0.1, rate: 1Mbps}, {to: 10.0.0.1/32, rate: 2Mbps}]"),
            "tenants.red.vms.a.destinations[1].to: '10.0.0.1': is already in this list, at [0]",
        ),
        ("tenants: {red: {vms: {a: {port: p}}}}", "a.rate: is missing, and defaults.rate is not"),
        ("tenants: {red: {vms: {a: {port: p, rate: }}}}", "a.rate: not a rate"),
        ("tenants: {red: {vms: {a: {port: p, rate: 0}}}}", "a.rate: 0: rate out of range; allowed"),
        ("tenants: {red: {vms: {a: {rate: 1Mbps}}}}", "nothing says which packets are this VM's"),
        ("tenants: {red: {vms: {a: }}}", "tenants.red.vms.a: must be a mapping"),
        ("tenants: {red: }", "tenants.red: must be a mapping"),
        ("tenants: {red: {}}", "tenants.red.vms: is missing"),
        ("tenants: {a/b: {vms: {}}}", "tenants.a/b: 'a/b': not a name"),
        ("tenants: {red: {vms: {a: {port: 5, rate: 1Mbps}}}}", "quote it to make it text"),
        (
            "tenants: {red: {vms: {a: {port: abcdefghijklmnop, rate: 1Mbps}}}}",
            "OpenFlow 1.3 cannot carry a port name this long",
        ),
        ("switches: {any: true}\ntenants: {}", "not a list of datapath ids; allowed: any,"),
        ("switches: [x]\ntenants: {}", "switches: ['x']: 'x' is not a datapath id; allowed: any,"),
        ("switches: [1234567890123456]\ntenants: {}", "is not a datapath id"),
        ("switches: []\ntenants: {}", "not a list of datapath ids"),
        ("unknown_sources: maybe\ntenants: {}", "unknown_sources: 'maybe': not one of the allowed"),
        ("resync_interval: -1\ntenants: {}", "resync_interval: -1: out of range; allowed: 0 to"),
        ("resync_interval: '5'\ntenants: {}", "resync_interval: '5': must be an integer"),
        ("meters: {first: 0}\ntenants: {}", "meters.first: 0: out of range"),
        (vm("burst: 1kB", "meters: {first: 5, last: 4}"), "0 meter ids are not enough for 1 VMs"),
        ("forwarding: {mode: normal, entries: [{to: 1.2.3.4, port: p}]}\ntenants: {}", "static"),
        ("forwarding: [{to: x, port: p}]\ntenants: {}", "forwarding.entries[0].to: 'x': not an ad"),
        ("", "the file is empty"),
        ("- 1", "must be a mapping"),
        ("tenants: [", "f.yaml:1: not YAML: while parsing a flow"),
        ("tenants:\n\t- x", "not YAML"),
        ("a: &a [*a]", "contains itself"),
        ("tenants: {red: {vms: {}}, red: {vms: {}}}", "tenants.red: given twice (first on line 1)"),
        ("tenants: !!python/object:os.system {}", "tenants: unknown tag"),
        ('a:\n  b: "\\U00110000"', f"f.yaml:2: {NO_CHARACTER}"),
        ('a:\n  b: "\\UFFFFFFFF"', f"f.yaml:2: {NO_CHARACTER}"),
        ('a:\n  b: "\\uD800"', f"f.yaml:2: {NO_CHARACTER}"),
        (vm(f"burst: {HUGE}", "\n"), "f.yaml:3: tenants.red.vms.a.burst: '0xffff"),
        (vm(f"ip: [{HUGE}]"), "fff... is not an IP address"),
        (f"switches: [{HUGE}]\ntenants: {{}}", "fff... is not a datapath id"),
        (f"#\n%YAML {'1' * 5000}.1\n---\na: 1", "f.yaml:2: not YAML: Exceeds the limit"),
        ("[" * 5000, "not YAML: nested too deep|not YAML|nested"),
    ],
)
def test_a_bad_file_is_told(text: str, said: str) -> None:
    told = "\n".join(problems(text))
    assert any(part in told for part in said.split("|")), told


@pytest.mark.parametrize("value", [HUGE, "9" * 4000, "1.0e999", "[[[10.0.0.1]]]", "{a: {b: 1}}"])
def test_what_is_refused_can_be_told_in_json(value: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        config.parse(vm(f"ip: {value}"))
    (problem,) = caught.value.problems
    told = json.loads(json.dumps(problem.as_dict(), allow_nan=False))
    assert told["field"] == "tenants.red.vms.a.ip"
    assert isinstance(told["value"], str)


def test_all_is_told_at_once_with_lines() -> None:
    told = problems(
        """\
defaults: {rate: -1}
tenants:
  red:
    vms:
      a: {port: vm-a, ip: 10.0.0.1, rtae: 3}
      b: {port: vm-a, ip: 10.0.0.1, mac: 02:00:00:00:00:01}
  blue:
    vms:
      c: {ip: ["10.0.0.1"], mac: 02:00:00:00:00:01}
"""
    )
    lines = [line.split(": ")[:2] for line in told]
    assert lines == [
        ["f.yaml:1", "defaults.rate"],
        ["f.yaml:5", "tenants.red.vms.a.rtae"],
        ["f.yaml:6", "tenants.red.vms.b.port"],
        ["f.yaml:9", "tenants.blue.vms.c.mac"],
        ["f.yaml:9", "tenants.blue.vms.c.ip"],
    ]
    assert "port is already that of tenants.red.vms.a" in told[2]


def test_aliases_cannot_blow_up() -> None:
    levels = "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 12))
    with pytest.raises(InvalidConfig, match="values"):
        loader.parse(f"x0: &x0 [1]\n{levels}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        config.load(str(tmp_path / "none"))
    (tmp_path / "latin1").write_bytes(b"tenants: \xff")
    with pytest.raises(InvalidConfig, match="not UTF-8 at byte 9"):
        config.load(str(tmp_path / "latin1"))


@given(st.text(alphabet="tenas:vm{}[]&*<>'\"-,# \n\tp0169.!|", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        config.parse(text)
    except InvalidConfig as error:
        assert error.problems


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "tenants",
                    "vms",
                    "red",
                    "port",
                    "mac",
                    "ip",
                    "rate",
                    "destinations",
                    "to",
                    "first",
                ]
                + ["defaults", "switches", "forwarding", "meters", "entries", "mode", "burst"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(_junk)
def test_any_structure_is_read_or_refused(data: object) -> None:
    import yaml

    try:
        config.parse(yaml.safe_dump(data, allow_unicode=False))
    except InvalidConfig as error:
        assert error.problems
        assert all("\n" not in problem.text() for problem in error.problems)
