"""Changes single points of the code that a person would call bugs, and looks who notices.

    make mutate [MUTANTS=300] [SEED=] [FILES="lib/edt-pace.c controller/fbrates/share.py"]

universalmutator makes the mutants of lib/ and controller/fbrates/; as many as wanted are
drawn, by a seed that is printed, from all files by size.  Each is built in a clone of the
last commit and tested by what is fast: the C programs whose headers have to do with it
and then the autotests of its part, or the controller's tests that need no switch.

A mutant is `found` (a test failed, or hung), has `survived`, is `invalid` (does not
compile) or `same`: the compiler makes the same code of it, or tests/mutants-same.csv says
why it is the same program.  What has been tried is in build/mutate/mutants.jsonl; a run with
the same seed goes on behind that.  The score is what was found of what could be.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from universalmutator import mutator

from scripts import load

REPO = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("FB_BUILD") or REPO / "build")
WORK = BUILD / "mutate"
TREE = WORK / "tree"
OVS = TREE / "build" / "ovs"
REPORT = WORK / "mutants.jsonl"
SAME = REPO / "tests" / "mutants-same.csv"

RULES = {".c": ["universal.rules", "c_like.rules", "c.rules"],
         ".h": ["universal.rules", "c_like.rules", "c.rules"],
         ".py": ["universal.rules", "python.rules"]}
#: Lines that say nothing that a test could see: declarations, assertions, logs.
IGNORED = [r"^\s*#", r"BUILD_ASSERT", r"ovs_assert", r"VLOG_", r"COVERAGE_DEFINE",
           r"^import ", r"^from "]
#: The wanted score.
GOALS = {"lib": 0.95, "controller": 0.9}
#: How many times as long as without a mutant tests may take, and at least so many seconds.
PATIENCE, LEAST_S = 4, 20


@dataclass(frozen=True)
class Mutant:
    """One changed line of a file."""

    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Result:
    """What became of a mutant, by which test, in how many seconds."""

    mutant: Mutant
    result: str
    by: str
    seconds: float


def sources() -> list[str]:
    """The product's files that are mutated."""
    return [str(path.relative_to(REPO)) for part in ("lib/*.[ch]", "controller/fbrates/*.py")
            for path in sorted(REPO.glob(part))]


