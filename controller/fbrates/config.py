"""The file of tenants: what may be in it, and all that is wrong with it at once.

`load` and `parse` give a `Config` in which every default is filled in and every
name resolved, or raise `InvalidConfig` with one `Problem` for each mistake.  The
format is described in docs/controller.md.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from fbrates import loader, units
from fbrates.loader import InvalidConfig, Path, Problem, dotted
from fbrates.share import MAX_WEIGHT

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PORT_NAME_LENGTH = 15
"""OpenFlow 1.3 carries a port's name in 16 bytes, the last one zero."""

NAME_ALLOWED = "1 to 63 letters, digits, '_', '.' and '-', the first one a letter, digit or '_'"
PORT_ALLOWED = f"an OpenFlow port's name: 1 to {PORT_NAME_LENGTH} printable characters, no spaces"
MAC_ALLOWED = "a unicast MAC address such as 02:00:00:00:00:01"
IP_ALLOWED = "a unicast IPv4 or IPv6 address, or a list of them"
TO_ALLOWED = "an IPv4 or IPv6 address or prefix, such as 10.0.0.9, 10.1.0.0/16 or 2001:db8::/64"
SWITCHES_ALLOWED = 'any, or a list of datapath ids such as 0x1 or "000002b2c3d4e5f6"'

FIRST_METER, LAST_METER = 10000, 65535
"""The meter ids that are ours if the file does not say: not those that people begin with
who number theirs by hand."""

MIN_SHARE = 256_000
"""The smallest min-rate, and the one of a VM that shares and has none, in bit/s.  At this
rate a full frame is through in 47 ms: at less it would not wait for its turn within the
50 ms that a meter allows, and a VM that was asleep could not be heard."""

MIN_RATE_ALLOWED = f"{units.format_rate(MIN_SHARE)} or more, a rate as in 100Mbps"
WEIGHT_ALLOWED = f"an integer from 1 to {MAX_WEIGHT}"
UNKNOWN_ALLOWED = "drop, forward, or {rate: RATE}"
SHARING_KEYS = ("shares", "min-rate", "max-rate", "weight")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
_PORT = re.compile(rf"[!-~]{{1,{PORT_NAME_LENGTH}}}")
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
UNSET = -1
"""The value of a number that was not given."""
_UNLIMITED = 0


# What the rest of the controller works with.


@dataclass(frozen=True)
class Destination:
    """A rate towards an address or prefix: one meter."""

    key: str
    network: Network
    rate: int | None
    burst: int | None


@dataclass(frozen=True)
class Share:
    """What a VM has a right to of a port that it shares; rates in bit/s."""

    port: str
    min_rate: int
    max_rate: int | None
    """None: the port's."""
    weight: int


@dataclass(frozen=True)
class Identity:
    """What packets come from: a port, or part of one; else a MAC address; else addresses."""

    port: str | None = None
    vlan: int | None = None
    vni: int | None = None
    mac: str | None = None
    ips: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.port is None:
            return f"mac {self.mac}" if self.mac is not None else f"ip {', '.join(self.ips)}"
        vlan = "" if self.vlan is None else f" vlan {self.vlan}"
        return f"port {self.port}{vlan}" + ("" if self.vni is None else f" vni {self.vni}")


@dataclass(frozen=True)
class Vm:
    """A VM, how its packets are recognized, and its rate: one meter.

    The rate of a VM that shares a port is its min-rate here; what it has of the port
    at the moment is not the configuration's business.
    """

    key: str
    tenant: str
    name: str
    port: str | None
    mac: str | None
    ips: tuple[Address, ...]
    rate: int | None
    burst: int | None
    destinations: dict[str, Destination]
    share: Share | None = None
    vlan: int | None = None
    vni: int | None = None

    @property
    def identity(self) -> Identity:
        """What of the above recognizes its packets."""
        if self.port is not None:
            return Identity(self.port, self.vlan, self.vni)
        if self.mac is not None:
            return Identity(mac=self.mac)
        return Identity(ips=tuple(str(address) for address in self.ips))


@dataclass(frozen=True)
class Total:
    """What all VMs of a tenant have together: one meter."""

    key: str
    rate: int | None
    burst: int | None


Limit = Vm | Destination | Total


@dataclass(frozen=True)
class Tenant:
    """A tenant: VMs, destinations whose rate they share, and perhaps a rate of its own."""

    key: str
    name: str
    vms: dict[str, Vm]
    destinations: dict[str, Destination]
    total: Total | None = None


@dataclass(frozen=True)
class ForwardingEntry:
    """Frames for `to` (a MAC address or a network) leave through `port`."""

    to: str | Network
    port: str


@dataclass(frozen=True)
class Forwarding:
    """What table 2 does."""

    mode: Literal["normal", "static"] = "normal"
    entries: tuple[ForwardingEntry, ...] = ()
    unknown: Literal["normal", "drop"] = "drop"


