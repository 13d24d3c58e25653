"""What parameters of mininet's links mean for the switch: neither mininet nor root."""

from __future__ import annotations

import pytest
from fbmininet.params import FRAME_BYTES, MAX_US, LinkError, Shape, shape, time_us
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(("text", "microseconds"), [
    ("5ms", 5000), ("5", 5), (5, 5), ("1.5ms", 1500), ("250us", 250), ("1s", 1_000_000),
    ("2sec", 2_000_000), ("3msecs", 3000), ("7usecs", 7), ("10s", MAX_US), ("0", 0),
    ("1e3us", 1000), (" 5 ms ", 5000), ("5MS", 5000),
])
def test_times_are_those_of_tc(text: object, microseconds: int) -> None:
    assert time_us("delay", text) == microseconds


@pytest.mark.parametrize("params", [
    {"bw": 0}, {"bw": -1}, {"bw": 400_001}, {"bw": "fast"}, {"bw": float("nan")}, {"bw": True},
    {"bw": []}, {"delay": "5 furlongs"}, {"delay": "-5ms"}, {"delay": "11s"}, {"delay": "5mss"},
    {"delay": ".ms"}, {"delay": "1ms", "jitter": "2ms"}, {"jitter": "1ms"}, {"loss": 101},
    {"loss": -1}, {"loss": "some"}, {"max_queue_size": 0}, {"max_queue_size": 1.5},
    {"max_queue_size": "many"}, {"use_hfsc": True}, {"use_tbf": 1}, {"latency_ms": 5},
    {"enable_ecn": True}, {"enable_red": True}, {"speedup": 10}, {"bandwith": 10},
])
def test_what_cannot_be_is_refused_by_its_name(params: dict[str, object]) -> None:
    with pytest.raises(LinkError) as error:
        shape(params)
    field, value = list(params.items())[-1]
    assert str(error.value).startswith(f"{field}={value!r}: ")
    # And what to do instead.
    assert any(word in str(error.value) for word in ("allowed", "leave", "give", "set"))


def test_a_misspelt_parameter_gets_a_hint() -> None:
    with pytest.raises(LinkError, match="did you mean jitter"):
        shape({"delay": "5ms", "jiter": "1ms"})


def test_what_says_nothing_is_no_shape() -> None:
    # As TCIntf: so config(ip=...) leaves rates alone.
    assert shape({}) is None
    assert shape({"bw": None, "delay": None, "use_htb": True, "use_hfsc": False,
                  "speedup": 0, "ip": "10.0.0.1/8", "txo": True}) is None


def test_both_directions_have_the_same_keys() -> None:
    wanted = shape({"bw": 10, "delay": "5ms", "jitter": "1ms", "max_queue_size": 100})
    assert wanted == Shape(10_000_000, 5000, 1000, 100)
    assert wanted.qos() == {"max-rate": "10000000", "max-delay": "121120",
                            "delay": "5000", "jitter": "1000"}
    assert wanted.reception() == {f"shaper-rx-{key.replace('max-rate', 'rate')}": value
                                  for key, value in wanted.qos().items()}


def test_no_rate_is_no_limit() -> None:
    wanted = shape({"delay": "15ms"})
    assert wanted is not None
    assert wanted.qos() == {"delay": "15000"}
    assert wanted.reception() == {"shaper-rx-delay": "15000"}
    assert Shape().qos() == Shape().reception() == {}


def test_a_link_takes_as_much_memory_as_it_holds() -> None:
    # 50 ms of 1 Gbit/s are 6.25 MB, 4129 full frames; 1000 more may wait.
    wanted = Shape(1_000_000_000, 50_000)
    assert wanted.buffers == 4129 + 1000
    wanted.check_buffers(262_144)
    with pytest.raises(LinkError, match=r"bw=1000, delay=50ms: 5129 full frames \(8 MB\).*3072"):
        wanted.check_buffers(4096)


@given(rate=st.integers(1000, 400_000_000_000), queue=st.integers(1, 10_000_000),
       delay=st.integers(0, MAX_US))
def test_keys_are_always_within_the_switch_s_ranges(rate: int, queue: int, delay: int) -> None:
    wanted = Shape(rate, delay, delay // 2, queue)
    assert 1 <= wanted.wait_us <= MAX_US
    # A queue of that many full frames fits, unless that takes longer than can be.
    assert (wanted.wait_us == MAX_US
            or wanted.wait_us * rate >= queue * FRAME_BYTES * 8_000_000)
    for keys in (wanted.qos(), wanted.reception()):
        assert all(0 < int(value) <= 400_000_000_000 for value in keys.values())


@given(st.dictionaries(
    st.sampled_from(["bw", "delay", "jitter", "loss", "max_queue_size", "use_tbf", "x"]),
    st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=6), st.booleans())))
def test_nothing_but_a_shape_or_a_message_comes_out(params: dict[str, object]) -> None:
    try:
        wanted = shape(params)
    except LinkError as error:
        assert any(f"{name}=" in str(error) for name in params)
    else:
        if wanted is not None:
            assert wanted.qos().keys() <= {"max-rate", "max-delay", "delay", "jitter"}
