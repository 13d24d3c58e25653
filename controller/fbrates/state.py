"""All that must not be forgotten, and what it looks like as rows of a database.

A `State` is what the file said when it was applied (`document`), what has been set since
(`rates`, `shares`, `ports`), and what was promised to switches (numbers and the like).  Its
rows are those of ``flowbundler.ovsschema``: one for each VM, with its rates as a map, so that
a change of a rate is a small one.  Text in rows is ASCII: in JSON all else is escaped.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fbrates import units
from fbrates.config import Identity, Share
from fbrates.resources import Ref, find

Row = dict[str, Any]
Rows = dict[str, dict[tuple[Any, ...], Row]]
"""By table and the columns of its index."""

INDEX = {
    "Global": (),
    "Tenant": ("name",),
    "VM": ("tenant", "name"),
    "Port": ("name",),
    "Number": ("kind", "number"),
    "Switch": ("datapath_id",),
    "Closed": ("identity",),
}
"""The tables that a state fills, and the columns that tell rows apart.  `Change` has the
history, and is only added to."""

SAID = ("Tenant", "VM", "Port")
"""The tables that have what users say of tenants, VMs, destinations and ports."""

EDITED = " edited"
"""Beside the settings; no file can have it there."""

UNLIMITED = 0
"""In the rows, where a rate is bit/s."""


@dataclass
class Retirement:
    """A number whose owner is gone, and the switches that may still have it."""

    owner: str
    pending: set[int]


@dataclass
class State:
    """See the module's text.  Rates are bit/s, None: unlimited; keys are those of limits."""

    document: dict[str, Any]
    rates: dict[str, int | None] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    meters: dict[str, int] = field(default_factory=dict)
    tenants: dict[str, int] = field(default_factory=dict)
    retired: dict[int, Retirement] = field(default_factory=dict)
    taken_on: dict[int, set[int]] = field(default_factory=dict)
    """By datapath id: the ids among ours that others have."""
    closed: list[Identity] = field(default_factory=list)
    edited: set[str] = field(default_factory=set)
    """Keys of what was made, changed or deleted by itself since a file was applied."""


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _split(rates: Mapping[str, int | None]) -> dict[str, dict[str, int]]:
    """By owner: the rates that are its own (key "") and of its destinations."""
    result: dict[str, dict[str, int]] = {}
    for key, rate in rates.items():
        owner, _, to = key.partition("->")
        result.setdefault(owner, {})[to] = UNLIMITED if rate is None else rate
    return result


def to_rows(state: State) -> Rows:
    """Give the rows that a state is."""
    rates = _split(state.rates)
    settings = {key: value for key, value in state.document.items() if key != "tenants"}
    rows: Rows = {table: {} for table in INDEX}
    if state.edited:
        settings[EDITED] = sorted(state.edited)
    rows["Global"][()] = {"settings": _dump(settings)}
    for name, tenant in (state.document.get("tenants") or {}).items():
        spec = {key: value for key, value in tenant.items() if key != "vms"}
        rows["Tenant"][name,] = {"name": name, "spec": _dump(spec), "rates": rates.get(name, {})}
        for vm_name, vm in (tenant.get("vms") or {}).items():
            key = f"{name}/{vm_name}"
            share = state.shares.get(key)
            rows["VM"][name, vm_name] = {
                "tenant": name,
                "name": vm_name,
                "spec": _dump(vm),
                "rates": rates.get(key, {}),
                "share": "" if share is None else share_text(share),
            }
    for name, rate in state.ports.items():
        rows["Port"][name,] = {"name": name, "max_rate": rate}
    for kind, numbers in (("meter", state.meters), ("tenant", state.tenants)):
        for owner, number in numbers.items():
            rows["Number"][kind, number] = {
                "kind": kind,
                "owner": owner,
                "number": number,
                "pending": [],
                "retired": False,
            }
    for number, item in state.retired.items():
        rows["Number"]["meter", number] = {
            "kind": "meter",
            "owner": item.owner,
            "number": number,
            "pending": sorted(f"{one:016x}" for one in item.pending),
            "retired": True,
        }
    for datapath_id, others in state.taken_on.items():
        name = f"{datapath_id:016x}"
        rows["Switch"][name,] = {"datapath_id": name, "others": sorted(others)}
    for identity in state.closed:
        text = _dump([identity.port, identity.vlan, identity.vni, identity.mac, identity.ips])
        rows["Closed"][text,] = {"identity": text}
    return rows


