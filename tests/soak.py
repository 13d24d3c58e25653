"""Random changes under traffic for as long as wanted; every packet is counted.

    sudo make soak MINUTES=30

What tests/test_production_reconfiguration.py does with one change after another,
in an order that a seed determines and with other ones from round to round.
After each round (a few changes) all that was sent must have come, in order and
once, or be in a counter of drops that one of the changes explains; no buffer may
be leaked; and vswitchd, the same process all the time, may have grown by no more
than it did in the first rounds, plus some.  The result is in build/soak.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "utilities")]

from fbtest.ovs import Ovs  # noqa: E402
from fbtest.testbed import Testbed  # noqa: E402

from oracle import Oracle, OracleError  # noqa: E402
from reconfiguration import CHANGES  # noqa: E402
from shaping import RESULTS, favour_pmds  # noqa: E402

#: Changes between two accounts.
ROUND = 5
#: The first rounds in which vswitchd may still grow (tables, pools, chunks).
WARM_UP_ROUNDS = 10
#: What its heap may gain after that, in kB: arenas of threads that come and go, and
#: what malloc keeps.  (A wheel is a block of megabytes.  The first ones are mappings of
#: their own, gone when they are freed; then malloc takes such from the heap, which has
#: gained 10 MB for good when that happens first.)
GROWTH_KB = 16_384


def rss_kb(ovs: Ovs) -> int:
    """vswitchd's resident memory without huge pages."""
    for line in Path(f"/proc/{ovs.pid()}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise RuntimeError("no RssAnon")


def soak(bed: Testbed, minutes: float, seed: int) -> dict[str, object]:
    """Run it; raises `OracleError` at the first packet that is not accounted for."""
    choose = random.Random(seed)
    oracle = Oracle(bed)
    favour_pmds(bed)
    pid = bed.ovs.pid()
    made: Counter[str] = Counter()
    rss: list[int] = []
    dropped: Counter[str] = Counter()
    sent = received = reordered = rounds = 0
    begin = time.monotonic()
    while time.monotonic() - begin < minutes * 60:
        oracle.start()
        some = choose.choices(CHANGES, k=ROUND)
        for change in some:
            print(f"soak: {time.monotonic() - begin:7.1f} s: {change.name}", flush=True)
            for _ in change.run(oracle):
                oracle.run(choose.random() * 0.3)
                oracle.check_counters(change.may_restart)
            made[change.name] += 1
        oracle.wait_traffic()
        sums = oracle.check(may_drop=tuple(d for change in some for d in change.may_drop),
                            may_reorder=any(change.may_reorder for change in some))
        sent += sums.sender.sent
        received += sums.receiver.received
        reordered += sums.receiver.misordered
        dropped.update(sums.drops)
        oracle.forget()
        if bed.ovs.pid() != pid:
            raise OracleError("vswitchd is another process than before")
        rounds += 1
        rss.append(rss_kb(bed.ovs))
        print(f"soak: round {rounds}: vswitchd has {rss[-1]} kB", flush=True)
        if len(rss) > WARM_UP_ROUNDS and rss[-1] > max(rss[:WARM_UP_ROUNDS]) + GROWTH_KB:
            raise OracleError(f"vswitchd grows: {rss} kB")
    return {
        "minutes": round((time.monotonic() - begin) / 60, 1), "seed": seed, "rounds": rounds,
        "changes": sum(made.values()), "by_change": dict(sorted(made.items())),
        "sent": sent, "received": received, "dropped": dict(sorted(dropped.items())),
        "missing": sent - received - sum(dropped.values()), "misordered": reordered,
        "rss_kb": [rss[0], max(rss), rss[-1]],
        "warnings": len(oracle.log.problems()),
    }


def main() -> int:
    """Do what the command line says, in the environment of fb-sandbox."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    with Testbed() as bed:
        try:
            result = soak(bed, args.minutes, seed)
        except (OracleError, TimeoutError) as exc:
            print(f"soak: FAILED with --seed {seed}: {exc}", file=sys.stderr)
            return 1
    text = json.dumps(result, indent=2)
    (RESULTS.parent / "soak.json").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
