"""QoS and Queue records of all kinds against a real ovs-vswitchd.

A record is in force with exactly the values it has, or refused with a message that names
key, value and what is allowed, and what ran before runs on.  Which keys and values there
are is read from the reference, vswitchd/flowbundler.xml.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_harness import ROOT, Switch
from hostile import TEXT, Unixctl, examples

pytestmark = pytest.mark.switch

# Bytes of the packets that a delay must have room for, and how many are received at most.
MTU = 1514
BUFFERS = 262_144


@dataclass(frozen=True)
class Key:
    """What the reference says of a key: a range or words, and a default."""

    name: str
    least: int
    most: int
    words: tuple[str, ...]
    power_of_two: bool
    default: str | None

    def allows(self, text: str) -> bool:
        if self.words:
            return text in self.words
        if not re.fullmatch("[0-9]+", text, re.ASCII):
            return False
        number = int(text)
        return self.least <= number <= self.most and not (
            self.power_of_two and number & (number - 1))

    def shown(self, text: str) -> str:
        """What flowbundler/show makes of an allowed value."""
        return text if self.words else str(int(text))


def read_reference() -> dict[str, dict[str, Key]]:
    """Give the keys of QoS and Queue records."""
    tables: dict[str, dict[str, Key]] = {}
    for splice in ET.parse(ROOT / "vswitchd" / "flowbundler.xml").getroot():
        keys = tables.setdefault(splice.attrib["table"], {})
        for column in splice.iter("column"):
            if "key" not in column.attrib or "type" not in column.attrib:
                continue
            kind = json.loads(column.attrib["type"])
            text = " ".join("".join(column.itertext()).split())
            default = re.search(r"Defaults to (\w+)", text)
            keys[column.attrib["key"]] = Key(
                column.attrib["key"], kind.get("minInteger", 0), kind.get("maxInteger", 0),
                tuple(kind["enum"][1]) if "enum" in kind else (), "power of two" in text,
                default[1] if default else None)
    return tables


REFERENCE = read_reference()
QOS, QUEUE = REFERENCE["QoS"], REFERENCE["Queue"]
# Of an Interface, what shapes what it receives.
RECEIVED = {name: key for name, key in REFERENCE["Interface"].items()
            if name != "shaper-rx-limit"}
Config = dict[str, str]


def expected(config: Config) -> Config | None:
    """Say what is in force with this QoS record, or None if it is to be refused."""
    if not all(key in QOS and QOS[key].allows(value) for key, value in config.items()):
        return None
    full = {key.name: key.default for key in QOS.values() if key.default is not None}
    full |= {key: QOS[key].shown(value) for key, value in config.items()}
    if int(full["max-granularity"]) < int(full["min-granularity"]):
        return None
    if int(full["ecn-threshold"]) >= int(full["max-delay"]):
        return None
    delay, jitter = int(full["delay"]), int(full["jitter"])
    on_the_way = int(full.get("max-rate", 0)) * (delay + jitter) // (8_000_000 * MTU)
    if jitter > delay or on_the_way > int(full["max-backlog"]):
        return None
    for key in ("ecn-threshold", "delay", "jitter"):
        if full[key] == "0":
            del full[key]
    return full


def expected_queue(config: Config) -> Config | None:
    """Say the same of a Queue record."""
    if not all(key in QUEUE and QUEUE[key].allows(value) for key, value in config.items()):
        return None
    return None if "burst" in config and "max-rate" not in config else config


def expected_received(config: Config) -> Config | None:
    """Say the same of an Interface's keys."""
    if not all(RECEIVED[key].allows(value) for key, value in config.items()):
        return None
    full = {key.name: key.default for key in RECEIVED.values()
            if key.default is not None and key.name != "shaper-rx-burst"}
    full |= {key: RECEIVED[key].shown(value) for key, value in config.items()}
    rate = int(full.get("shaper-rx-rate", 0))
    delay, jitter = int(full["shaper-rx-delay"]), int(full["shaper-rx-jitter"])
    if not rate and {"shaper-rx-burst", "shaper-rx-max-delay"} & config.keys():
        return None
    if jitter > delay or rate * (delay + jitter) // (8_000_000 * MTU) > BUFFERS:
        return None
    if not rate:
        del full["shaper-rx-max-delay"]
    return {key: value for key, value in full.items() if value != "0"}


