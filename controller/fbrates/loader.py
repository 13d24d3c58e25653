"""YAML with the places of things, and without YAML 1.1's surprises.

PyYAML's safe loader reads ``52:54:00:12:34:56`` as a number in base sixty, ``no``
as false, and lets the last of two equal keys win in silence.  In a file full of
MAC addresses and names that is not safe enough.  Here scalars follow YAML 1.2's
core schema, keys are always text, and a key given twice is an error.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_BYTES = 16 << 20
MAX_NODES = 2_000_000
"""Bounds what a file may expand to through aliases."""
MAX_NUMBER = 64
"""Characters of the longest number.  A longer one is left as text: nothing in the file is
as large, and from 4301 digits on Python refuses to show it."""
MAX_SHOWN = 60
"""Characters of a value in a message."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, for a human and for a program."""

    field: str
    message: str
    value: Any = None
    allowed: str | None = None
    line: int | None = None

    def text(self, filename: str | None = None) -> str:
        """One line: ``FILE:LINE: field: value: message; allowed: ...``.

        Without the file's name, ``line LINE: field: ...``.
        """
        if filename is not None:
            where = f"{filename}:{self.line}: " if self.line is not None else f"{filename}: "
        else:
            where = f"line {self.line}: " if self.line is not None else ""
        value = "" if self.value is None else f"{shorten(self.value)}: "
        allowed = "" if self.allowed is None else f"; allowed: {self.allowed}"
        name = f"{self.field}: " if self.field else ""
        return f"{where}{name}{value}{self.message}{allowed}"

    def as_dict(self) -> dict[str, Any]:
        """Give what the REST interface answers with."""
        result: dict[str, Any] = {
            "field": self.field,
            "value": plain(self.value),
            "allowed": self.allowed,
            "message": self.message,
        }
        if self.line is not None:
            result["line"] = self.line
        return result


class InvalidConfig(ValueError):
    """The file was refused; ``problems`` has all that is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.text() for problem in problems))
        self.problems = problems


@dataclass
class Document:
    """What a file said, and on which line it said it."""

    data: Any
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, path: Path) -> int | None:
        """Give the line of the thing at `path`, or of what it would be in."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path)


def dotted(path: Path) -> str:
    """``("tenants", "red", "destinations", 0)`` -> ``tenants.red.destinations[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        name = part if part.isprintable() and part else repr(part)
        text += f".{name}" if text else name
    return text


def shorten(value: Any) -> str:
    """Show any value in at most 60 characters; never fails."""
    try:
        text = repr(value)
    except Exception:
        # Nested too deep, an integer of too many digits, whatever comes.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def plain(value: Any) -> Any:
    """Give what an answer in JSON shows of a value: a scalar itself, else text."""
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return shorten(value)
    if isinstance(value, float) and not math.isfinite(value):
        return shorten(value)
    return value if value is None or isinstance(value, int | float | str) else shorten(value)


class _Loader(yaml.SafeLoader):
    """A safe loader whose plain scalars follow YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def scan_flow_scalar_non_spaces(self, double: bool, start_mark: yaml.Mark) -> list[str]:
        """Read a part of a quoted scalar; PyYAML lets escapes name any number."""
        try:
            chunks: list[str] = super().scan_flow_scalar_non_spaces(double, start_mark)
            "".join(chunks).encode()
        except (ValueError, OverflowError):
            # Beyond Unicode, or half of a UTF-16 pair, which no one could print.
            raise yaml.scanner.ScannerError(
                "while scanning a quoted scalar",
                start_mark,
                "found an escape that is not a Unicode character",
                self.get_mark(),
            ) from None
        return chunks


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"(?:[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])


def parse(text: str) -> Document:
    """Read one YAML document.

    Raises InvalidConfig if it is not YAML; keys given twice are in the result's
    `problems`, so that they are reported together with what else is wrong.
    """
    if len(text) > MAX_BYTES:
        raise InvalidConfig([Problem("", f"file is larger than {MAX_BYTES} bytes")])
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise InvalidConfig(
            [Problem("", f"not YAML: {what}", line=mark.line + 1 if mark else None)]
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        # YAML's own messages have several lines, the log's one.
        what = " ".join(str(error).split()) or "nested too deep"
        raise InvalidConfig([Problem("", f"not YAML: {what}")]) from None
    except (ValueError, OverflowError) as error:
        # PyYAML's scanner converts some numbers itself, such as a directive's version.
        line = loader.line + 1 if loader is not None else None
        raise InvalidConfig([Problem("", f"not YAML: {error}", line=line)]) from None
    finally:
        if loader is not None:
            loader.dispose()
    document = Document(None)
    if node is not None:
        try:
            document.data = _Converter(document).convert(node, ())
        except RecursionError:
            raise InvalidConfig([Problem("", "nested too deep")]) from None
    return document


class _Converter:
    """Turns PyYAML's nodes into dicts, lists and scalars, noting the lines."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0
        self.open: set[int] = set()

    def convert(self, node: yaml.Node, path: Path) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise InvalidConfig([Problem("", f"file has more than {MAX_NODES} values")])
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open:
            raise InvalidConfig(
                [Problem(dotted(path), "contains itself", line=node.start_mark.line + 1)]
            )
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self.problem(path, f"unknown tag {node.tag!r}", node.start_mark.line + 1)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.convert(item, (*path, i)) for i, item in enumerate(node.value)]
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                if isinstance(value_node, yaml.SequenceNode):
                    merged += value_node.value
                else:
                    merged.append(value_node)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(path, "a key must be plain text", line)
                continue
            key = key_node.value
            if key in result:
                first = self.document.lines[(*path, key)]
                self.problem((*path, key), f"given twice (first on line {first})", line)
                continue
            self.document.lines[(*path, key)] = line
            result[key] = self.convert(value_node, (*path, key))
        for source in merged:
            value = self.convert(source, path)
            if not isinstance(value, dict):
                self.problem(path, "'<<' merges mappings only", source.start_mark.line + 1)
                continue
            for key, item in value.items():
                result.setdefault(key, item)
        return result

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        text = node.value
        if tag == "null":
            return None
        if tag == "bool":
            return text == "true"
        if tag == "int":
            if len(text) > MAX_NUMBER:
                return text
            try:
                return int(text, 0) if text[:2].lower() == "0x" else int(text)
            except ValueError:
                return text
        if tag == "float":
            try:
                return float(text)
            except ValueError:
                return text
        if tag != "str":
            self.problem(path, f"unknown tag {node.tag!r}", node.start_mark.line + 1)
        return text

    def problem(self, path: Path, message: str, line: int) -> None:
        self.document.problems.append(Problem(dotted(path), message, line=line))
