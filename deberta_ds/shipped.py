"""What comes with the program beside its modules: scripts, recipes, DeepSpeed configurations.

In a clone they lie beside the package, in an installation inside it (setup.py). A path that does
not exist in the working directory is looked for here, so that `--config launch/runs/v3_base.toml`
means the recipe wherever a command is called.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
IS_INSTALLED = not (_PACKAGE.parent / "launch/pretrain.py").is_file()
ROOT = _PACKAGE if IS_INSTALLED else _PACKAGE.parent


def find(path: str | Path) -> Path:
    """Return `path`, or the shipped file of that name where there is none in this directory."""
    path = Path(path)
    shipped = ROOT / path
    return shipped if shipped.is_file() and not path.exists() else path
