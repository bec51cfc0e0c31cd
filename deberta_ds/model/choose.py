"""How one of several implementations is chosen: the best that can run here, and why.

`KERNELS` is the table: the first row of an idea that runs on the device and in the dtype and whose
limits hold is taken. A Triton kernel must agree with torch's operators on this card
(`kernel_check`): where it does not, that is an error, not a slower kernel.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import ModelConfig
from deberta_ds.model.kernels import kernel_check
from deberta_ds.model.precision import DTYPES

_LOG = logging.getLogger("deberta_ds")
LARGEST_HEAD = 128  # of fused attention; sizes that are no power of 2 are filled with zeros
LONGEST_SHORT = 512  # longer sequences may have pairs beyond the reach of the relative table
MOST_PROGRAMS = 65_535  # along the second axis of a launch: one for each sequence and head
MOST_ELEMENTS = 1 << 31  # the kernels count in 32 bits
MOST_COLUMNS = 8192  # a program of LayerNorm holds a whole hidden state
_ALIGNED = 16  # hidden sizes at which every hidden state begins at a whole vector
OPTIONS = {"attention": "attention", "cross-entropy": "cross_entropy"}  # keys of [model], by idea
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}
_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALF)
_GPU, _CPU = ("cuda",), ("cpu",)


class Request(NamedTuple):
    """What a choice depends on: device, types and sizes, no values."""

    device: torch.device
    dtype: torch.dtype  # of the operands; LayerNorm's and GELU's update
    size: int  # of a head for attention, otherwise of a hidden state
    state: torch.dtype | None = None  # LayerNorm's other operand
    long: bool = False  # attention: with pairs beyond the reach of the relative table
    terms: tuple[bool, bool] = (True, True)  # attention: content to position, position to content
    obstacle: str = ""  # what only the caller can see that rules out all but the last


class Kernel(NamedTuple):
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


def _up_to(most: int, words: str) -> Callable[[Request], str]:
    return lambda request: words.format(request.size, most) if request.size > most else ""


def _aligned(request: Request) -> str:
    odd = request.size % _ALIGNED and not kernel_check.interpreted()
    return f"hidden size {request.size} is no multiple of {_ALIGNED}" if odd else ""


_NORM = (_GPU, _FLOATS, _up_to(MOST_COLUMNS, "hidden size {} is larger than {}"),
         "kernels.checks:norm")
_WIDTH = f"hidden size up to {MOST_COLUMNS:,}"
# The best first; the last of each idea runs everywhere.
KERNELS = (
    Kernel("attention", "fused", "kernels.attention:fused_path", _GPU, _HALF,
           _up_to(LARGEST_HEAD, "heads of {} are larger than {}"), "kernels.checks:attention",
           f"heads of up to {LARGEST_HEAD}; up to {MOST_PROGRAMS:,} sequences x heads"),
    Kernel("attention", "tiled", "attention.tiled:tiled_attention", _CPU),
    Kernel("attention", "reference", "attention.reference:reference_attention", by_name_only=True),
    Kernel("attention", "dense", "attention.dense:dense_attention",
           needs="memory for the scores of all pairs"),
    Kernel("cross-entropy", "fused", "kernels.fused_cross_entropy:fused_linear_cross_entropy",
           _GPU, _HALF, _aligned, "kernels.checks:cross_entropy",
           f"hidden size a multiple of {_ALIGNED}; under 2^31 elements"),
    Kernel("cross-entropy", "chunked", "linear_cross_entropy:linear_cross_entropy"),
    Kernel("LayerNorm", "fused", "kernels.fused_norm:residual_norm", *_NORM, _WIDTH),
    Kernel("LayerNorm", "torch"),
    Kernel("GELU", "fused", "kernels.fused_norm:biased_gelu", *_NORM, _WIDTH),
    Kernel("GELU", "torch"),
    Kernel("dropout", "fused", "kernels.fused_norm:dropout", *_NORM),
    Kernel("dropout", "hash", needs="the elements that the kernels drop"),
    Kernel("projections", "fused", "fused_projections:fused_projections", _GPU,
           needs="training without autocast, below ZeRO-3"),
    Kernel("projections", "separate"),
)
_LOADED: dict[str, Any] = {"": None}  # functions by place


def load(place: str) -> Any:
    """Return the function at "module:function", None without one."""
    if place not in _LOADED:
        module, name = place.split(":")
        _LOADED[place] = getattr(import_module(f"deberta_ds.model.{module}"), name)
    return _LOADED[place]


class Choice(NamedTuple):
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
    known = [kernel for kernel in KERNELS if kernel.idea == idea]
    if mode != "auto":
        option, asked = OPTIONS[idea], {kernel.name: kernel for kernel in known}
        if mode not in asked:
            raise UserError(f"{option} = {mode!r}: choose one of {', '.join(['auto', *asked])}")
        if problem := _problem(asked[mode], request, interpreted):
            raise UserError(f"{option} = {mode!r} cannot run here: {problem}; use 'auto' or "
                            f"'{known[-1].name}'")
        return Choice(asked[mode], f"{option} = {mode!r}")
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
        return "no GPU" if kernel.devices == _GPU else f"it is for {' and '.join(kernel.devices)}"
    # On a card, attention's tiles do not fit into registers in fp32.
    known = {*kernel.dtypes, *([torch.float32] if interpreted else [])}
    if kernel.dtypes and (unknown := {request.dtype, request.state or request.dtype} - known):
        return f"it takes {_names_of(kernel.dtypes)}, not {_names_of(tuple(unknown))}"
    found = request.obstacle if kernel.devices else ""
    return found or (kernel.limits(request) if kernel.limits else "")


def _names_of(dtypes: tuple[torch.dtype, ...]) -> str:
    *first, last = (_NAMES.get(dtype, str(dtype)) for dtype in dtypes)
    return f"{', '.join(first)} and {last}" if first else last


def choices(model: ModelConfig, device: torch.device, weights: torch.dtype, matmuls: torch.dtype,
            length: int, zero_stage: int = 0, without: tuple[str, ...] = ()
            ) -> dict[str, dict[str, str]]:
    """Return {idea: {"kernel": name, "why": reason}} for training a model.

    weights, matmuls: their dtypes, which differ under autocast. length: of a sequence. without:
    ideas that it does not have. Raises UserError for a kernel that fails its check on this card.
    """
    from deberta_ds.model.attention.geometry import Geometry, make_band  # its package imports this

    reach = Geometry(model.largest_distance, model.position_buckets).reach
    long = length > LONGEST_SHORT or make_band(reach, length).far
    terms = ("c2p" in model.position_terms, "p2c" in model.position_terms)
    states = Request(device, matmuls, model.hidden_size, weights)
    separate = "autocast" if weights != matmuls else "ZeRO-3" if zero_stage == 3 else ""
    requests = {
        "attention": Request(device, matmuls, model.head_size, long=long, terms=terms),
        "cross-entropy": states._replace(state=None),
        "LayerNorm": states, "GELU": states, "dropout": states,
        "projections": Request(device, weights, model.hidden_size, obstacle=separate)}
    modes = {idea: getattr(model, option) for idea, option in OPTIONS.items()}
    picked = {idea: pick(idea, one, modes.get(idea, "auto")) for idea, one in requests.items()
              if idea not in without}
    return {idea: {"kernel": one.name, "why": one.why} for idea, one in picked.items()}


def in_a_line(found: dict[str, dict[str, str]]) -> str:
    """Return `choices` as one line, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for idea, choice in found.items():
        by_reason.setdefault(choice["why"], []).append(f"{idea} {choice['kernel']}")
    return "; ".join(", ".join(names) + (f" ({why})" if why else "")
                     for why, names in by_reason.items())


def table() -> list[str]:
    """Return the rows of the table of docs/explanation/attention.md."""
    where = {_GPU: "GPU", _CPU: "CPU", (): "everywhere else"}
    return [f"| {one.idea} | `{one.name}` | "
            f"{'only by name' if one.by_name_only else where[one.devices]} | "
            f"{_names_of(one.dtypes) if one.dtypes else 'any'} | {one.needs} |" for one in KERNELS]
