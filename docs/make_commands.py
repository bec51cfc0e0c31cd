"""Write docs/reference/commands.md from the parsers of all commands: python docs/make_commands.py

tests/project/test_docs.py holds that the page is current.
"""

import argparse
import ast
import runpy
import sys
from pathlib import Path
from unittest import mock

from deberta_ds.__main__ import FOLDERS, commands

PAGE = Path(__file__).with_name("reference") / "commands.md"
HEAD = """# Commands

After this page you know every command and every option.

Made by `python docs/make_commands.py` from the parsers of the commands; do not edit.

A clone has each command as a script. An installation has it as `deberta-NAME`, and
`python -m deberta_ds` lists them all. With a launcher, write `deepspeed --module deberta_ds NAME`.
"""


class ParserFound(Exception):  # noqa: N818
    """Holds the parser of a command, when it would read its arguments."""


def parser_of(script: Path) -> argparse.ArgumentParser:
    """Return the parser that a script builds; nothing of the command runs."""
    def stop(parser, *_args, **_options):
        raise ParserFound(parser)

    with (mock.patch("deberta_ds.base.errors.exit_cleanly", lambda main: main()),
          mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
          mock.patch.object(sys, "argv", [str(script)]),
          mock.patch.object(sys, "path", [str(script.parent), *sys.path])):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except ParserFound as found:
            return found.args[0]
    raise AssertionError(f"{script} reads no arguments")


def escaped(text: str) -> str:
    """Return a text as the cell of a table."""
    return text.replace("|", "\\|")


def section(name: str, script: Path) -> str:
    """Return the description of one command and the table of its options."""
    parser = parser_of(script)
    description = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    rows = ["| option | meaning |", "|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        shown = parser._get_formatter()._format_action_invocation(action)
        value = f"One of {', '.join(map(str, action.choices))}. " if action.choices else ""
        meaning = value + parser._get_formatter()._expand_help(action)
        meaning = escaped(" ".join(meaning.split())).replace("[", "\\[")  # else a link, as [A][B]
        rows.append(f"| `{escaped(shown)}` | {meaning} |")
    return f"### {name}\n\n`{script.parent.name}/{script.name}`\n\n{description}\n\n" + \
        "\n".join(rows) + "\n"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for folder, what in FOLDERS.items():
        parts.append(f"## {folder}: {what}\n")
        parts += [section(name, path) for name, path in commands().items()
                  if path.parent.name == folder]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