@dataclass(frozen=True)
class Shaping:
    """What shape bands say beside rate and burst, in us; 0 is the switch's default."""

    max_delay_us: int = 0
    ecn_threshold_us: int = 0
    fair: bool = False
    """Whether the flows that pass a meter share its rate equally."""


@dataclass(frozen=True)
class Config:
    """The whole file, checked, with all defaults filled in."""

    tenants: dict[str, Tenant]
    switches: frozenset[int] | None = None
    unknown_sources: Literal["drop", "rate", "forward"] = "drop"
    unknown_rate: int | None = None
    """bit/s that all unknown sources have together at each switch; None: no such rate."""
    uplinks: tuple[str, ...] = ()
    """Ports that lead elsewhere: what comes in there is no VM's, and passes."""
    forwarding: Forwarding = field(default_factory=Forwarding)
    shaping: Shaping | None = field(default_factory=Shaping)
    """None: drop bands, also where the switch has the shape band."""
    first_meter: int = FIRST_METER
    last_meter: int = LAST_METER
    resync_interval: int = 10
    ports: dict[str, int] = field(default_factory=dict)
    """Ports that are shared: their rates in bit/s, by name."""
    document: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the file said, as it said it."""

    def shares(self) -> dict[str, Share]:
        """Who shares a port, by the VM's key."""
        return {
            vm.key: vm.share
            for tenant in self.tenants.values()
            for vm in tenant.vms.values()
            if vm.share is not None
        }

    def identities(self) -> Iterator[Identity]:
        """What all VMs are recognized by, and uplinks."""
        for tenant in self.tenants.values():
            yield from (vm.identity for vm in tenant.vms.values())
        yield from (Identity(port) for port in self.uplinks)

    def limits(self) -> Iterator[Limit]:
        """Everything that has a rate, in the file's order."""
        for tenant in self.tenants.values():
            if tenant.total is not None:
                yield tenant.total
            for vm in tenant.vms.values():
                yield vm
                yield from vm.destinations.values()
            yield from tenant.destinations.values()

    def selects(self, datapath_id: int) -> bool:
        """Whether the switch is one that the file is about."""
        return self.switches is None or datapath_id in self.switches


def network_text(network: Network) -> str:
    """``10.0.0.9`` for a single address, ``10.1.0.0/16`` for a prefix."""
    return str(network.network_address) if _is_host(network) else str(network)


def _is_host(network: Network) -> bool:
    return network.prefixlen == network.max_prefixlen


# Parsing of single values.  Each raises `units.UnitError`.


def parse_rate_or_unlimited(value: object) -> int:
    """Give bit/s, or 0 for ``unlimited``."""
    if value == units.UNLIMITED:
        return _UNLIMITED
    try:
        return units.parse_rate(value)
    except units.UnitError as error:
        raise units.UnitError(error.message, f"{error.allowed}, or {units.UNLIMITED}") from None


def parse_name(value: object) -> str:
    """Check a tenant's or VM's name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise units.UnitError("not a name", NAME_ALLOWED)
    return value


def parse_port(value: object) -> str:
    """Check an OpenFlow port's name."""
    if isinstance(value, str) and _PORT.fullmatch(value):
        return value
    if isinstance(value, str) and len(value) > PORT_NAME_LENGTH:
        raise units.UnitError("OpenFlow 1.3 cannot carry a port name this long", PORT_ALLOWED)
    hint = " (quote it to make it text)" if value is not None and not isinstance(value, str) else ""
    raise units.UnitError(f"not a port's name{hint}", PORT_ALLOWED)


def parse_mac(value: object) -> str:
    """Normalize a unicast MAC address."""
    text = value.lower() if isinstance(value, str) else ""
    if not _MAC.fullmatch(text) or int(text[:2], 16) & 1 or text == "00:00:00:00:00:00":
        raise units.UnitError("not a unicast MAC address", MAC_ALLOWED)
    return text


def parse_ips(value: object) -> tuple[Address, ...]:
    """Read one address or a list of them."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise units.UnitError("the list is empty", IP_ALLOWED)
    result: list[Address] = []
    for item in items:
        try:
            address = ipaddress.ip_address(item if isinstance(item, str) else "")
        except ValueError:
            raise units.UnitError(
                f"{loader.shorten(item)} is not an IP address", IP_ALLOWED
            ) from None
        if address.is_multicast or address.is_unspecified or str(address) == "255.255.255.255":
            raise units.UnitError(f"{item} is not the address of one host", IP_ALLOWED)
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
            raise units.UnitError(f"{item} has a zone", IP_ALLOWED)
        if address in result:
            raise units.UnitError(f"{item} is listed twice", IP_ALLOWED)
        result.append(address)
    return tuple(result)


def parse_min_rate(value: object) -> int:
    """Read a min-rate, in bit/s."""
    try:
        rate = units.parse_rate(value)
    except units.UnitError as error:
        raise units.UnitError(error.message, MIN_RATE_ALLOWED) from None
    if rate < MIN_SHARE:
        raise units.UnitError("rate too low to let one full frame pass in time", MIN_RATE_ALLOWED)
    return rate


def parse_weight(value: object) -> int:
    """Read a weight."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WEIGHT:
        raise units.UnitError("not a weight", WEIGHT_ALLOWED)
    return value


