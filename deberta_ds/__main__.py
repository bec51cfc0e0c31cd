"""DeBERTa pretraining on DeepSpeed. `python -m deberta_ds COMMAND --help` explains one command.

An installation has each of them as deberta-COMMAND, a clone as a script in launch/ or data_prep/.
"""

import ast
import runpy
import sys
from pathlib import Path

from deberta_ds.base.command_line import ROOT, columns
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.numbers import fill

FOLDERS = {"data_prep": "from text to packed token shards", "launch": "models"}
_OF_A_CLONE = {"demo"}  # its data lies in tests/


def commands() -> dict[str, Path]:
    """Return {name: script} of every command, in the order of FOLDERS."""
    return {path.stem.replace("_", "-"): path for folder in FOLDERS
            for path in sorted((ROOT / folder).glob("*.py"))
            if path.stem not in _OF_A_CLONE and '__name__ == "__main__"' in path.read_text()}


def listing() -> str:
    """Return the commands with the first sentence of each script."""
    width = columns() - 1
    lines = [fill(" ".join(part.split()), width) for part in __doc__.split("\n\n")]
    lines.insert(1, "")
    for folder, what in FOLDERS.items():
        lines += ["", f"{folder}: {what}"]
        for name, path in commands().items():
            if path.parent.name == folder:
                docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
                summary = docstring.split("\n\n")[0]
                lines.append(fill(f"  {name:16} {' '.join(summary.split())}", width, hanging=19))
    return "\n".join(lines)


def main() -> None:
    """Run the command that this program is called as, or that its first word names."""
    called = Path(sys.argv[0]).stem
    words = sys.argv[1:]
    if called.startswith("deberta-"):
        name = called.removeprefix("deberta-")
    else:
        # `deepspeed --module deberta_ds pretrain ...` puts --local_rank=N before the name.
        name = next((word for word in words if not word.startswith("-")), "")
        if not name:
            print(listing())
            return
        words.remove(name)
    script = commands().get(name.replace("_", "-"))
    if script is None:
        raise UserError(f"{name}: no such command; python -m deberta_ds lists them")
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    exit_cleanly(main)
