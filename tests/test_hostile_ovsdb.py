"""QoS and Queue records of all kinds against a real ovs-vswitchd.

What can be honoured of a record is in force, and for each of the rest there is a message that
names key, value, what is allowed and what is in force instead: what was before, or else the
nearest that is allowed.  (What an Interface receives is shaped by all of its keys, or as
before.)  Which keys and values there are is read from the reference,
vswitchd/flowbundler.xml.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest
from fbtest.proc import wait_until
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

    def nearest(self, text: str) -> int | None:
        """The allowed value that is nearest to a whole number."""
        if not re.fullmatch("-?[0-9]+", text, re.ASCII):
            return None
        # (Python reads no numbers of thousands of digits.)
        number = min(max(int(text[:40]), self.least), self.most)
        if self.power_of_two and number & (number - 1):
            below = 1 << number.bit_length() - 1
            number = below if number - below < 2 * below - number else 2 * below
        return number

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


Values = dict[str, int]
#: What is refused: the key, and what is said to be in force (None: nothing is).
Refused = list[tuple[str, int | None]]


def chosen(key: Key, text: str, before: int | None, default: int) -> int:
    """Say what is in force with `text` in a record."""
    if key.allows(text):
        return int(text)
    if before is not None and before >= key.least:
        return before
    nearest = key.nearest(text)
    return default if nearest is None else nearest


def confined(value: int, least: int, most: int, before: int) -> int:
    """Say what is in force with `value` if it must be from `least` to `most`."""
    return before if least <= before <= most else min(max(value, least), most)


def parse(config: Config, keys: dict[str, Key], defaults: Values, before: Values
          ) -> tuple[Values, set[str]]:
    """Say what is in force of a record's values by themselves, and which are not."""
    full = dict(defaults)
    for key, text in config.items():
        if key in keys:
            full[key] = chosen(keys[key], text, before.get(key), defaults.get(key, 0))
    return full, {key for key, text in config.items()
                  if key not in keys or not keys[key].allows(text)}


QUEUE_DEFAULTS = {"max-rate": 0, "burst": 0, "min-rate": 0, "priority": 0, "weight": 1}
DEFAULTS = {key.name: int(key.default or 0) for key in QOS.values()}