class ShareError(ValueError):
    """Shares of a port that cannot be honoured: which field, its value, what is allowed."""

    def __init__(self, key: str | None, name: str, value: int, message: str, allowed: str) -> None:
        super().__init__(message)
        self.key = key
        """The VM's, or None if it is about the port."""
        self.field = name
        self.value = units.format_rate(value)
        self.message = message
        self.allowed = allowed


def check_shares(port: str, rate: int, shares: Mapping[str, Share]) -> list[ShareError]:
    """Find what keeps a port of `rate` bit/s from honouring these shares, by VM's key."""
    errors = []
    show = units.format_rate
    for key, item in shares.items():
        if item.max_rate is not None and item.min_rate > item.max_rate:
            message = f"is above its max-rate of {show(item.max_rate)}"
            allowed = f"at most {show(item.max_rate)}"
        elif item.min_rate > rate:
            message, allowed = f"is above what port {port} has", f"at most {show(rate)}"
        else:
            continue
        errors.append(ShareError(key, "min-rate", item.min_rate, message, allowed))
    return errors or check_port(rate, shares)


def check_port(rate: int, shares: Mapping[str, Share]) -> list[ShareError]:
    """Find whether `rate` bit/s is enough for the guarantees of all who share it."""
    total = sum(item.min_rate for item in shares.values())
    if total <= rate:
        return []
    message = f"is less than the min-rates of the {len(shares)} VMs that share it"
    allowed = f"at least {units.format_rate(total)}"
    return [ShareError(None, "max-rate", rate, message, allowed)]


def parse_network(value: object) -> Network:
    """Read an address or a prefix without host bits."""
    text = value if isinstance(value, str) else ""
    if "%" in text or not re.fullmatch(r"[0-9A-Fa-f:.]+(?:/[0-9]{1,3})?", text):
        raise units.UnitError("not an address or prefix", TO_ALLOWED)
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        pass
    try:
        prefix = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise units.UnitError("not an address or prefix", TO_ALLOWED) from None
    raise units.UnitError(f"prefix has host bits set; did you mean {prefix}?", TO_ALLOWED)


def parse_unknown(value: object) -> str | int:
    """Read what unknown sources get: a word, or their rate in bit/s."""
    if value in ("drop", "forward"):
        return str(value)
    if isinstance(value, dict) and set(value) == {"rate"}:
        return units.parse_rate(value["rate"])
    raise units.UnitError("not one of the allowed words", UNKNOWN_ALLOWED)


def parse_vlan(value: object) -> int:
    """Read a VLAN's id."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4094:
        raise units.UnitError("not a VLAN", "an integer from 1 to 4094")
    return value


def parse_vni(value: object) -> int:
    """Read the id of a virtual network in tunnels (VXLAN, Geneve)."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
        raise units.UnitError("not a VNI", "an integer from 0 to 16777215")
    return value


def parse_switches(value: object) -> frozenset[int] | None:
    """Give the datapath ids, or None for all switches."""
    if value == "any":
        return None
    if not isinstance(value, list) or not value:
        raise units.UnitError("not a list of datapath ids", SWITCHES_ALLOWED)
    result = set()
    for item in value:
        number = None
        if isinstance(item, int) and not isinstance(item, bool):
            # Sixteen decimal digits are a hexadecimal id that lost its quotes.
            number = item if item < 10**15 or item >= 10**16 else None
        elif isinstance(item, str) and re.fullmatch(r"[0-9A-Fa-f]{16}|0x[0-9A-Fa-f]{1,16}", item):
            number = int(item, 16)
        if number is None or not 0 < number < 1 << 64:
            raise units.UnitError(f"{loader.shorten(item)} is not a datapath id", SWITCHES_ALLOWED)
        result.add(number)
    return frozenset(result)


def parse_to(value: object) -> str | Network:
    """Read what a forwarding entry is about: a MAC address, an address or a prefix."""
    try:
        return parse_mac(value)
    except units.UnitError:
        pass
    try:
        return parse_network(value)
    except units.UnitError as error:
        raise units.UnitError(error.message, f"{MAC_ALLOWED}, or {TO_ALLOWED}") from None


def validator(parse: Any) -> BeforeValidator:
    """Let pydantic call `parse` and keep what its error allows.

    What pydantic cannot know, how a value that `parse` takes looks, is said beside it, for
    programs that read the schema (`fbrates.openapi`).
    """

    def validate(value: object) -> Any:
        try:
            return parse(value)
        except units.UnitError as error:
            raise PydanticCustomError(
                "fbrates", "{message}", {"message": error.message, "allowed": error.allowed}
            ) from None

    return BeforeValidator(validate)


# The file, as pydantic checks it.  A field that was not given has a value that
# no file can give, so that `rate:` with nothing behind it is an error.


