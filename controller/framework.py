"""The OpenFlow framework: Ryu, or os-ken, its fork, where Ryu cannot run.

Ryu 4.34, the last one, installs and runs with Python up to 3.11.  os-ken has the same
classes under another name, but neither a manager command nor WSGI.  FLOWBUNDLER_FRAMEWORK
(ryu or os_ken) chooses where both are installed.  The rest of the controller imports the
framework from here only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import weakref
from typing import Any

NAMES = ("ryu", "os_ken")


def _choose() -> str:
    wanted = os.environ.get("FLOWBUNDLER_FRAMEWORK")
    if wanted:
        if wanted not in NAMES:
            raise SystemExit(
                f"FLOWBUNDLER_FRAMEWORK={wanted!r}: no such framework; allowed: {', '.join(NAMES)}"
            )
        return wanted
    found = [name for name in NAMES if importlib.util.find_spec(name) is not None]
    if not found:
        raise SystemExit("neither Ryu nor os-ken is installed: see requirements.txt")
    return found[0]


NAME = _choose()
# One call at a time: green threads switch where they wait, and nowhere else.
os.environ.setdefault("OSKEN_HUB_TYPE", "eventlet")


def fit_eventlet() -> None:
    """Give eventlet what Ryu 4.34 imports from it."""
    import eventlet.wsgi

    if not hasattr(eventlet.wsgi, "ALREADY_HANDLED"):
        eventlet.wsgi.ALREADY_HANDLED = object()


def _import(name: str) -> Any:
    return importlib.import_module(f"{NAME}.{name}")


def fit_ovs() -> None:
    """Give the ovs package what Ryu 4.34's OVSDB client (ryu.lib.ovs) takes from it.

    That finds rows by a function of the module, which has only the schema of the table that
    is referred to.  Rows are in the IDL's table, so a schema's table has to know that.
    """
    import ovs.db.idl

    if hasattr(ovs.db.idl, "_uuid_to_row"):
        return
    create = ovs.db.idl.IdlTable.__init__

    def create_known(self: Any, idl: Any, table: Any) -> None:
        create(self, idl, table)
        table.idl_table = weakref.ref(self)

    def uuid_to_row(atom: Any, base: Any) -> Any:
        if not base.ref_table:
            return atom
        table = getattr(base.ref_table, "idl_table", lambda: None)()
        return None if table is None else table.rows.get(atom)

    ovs.db.idl.IdlTable.__init__ = create_known
    ovs.db.idl._uuid_to_row = uuid_to_row


fit_eventlet()
fit_ovs()
cfg = _import("cfg")
hub = _import("lib.hub")
app_manager = _import("base.app_manager")
ofp_event = _import("controller.ofp_event")
ofp = _import("ofproto.ofproto_v1_3")
parser = _import("ofproto.ofproto_v1_3_parser")
_handler = _import("controller.handler")
DEAD_DISPATCHER, MAIN_DISPATCHER = _handler.DEAD_DISPATCHER, _handler.MAIN_DISPATCHER
set_ev_cls = _handler.set_ev_cls
RyuApp = app_manager.RyuApp if NAME == "ryu" else app_manager.OSKenApp
wsgi = _import("app.wsgi") if NAME == "ryu" else None