# What is tried.


def values(key: Key) -> st.SearchStrategy[str]:
    """Give values at and around the edges of what is allowed, and junk."""
    if key.words:
        good = st.sampled_from(key.words)
        bad = st.sampled_from([word.upper() for word in key.words] + ["", "0", " slot"]) | TEXT
    else:
        middle = st.integers(key.least, key.most)
        if key.power_of_two:
            middle = st.integers(key.least.bit_length() - 1, key.most.bit_length() - 1).map(
                lambda bits: 1 << bits)
        good = (st.sampled_from([key.least, key.most]) | middle).map(str)
        good |= good.map(lambda text: f"00{text}")
        bad = st.sampled_from([str(key.least - 1), str(key.most + 1), "-1", "+1000", " 1000",
                               "1000 ", "0x400", "1e3", "1000.0", "", "٣", "1" * 400,
                               str((1 << 64) + key.least), "1000\n", "true"]) | TEXT
    return st.one_of([good] * 6 + [bad])


def records(keys: dict[str, Key], unknown: bool = True) -> st.SearchStrategy[Config]:
    """Give records, most of them allowed but for what their keys say together."""
    known = st.fixed_dictionaries({}, optional={name: values(key) for name, key in keys.items()})
    others = st.dictionaries(
        st.sampled_from(["max-rat", "MAX-RATE", "", "min-rate", "max_rate", "burst "]) | TEXT,
        TEXT, min_size=1, max_size=2)
    few = known.flatmap(lambda record: st.sets(st.sampled_from(sorted(record)), max_size=3).map(
        lambda names: {name: record[name] for name in names}) if record else st.just({}))
    if not unknown:
        return st.one_of(few, few, known)
    return st.one_of(few, few, known, st.builds(lambda a, b: {**a, **b}, few, others))


def test_the_reference_is_read() -> None:
    assert len(QOS) == 11 and set(QUEUE) == {"max-rate", "burst"}
    # The defaults together are in force.
    assert expected({}) is not None
    assert sum(key.power_of_two for key in QOS.values()) == 2
    assert len(RECEIVED) == 5 and expected_received({}) == {}


