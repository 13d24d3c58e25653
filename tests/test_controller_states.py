"""The states of a switch: one table, drawn in the documentation, and nothing beside it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from controller_harness import ROOT
from controller_pipeline import FakeSwitch
from fbrates import plan, states, sync
from fbrates.config import parse
from fbrates.plan import MeterMod
from fbrates.service import Service
from fbrates.states import AWAITED, PLANNED, TRANSITIONS, Event, State, after
from test_controller_rest import FILE, World


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "controller.md").read_text()
    assert re.findall(r"```mermaid\n(.*?)\n```", text, re.DOTALL) == [states.diagram()]
    for event in Event:
        assert f"| `{event.name.lower()}` | {event.value} |" in text
    for state in State:
        assert f"| {state.value} |" in text


def test_every_state_is_reached_and_left() -> None:
    reached, pending = set(), [State.SURVEYING]
    while pending:
        state = pending.pop()
        reached.add(state)
        pending += [
            new for (old, _), new in TRANSITIONS.items() if old is state and new not in reached
        ]
    assert reached == set(State) - {State.GONE}
    for state in State:
        assert after(state, Event.DISCONNECTED) is State.GONE
        assert after(State.GONE, Event.CONFIRMED) is State.GONE
    # Whatever happened, it can be in sync again.
    back, pending = {State.IN_SYNC}, [State.IN_SYNC]
    while pending:
        state = pending.pop()
        for (old, _), new in TRANSITIONS.items():
            if new is state and old not in back:
                back.add(old)
                pending.append(old)
    assert back == reached
    # What is only waited for can be confirmed or doubted, and an error is heard in any state.
    for state in reached:
        assert (state, Event.REFUSED) in TRANSITIONS
        assert ((state, Event.CONFIRMED) in TRANSITIONS) == (state in AWAITED)
        assert ((state, Event.DOUBTED) in TRANSITIONS) == (state in AWAITED)
        assert ((state, Event.SENT) in TRANSITIONS) == (state in PLANNED)
    with pytest.raises(ValueError, match="cannot happen"):
        after(State.BLOCKED, Event.CONFIRMED)


def test_the_states_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    seen: list[State] = []
    original = sync.SwitchSync._enter

    def enter(self: sync.SwitchSync, event: Event) -> None:
        original(self, event)
        seen.append(self.state)

    switch = world.switch.connect(world.service)
    monkeypatch.setattr(sync.SwitchSync, "_enter", enter)
    assert switch.state is State.SURVEYING
    world.switch.run()
    assert seen == [State.TRYING, State.DIFFERENT, State.SETTLING, State.IN_SYNC]
    assert world.service.status_view()["switches"][switch.name]["state"] == "in sync"
    world.put("/v1/tenants/red/vms/a/rate", {"rate": "unlimited"})
    assert seen[4:] == [State.CHANGING, State.IN_SYNC]
    # A refusal, and what follows.
    world.switch.max_meters = 1
    world.put("/v1/tenants/red/vms/a/rate", {"rate": "5Mbps"})
    # (The meter, and the flow that needs it.)
    refused = [State.CHANGING, State.SETTLING, State.SETTLING, State.DIFFERENT]
    assert seen[6:] == refused
    world.service.disconnect(switch)
    assert seen[10:] == [State.GONE] and not switch.connected


def test_a_switch_that_is_blocked_is_not_in_sync_when_a_barrier_is_answered() -> None:
    """It was, until the next audit, if others took an id while something was awaited."""
    world = World()
    switch = world.switch.sync
    assert switch is not None and switch.in_sync
    # Somebody has taken the id that is wanted next, while its meter is on the way.
    switch.port_changed("vm-n", 2, False)
    world.switch.run()
    world.text = FILE.replace("rate: 1Mbps}", "rate: 1Mbps}\n      new: {port: vm-n, rate: 3Mbps}")
    world.obeying = False
    world.api.handle("POST", "/v1/reload")
    assert switch.state is State.CHANGING
    number = world.service.numbers.meters["red/new"]
    world.switch.queue.clear()
    world.switch.meters[number] = plan.Meter(number, 7)
    switch._audit = None
    world.service.taken_on[1] = {number}
    switch.start_audit()
    for _ in range(4):
        world.switch.run()
    assert (switch.state, switch.in_sync) == (State.BLOCKED, False)
    # The barriers that were sent before.
    assert switch._barrier is not None
    while switch._barrier is not None:
        switch.barrier_reply(switch._barrier)
    assert (switch.state, switch.in_sync) == (State.BLOCKED, False)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_happens_that_is_not_in_the_table(seed: int) -> None:
    """Whatever comes in whatever order; `after` raises for what is not in the table."""
    rng = random.Random(seed)
    now = 0.0
    text = FILE
    switch = FakeSwitch({"vm-a": 1})
    switch.shapes = rng.random() < 0.5

    class Never:
        def set(self) -> None: ...
        def wait(self, timeout: float | None = None) -> bool:
            return True

    service = Service(lambda: parse(text), Never, lambda: now, lambda: now)
    limits = list(service.config.limits())
    switch.connect(service)
    for _ in range(150):
        now += rng.choice([0, 0.1, 1, 11])
        action: Any = rng.choice(["run", "run", "some", "tick", "rate", "reload", "port", "full",
                                  "foreign", "forget", "adopt", "trial", "connect"])  # fmt: skip
        connection = switch.sync
        assert connection is not None
        if action == "run":
            switch.run()
        elif action == "some":
            switch.run(rng.randrange(4))
        elif action == "tick":
            service.tick()
        elif action == "rate":
            rate = rng.choice([None, 1_000_000, 2_000_000])
            service.set_rate(rng.choice(limits), rate)
        elif action == "reload":
            text = rng.choice([FILE, FILE + "unknown_sources: forward\n",
                               FILE + "shaping: {band: drop}\n"])  # fmt: skip
            service.reload(force=True)
        elif action == "port":
            connection.port_changed("absent", 7, rng.random() < 0.5)
        elif action == "full":
            switch.max_meters = rng.choice([0, 2, 1000])
        elif action == "foreign":
            number = rng.choice(list(service.given()))
            if number not in switch.meters:
                plan.apply([MeterMod(plan.ADD, plan.Meter(number, 7))], switch.meters, switch.flows)
        elif action == "forget":
            for number in [n for n in switch.meters if rng.random() < 0.2]:
                del switch.meters[number]
        elif action == "adopt":
            service.adopt(1)
        elif action == "trial":
            switch.refuse_trial = rng.choice(["", "", "OFPET_METER_MOD_FAILED OUT_OF_METERS"])
        else:
            switch.connect(service)
    # And in the end all is well.
    switch.max_meters, switch.refuse_trial = 1000, ""
    service.adopt(1)
    for _ in range(20):
        switch.run()
        now += 31
        service.tick()
    switch.run()
    assert switch.sync is not None and switch.sync.state is State.IN_SYNC
    assert switch.meters.keys() == switch.sync.plan.meters.keys()
