"""The parts of a run that may be code of one's own (docs/how-to/extend.md): where, how called."""

from collections.abc import Callable, Mapping

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.base.user_code import is_own, split
from deberta_ds.config.run_config import RunConfig

_TAKES = {
    "optim.schedule": ("step", "total_steps", "optim"),
    "optim.name": ("groups", "optim"),
    "objective.mask.selection": ("ids", "starts", "lengths", "budget", "rng"),
    "evaluate.metrics": ("total", "per_token"),
    "log.callbacks": ("record",),
}


def function(key: str, value: str) -> Callable:
    """Return the function that `value` of the option `key` names; UserError if it cannot be."""
    return user_code.load(key, value, _TAKES[key])


def problems(run: RunConfig) -> list[str]:
    """Return what is wrong with a run's functions; its objective says so by itself."""
    found = []
    for key, value in (*_functions(run), *(("log.callbacks", one) for one in run.log.callbacks)):
        try:
            function(key, value)
        except UserError as error:
            found.append(str(error))
    return found


def digests(run: RunConfig) -> dict[str, str]:
    """Return {FILE.py:NAME: sha256 of the file} of all code of one's own that a run uses."""
    used = _functions(run)
    if is_own(run.objective.kind):
        used.append(("objective.kind", run.objective.kind))
    return {value: user_code.digest(key, value) for key, value in used}


def check_same(run: RunConfig, known: Mapping[str, str], place: str) -> None:
    """Raise UserError if code of one's own that decides what a model computes or is scored by is
    not what it was when the checkpoint at `place` was saved, with the digests `known`.
    """
    unused = (run.optim.schedule, run.optim.name)  # of training alone
    for value, digest in digests(run).items():
        if value not in unused and known.get(value, digest) != digest:
            raise UserError(f"{split(value)[0]}: has changed since {place} was saved (sha256 "
                            f"{known[value][:12]}..., now {digest[:12]}...); put the former file "
                            "there")


def _functions(run: RunConfig) -> list[tuple[str, str]]:
    used = [("optim.schedule", run.optim.schedule), ("optim.name", run.optim.name),
            ("objective.mask.selection", run.objective.mask.selection),
            *(("evaluate.metrics", value) for value in run.evaluate.metrics)]
    return [(key, value) for key, value in used if is_own(value)]
