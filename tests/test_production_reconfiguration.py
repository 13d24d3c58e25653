"""Everything is changed while traffic runs; every packet is counted.

None is lost that no counter has, none comes twice, none overtakes another one of
its flow, no buffer is leaked, no counter falls, and traffic goes on.
"""

from __future__ import annotations

import pytest
from fbtest.testbed import Testbed

from oracle import Oracle
from reconfiguration import CHANGES, Change
from shaping import favour_pmds, second_cpu

ROUNDS = 2


@pytest.mark.parametrize("what", CHANGES, ids=lambda change: change.name)
def test_nothing_is_lost(testbed: Testbed, what: Change) -> None:
    second_cpu(testbed)
    oracle = Oracle(testbed)
    favour_pmds(testbed)
    oracle.start()
    for _ in range(ROUNDS):
        for _ in what.run(oracle):
            oracle.run(0.1)
            oracle.check_counters(what.may_restart)
        oracle.wait_traffic()
    print(oracle.check(may_drop=what.may_drop, may_reorder=what.may_reorder))
    warnings = [line for line in oracle.log.problems()
                if not any(part in line for part in what.may_warn)]
    assert warnings == [], "\n".join(warnings)