def _text(pattern: str, description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{pattern}$", "description": description, **more}


BPS_SCHEMA = {
    "type": "integer",
    "minimum": units.MIN_RATE,
    "maximum": units.MAX_RATE,
    "multipleOf": 1000,
    "description": "bit/s",
}
_RATE_TEXT = r"([0-9]{1,18}(\.[0-9]{1,9})? ?[kMG]?bps|[0-9]{1,30})"
_RATE_SCHEMA = {"anyOf": [_text(_RATE_TEXT, units.RATE_ALLOWED, examples=["300Mbps"]), BPS_SCHEMA]}
_RATE_OR_UNLIMITED_SCHEMA = {"anyOf": [*_RATE_SCHEMA["anyOf"], {"const": units.UNLIMITED}]}
_MIN_RATE_SCHEMA = {"anyOf": [_RATE_SCHEMA["anyOf"][0], {**BPS_SCHEMA, "minimum": MIN_SHARE}]}
_IP_SCHEMA = {"type": "string", "description": "a unicast IPv4 or IPv6 address"}
_NETWORK_SCHEMA = {"type": "string", "description": TO_ALLOWED}
_SWITCH_SCHEMA = {"anyOf": [_text("(0x[0-9A-Fa-f]{1,16}|[0-9A-Fa-f]{16})", "a datapath id"),
                            {"type": "integer", "minimum": 1}]}  # fmt: skip
_UNKNOWN_SCHEMA = {
    "anyOf": [
        {"enum": ["drop", "forward"]},
        {
            "type": "object",
            "properties": {"rate": _RATE_SCHEMA},
            "required": ["rate"],
            "additionalProperties": False,
        },
    ]
}

Rate = Annotated[int, validator(parse_rate_or_unlimited), WithJsonSchema(_RATE_OR_UNLIMITED_SCHEMA)]
FixedRate = Annotated[int, validator(units.parse_rate), WithJsonSchema(_RATE_SCHEMA)]
MinRate = Annotated[int, validator(parse_min_rate), WithJsonSchema(_MIN_RATE_SCHEMA)]
Weight = Annotated[
    int,
    validator(parse_weight),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_WEIGHT}),
]
_Burst = Annotated[
    int,
    validator(units.parse_burst),
    WithJsonSchema(
        _text(r"[0-9]{1,18}(\.[0-9]{1,9})? ?[kM]?(bit|B)", units.BURST_ALLOWED, examples=["15kB"])
    ),
]
_Duration = Annotated[
    int,
    validator(units.parse_duration),
    WithJsonSchema(
        _text(r"[0-9]{1,18}(\.[0-9]{1,9})? ?(us|ms|s)", units.DURATION_ALLOWED, examples=["20ms"])
    ),
]
Name = Annotated[
    str, validator(parse_name), WithJsonSchema(_text(f"{_NAME.pattern}", NAME_ALLOWED))
]
_Port = Annotated[str, validator(parse_port), WithJsonSchema(_text(_PORT.pattern, PORT_ALLOWED))]
_Mac = Annotated[
    str,
    validator(parse_mac),
    WithJsonSchema(_text("[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}", MAC_ALLOWED)),
]
_Ips = Annotated[
    Any,
    validator(parse_ips),
    WithJsonSchema({"anyOf": [_IP_SCHEMA, {"type": "array", "items": _IP_SCHEMA, "minItems": 1}]}),
]
_To = Annotated[Any, validator(parse_network), WithJsonSchema(_NETWORK_SCHEMA)]
_ForwardTo = Annotated[
    Any,
    validator(parse_to),
    WithJsonSchema({"type": "string", "description": f"{MAC_ALLOWED}, or {TO_ALLOWED}"}),
]
_Switches = Annotated[
    Any,
    validator(parse_switches),
    WithJsonSchema(
        {"anyOf": [{"const": "any"}, {"type": "array", "items": _SWITCH_SCHEMA, "minItems": 1}]}
    ),
]
_Unknown = Annotated[Any, validator(parse_unknown), WithJsonSchema(_UNKNOWN_SCHEMA)]
_Vlan = Annotated[
    int,
    validator(parse_vlan),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 4094}),
]
_Vni = Annotated[
    int,
    validator(parse_vni),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": (1 << 24) - 1}),
]


