"""Fixtures of the Python tests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from hostile import examples

# All tests with generated input try the same examples each time, however busy the
# machine is: what a change broke, it broke at once.  FB_EXAMPLES has others tried.
settings.register_profile("same", parent=examples(100))
settings.load_profile("same")

pytest_plugins: list[str] = ["fbtest.fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options with which CI says what it cannot have, and check-full what it wants."""
    parser.addoption("--no-skip", action="store_true", help="fail tests that are skipped")
    parser.addoption("--full", action="store_true", help="run also what is marked \"full\"")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only ``make check-full`` runs, unless it is asked for by its name."""
    if config.getoption("--full") or any("::" in arg for arg in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport,
                                                              pytest.TestReport]:
    """Have a skip fail with --no-skip."""
    report = yield
    if (report.skipped and item.config.getoption("--no-skip")
            and not hasattr(report, "wasxfail")):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"with --no-skip: {reason}"
    return report


@pytest.fixture(scope="session")
def ovs_tree() -> Path:
    """The built Open vSwitch; a test that needs it fails without, it does not skip."""
    from controller_harness import ovs_tree

    return ovs_tree()


@pytest.fixture
def ovs(tmp_path_factory: pytest.TempPathFactory, ovs_tree: Path) -> Iterator[object]:
    """A running ovsdb-server and ovs-vswitchd with dummy datapaths."""
    import tempfile

    from controller_harness import Switch

    # A short path: Unix domain sockets have 108 bytes for theirs.
    with tempfile.TemporaryDirectory(prefix="fb-") as directory:
        switch = Switch(Path(directory), ovs_tree)
        try:
            switch.start()
            yield switch
        finally:
            switch.stop()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Start controllers: call it with the text of the file of tenants."""
    from controller_harness import Controller

    started: list[Controller] = []

    def start(config: str, *options: str) -> Controller:
        directory = tmp_path / f"controller{len(started)}"
        directory.mkdir()
        started.append(Controller(directory, config, *options))
        return started[-1].start()

    yield start
    for item in started:
        if item.process is not None and item.process.poll() is None:
            item.stop()