class Port:
    """The port `p1` of a running switch, and what is in force there."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.appctl = Unixctl(switch.directory / "ovs-vswitchd.ctl")
        self.qos, self.queue = (
            line.strip() for line in switch.vsctl(
                *("--", "set", "Port", "p1", "qos=@q"),
                *("--", "--id=@q", "create", "QoS", "type=flowbundler", "queues:1=@one"),
                *("--", "--id=@one", "create", "Queue", "other_config:max-rate=80000"),
            ).split())
        # Each refusal is to be seen in the log.
        self.appctl("vlog/disable-rate-limit", "netdev_flowbundler")
        self.log = Path(switch.directory, "ovs-vswitchd.log")
        self.start = self.log.stat().st_size

    def set(self, qos: Config, queue: Config) -> None:
        """Write both records, and wait until the switch has followed."""
        self.start = self.log.stat().st_size

        def column(config: Config) -> str:
            pairs = (f"{json.dumps(key)}={json.dumps(value)}" for key, value in config.items())
            return "other_config={" + ", ".join(pairs) + "}"

        self.switch.vsctl("set", "QoS", self.qos, column(qos),
                          "--", "set", "Queue", self.queue, column(queue))

    def new_log(self) -> str:
        """What has been logged since."""
        with self.log.open("rb") as file:
            file.seek(self.start)
            return file.read().decode()

    def in_force(self) -> tuple[Config, Config, str]:
        """What is in force of the port and of queue 1, and what was refused."""
        text = self.appctl("flowbundler/show", "p1")
        assert text.startswith("p1: shaping\n"), text
        refused = re.match(r"p1: shaping\n  refused: (.*?)\n  config: ", text, re.S)
        config = re.search(r"^  config: (.*)$", text, re.M)
        queue = re.search(r"^  queue 1:(.*) sent \d+ packets", text, re.M)
        assert config and queue, text
        return (dict(pair.split("=") for pair in config[1].split()),
                dict(pair.split("=") for pair in queue[1].split()), refused[1] if refused else "")

    def close(self) -> None:
        self.appctl.close()


def assert_named(message: str, table: str, config: Config) -> None:
    """The message names a key of the record, its value and what is allowed."""
    assert re.search(r": (unknown key, )?must ", message), message
    named = [key for key, value in config.items() for shown in (value, value.lstrip("0"))
             if message.startswith(f'{table} other_config:{key}="{shown}": ')]
    # With what keys say together, a default may be what is wrong.
    if not named:
        assert message.startswith((f"{table} other_config:max-granularity=",
                                   f"{table} other_config:ecn-threshold=")), (message, config)


def test_any_record_is_in_force_or_refused(ovs: Switch) -> None:
    ovs.add_bridge("br0", "p1")
    port = Port(ovs)
    assert ovs.vswitchd is not None
    done = refusals = 0

    @examples(80)
    @given(records(QOS), records(QUEUE))
    def run(qos: Config, queue: Config) -> None:
        nonlocal done, refusals
        # Also so that the same mistake is one again, and is logged.
        port.set({}, {"max-rate": "80000"})
        running, running_queue = expected({}), {"max-rate": "80000"}
        assert port.in_force() == (running, running_queue, "")

        port.set(qos, queue)
        wanted, wanted_queue = expected(qos), expected_queue(queue)
        config, queue_config, refused = port.in_force()
        if wanted is None:
            refusals += 1
            assert_named(refused, "QoS", qos)
        elif wanted_queue is None:
            refusals += 1
            running = wanted
            assert_named(refused, "Queue 1", queue)
        else:
            done += 1
            running, running_queue = wanted, wanted_queue
            assert refused == ""
        if refused:
            assert f"p1: {refused}" in port.new_log()
        assert (config, queue_config) == (running, running_queue)

    run()
    assert done > 20 and refusals > 20, (done, refusals)
    assert ovs.vswitchd.poll() is None
    port.close()


def received(port: Port) -> tuple[Config, str]:
    """What is in force of what `p1` receives, and what was refused."""
    text = port.appctl("flowbundler/show", "p1")
    config = re.search(r"^  receives:(.*)$", text, re.M)
    refused = re.search(r"^  refused: (Interface .*?)\n  receives:", text, re.M | re.S)
    pairs = config[1].split() if config else []
    return dict(pair.split("=") for pair in pairs), refused[1] if refused else ""


def test_what_a_port_receives_is_shaped_as_told_or_as_before(ovs: Switch) -> None:
    ovs.add_bridge("br0", "p1")
    port = Port(ovs)
    assert ovs.vswitchd is not None
    done = refusals = 0

    @examples(60)
    @given(records(RECEIVED, unknown=False))
    def run(config: Config) -> None:
        nonlocal done, refusals
        before = {"shaper-rx-rate": "80000", "shaper-rx-max-delay": "50000"}
        ovs.vsctl("clear", "Interface", "p1", "other_config",
                  "--", "set", "Interface", "p1", "other_config:shaper-rx-rate=80000")
        assert received(port) == (before, "")

        pairs = (f"{json.dumps(key)}={json.dumps(value)}" for key, value in config.items())
        ovs.vsctl("set", "Interface", "p1", "other_config={" + ", ".join(pairs) + "}")
        wanted = expected_received(config)
        in_force, refused = received(port)
        if wanted is None:
            refusals += 1
            assert in_force == before
            assert re.match(r'Interface other_config:shaper-rx-[a-z-]+="', refused), refused
            assert " must " in refused
        else:
            done += 1
            assert (in_force, refused) == (wanted, "")

    run()
    assert done > 10 and refusals > 10, (done, refusals)
    assert ovs.vswitchd.poll() is None
    port.close()
