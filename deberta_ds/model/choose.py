"""How one of several implementations is chosen: the best that can run here, and why.

The table is `kernels/kernel_table.py`. A Triton kernel must agree with torch's operators on this
card (`kernel_check`): where it does not, that is an error, not a slower kernel.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.model.kernels import kernel_check
from deberta_ds.model.precision import DTYPES

_LOG = logging.getLogger("deberta_ds")
LARGEST_HEAD = 128  # of fused attention; sizes that are no power of 2 are filled with zeros
LONGEST_SHORT = 512  # longer sequences may have pairs beyond the reach of the relative table
MOST_PROGRAMS = 65_535  # along the second axis of a launch: one for each sequence and head
MOST_ELEMENTS = 1 << 31  # the kernels count in 32 bits
OPTIONS = {"attention": "attention", "cross-entropy": "cross_entropy"}  # keys of [model], by idea
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}


class Request(NamedTuple):
    """What a choice depends on: device, types and sizes, no values."""

    device: torch.device
    dtype: torch.dtype  # of the operands; LayerNorm's and GELU's update
    size: int  # of a head for attention, otherwise of a hidden state
    state: torch.dtype | None = None  # LayerNorm's other operand
    long: bool = False  # attention: with pairs beyond the reach of the relative table
    terms: tuple[bool, bool] = (True, True)  # attention: content to position, position to content
    obstacle: str = ""  # what only the caller can see that rules out all but the last


@dataclass(frozen=True)
class Kernel:
    """One implementation of an idea. Without `devices` and `dtypes` it runs everywhere.

    `place` and `check` are "module:function" below deberta_ds.model, imported late: Triton need not
    be installed. Without a place it is the module's own operators.
    """

    idea: str
    name: str
    place: str = ""
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    limits: Callable[[Request], str] | None = None  # why it cannot run, or an empty string
    check: str = ""  # of Triton kernels: is it right here? (kernels/checks.py)
    needs: str = ""  # the limits in words, for the documentation
    by_name_only: bool = False


_LOADED: dict[str, Any] = {"": None}  # functions by place


def load(place: str) -> Any:
    """Return the function at "module:function", None without one."""
    if place not in _LOADED:
        module, name = place.split(":")
        _LOADED[place] = getattr(import_module(f"deberta_ds.model.{module}"), name)
    return _LOADED[place]


@dataclass(frozen=True)
class Choice:
    """A kernel, and why it is this one."""

    kernel: Kernel
    why: str

    @property
    def name(self) -> str:
        return self.kernel.name


def find(idea: str, mode: str, *request) -> tuple[str, Any]:
    """Return the name and the function of the kernel that `pick` picks for `Request(*request)`."""
    name, place = _find(idea, mode, *request)
    return name, _LOADED[place]


def _find(idea: str, mode: str, *request) -> tuple[str, str]:
    kernel = pick(idea, Request(*request), mode).kernel
    load(kernel.place)
    return kernel.name, kernel.place


_find._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile takes its result


def pick(idea: str, request: Request, mode: str = "auto") -> Choice:
    """Return the kernel for `idea`: the best that can run, or the one called `mode`.

    Found once for all equal requests. Raises UserError for one that was asked for by name and
    cannot run here, and for one that fails its check.
    """
    return _pick(idea, request, mode, kernel_check.interpreted())


@lru_cache
def _pick(idea: str, request: Request, mode: str, interpreted: bool) -> Choice:
    table = import_module("deberta_ds.model.kernels.kernel_table").KERNELS
    known = [kernel for kernel in table if kernel.idea == idea]
    if mode != "auto":
        option, names = OPTIONS[idea], [kernel.name for kernel in known]
        if mode not in names:
            raise UserError(f"{option} = {mode!r}: choose one of {', '.join(['auto', *names])}")
        kernel = known[names.index(mode)]
        if problem := _problem(kernel, request, interpreted):
            raise UserError(f"{option} = {mode!r} cannot run here: {problem}; use 'auto' or "
                            f"'{known[-1].name}'")
        return Choice(kernel, f"{option} = {mode!r}")
    missed: list[str] = []
    for kernel in (one for one in known if not one.by_name_only):  # the last one runs everywhere
        problem = _problem(kernel, request, interpreted)
        if not problem:
            break
        missed.append(f"not {kernel.name}: {problem}")
    else:
        raise UserError(f"{idea}: nothing can run here: {'; '.join(missed)}")
    why = "; ".join(missed)
    if kernel.check and not interpreted:
        verdict = kernel_check.check(request, load(kernel.check))
        if not verdict.passed:
            remedy = f"set {kernel_check.OFF}=0 (torch's operators for all parts)"
            if idea in OPTIONS:
                remedy = f"--model.{OPTIONS[idea]}={known[-1].name} in pretraining, or {remedy}"
            raise UserError(f"{idea}: the {kernel.name} kernel fails its check {verdict.text}\nfix "
                            f"this, or go on without the kernel, several times slower: {remedy}")
        why = verdict.text
    if missed and request.device.type == "cuda" and known[0].check:
        _LOG.warning("WARNING: %s runs as %s, several times slower than %s: %s", idea, kernel.name,
                     known[0].name, why)
    return Choice(kernel, why)


def _problem(kernel: Kernel, request: Request, interpreted: bool) -> str:
    """Return what keeps a kernel from running, or an empty string."""
    if kernel.check and (missing := kernel_check.obstacle(request.device)):
        return missing
    if kernel.devices and request.device.type not in kernel.devices and not interpreted:
        return "no GPU" if kernel.devices == ("cuda",) else \
            f"it is for {' and '.join(kernel.devices)}"
    # On a card, attention's tiles do not fit into registers in fp32.
    known = {*kernel.dtypes, *([torch.float32] if interpreted else [])}
    if kernel.dtypes and (unknown := {request.dtype, request.state or request.dtype} - known):
        return f"it takes {names_of(kernel.dtypes)}, not {names_of(tuple(unknown))}"
    found = request.obstacle if kernel.devices else ""
    return found or (kernel.limits(request) if kernel.limits else "")


def names_of(dtypes: tuple[torch.dtype, ...]) -> str:
    *first, last = (_NAMES.get(dtype, str(dtype)) for dtype in dtypes)
    return f"{', '.join(first)} and {last}" if first else last
