"""How a port's rate is divided among those who share it: weighted max-min fairness.

Nothing here knows of switches, meters or time; `fbrates.sharing` does.

Rates are whole kbit/s, which is what meters count in, and all arithmetic is that of
integers, so that the same claims always give the same shares and no sum is ever too
large by a rounding.  What is rounded off, less than 1 kbit/s for each claim, is nobody's.

A share is ``clamp(level * weight, floor, ceiling)`` with one level for all: the water
level of the usual picture (progressive filling; Bertsekas and Gallager, Data Networks,
section 6.5.2, here with weights and with floors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

MAX_WEIGHT = 1000
"""With this, rates up to 400 Gbit/s divided by weights differ by 2.5e-15 of themselves or
are equal, which floating point keeps apart: `water_fill` sorts by quotients."""


@dataclass(frozen=True)
class Claim:
    """What one has a right to, and what it wants now, in kbit/s.

    `demand` is how much it would use; None if it would use all that it can get.
    """

    minimum: int
    maximum: int
    weight: int
    demand: int | None

    @property
    def wants(self) -> int:
        """How much it would use of what it may use."""
        return self.maximum if self.demand is None else min(self.maximum, self.demand)


def water_fill(
    capacity: int, floors: Sequence[int], ceilings: Sequence[int], weights: Sequence[int]
) -> list[int]:
    """Give each its floor, and raise all in proportion to the weights up to the ceilings.

    The shares are ``floor <= share <= ceiling``, their sum is at most `capacity`, and
    either all are at their ceilings or less than 1 kbit/s for each is left.  Raises
    ValueError if a floor is above its ceiling or the floors' sum above `capacity`.
    """
    if any(floor > ceiling for floor, ceiling in zip(floors, ceilings, strict=True)):
        raise ValueError("a floor is above its ceiling")
    fixed = sum(floors)
    if fixed > capacity:
        raise ValueError(f"the floors add up to {fixed} of {capacity} kbit/s")
    if sum(ceilings) <= capacity:
        return list(ceilings)
    # The sum of shares grows with the level, in straight pieces between the levels at
    # which a share leaves its floor or arrives at its ceiling: in the piece that ends at
    # `value / weight` it is fixed + slope * level.
    events = []
    for floor, ceiling, weight in zip(floors, ceilings, weights, strict=True):
        events.append((floor / weight, floor, weight, True))
        events.append((ceiling / weight, ceiling, weight, False))
    events.sort(key=itemgetter(0))
    slope = 0
    for _, value, weight, leaves_floor in events:
        if fixed * weight + slope * value >= capacity * weight and slope:
            break
        if leaves_floor:
            fixed -= value
            slope += weight
        else:
            fixed += value
            slope -= weight
    rest = capacity - fixed
    return [
        min(max(weight * rest // slope, floor), ceiling)
        for floor, ceiling, weight in zip(floors, ceilings, weights, strict=True)
    ]


def fair_shares(capacity: int, claims: Sequence[Claim]) -> list[int]:
    """Give what each would have if all wanted all: the least that it ever has a right to."""
    return water_fill(
        capacity,
        [claim.minimum for claim in claims],
        [claim.maximum for claim in claims],
        [claim.weight for claim in claims],
    )


def divide(capacity: int, claims: Sequence[Claim]) -> list[int]:
    """Divide `capacity` kbit/s; raises ValueError if the minimums add up to more.

    - Nobody has more than its maximum, nor the sum more than the capacity.
    - Who wants its minimum has it; who wants less has what it wants.
    - What somebody does not want is for those who do, in proportion to their weights.
    - When all have what they want, the rest goes, by weight, on top of that to those
      who want anything at all, so that they can grow at once.  Who wants nothing has 0.
    """
    weights = [claim.weight for claim in claims]
    wanted = [claim.wants for claim in claims]
    if sum(wanted) <= capacity:
        ceilings = [
            claim.maximum if want else 0 for claim, want in zip(claims, wanted, strict=True)
        ]
        return water_fill(capacity, wanted, ceilings, weights)
    floors = [min(claim.minimum, want) for claim, want in zip(claims, wanted, strict=True)]
    return water_fill(capacity, floors, wanted, weights)
