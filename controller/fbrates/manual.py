"""Manual pages, made from the commands' own parsers: nothing in them can be out of date.

    python -m fbrates.manual DIR

writes fb-controller.8 and flowbundler-ctl.1 into DIR.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from fbrates import cli, launch

EXIT_CONTROLLER = (
    ("0", "ended by SIGTERM or SIGINT, or the file is right (--check)"),
    ("1", "the file is wrong, an address is taken, or the database cannot be used"),
    ("2", "the command line is wrong"),
)
EXIT_CTL = (
    ("0", "done, and confirmed by the switches; with status: all switches are in sync"),
    ("1", "refused, unreachable, or not confirmed; standard error says why"),
    ("2", "the command line is wrong"),
)
SIGNALS = (("SIGHUP", "read the file again"), ("SIGTERM, SIGINT", "end"))


def quoted(text: str) -> str:
    """Give text as roff takes it."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    # At the start of a line these begin a request.
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def _label(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"\\fI{quoted(_metavar(action))}\\fR"
    names = ", ".join(f"\\fB{quoted(name)}\\fR" for name in action.option_strings)
    return names if action.nargs == 0 else f"{names} \\fI{quoted(_metavar(action))}\\fR"


def _metavar(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    if not action.help or action.help == argparse.SUPPRESS:
        return ""
    # What argparse would fill in.
    return parser._get_formatter()._expand_help(action)


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)
    ]


def _options(parser: argparse.ArgumentParser) -> list[str]:
    lines = []
    for action in _shown(parser):
        lines += [".TP", _label(action), quoted(_help(parser, action)) or "\\&"]
    return lines


def _synopsis(parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    name, _, rest = usage.partition(" ")
    return f"\\fB{quoted(name)}\\fR {quoted(rest)}"


def _commands(parser: argparse.ArgumentParser) -> list[str]:
    lines: list[str] = []
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            usage = " ".join(command.format_usage().split()[2:])
            words = usage.removeprefix(f"{name} ").replace("[-h]", "").split()
            lines += [".SS", f"\\fB{quoted(name)}\\fR {quoted(' '.join(words))}".rstrip()]
            lines.append(quoted(helps[name][:1].upper() + helps[name][1:] + "."))
            lines += [
                line
                for item in _shown(command)
                if item.dest != "help" and _help(command, item)
                for line in (".TP", _label(item), quoted(_help(command, item)))
            ]
    return lines


def page(
    parser: argparse.ArgumentParser,
    section: int,
    exits: tuple[tuple[str, str], ...],
    see: str,
    signals: tuple[tuple[str, str], ...] = (),
) -> str:
    """Give a manual page as roff."""
    description = parser.description or ""
    first = description.partition(". ")[0].rstrip(".")
    summary = first[:1].lower() + first[1:]
    lines = [
        f'.TH "{parser.prog.upper()}" "{section}" "" "FlowBundler" ""',
        ".SH NAME",
        f"{quoted(parser.prog)} \\- {quoted(summary)}",
        ".SH SYNOPSIS",
        _synopsis(parser),
        ".SH DESCRIPTION",
        quoted(description),
        ".SH OPTIONS",
        *_options(parser),
    ]
    if commands := _commands(parser):
        lines += [".SH COMMANDS", *commands]
    if signals:
        lines += [".SH SIGNALS"]
        for name, text in signals:
            lines += [".TP", f"\\fB{quoted(name)}\\fR", quoted(text)]
    lines += [".SH EXIT STATUS"]
    for status, text in exits:
        lines += [".TP", f"\\fB{status}\\fR", quoted(text)]
    lines += [".SH SEE ALSO", see]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Give all pages by the names of their files."""
    controller, ctl = launch.parser(), cli.parser()
    # As on any terminal, and with no one's own surroundings.
    for parser in (controller, ctl):
        parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=1000)
    return {
        "fb-controller.8": page(
            controller, 8, EXIT_CONTROLLER, "\\fBflowbundler\\-ctl\\fR(1)", SIGNALS
        ),
        "flowbundler-ctl.1": page(ctl, 1, EXIT_CTL, "\\fBfb\\-controller\\fR(8)"),
    }


def main() -> int:
    """Write them."""
    if len(sys.argv) != 2:
        print("usage: python -m fbrates.manual DIR", file=sys.stderr)
        return 2
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