def share_text(share: Share) -> str:
    """Give the column `share` of a VM."""
    return _dump([share.port, share.min_rate, share.max_rate, share.weight])


def from_rows(rows: Rows) -> State:
    """Give the state that rows are; raises ValueError, KeyError or TypeError if they are none."""
    (settings,) = rows["Global"].values()
    document: dict[str, Any] = {**json.loads(settings["settings"]), "tenants": {}}
    state = State(document, edited=set(document.pop(EDITED, ())))

    def take(key: str, rates: Mapping[str, int]) -> None:
        for to, rate in rates.items():
            limit = f"{key}->{to}" if to else key
            state.rates[limit] = None if rate == UNLIMITED else rate

    for (name,), row in sorted(rows["Tenant"].items()):
        document["tenants"][name] = {**json.loads(row["spec"]), "vms": {}}
        take(name, row["rates"])
    for (tenant, name), row in sorted(rows["VM"].items()):
        document["tenants"][tenant]["vms"][name] = json.loads(row["spec"])
        take(f"{tenant}/{name}", row["rates"])
        if row["share"]:
            state.shares[f"{tenant}/{name}"] = Share(*json.loads(row["share"]))
    state.ports = {name: row["max_rate"] for (name,), row in rows["Port"].items()}
    for (kind, number), row in rows["Number"].items():
        if row["retired"]:
            pending = {int(one, 16) for one in row["pending"]}
            state.retired[number] = Retirement(row["owner"], pending)
        else:
            (state.meters if kind == "meter" else state.tenants)[row["owner"]] = number
    for (name,), row in rows["Switch"].items():
        state.taken_on[int(name, 16)] = set(row["others"])
    for (text,) in sorted(rows["Closed"]):
        port, vlan, vni, mac, ips = json.loads(text)
        state.closed.append(Identity(port, vlan, vni, mac, tuple(ips)))
    return state


def export(state: State) -> dict[str, Any]:
    """Give a document that says what is wanted now: as applied, with what was set since."""
    document = {key: copy.deepcopy(value) for key, value in state.document.items()
                if key != "tenants"}  # fmt: skip
    for name, rate in state.ports.items():
        document["ports"][name]["max-rate"] = units.format_rate(rate)
    document["tenants"] = {name: export_tenant(state, name) for name in state.document["tenants"]}
    return document


def export_tenant(state: State, name: str) -> dict[str, Any]:
    """Give what is wanted of one tenant."""
    given = state.document["tenants"][name]
    tenant = {key: copy.deepcopy(value) for key, value in given.items() if key != "vms"}
    if name in state.rates:
        tenant["rate"] = units.format_rate(state.rates[name])
    _export_rates(tenant, name, state.rates)
    tenant["vms"] = {vm: export_vm(state, name, vm) for vm in given.get("vms") or {}}
    return tenant


def export_vm(state: State, tenant: str, name: str) -> dict[str, Any]:
    """Give what is wanted of one VM."""
    vm: dict[str, Any] = copy.deepcopy(state.document["tenants"][tenant]["vms"][name])
    key = f"{tenant}/{name}"
    share = state.shares.get(key)
    if share is None:
        vm["rate"] = units.format_rate(state.rates[key])
    else:
        vm |= {"shares": share.port, "weight": share.weight}
        vm["min-rate"] = units.format_rate(share.min_rate)
        if share.max_rate is not None:
            vm["max-rate"] = units.format_rate(share.max_rate)
    _export_rates(vm, key, state.rates)
    return vm


def _export_rates(owner: dict[str, Any], key: str, rates: Mapping[str, int | None]) -> None:
    from fbrates.config import network_text, parse_network

    for item in owner.get("destinations") or []:
        text = network_text(parse_network(item["to"]))
        item["rate"] = units.format_rate(rates[f"{key}->{text}"])


def export_part(state: State, ref: Ref) -> dict[str, Any] | None:
    """Give what is wanted of something; None if it is not there; raises UnknownName."""
    if find(state.document, ref) is None:
        return None
    match ref.kind:
        case "port":
            return {"max-rate": units.format_rate(state.ports[ref.port])}
        case "tenant":
            return export_tenant(state, ref.tenant)
        case "vm":
            return export_vm(state, ref.tenant, ref.vm)
    owner = export_vm(state, ref.tenant, ref.vm) if ref.vm else export_tenant(state, ref.tenant)
    return find({"tenants": {ref.tenant: {**owner, "vms": {ref.vm: owner}}}}, ref)