def expected(config: Config) -> tuple[Values, Refused]:
    """Say what is in force with this QoS record after one that says nothing."""
    full, refused = parse(config, QOS, DEFAULTS, DEFAULTS)

    def confine(key: str, least: int, most: int) -> None:
        if not least <= full[key] <= most:
            full[key] = confined(full[key], least, most, DEFAULTS[key])
            refused.add(key)

    confine("max-granularity", full["min-granularity"], 1 << 40)
    confine("ecn-threshold", 0, full["max-delay"] - 1)
    confine("jitter", 0, full["delay"])
    rate, backlog = full["max-rate"], full["max-backlog"]
    delay, jitter = full["delay"], full["jitter"]
    if rate * (delay + jitter) // (8_000_000 * MTU) > backlog:
        room = backlog * 8_000_000 * MTU // rate
        most = max(room - min(jitter, room), room // 2)
        full["delay"] = confined(delay, min(jitter, most), most, DEFAULTS["delay"])
        full["jitter"] = min(jitter, room // 2)
        refused |= {"delay"} | ({"jitter"} if full["jitter"] < jitter else set())
    return full, [(key, full.get(key)) for key in refused]


def expected_queue(config: Config, before: Values) -> tuple[Values, Refused]:
    """Say the same of a Queue record."""
    full, refused = parse(config, QUEUE, QUEUE_DEFAULTS, QUEUE_DEFAULTS | before)
    if full["burst"] and not full["max-rate"]:
        full["burst"] = 0
        refused.add("burst")
    if full["max-rate"] and full["min-rate"] > full["max-rate"]:
        full["min-rate"] = 0
        refused.add("min-rate")
    return full, [(key, full.get(key)) for key in refused]


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
        st.sampled_from(["max-rat", "MAX-RATE", "", "min_rate", "max_rate", "burst "]) | TEXT,
        TEXT, min_size=1, max_size=2)
    few = known.flatmap(lambda record: st.sets(st.sampled_from(sorted(record)), max_size=3).map(
        lambda names: {name: record[name] for name in names}) if record else st.just({}))
    if not unknown:
        return st.one_of(few, few, known)
    return st.one_of(few, few, known, st.builds(lambda a, b: {**a, **b}, few, others))


def test_the_reference_is_read() -> None:
    assert len(QOS) == 11 and QUEUE.keys() == QUEUE_DEFAULTS.keys()
    # The defaults together are in force.
    assert expected({}) == (DEFAULTS, [])
    assert sum(key.power_of_two for key in QOS.values()) == 2
    assert len(RECEIVED) == 5 and expected_received({}) == {}


class Port:
    """The port `p1` of a running switch, and what is in force there."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.appctl = Unixctl(switch.directory / "ovs-vswitchd.ctl")
        self.json = Unixctl(switch.directory / "ovs-vswitchd.ctl")
        self.json("set-options", "--format", "json")
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

    def await_log(self, messages: list[str]) -> None:
        """Each of `messages` has been logged once (the switch writes its log a little later)."""
        wait_until(lambda: all(f"p1: {message}" in self.new_log() for message in messages),
                   "all that is refused is in the log")
        log = self.new_log()
        assert all(log.count(f"p1: {message}") == 1 for message in messages), log

    def in_force(self) -> tuple[Values, Values, list[str]]:
        """What is in force of the port and of queue 1, and what was refused."""
        shown = self.json("flowbundler/show", "p1")["p1"]
        assert shown["shaping"]
        queue, = (queue["config"] for queue in shown["queues"] if queue["queue"] == 1)
        return shown["config"], queue, shown.get("refused", [])

    def close(self) -> None:
        self.appctl.close()
        self.json.close()


def without(values: Values, *keys: str) -> Values:
    """Leave out of `values` those of `keys` that are 0, as the switch does."""
    return {key: value for key, value in values.items() if value or key not in keys}


def assert_named(messages: list[str], table: str, config: Config, refused: Refused) -> None:
    """Each value that is not in force is named, with what is allowed and what is in force."""
    assert len(messages) == len(refused), (messages, refused)
    for key, value in refused:
        # With what keys say together, a default may be what is wrong.
        text = config.get(key, "")
        found = [message for message in messages
                 if message.startswith(tuple(f'{table} other_config:{key}="{shown}": '
                                             for shown in (text, text.lstrip("0") or "0"))
                                       if key in config else f"{table} other_config:{key}=")]
        assert found, (key, messages)
        known = key in (QOS if table == "QoS" else QUEUE)
        ends = (f"; {value} is in force", f"; no {key} is in force") if known else ("",)
        assert any(" must " in message and message.endswith(ends) for message in found), (
            key, value, found)


def test_what_can_be_honoured_of_any_record_is_in_force(ovs: Switch) -> None:
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
        shown = "max-rate", "ecn-threshold", "delay", "jitter"
        assert port.in_force() == (without(DEFAULTS, *shown), {"max-rate": 80000}, [])

        port.set(qos, queue)
        wanted, wrong = expected(qos)
        wanted_queue, wrong_queue = expected_queue(queue, {"max-rate": 80000})
        config, queue_config, refused = port.in_force()
        assert config == without(wanted, *shown)
        assert queue_config == {key: value for key, value in wanted_queue.items()
                                if value != QUEUE_DEFAULTS[key]}
        minima = [m for m in refused if m.startswith("Queue other_config:min-rate of ")]
        assert len(minima) == (0 < wanted["max-rate"] < wanted_queue["min-rate"])
        # (That one is logged when the status is read.)
        refused = [m for m in refused if m not in minima]
        assert_named([m for m in refused if m.startswith("QoS ")], "QoS", qos, wrong)
        assert_named([m for m in refused if not m.startswith("QoS ")], "Queue 1", queue,
                     wrong_queue)
        if refused:
            refusals += 1
            port.await_log(refused)
        else:
            done += 1

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
