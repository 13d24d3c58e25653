"""What mininet, and the command mn, need to work with us."""

from __future__ import annotations

import re
import sys
from typing import Any

from mininet.clean import addCleanupCallback
from mininet.node import NullController, findController

from . import iperf, vswitch

iperf.replace()
addCleanupCallback(vswitch.close)


def add_links(links: dict[str, Any]) -> None:
    """Add `links` to mn's own.

    mn takes the names `switches` and `controllers` from a custom file, and up to 2.3.0 not
    `links`: a comma is missing in its list of these names.
    """
    known = getattr(sys.modules["__main__"], "LINKS", None)
    if isinstance(known, dict):
        known.update(links)


def find_controller(*args: Any) -> Any:
    """The controller that mn takes unless told which.

    Where none is installed, mn refuses switches that it does not know; ours then switch by
    themselves.
    """
    found = findController(*args)
    if not found and any(re.match(r"(--switch=)?fb(,|$)", word) for word in sys.argv):
        return NullController
    return found
