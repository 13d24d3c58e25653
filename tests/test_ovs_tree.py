"""utilities/ovs-tree: one series of patches for two releases of OVS.

On a small tree that looks like OVS's, with real git.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com"]

# In 3.5 the second patch finds what it changes, in 4.0 it must look otherwise.
BODY = {"3.5": "one\ntwo\nthree\n", "4.0": "one\nTWO\nthree\n"}


class Repo:
    """A repository of its own with ovs-tree in it, and sources of OVS."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.patches = path / "ovs-patches"
        for name in ("utilities", "lib", "tests", "ovs-patches"):
            (path / name).mkdir()
        shutil.copy(REPO / "utilities" / "ovs-tree", path / "utilities")
        for release in ("3.5", "4.0", "4.1"):
            source = path / f"ovs-{release}"
            for name, text in {
                    "configure.ac": f"AC_INIT(openvswitch, {release}.0, x@example.com)\n",
                    "lib/dpif-netdev.c": BODY.get(release, BODY["4.0"]),
                    "lib/other.c": "first\n",
                    "tests/x.at": "x\n",
                    "vswitchd/vswitch.xml": "<database/>\n",
                    "debian/changelog": "x\n"}.items():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_text(text)

    def run(self, release: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run ovs-tree on the tree of `release`, which may not succeed."""
        return subprocess.run(
            [self.path / "utilities" / "ovs-tree", "--build", self.path / f"b{release}", *args],
            text=True, capture_output=True,
            env={k: v for k, v in os.environ.items() if k not in ("OVS_SRC", "OVS_SUITE")})

    def prepare(self, release: str) -> Path:
        """Prepare the tree of `release`, and return it."""
        done = self.run(release, "prepare", "--ovs-src", str(self.path / f"ovs-{release}"))
        assert not done.returncode, done.stderr
        return self.path / f"b{release}" / "ovs"

    def export(self, release: str) -> None:
        """Export the tree of `release`, and see that it is in ovs-patches/ then."""
        for command in ("export", "check"):
            done = self.run(release, command)
            assert not done.returncode, done.stdout + done.stderr

    def names(self) -> list[str]:
        """Return the patches there are, below ovs-patches/."""
        return sorted(str(p.relative_to(self.patches)) for p in self.patches.rglob("*.patch"))


def commit(tree: Path, name: str, text: str, message: str, *options: str) -> None:
    """Commit `text` as the tree's file `name`."""
    (tree / name).write_text(text)
    subprocess.run([*GIT, "commit", "-q", *options, "-m", message, name], cwd=tree, check=True)


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """Two patches for 3.5, of which one has a variant for 4.0."""
    repo = Repo(tmp_path)
    tree = repo.prepare("3.5")
    commit(tree, "lib/other.c", "first\nsecond\n", "other: Add a line.")
    commit(tree, "lib/dpif-netdev.c", "one\ntwo\nours\nthree\n", "dpif-netdev: Add ours.")
    repo.export("3.5")
    (repo.patches / "4.0").mkdir()
    text = (repo.patches / "0002-dpif-netdev-Add-ours.patch").read_text()
    (repo.patches / "4.0" / "0002-dpif-netdev-Add-ours.patch").write_text(
        text.replace("\n two\n", "\n TWO\n"))
    return repo


def test_each_release_has_its_own_patches(repo: Repo) -> None:
    for release, expected in {"3.5": "one\ntwo\nours\nthree\n", "4.0": "one\nTWO\nours\nthree\n",
                              "4.1": "one\nTWO\nours\nthree\n"}.items():
        tree = repo.prepare(release)
        assert (tree / "lib/dpif-netdev.c").read_text() == expected
        assert (tree / "lib/other.c").read_text() == "first\nsecond\n"
        assert repo.run(release, "check").returncode == 0


def test_export_writes_what_differs_only(repo: Repo) -> None:
    before = repo.names()
    tree = repo.prepare("4.0")
    commit(tree, "lib/dpif-netdev.c", "one\nTWO\nours 4.0\nthree\n", "dpif-netdev: Add ours.",
           "--amend")
    assert repo.run("4.0", "check").returncode == 1
    repo.export("4.0")
    assert repo.names() == before
    assert "ours 4.0" in (repo.patches / "4.0" / "0002-dpif-netdev-Add-ours.patch").read_text()
    assert "ours 4.0" not in (repo.patches / "0002-dpif-netdev-Add-ours.patch").read_text()
    assert (repo.prepare("3.5") / "lib/dpif-netdev.c").read_text() == "one\ntwo\nours\nthree\n"


def test_export_for_a_later_release_adds_no_patch(repo: Repo) -> None:
    before = repo.names()
    commit(repo.prepare("4.0"), "lib/other.c", "first\nsecond\nthird\n", "other: Add another.")
    done = repo.run("4.0", "export")
    assert done.returncode == 1
    assert "not in both: 0003-other-Add-another.patch" in done.stderr
    assert repo.names() == before


def test_variants_keep_to_the_numbers_of_the_series(repo: Repo) -> None:
    tree = repo.prepare("3.5")
    subprocess.run([*GIT, "reset", "-q", "--hard", "HEAD~1"], cwd=tree, check=True)
    commit(tree, "tests/x.at", "x\ny\n", "tests: Add y.")
    commit(tree, "lib/dpif-netdev.c", "one\ntwo\nours\nthree\n", "dpif-netdev: Add ours.")
    repo.export("3.5")
    assert repo.names() == ["0001-other-Add-a-line.patch", "0002-tests-Add-y.patch",
                            "0003-dpif-netdev-Add-ours.patch",
                            "4.0/0003-dpif-netdev-Add-ours.patch"]
    assert (repo.prepare("4.0") / "lib/dpif-netdev.c").read_text() == "one\nTWO\nours\nthree\n"


def test_a_variant_of_nothing_is_refused(repo: Repo) -> None:
    variant = repo.patches / "4.0" / "0002-dpif-netdev-Add-ours.patch"
    variant.rename(variant.with_name("0007-nothing.patch"))
    done = repo.run("4.0", "prepare", "--ovs-src", str(repo.path / "ovs-4.0"))
    assert done.returncode == 1
    assert "ovs-patches/4.0/0007-nothing.patch: there is none in ovs-patches/" in done.stderr
    assert repo.run("3.5", "check").returncode == 0
