"""How one of several implementations is chosen: the best that can run here, and why.

`KERNELS` is the table: the first row of an idea that runs on the device and in the dtypes and whose
limits hold is taken. A Triton kernel must agree with torch's operators on this card
(`kernels/checks.py`): where it does not, that is an error, not a slower kernel.
"""

import logging
import os
import socket
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import TERMS, ModelConfig
from deberta_ds.model.precision import DTYPES

_LOG = logging.getLogger("deberta_ds")
LARGEST_HEAD = 128  # of fused attention; sizes that are no power of 2 are filled with zeros
MOST_ELEMENTS = 1 << 31  # the kernels count in 32 bits
OFF = "DEBERTA_DS_KERNELS"  # "0": no Triton kernels, torch's operators alone
OLDEST = (8, 0)  # compute capability: before it, no bf16 and no asynchronous copies
OPTIONS = {"attention": "attention", "cross-entropy": "cross_entropy"}  # keys of [model], by idea
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}
_HALF = (torch.bfloat16, torch.float16)


class Request(NamedTuple):
    """What a choice depends on: device, types and sizes, no values."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]  # of the operands; LayerNorm's and its like: update and state
    size: int  # of a head for attention, otherwise of a hidden state
    terms: tuple[bool, ...] = ()  # attention: which of TERMS
    obstacle: str = ""  # what only the caller can see that rules out all with a `device`


class Kernel(NamedTuple):
    """One implementation of an idea. Without `device` and `dtypes` it runs everywhere.

    `place` and `check` are "module:function" from deberta_ds.model on, imported late: Triton need
    not be installed. Without a place it is the module's own operators.
    """

    idea: str
    name: str
    place: str = ""
    device: str = ""
    dtypes: tuple[torch.dtype, ...] = ()
    check: str = ""  # of Triton kernels: problems that show whether it is right here
    largest: int = 1 << 31  # size
    multiple: int = 1  # of which every size is one, so that each state begins at a whole vector
    terms: int = len(TERMS)  # of attention: it has the first ones of TERMS


# LayerNorm, GELU and dropout; a program holds a whole hidden state.
_NORM = ("cuda", (torch.float32, *_HALF), ".kernels.checks:norm", 8192)
# The best first. What comes after one that runs everywhere is taken by name only.
KERNELS = (
    Kernel("attention", "fused", ".kernels.attention:fused_path", "cuda", _HALF,
           ".kernels.checks:attention", LARGEST_HEAD, terms=2),
    Kernel("attention", "tiled", ".attention.tiled:tiled_attention", "cpu"),
    Kernel("attention", "dense", ".attention.dense:dense_attention"),
    Kernel("attention", "reference", ".attention.reference:reference_attention"),
    Kernel("cross-entropy", "fused", ".kernels.fused_cross_entropy:fused_linear_cross_entropy",
           "cuda", _HALF, ".kernels.checks:cross_entropy", multiple=16),
    Kernel("cross-entropy", "chunked", ".linear_cross_entropy:linear_cross_entropy"),
    Kernel("LayerNorm", "fused", ".kernels.fused_norm:residual_norm", *_NORM),
    Kernel("LayerNorm", "torch"),
    Kernel("GELU", "fused", ".kernels.fused_norm:biased_gelu", *_NORM),
    Kernel("GELU", "torch"),
    Kernel("dropout", "fused", ".kernels.fused_norm:dropout", *_NORM),
    Kernel("dropout", "hash"),
    Kernel("projections", "fused", ".fused_projections:fused_projections", "cuda"),
    Kernel("projections", "separate"),
)
_LOADED: dict[str, Any] = {"": None}  # functions by place; torch.compile can look one up


def load(place: str) -> Any:
    """Return the function at "module:function", None without one."""
    if place not in _LOADED:
        module, name = place.split(":")
        _LOADED[place] = getattr(import_module(module, "deberta_ds.model"), name)
    return _LOADED[place]


def find(idea: str, mode: str, *request) -> tuple[str, Any]:
    """Return the name and the function of the kernel that `pick` picks for `Request(*request)`."""
    name, place = _find(idea, mode, *request)
    return name, _LOADED[place]


def _find(idea: str, mode: str, *request) -> tuple[str, str]:
    kernel, _ = pick(idea, Request(*request), mode)
    load(kernel.place)
    return kernel.name, kernel.place


_find._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile takes its result


@lru_cache
def pick(idea: str, request: Request, mode: str = "auto") -> tuple[Kernel, str]:
    """Return the kernel for `idea`, the best that can run or the one called `mode`, and why.

    Found once for all equal requests. Raises UserError for one that was asked for by name and
    cannot run here, and for one that fails its check.
    """
    known = [kernel for kernel in KERNELS if kernel.idea == idea]
    slow = next(kernel.name for kernel in known if not kernel.device)
    option, reasons = OPTIONS.get(idea, idea), []
    problem = f"it is none of {', '.join(kernel.name for kernel in known)}"
    for kernel in known:
        if mode in ("auto", kernel.name):
            if not (problem := _problem(kernel, request)):
                break
            reasons.append(f"not {kernel.name}: {problem}")
    else:
        raise UserError(f"{option} = {mode!r} cannot run here: {problem}; use 'auto' or '{slow}'")
    if mode != "auto":
        reasons.append(f"{option} = {mode!r}")
    elif reasons and request.device.type == "cuda" and known[0].check:
        _LOG.warning("WARNING: %s runs as %s, several times slower than %s: %s", idea, kernel.name,
                     known[0].name, "; ".join(reasons))
    if kernel.check and not interpreted():
        checks = import_module(".kernels.checks", "deberta_ds.model")  # it knows what is chosen
        try:
            reasons.append(checks.check(request, kernel.check))
        except UserError as error:
            own = f"--model.{option}={slow} in pretraining, or " if idea in OPTIONS else ""
            raise UserError(
                f"{idea}: the {kernel.name} kernel fails its check on {socket.gethostname()}, "
                f"{request.device}: {error}\nfix this, or go on without the kernel, several times "
                f"slower: {own}set {OFF}=0 (torch's operators for all parts)") from None
    return kernel, "; ".join(reasons)


def _problem(kernel: Kernel, request: Request) -> str:
    """Return what keeps a kernel from running, or an empty string."""
    emulated, device = interpreted(), request.device
    if kernel.check and os.environ.get(OFF) == "0":
        return f"{OFF}=0"
    if kernel.device not in ("", device.type) and not emulated:
        return "no GPU" if kernel.device == "cuda" else f"it is for {kernel.device}"
    if kernel.check and not emulated and torch.cuda.get_device_capability(device) < OLDEST:
        return "the card has no compute capability {}.{}".format(*OLDEST)
    # On a card, attention's tiles do not fit into registers in fp32.
    known = {*kernel.dtypes, *([torch.float32] if emulated else [])}
    if kernel.dtypes and (unknown := {*request.dtypes} - known):
        return f"it takes {names_of(kernel.dtypes)}, not {names_of(tuple(unknown))}"
    if kernel.device and request.obstacle:
        return request.obstacle
    what = "heads of {} are" if kernel.idea == "attention" else "hidden size {} is"
    if request.size > kernel.largest:
        return f"{what.format(request.size)} larger than {kernel.largest}"
    if request.size % kernel.multiple and not emulated:
        return f"{what.format(request.size)} no multiple of {kernel.multiple}"
    return "it lacks a position term" if any(request.terms[kernel.terms:]) else ""


def interpreted() -> bool:
    """Return whether Triton runs its kernels on the CPU, as tests have it."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def names_of(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return dtypes in words."""
    *first, last = (_NAMES.get(dtype, str(dtype)) for dtype in dtypes)
    return f"{', '.join(first)} and {last}" if first else last