class Model(BaseModel):
    """What has these keys and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class DestinationBody(Model):
    """A rate towards a destination that is named elsewhere."""

    rate: Rate = UNSET
    burst: _Burst = UNSET


class DestinationSpec(DestinationBody):
    """A rate towards a destination."""

    to: _To


class VmSpec(Model):
    """How packets of a VM are recognized, and its rate, or its part of a port."""

    port: _Port = ""
    vlan: _Vlan = UNSET
    vni: _Vni = UNSET
    mac: _Mac = ""
    ip: _Ips = ()
    rate: Rate = UNSET
    shares: Name = ""
    min_rate: Annotated[MinRate, Field(alias="min-rate")] = UNSET
    max_rate: Annotated[FixedRate, Field(alias="max-rate")] = UNSET
    weight: Weight = UNSET
    burst: _Burst = UNSET
    destinations: list[DestinationSpec] = Field(default_factory=list)


class PortSpec(Model):
    """A port whose rate VMs share."""

    max_rate: Annotated[FixedRate, Field(alias="max-rate")]


class TenantBody(Model):
    """A tenant; VMs and destinations that it has and that are not named here stay."""

    rate: Rate = UNSET
    burst: _Burst = UNSET
    vms: dict[Name, VmSpec] = Field(default_factory=dict)
    destinations: list[DestinationSpec] = Field(default_factory=list)


class TenantSpec(TenantBody):
    """A tenant in a file."""

    vms: dict[Name, VmSpec]


class _Defaults(Model):
    rate: Rate = UNSET
    burst: _Burst = UNSET
    destination_rate: Rate = UNSET
    destination_burst: _Burst = UNSET


class _Shaping(Model):
    band: Literal["auto", "drop"] = "auto"
    max_delay: _Duration = 0
    ecn_threshold: _Duration = 0
    fair: bool = False


class _ForwardingEntry(Model):
    to: _ForwardTo
    port: _Port


class _Forwarding(Model):
    mode: Literal["normal", "static"] = "static"
    entries: list[_ForwardingEntry] = Field(default_factory=list)
    unknown: Literal["normal", "drop"] = "drop"


class _Meters(Model):
    first: Annotated[int, Field(ge=1, le=0xFFFF0000)] = FIRST_METER
    last: Annotated[int, Field(ge=1, le=0xFFFF0000)] = LAST_METER


def _expand_forwarding(value: object) -> object:
    if isinstance(value, str) and value in ("normal", "static"):
        return {"mode": value}
    if isinstance(value, list):
        return {"mode": "static", "entries": value}
    return value


class FileSpec(Model):
    """A file of tenants."""

    tenants: dict[Name, TenantSpec]
    ports: dict[Name, PortSpec] = Field(default_factory=dict)
    switches: _Switches = None
    unknown_sources: _Unknown = "drop"
    uplinks: list[_Port] = Field(default_factory=list)
    defaults: _Defaults = Field(default_factory=_Defaults)
    forwarding: Annotated[_Forwarding, BeforeValidator(_expand_forwarding)] = Field(
        default_factory=lambda: _Forwarding(mode="normal")
    )
    meters: _Meters = Field(default_factory=_Meters)
    shaping: _Shaping = Field(default_factory=_Shaping)
    resync_interval: Annotated[int, Field(ge=0, le=86400)] = 10


def _model_at(path: Path) -> type[Model] | None:
    """Find the model of the mapping at `path`, to say which keys it may have."""
    match path:
        case ():
            return FileSpec
        case ("defaults",):
            return _Defaults
        case ("meters",):
            return _Meters
        case ("shaping",):
            return _Shaping
        case ("forwarding",):
            return _Forwarding
        case ("forwarding", "entries", int()) | ("forwarding", int()):
            return _ForwardingEntry
        case ("ports", _):
            return PortSpec
        case ("tenants", _):
            return TenantSpec
        case ("tenants", _, "vms", _):
            return VmSpec
        case ("tenants", _, "destinations", int()):
            return DestinationSpec
        case ("tenants", _, "vms", _, "destinations", int()):
            return DestinationSpec
    return None


_TYPE_MESSAGES = {
    "dict_type": ("must be a mapping", "'key: value' lines"),
    "model_type": ("must be a mapping", "'key: value' lines"),
    "model_attributes_type": ("must be a mapping", "'key: value' lines"),
    "list_type": ("must be a list", "a list: '- ...' lines or [..., ...]"),
    "int_type": ("must be an integer", None),
    "string_type": ("must be text", None),
    "bool_type": ("not one of the allowed words", "true or false"),
}


def _problem(error: Any, document: loader.Document) -> Problem:
    """Turn one of pydantic's errors into one of ours."""
    path: Path = tuple(part for part in error["loc"] if part != "[key]")
    value = error["input"]
    context = error.get("ctx", {})
    kind = error["type"]
    if kind == "fbrates":
        message, allowed = context["message"], context["allowed"]
    elif kind == "extra_forbidden":
        model = _model_at(path[:-1])
        fields = model.model_fields.items() if model else ()
        keys = [info.alias or name for name, info in fields]
        close = difflib.get_close_matches(str(path[-1]), keys, n=1)
        message = f"unknown key, did you mean {close[0]}?" if close else "unknown key"
        allowed, value = ", ".join(keys), None
    elif kind == "missing":
        message, allowed, value = "is missing", None, None
    elif kind == "literal_error":
        message, allowed = "not one of the allowed words", context["expected"]
    elif kind in ("greater_than_equal", "less_than_equal"):
        message = "out of range"
        allowed = "0 to 86400 seconds" if path[0] == "resync_interval" else "1 to 4294901760"
    else:
        message, allowed = _TYPE_MESSAGES.get(kind, (error["msg"], None))
        if value is None:
            message += ", and there is nothing here"
    if isinstance(value, dict | list) and kind != "fbrates":
        value = None
    return Problem(dotted(path), message, value, allowed, document.line_of(path))


