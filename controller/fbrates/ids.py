"""Which number belongs to which VM, destination and tenant.

Numbers come from names, not from the order of the file and not from a state file:
a name's hash picks its place in the range, and the few names whose places coincide
take the next free ones, in the order of their hashes.  So a VM keeps its meter when
the controller restarts, when the file's lines move, on every switch, and, coincident
hashes apart, when other VMs come and go.  What a re-sync finds is then what it wants
to be there, and it has nothing to disturb.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def allocate(names: Iterable[str], first: int, last: int) -> dict[str, int]:
    """Give each name a number of its own in first..last; ValueError if they are too few."""
    span = last - first + 1
    hashed = sorted((_hash(name), name) for name in set(names))
    if len(hashed) > span:
        raise ValueError(f"{len(hashed)} names for {span} numbers")
    result: dict[str, int] = {}
    taken: set[int] = set()
    for value, name in hashed:
        place = value % span
        while place in taken:
            place = (place + 1) % span
        taken.add(place)
        result[name] = first + place
    return result


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