def choices(model: ModelConfig, device: torch.device, weights: torch.dtype, matmuls: torch.dtype,
            zero_stage: int = 0, without: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """Return {idea: {"kernel": name, "why": reason}} for training a model.

    weights, matmuls: their dtypes, which differ under autocast. without: ideas that it does not
    have. Raises UserError for a kernel that fails its check on this card.
    """
    size, terms = model.hidden_size, tuple(term in model.position_terms for term in TERMS)
    separate = "autocast" if weights != matmuls else "ZeRO-3" if zero_stage == 3 else ""
    states = Request(device, (matmuls, weights), size)
    requests = {
        "attention": Request(device, (matmuls,), model.head_size, terms),
        "cross-entropy": Request(device, (matmuls,), size), "LayerNorm": states, "GELU": states,
        "dropout": Request(device, (weights, weights), size),
        "projections": Request(device, (weights,), size, obstacle=separate)}
    picked = {idea: pick(idea, one, getattr(model, OPTIONS.get(idea, ""), "auto"))
              for idea, one in requests.items() if idea not in without}
    return {idea: {"kernel": kernel.name, "why": why} for idea, (kernel, why) in picked.items()}


def in_a_line(found: dict[str, dict[str, str]]) -> str:
    """Return `choices` as one line, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for idea, choice in found.items():
        by_reason.setdefault(choice["why"], []).append(f"{idea} {choice['kernel']}")
    return "; ".join(", ".join(names) + (f" ({why})" if why else "")
                     for why, names in by_reason.items())