# What no single field can tell.


def _cross_check(data: Any, document: loader.Document) -> list[Problem]:
    """Find what two places of the file say differently; works on files with other errors."""
    problems: list[Problem] = []
    seen: dict[tuple[str, Any], tuple[Path, bool]] = {}
    at_port: dict[str, dict[str, Path]] = {}
    """By port: who is there, by what says more: vlan, vni or nothing."""
    static = _is_static(_get(data, "forwarding"))

    def complain(path: Path, message: str, value: Any, allowed: str) -> None:
        problems.append(Problem(dotted(path), message, value, allowed, document.line_of(path)))

    def claim(kind: str, value: Any, path: Path, apart: bool = False) -> None:
        first, first_apart = seen.setdefault((kind, value), (path, apart))
        if first != path and not (apart and first_apart):
            but = "" if kind == "port" else ", or each VM a port"
            complain(
                path,
                f"{kind} is already that of {dotted(first[:4])}",
                str(value),
                f"each VM its own {kind}{'' if static else but}",
            )
        if not apart:
            seen[kind, value] = (first, False)

    def destinations(where: Any, path: Path) -> None:
        first: dict[Network, int] = {}
        items = _get(where, "destinations")
        for i, item in enumerate(items if isinstance(items, list) else []):
            network = _quietly(parse_network, _get(item, "to"))
            if network is not None and first.setdefault(network, i) != i:
                here = (*path, "destinations", i, "to")
                problems.append(
                    Problem(
                        dotted(here),
                        f"is already in this list, at [{first[network]}]",
                        network_text(network),
                        "each destination once",
                        document.line_of(here),
                    )
                )

    for tenant, tenant_data in _items(_get(data, "tenants")):
        destinations(tenant_data, ("tenants", tenant))
        for vm, vm_data in _items(_get(tenant_data, "vms")):
            path: Path = ("tenants", tenant, "vms", vm)
            destinations(vm_data, path)
            if not isinstance(vm_data, dict):
                continue
            if not any(key in vm_data for key in ("port", "mac", "ip")):
                problems.append(
                    Problem(
                        dotted(path),
                        "nothing says which packets are this VM's",
                        None,
                        "at least one of port, mac and ip",
                        document.line_of(path),
                    )
                )
            port = _quietly(parse_port, vm_data.get("port"))
            segment = _segment(vm_data)
            if port is not None:
                here = (*path, "port")
                claim("port", f"{port}{segment}", here)
                users = at_port.setdefault(port, {})
                kind = segment.split()[0] if segment else ""
                users.setdefault(kind, here)
                if len(users) > 1 and users[kind] == here:
                    other = next(where for key, where in users.items() if key != kind)
                    complain(
                        here,
                        f"port is already that of {dotted(other[:4])}",
                        port,
                        "of VMs at one port each a vlan, or each a vni, of its own",
                    )
            elif segment:
                key = next(key for key in ("vlan", "vni") if key in vm_data)
                complain((*path, key), "is of no use without a port", vm_data[key], "with port")
            if "vlan" in vm_data and "vni" in vm_data:
                complain((*path, "vni"), "both vlan and vni", vm_data["vni"], "one of them")
            if "vlan" in vm_data and static:
                complain(
                    (*path, "vlan"),
                    "forwarding: static knows no VLANs",
                    vm_data["vlan"],
                    "with forwarding: normal",
                )
            # Where the port tells VMs apart their addresses may be the same, as they are
            # in networks that have nothing to do with each other.
            apart = port is not None and not static
            mac = _quietly(parse_mac, vm_data.get("mac"))
            if mac is not None:
                claim("mac", mac, (*path, "mac"), apart)
            for address in _quietly(parse_ips, vm_data.get("ip")) or ():
                claim("ip", address, (*path, "ip"), apart)
    uplinks = _get(data, "uplinks")
    for i, item in enumerate(uplinks if isinstance(uplinks, list) else []):
        name = _quietly(parse_port, item)
        if name is not None and "" in at_port.get(name, {}):
            complain(
                ("uplinks", i),
                f"is the port of {dotted(at_port[name][''][:4])}",
                name,
                "ports that are no VM's",
            )
        if name is not None and name in uplinks[:i]:
            complain(("uplinks", i), "is already in this list", name, "each port once")
    return problems


def _is_static(forwarding: Any) -> bool:
    if isinstance(forwarding, dict):
        return forwarding.get("mode", "static") == "static"
    return forwarding == "static" or isinstance(forwarding, list)


def _segment(vm: Mapping[str, Any]) -> str:
    """Tell what beside the port says whose packets they are, as text; "" for nothing."""
    vlan, vni = _quietly(parse_vlan, vm.get("vlan")), _quietly(parse_vni, vm.get("vni"))
    return ("" if vlan is None else f" vlan {vlan}") + ("" if vni is None else f" vni {vni}")


