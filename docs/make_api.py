"""Write docs/reference/python-api.md from the docstrings: python docs/make_api.py"""

import inspect
import textwrap
from pathlib import Path

from deberta_ds.api import jobs, model
from deberta_ds.evaluate.fill_mask import Filling

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/python-api.md"
HEAD = """# Python API

After this page you know the arguments, results and errors of every public Python function.

Made by `python docs/make_api.py` from the docstrings; do not edit. For examples, see
[Use from Python](../how-to/python.md).
"""
FUNCTIONS = (jobs.train, jobs.finetune, jobs.predict, jobs.export, model.load)
CLASSES = (model.Model, Filling, jobs.TrainingResult, jobs.FinetuningResult, jobs.Predictions)


def page() -> str:
    """Return the page: functions, then the classes of what they return."""
    parts = [HEAD, *(_entry(f"deberta_ds.{one.__name__}", one) for one in FUNCTIONS)]
    for kind in CLASSES:
        parts.append(_entry(kind.__name__, kind))
        parts += [_entry(f"{kind.__name__}.{name}", member, level=3)
                  for name, member in vars(kind).items() if not name.startswith("_")
                  and (inspect.isfunction(member) or isinstance(member, property))
                  and "in 0.2.0" not in (member.__doc__ or "")]  # an old name
    return "\n".join(parts)


def _entry(name: str, what, level: int = 2) -> str:
    """Return a heading, the signature of a function, and the docstring."""
    lines = ["#" * level + f" {name}", ""]
    if inspect.isfunction(what):
        head, _, _ = textwrap.dedent(inspect.getsource(what)).partition(':\n    """')
        lines += ["```python", head[head.index("def "):], "```", ""]
    lines += ["```text", inspect.getdoc(what) or "", "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
