"""Which number belongs to which VM, destination and tenant.

A number comes from the name: a hash of it picks a place in the range, and a name whose
place is taken has the next free one.  So a controller that knows nothing finds nearly all
numbers again, on every switch.  But a number that was given stays: who comes later never
moves somebody else, because while a meter's number changes hands packets are under another
one's rate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping


def allocate(
    names: Iterable[str],
    first: int,
    last: int,
    kept: Mapping[str, int] | None = None,
    unusable: Collection[int] = (),
) -> dict[str, int]:
    """Give each name a number of its own in first..last; ValueError if they are too few.

    Names in `kept` keep their number if it is in the range; the others have none of the
    `unusable` ones.
    """
    span = last - first + 1
    wanted = set(names)
    result = {
        name: number
        for name, number in (kept or {}).items()
        if name in wanted and first <= number <= last
    }
    taken = set(result.values()) | {number for number in unusable if first <= number <= last}
    fresh = sorted((_hash(name), name) for name in wanted - result.keys())
    if len(fresh) + len(taken) > span:
        raise ValueError(f"{len(wanted)} names for {max(span, 0)} numbers")
    for value, name in fresh:
        place = value % span
        while first + place in taken:
            place = (place + 1) % span
        taken.add(first + place)
        result[name] = first + place
    return result


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