def _get(data: Any, key: str) -> Any:
    return data.get(key) if isinstance(data, dict) else None


def _items(data: Any) -> list[tuple[str, Any]]:
    return list(data.items()) if isinstance(data, dict) else []


def _quietly(parse: Any, value: Any) -> Any:
    try:
        return parse(value)
    except units.UnitError:
        return None


class _Resolver:
    """Fills in defaults, and notes rates that nothing gives."""

    def __init__(self, file: FileSpec, document: loader.Document) -> None:
        self.file = file
        self.document = document
        self.problems: list[Problem] = []

    def config(self) -> Config:
        file = self.file
        tenants = {name: self.tenant(name, tenant) for name, tenant in file.tenants.items()}
        unknown = file.unknown_sources
        config = Config(
            tenants=tenants,
            switches=file.switches,
            unknown_sources="rate" if isinstance(unknown, int) else unknown,
            unknown_rate=unknown if isinstance(unknown, int) else None,
            uplinks=tuple(file.uplinks),
            forwarding=self.forwarding(tenants),
            shaping=self.shaping(),
            first_meter=file.meters.first,
            last_meter=file.meters.last,
            resync_interval=file.resync_interval,
            ports={name: port.max_rate for name, port in file.ports.items()},
        )
        self.check_ports(config)
        count = sum(1 for _ in config.limits())
        span = config.last_meter - config.first_meter + 1
        # To try the shape band with, and for unknown sources.
        more = 1 if config.unknown_rate is None else 2
        if span < count + more:
            self.complain(
                ("meters",),
                f"{max(span, 0)} meter ids are not enough for {count} VMs and destinations",
                f"{config.first_meter}..{config.last_meter}",
                f"first not above last, an id for each VM and destination, and {more} more",
            )
        return config

    def tenant(self, name: str, tenant: TenantSpec) -> Tenant:
        path: Path = ("tenants", name)
        vms = {
            vm_name: self.vm(name, vm_name, vm, (*path, "vms", vm_name))
            for vm_name, vm in tenant.vms.items()
        }
        total = None
        if tenant.rate != UNSET:
            total = Total(name, tenant.rate or None, self.burst(tenant.burst, UNSET))
        elif tenant.burst != UNSET:
            self.complain((*path, "burst"), "is of no use without a rate", None, "with rate")
        destinations = self.destinations(name, tenant.destinations, path)
        return Tenant(name, name, vms, destinations, total)

    def vm(self, tenant: str, name: str, vm: VmSpec, path: Path) -> Vm:
        defaults = self.file.defaults
        key = f"{tenant}/{name}"
        share = self.share(vm, path)
        return Vm(
            key=key,
            tenant=tenant,
            name=name,
            port=vm.port or None,
            mac=vm.mac or None,
            ips=vm.ip,
            rate=share.min_rate if share else self.vm_rate(vm, path),
            burst=self.burst(vm.burst, defaults.burst),
            destinations=self.destinations(key, vm.destinations, path),
            share=share,
            vlan=None if vm.vlan == UNSET else vm.vlan,
            vni=None if vm.vni == UNSET else vm.vni,
        )

    def vm_rate(self, vm: VmSpec, path: Path) -> int | None:
        return self.rate(vm.rate, self.file.defaults.rate, path, "defaults.rate")

    def share(self, vm: VmSpec, path: Path) -> Share | None:
        """Give what the VM has of which port; None if it has a rate of its own."""
        given = [
            key for key in SHARING_KEYS if vm.__pydantic_fields_set__ & {key.replace("-", "_")}
        ]
        if not given:
            return None
        if vm.rate != UNSET:
            self.complain(
                (*path, "rate"),
                f"is a rate of its own, but {given[0]} says that it shares a port's",
                units.format_rate(vm.rate or None),
                "either rate, or " + ", ".join(SHARING_KEYS),
            )
        ports = self.file.ports
        port = vm.shares or (next(iter(ports)) if len(ports) == 1 else "")
        if port not in ports:
            if vm.shares or ports:
                message = "no such port in ports" if vm.shares else "several ports are shared"
                where, value, allowed = "shares", vm.shares or None, ", ".join(ports) or "none yet"
            else:
                message = "there is no port whose rate could be shared"
                where, value = given[0], None
                allowed = "with ports: {NAME: {max-rate: RATE}} at the top of the file"
            self.complain((*path, where), message, value, allowed)
        return Share(
            port,
            MIN_SHARE if vm.min_rate == UNSET else vm.min_rate,
            None if vm.max_rate == UNSET else vm.max_rate,
            1 if vm.weight == UNSET else vm.weight,
        )

    def check_ports(self, config: Config) -> None:
        """Note what the shared ports cannot honour."""
        shares = config.shares()
        paths: dict[str, Path] = {
            vm.key: ("tenants", tenant.name, "vms", vm.name)
            for tenant in config.tenants.values()
            for vm in tenant.vms.values()
        }
        for name, rate in config.ports.items():
            those = {key: item for key, item in shares.items() if item.port == name}
            for error in check_shares(name, rate, those):
                path = ("ports", name) if error.key is None else paths[error.key]
                self.complain((*path, error.field), error.message, error.value, error.allowed)

    def destinations(
        self, owner: str, items: list[DestinationSpec], path: Path
    ) -> dict[str, Destination]:
        defaults = self.file.defaults
        result = {}
        for i, item in enumerate(items):
            text = network_text(item.to)
            result[text] = Destination(
                key=f"{owner}->{text}",
                network=item.to,
                rate=self.rate(
                    item.rate,
                    defaults.destination_rate,
                    (*path, "destinations", i),
                    "defaults.destination_rate",
                ),
                burst=self.burst(item.burst, defaults.destination_burst),
            )
        return result

    def rate(self, own: int, default: int, path: Path, default_name: str) -> int | None:
        rate = default if own == UNSET else own
        if rate == UNSET:
            self.complain(
                (*path, "rate"),
                f"is missing, and {default_name} is not given either",
                None,
                f"{units.RATE_ALLOWED}, or {units.UNLIMITED}",
            )
        return None if rate in (UNSET, _UNLIMITED) else rate

    @staticmethod
    def burst(own: int, default: int) -> int | None:
        burst = default if own == UNSET else own
        return None if burst == UNSET else burst

    def shaping(self) -> Shaping | None:
        given = self.file.shaping
        if given.band == "drop":
            for key, value in (
                ("max_delay", f"{given.max_delay}us" if given.max_delay else ""),
                ("ecn_threshold", f"{given.ecn_threshold}us" if given.ecn_threshold else ""),
                ("fair", "true" if given.fair else ""),
            ):
                if value:
                    self.complain(
                        ("shaping", key),
                        "a drop band cannot say this",
                        value,
                        "left out with band: drop",
                    )
            return None
        if given.max_delay and given.ecn_threshold >= given.max_delay:
            self.complain(
                ("shaping", "ecn_threshold"),
                "no packet waits for that long",
                f"{given.ecn_threshold}us",
                f"less than shaping.max_delay, {given.max_delay}us",
            )
        return Shaping(given.max_delay, given.ecn_threshold, given.fair)

    def forwarding(self, tenants: dict[str, Tenant]) -> Forwarding:
        given = self.file.forwarding
        entries = [ForwardingEntry(entry.to, entry.port) for entry in given.entries]
        known = {entry.to for entry in entries}
        if given.mode == "normal":
            if entries:
                self.complain(
                    ("forwarding", "entries"),
                    "entries are for mode static",
                    None,
                    "mode: static with entries, or mode: normal without",
                )
            return Forwarding()
        for i, entry in enumerate(entries):
            if any(other.to == entry.to for other in entries[:i]):
                self.complain(
                    ("forwarding", "entries", i, "to"),
                    "is already in this list",
                    entry.to if isinstance(entry.to, str) else network_text(entry.to),
                    "each destination once",
                )
        # A VM of which port and address are known needs no entry of its own.
        for tenant in tenants.values():
            for vm in tenant.vms.values():
                if vm.port is None:
                    continue
                own: list[str | Network] = [ipaddress.ip_network(ip) for ip in vm.ips]
                own += [vm.mac] if vm.mac else []
                entries += [ForwardingEntry(to, vm.port) for to in own if to not in known]
        return Forwarding("static", tuple(entries), given.unknown)

    def complain(self, path: Path, message: str, value: Any, allowed: str) -> None:
        line = self.document.line_of(path)
        self.problems.append(Problem(dotted(path), message, value, allowed, line))