def strings_of(text: str) -> set[int]:
    """The lines of a Python file that are in strings on their own: documentation."""
    return {line for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def mutants_of(file: str) -> list[Mutant]:
    """All mutants of a file."""
    text = (REPO / file).read_text()
    lines = text.splitlines(keepends=True)
    apart = strings_of(text) if file.endswith(".py") else set()
    with contextlib.redirect_stdout(io.StringIO()):
        found = mutator.mutants_regexp(lines, ruleFiles=RULES[Path(file).suffix],
                                       ignorePatterns=IGNORED, ignoreStringOnly=True)
    return [Mutant(file, number, lines[number - 1].rstrip("\n"), text.rstrip("\n"))
            for number, text, *_ in found if number not in apart]


def draw(files: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of `files`: a file by its lines, a line, and one of its mutants."""
    choose = random.Random(seed)
    by_line: dict[str, dict[int, list[Mutant]]] = {}
    for file in files:
        for mutant in mutants_of(file):
            by_line.setdefault(file, {}).setdefault(mutant.line, []).append(mutant)
    drawn: dict[Mutant, None] = {}
    weights = [len(by_line[file]) for file in by_line]
    count = min(count, sum(weights))
    while len(drawn) < count:
        file, = choose.choices(list(by_line), weights)
        drawn[choose.choice(by_line[file][choose.choice(list(by_line[file]))])] = None
    return list(drawn)


def declared_same() -> set[tuple[str, str, str]]:
    """What tests/mutants-same.csv says is the same program, each with its reason."""
    with SAME.open(newline="") as rows:
        return {(row["file"], row["before"].strip(), row["after"].strip())
                for row in csv.DictReader(rows)}


def run(command: list[str], seconds: float) -> str | None:
    """Run `command` in the clone; returns what failed in it, or None."""
    try:
        done = subprocess.run(command, cwd=TREE, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "not ended"
    return f"status {done.returncode}" if done.returncode else None


class Laboratory:
    """A clone of the last commit with a build of its own, and tests of its files."""

    def __init__(self, files: list[str]) -> None:
        """For mutants of `files`; each of their tests passes, or this exits."""
        self._quick = load("quick")
        self._seconds: dict[str, float] = {}
        WORK.mkdir(parents=True, exist_ok=True)
        if not TREE.exists():
            subprocess.run(["git", "clone", "-q", "--shared", REPO, TREE], check=True)
        subprocess.run(["git", "-C", TREE, "fetch", "-q", "origin"], check=True)
        subprocess.run(["git", "-C", TREE, "checkout", "-q", "-f", "--detach", "origin/HEAD"],
                       check=True)
        (TREE / "build").mkdir(exist_ok=True)
        for name in ("apt-trixie", "venv"):
            link = TREE / "build" / name
            if not link.is_symlink():
                link.symlink_to(BUILD / name)
        if any(not file.endswith(".py") for file in files):
            self._build_ovs()
        self._baseline(files)

    def _build_ovs(self) -> None:
        """Without line numbers, so that object files of the same code are the same."""
        subprocess.run(["make", "-s", "-C", TREE, f"B={TREE / 'build'}", "CFLAGS=-O1 -g0", "ovs"],
                       check=True, stdout=subprocess.DEVNULL)
        if failed := self._build("lib/mltw.c"):
            raise SystemExit(f"mutate: the clone does not build: {failed}")

    def _tests(self, file: str) -> list[tuple[str, list[str]]]:
        """(name, command) of each test of `file`, the quickest kind first."""
        path = Path(file)
        if path.suffix == ".py":
            # A mutant in them is found by the tests of a sibling, too.
            tests = [str(p.relative_to(TREE)) for p in sorted(TREE.glob("tests/test_controller_*"))]
            return [("pytest", [str(BUILD / "venv/bin/python"), "-m", "pytest", "-q", "-x",
                                "-p", "no:cacheprovider", "-m", "not switch", *tests])]
        programs = self._quick.programs_of({path.stem}, {f"test-{path.stem}"})
        steps = [(name, [str(OVS / "tests" / name)]) for name in programs]
        autotests = [step.command for step in self._quick.steps_for([file])
                     if step.name == "autotests"]
        return steps + [("autotests", [*command[:3], str(OVS), *command[4:]])
                        for command in autotests]

    def _build(self, file: str) -> str | None:
        """Build what tests of `file` need."""
        if file.endswith(".py"):
            return run([str(BUILD / "venv/bin/python"), "-m", "py_compile", file], 60)
        return run(["make", "-s", "-j2", "-C", str(OVS), "all"], 900)

    def _objects(self, file: str) -> str:
        """What the compiler made of `file`, and of all that include it."""
        digest = hashlib.sha256()
        for path in sorted((OVS / "lib").glob("*.o")):
            if path.stem == Path(file).stem or file.endswith(".h"):
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def _baseline(self, files: list[str]) -> None:
        """Have each test pass, and note how long it takes."""
        for file in files:
            for name, command in self._tests(file):
                key = " ".join(command)
                if key not in self._seconds:
                    begin = time.monotonic()
                    if failed := run(command, 900):
                        raise SystemExit(f"mutate: {name} fails without a mutant: {failed}")
                    self._seconds[key] = time.monotonic() - begin

    def try_one(self, mutant: Mutant) -> Result:
        """Build and test one mutant."""
        begin = time.monotonic()
        path = TREE / mutant.file
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        if lines[mutant.line - 1].rstrip("\n") != mutant.before:
            raise SystemExit(f"mutate: {mutant.file} is not what the mutants were made of: "
                             "commit it first")
        before = self._objects(mutant.file)
        lines[mutant.line - 1] = mutant.after + "\n"
        result, by = "survived", ""
        try:
            path.write_text("".join(lines))
            if failed := self._build(mutant.file):
                result, by = "invalid", failed
            elif mutant.file.endswith((".c", ".h")) and self._objects(mutant.file) == before:
                result, by = "same", "compiler"
            else:
                for name, command in self._tests(mutant.file):
                    allowed = max(LEAST_S, PATIENCE * self._seconds[" ".join(command)])
                    if failed := run(command, allowed):
                        result, by = "found", f"{name}: {failed}"
                        break
        finally:
            path.write_text(original)
            self._build(mutant.file)
        return Result(mutant, result, by, round(time.monotonic() - begin, 1))


def tried() -> dict[Mutant, str]:
    """What became of those that earlier runs have tried."""
    if not REPORT.exists():
        return {}
    return {Mutant(**entry["mutant"]): entry["result"]
            for entry in map(json.loads, REPORT.read_text().splitlines())}


def summary(results: dict[Mutant, str]) -> bool:
    """Print scores and survivors; returns whether the goals are met."""
    met = True
    for part, goal in GOALS.items():
        some = {m: r for m, r in results.items() if m.file.startswith(part)}
        by_file: dict[str, Counter[str]] = {}
        for mutant, result in some.items():
            by_file.setdefault(mutant.file, Counter())[result] += 1
        for file, counts in sorted(by_file.items()):
            print(f"{file}: {dict(counts)}")
        counts = Counter(some.values())
        if could := counts["found"] + counts["survived"]:
            score = counts["found"] / could
            print(f"{part}/: {counts['found']} of {could} found, {score:.1%} "
                  f"(wanted: {goal:.0%}); {counts['same']} the same, {counts['invalid']} invalid")
            met = met and score >= goal
    for mutant, result in results.items():
        if result == "survived":
            print(f"SURVIVED {mutant.file}:{mutant.line}\n  - {mutant.before.strip()}\n"
                  f"  + {mutant.after.strip()}")
    return met


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="of lib/ and controller/fbrates/ (default: all)")
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    args = parser.parse_args()
    if unknown := set(args.files) - set(sources()):
        parser.error(f"{min(unknown)}: must be one of {', '.join(sources())}")
    seed = int(time.time()) if args.seed is None else args.seed
    print(f"mutate: seed {seed}", flush=True)
    drawn = draw(args.files or sources(), args.mutants, seed)
    same, known = declared_same(), tried()
    laboratory = Laboratory(sorted({mutant.file for mutant in drawn}))
    results: dict[Mutant, str] = {}
    with REPORT.open("a") as report:
        for number, mutant in enumerate(drawn, 1):
            if (mutant.file, mutant.before.strip(), mutant.after.strip()) in same:
                results[mutant] = "same"
            elif mutant in known:
                results[mutant] = known[mutant]
            else:
                done = laboratory.try_one(mutant)
                report.write(json.dumps(asdict(done)) + "\n")
                report.flush()
                results[mutant] = done.result
                print(f"mutate: {number} of {len(drawn)}: {mutant.file}:{mutant.line} "
                      f"{done.result} {done.by} {done.seconds:.0f} s", flush=True)
    met = summary(results)
    counts = Counter(results.values())
    print(f"{counts['found']} passed, {counts['survived']} failed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
