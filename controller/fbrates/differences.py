"""What one configuration says differently from another, in lines to read."""

from __future__ import annotations

from fbrates import units
from fbrates.config import Config, Vm, network_text


def differences(old: Config, new: Config) -> list[str]:
    """Give a line for each thing that comes (+), goes (-) or changes (~)."""
    before, after = flatten(old), flatten(new)
    lines = [f"+ {key}: {after[key]}" for key in sorted(after.keys() - before.keys())]
    lines += [f"- {key}" for key in sorted(before.keys() - after.keys())]
    lines += [
        f"~ {key}: {before[key]} -> {after[key]}"
        for key in sorted(before.keys() & after.keys())
        if before[key] != after[key]
    ]
    return lines


def flatten(config: Config) -> dict[str, str]:
    """Give all that a configuration says, as text by name."""
    switches = config.switches
    shaping = config.shaping
    result = {
        "switches": "any"
        if switches is None
        else ", ".join(f"{number:016x}" for number in sorted(switches)),
        "unknown_sources": config.unknown_sources
        if config.unknown_rate is None
        else f"rate {units.format_rate(config.unknown_rate)}",
        "uplinks": ", ".join(config.uplinks) or "none",
        "resync_interval": str(config.resync_interval),
        "meters": f"{config.first_meter}..{config.last_meter}",
        "shaping": "drop bands"
        if shaping is None
        else f"max_delay {shaping.max_delay_us}us, ecn_threshold {shaping.ecn_threshold_us}us, "
        f"fair {str(shaping.fair).lower()}",
        "forwarding": config.forwarding.mode,
    }
    if config.forwarding.mode == "static":
        result["forwarding.unknown"] = config.forwarding.unknown
        for entry in config.forwarding.entries:
            to = entry.to if isinstance(entry.to, str) else network_text(entry.to)
            result[f"forwarding to {to}"] = entry.port
    for name, rate in config.ports.items():
        result[f"port {name}"] = units.format_rate(rate)
    for name in config.tenants:
        result[f"tenant {name}"] = "a tenant"
    for limit in config.limits():
        if isinstance(limit, Vm):
            mac = [limit.mac] if limit.mac else []
            result[f"{limit.key} is"] = ", ".join([str(limit.identity), *mac, *map(str, limit.ips)])
            if limit.share is not None:
                share = limit.share
                result[limit.key] = (
                    f"shares {share.port}, min-rate {units.format_rate(share.min_rate)}, max-rate "
                    f"{units.format_rate(share.max_rate)}, weight {share.weight}"
                )
                continue
        burst = "" if limit.burst is None else f", burst {limit.burst}kbit"
        result[limit.key] = units.format_rate(limit.rate) + burst
    return result
