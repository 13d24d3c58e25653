"""What a supervisor is told: systemd's notifications (sd_notify(3)), by a datagram.

Without NOTIFY_SOCKET in the environment nothing is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(message: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Tell the supervisor, such as ``READY=1``; False if there is none, or it does not listen."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(message.encode(), address)
    except OSError:
        return False
    return True


def watchdog_interval(environment: Mapping[str, str] = os.environ) -> float | None:
    """Give the seconds after which to say ``WATCHDOG=1`` again; None: nobody waits for that."""
    text = environment.get("WATCHDOG_USEC", "")
    ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    if not (ours and text.isdecimal() and int(text) > 0):
        return None
    # Half of the time, as sd_watchdog_enabled(3) recommends.
    return int(text) / 2e6
