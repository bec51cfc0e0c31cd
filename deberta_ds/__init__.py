"""deberta_ds: pretrain, resume, export and fine-tune DeBERTa models on DeepSpeed.

`load` reads a model of any format; `train`, `finetune`, `predict` and `export` do what the commands
do (docs/how-to/python.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deberta_ds.base.version import __version__ as __version__

__all__ = ["export", "finetune", "load", "predict", "train"]

if TYPE_CHECKING:
    from deberta_ds.api.jobs import export, finetune, predict, train
    from deberta_ds.api.model import load


def __getattr__(name: str) -> Any:
    """Import a function when it is asked for: torch and DeepSpeed take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.api.{'model' if name == 'load' else 'jobs'}"), name)