def parse(text: str) -> Config:
    """Check a file's text; raises InvalidConfig with all that is wrong."""
    return check(loader.parse(text))


def from_document(data: dict[str, Any]) -> Config:
    """Check what a file would say; raises InvalidConfig."""
    return check(loader.Document(data))


def check(document: loader.Document) -> Config:
    """Check a document; raises InvalidConfig with all that is wrong."""
    problems = list(document.problems)
    if not isinstance(document.data, dict):
        what = "the file is empty" if document.data is None else "must be a mapping"
        keys = ", ".join(FileSpec.model_fields)
        raise InvalidConfig([*problems, Problem("", what, None, keys, document.line_of(()))])
    problems += _cross_check(document.data, document)
    config = None
    try:
        file = FileSpec.model_validate(document.data)
    except ValidationError as error:
        problems += [_problem(item, document) for item in error.errors(include_url=False)]
    else:
        resolver = _Resolver(file, document)
        config = resolver.config()
        problems += resolver.problems
    if problems or config is None:
        raise InvalidConfig(sorted(problems, key=lambda problem: problem.line or 0))
    return replace(config, document=document.data)


def load(filename: str) -> Config:
    """Read and check a file; raises InvalidConfig, also when it cannot be read."""
    try:
        with open(filename, "rb") as stream:
            data = stream.read(loader.MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise InvalidConfig([Problem("", f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise InvalidConfig([Problem("", f"is not UTF-8 at byte {error.start}")]) from None
    return parse(text)
