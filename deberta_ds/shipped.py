"""What comes with the program beside its modules: scripts, recipes, DeepSpeed configurations.

In a clone they lie beside the package, in an installation inside it (setup.py). A path that does
not exist in the working directory is looked for here, so that `--config launch/runs/v3_base.toml`
means the recipe wherever a command is called.
"""

import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
IS_INSTALLED = not (_PACKAGE.parent / "launch/pretrain.py").is_file()
ROOT = _PACKAGE if IS_INSTALLED else _PACKAGE.parent
_SCRIPT = re.compile(
    r"\b(?:(python|deepspeed|mpi4py\.futures)\s+)?(?:launch|data_prep)/(\w+)\.py\b")
_AS_MODULE = {"deepspeed": "deepspeed --module deberta_ds ",
              "mpi4py.futures": "mpi4py.futures -m deberta_ds "}


def find(path: str | Path) -> Path:
    """Return `path`, or the shipped file of that name where there is none in this directory."""
    path = Path(path)
    shipped = ROOT / path
    return shipped if shipped.is_file() and not path.exists() else path


def as_typed(text: str) -> str:
    """Return a text with its commands as they are typed here: scripts of a clone, or installed."""
    return _SCRIPT.sub(_installed_name, text) if IS_INSTALLED else text


def _installed_name(found: re.Match) -> str:
    return _AS_MODULE.get(found[1], "deberta-") + found[2].replace("_", "-")
