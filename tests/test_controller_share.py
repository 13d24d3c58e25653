"""Division of a port's rate: the properties that it promises, on generated claims."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbrates.share import MAX_WEIGHT, Claim, divide, fair_shares, water_fill

CAPACITY = 400_000_000
RATES = st.one_of(st.integers(1, 2_000), st.integers(1, CAPACITY))
WEIGHTS = st.one_of(st.integers(1, 5), st.integers(1, MAX_WEIGHT))


@st.composite
def claims(draw: st.DrawFn) -> tuple[int, list[Claim]]:
    """A capacity, and claims whose minimums it can honour."""
    result = []
    for _ in range(draw(st.integers(1, 12))):
        low, high = sorted((draw(RATES), draw(RATES)))
        demand = draw(st.one_of(st.none(), st.just(0), RATES))
        result.append(Claim(low, high, draw(WEIGHTS), demand))
    least = sum(claim.minimum for claim in result)
    most = sum(claim.maximum for claim in result)
    return draw(st.integers(least, max(least, most + 1000))), result


@given(claims())
def test_bounds(case: tuple[int, list[Claim]]) -> None:
    """Nobody is above its maximum or below what is guaranteed; the sum is not too large."""
    capacity, items = case
    shares = divide(capacity, items)
    assert sum(shares) <= capacity
    for share, claim in zip(shares, items, strict=True):
        assert min(claim.minimum, claim.wants) <= share <= claim.maximum
        assert share > 0 or claim.wants == 0


@given(claims())
def test_work_conserving(case: tuple[int, list[Claim]]) -> None:
    """Nothing is left, roundings apart, while somebody wants more."""
    capacity, items = case
    shares = divide(capacity, items)
    wanted = [claim.wants for claim in items]
    left = capacity - sum(shares)
    if any(share < want for share, want in zip(shares, wanted, strict=True)):
        assert left < len(items)
    else:
        # All have what they want, so who wants anything has the rest, up to its maximum.
        full = all(
            share == claim.maximum
            for share, claim in zip(shares, items, strict=True)
            if claim.wants
        )
        assert full or left < len(items)


@given(claims())
def test_max_min_fair_by_weight(case: tuple[int, list[Claim]]) -> None:
    """Who has more for its weight than one who wants more has it by guarantee only."""
    capacity, items = case
    shares = divide(capacity, items)
    for share, claim in zip(shares, items, strict=True):
        if share >= claim.wants:
            continue
        for other_share, other in zip(shares, items, strict=True):
            if other_share > min(other.minimum, other.wants):
                # Rounding down takes less than 1 kbit/s from `share`.
                assert other_share * claim.weight <= (share + 1) * other.weight


@given(claims(), st.integers(0, 11), st.integers(1, CAPACITY))
def test_monotone(case: tuple[int, list[Claim]], place: int, more: int) -> None:
    """More capacity takes from nobody; one that wants more takes from the others only."""
    capacity, items = case
    shares = divide(capacity, items)
    if sum(claim.wants for claim in items) > capacity + more:
        grown = divide(capacity + more, items)
        assert all(new >= old for new, old in zip(grown, shares, strict=True))
    place %= len(items)
    claim = items[place]
    wanting = dataclasses.replace(claim, demand=None)
    changed = divide(capacity, [*items[:place], wanting, *items[place + 1 :]])
    if claim.wants:
        assert changed[place] >= shares[place]
    assert all(
        new <= max(old, 0)
        for i, (new, old) in enumerate(zip(changed, shares, strict=True))
        if i != place
    )


@given(claims())
def test_who_wants_has_at_least_its_fair_share(case: tuple[int, list[Claim]]) -> None:
    """Other people's modesty never costs anybody: the base of what a sleeper keeps."""
    capacity, items = case
    least = fair_shares(capacity, items)
    assert sum(least) <= capacity
    for share, fair, claim in zip(divide(capacity, items), least, items, strict=True):
        assert share >= min(fair, claim.wants)
        assert fair >= claim.minimum


@given(claims())
def test_order_does_not_matter(case: tuple[int, list[Claim]]) -> None:
    """The same claims in another order have the same shares."""
    capacity, items = case
    assert divide(capacity, items[::-1]) == divide(capacity, items)[::-1]


@settings(deadline=None)
@given(claims())
def test_level_is_the_one_of_bisection(case: tuple[int, list[Claim]]) -> None:
    """Another way to find the level, slow and obvious, gives the same."""
    capacity, items = case
    floors = [claim.minimum for claim in items]
    ceilings = [claim.maximum for claim in items]
    weights = [claim.weight for claim in items]
    low, high = 0.0, float(CAPACITY)
    for _ in range(200):
        level = (low + high) / 2
        total = sum(
            min(max(level * w, f), c) for f, c, w in zip(floors, ceilings, weights, strict=True)
        )
        low, high = (level, high) if total <= capacity else (low, level)
    for share, f, c, w in zip(
        water_fill(capacity, floors, ceilings, weights), floors, ceilings, weights, strict=True
    ):
        # 1 for rounding down, and floating point's error at 4e8 times 1000.
        assert share == pytest.approx(min(max(low * w, f), c), abs=1.001)


def kbps(mbps: int) -> int:
    """Megabits in kbit/s."""
    return mbps * 1000


def three(*demands: int | None) -> list[int]:
    """Three VMs under 300 Mbit/s, at least 100, 50, 50, weights 1, 2, 1; in Mbit/s."""
    minimums, weights = (100, 50, 50), (1, 2, 1)
    items = [
        Claim(kbps(low), kbps(300), weight, demand if demand is None else kbps(demand))
        for low, weight, demand in zip(minimums, weights, demands, strict=True)
    ]
    return [share // 1000 for share in divide(kbps(300), items)]


@pytest.mark.parametrize(
    ("demands", "shares"),
    [
        ((None, 0, 0), [300, 0, 0]),
        ((None, None, 0), [100, 200, 0]),
        ((0, None, None), [0, 200, 100]),
        ((None, 0, None), [150, 0, 150]),
        ((None, None, None), [100, 133, 66]),
        ((None, 20, None), [140, 20, 140]),
        ((100, 0, 0), [300, 0, 0]),
        ((10, 20, 0), [100, 200, 0]),
        ((0, 0, 0), [0, 0, 0]),
    ],
)
def test_examples(demands: tuple[int | None, ...], shares: list[int]) -> None:
    """The shares that the documentation shows."""
    assert three(*demands) == shares


def test_refused() -> None:
    """What cannot be honoured is an error, not a smaller guarantee."""
    with pytest.raises(ValueError, match="add up to 300 of 299"):
        divide(299, [Claim(100, 300, 1, None), Claim(200, 300, 1, None)])
    with pytest.raises(ValueError, match="above its ceiling"):
        water_fill(10, [2], [1], [1])
