"""Tenants, VMs, destinations and ports one by one: parts of what a file would say.

A `Ref` names one of them.  It is changed in a document of the file's form, and the whole is
checked as a file is (`fbrates.config`): so there is one schema, and nothing can be made
piece by piece that a file could not say.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from fbrates.config import Network, network_text, parse_network
from fbrates.loader import Path, Problem, dotted
from fbrates.units import UnitError

Spec = dict[str, Any]
"""What a file says of one of them."""

PARTS = ("vms", "destinations")
"""What in a spec has a name, or a destination, of its own."""


class UnknownName(LookupError):
    """No such tenant, VM or destination; `known` are those there are."""

    def __init__(self, field_name: str, value: str, known: list[str]) -> None:
        super().__init__(f"unknown {field_name} {value}")
        self.field = field_name
        self.value = value
        self.known = known


@dataclass(frozen=True)
class Ref:
    """One tenant; or one VM, or destination, of it; or a destination of a VM; or a port."""

    tenant: str = ""
    vm: str = ""
    to: Network | None = None
    port: str = ""

    @property
    def kind(self) -> str:
        """What it is."""
        if self.port:
            return "port"
        if self.to is not None:
            return "destination"
        return "vm" if self.vm else "tenant"

    @property
    def key(self) -> str:
        """Its name, as limits have it."""
        if self.port:
            return f"port {self.port}"
        owner = f"{self.tenant}/{self.vm}" if self.vm else self.tenant
        return owner if self.to is None else f"{owner}->{network_text(self.to)}"

    def covers(self, key: str, spec: Spec | None = None) -> bool:
        """Whether `spec` of this (None: whatever it is) also says what the limit `key` is."""
        if key == self.key:
            return True
        if self.port or self.to is not None:
            return False
        if key.startswith(f"{self.key}->"):
            return spec is None or "destinations" in spec
        return not self.vm and key.startswith(f"{self.key}/") and (spec is None or "vms" in spec)


def _owner(document: dict[str, Any], ref: Ref) -> Spec:
    """Give the tenant or VM that a VM or destination is of; raises UnknownName."""
    tenants = document.get("tenants") or {}
    if ref.tenant not in tenants:
        raise UnknownName("tenant", ref.tenant, list(tenants))
    tenant: Spec = tenants[ref.tenant]
    if not ref.vm or ref.to is None:
        return tenant
    vms = tenant.get("vms") or {}
    if ref.vm not in vms:
        raise UnknownName("vm", ref.vm, list(vms))
    found: Spec = vms[ref.vm]
    return found


def _place(destinations: list[Spec], network: Network | None) -> int:
    """Find a destination in a list; its length if it is not there."""
    for place, item in enumerate(destinations):
        try:
            if parse_network(item["to"]) == network:
                return place
        except (UnitError, LookupError, TypeError):
            continue
    return len(destinations)


def find(document: dict[str, Any], ref: Ref) -> Spec | None:
    """Give what a document says of something, None if it is not there.

    Raises UnknownName if what it would belong to is not there.
    """
    found: Spec | None
    match ref.kind:
        case "port":
            found = (document.get("ports") or {}).get(ref.port)
        case "tenant":
            found = (document.get("tenants") or {}).get(ref.tenant)
        case "vm":
            found = (_owner(document, ref).get("vms") or {}).get(ref.vm)
        case _:
            items = _owner(document, ref).get("destinations") or []
            place = _place(items, ref.to)
            if place == len(items):
                return None
            found = {key: value for key, value in items[place].items() if key != "to"}
    return None if found is None else copy.deepcopy(found)


def put(document: dict[str, Any], ref: Ref, spec: Spec) -> Path:
    """Let a document say `spec` of something, and give the place.

    A tenant's VMs and destinations, and a VM's destinations, stay if `spec` says nothing of
    them.  It comes last, so that of two that are in each other's way it is the one that is
    told.  Raises UnknownName if what it would belong to is not there.
    """
    match ref.kind:
        case "port":
            document.setdefault("ports", {})[ref.port] = spec
            return ("ports", ref.port)
        case "tenant":
            tenants = document.setdefault("tenants", {})
            tenants[ref.tenant] = {"vms": {}, **_with_parts(spec, tenants.pop(ref.tenant, None))}
            return ("tenants", ref.tenant)
        case "vm":
            vms = _owner(document, ref).setdefault("vms", {})
            vms[ref.vm] = _with_parts(spec, vms.pop(ref.vm, None))
            document["tenants"][ref.tenant] = document["tenants"].pop(ref.tenant)
            return ("tenants", ref.tenant, "vms", ref.vm)
        case _:
            assert ref.to is not None
            items = _owner(document, ref).setdefault("destinations", [])
            place = _place(items, ref.to)
            items[place : place + 1] = [{**spec, "to": network_text(ref.to)}]
            owner: Path = ("vms", ref.vm) if ref.vm else ()
            return ("tenants", ref.tenant, *owner, "destinations", place)


def _with_parts(spec: Spec, before: Spec | None) -> Spec:
    kept = {key: before[key] for key in PARTS if before and key in before and key not in spec}
    return {**spec, **kept}


def remove(document: dict[str, Any], ref: Ref) -> None:
    """Let a document say nothing of something that it has."""
    match ref.kind:
        case "port":
            del document["ports"][ref.port]
        case "tenant":
            del document["tenants"][ref.tenant]
        case "vm":
            del _owner(document, ref)["vms"][ref.vm]
        case _:
            items = _owner(document, ref)["destinations"]
            del items[_place(items, ref.to)]


def relative(problem: Problem, ref: Ref, path: Path) -> Problem:
    """Say of a problem with a document where in the spec at `path` it is, if it is there."""
    base, name = dotted(path), problem.field
    if name == base:
        name = ref.kind
    elif name.startswith(f"{base}."):
        name = name[len(base) + 1 :]
    return Problem(name, problem.message, problem.value, problem.allowed)


def tag(spec: object) -> str:
    """Give the entity tag (RFC 9110, 8.8.3) of what is wanted of something."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:20]}"'
