"""Table of kernels: which implementation of attention, cross-entropy, LayerNorm, ... runs where.

`model/choose.py` takes the first one of an idea that runs on the device and in the dtype and whose
limits hold. docs/explanation/attention.md shows the same table.
"""

import torch

from deberta_ds.config.model import ModelConfig
from deberta_ds.model.attention.geometry import Geometry, make_band
from deberta_ds.model.choose import (
    LARGEST_HEAD,
    LONGEST_SHORT,
    MOST_PROGRAMS,
    OPTIONS,
    Kernel,
    Request,
    names_of,
    pick,
)
from deberta_ds.model.kernels import kernel_check

MOST_COLUMNS = 8192  # a program of LayerNorm holds a whole hidden state
_ALIGNED = 16  # hidden sizes at which every hidden state begins at a whole vector
_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALF)
_GPU, _CPU = ("cuda",), ("cpu",)


def _head_size(request: Request) -> str:
    large = request.size > LARGEST_HEAD
    return f"heads of {request.size} are larger than {LARGEST_HEAD}" if large else ""


def _aligned(request: Request) -> str:
    odd = request.size % _ALIGNED and not kernel_check.interpreted()
    return f"hidden size {request.size} is no multiple of {_ALIGNED}" if odd else ""


def _columns(request: Request) -> str:
    large = request.size > MOST_COLUMNS
    return f"hidden size {request.size} is larger than {MOST_COLUMNS}" if large else ""


_NORM = _GPU, _FLOATS, _columns, "kernels.checks:norm"
_WIDTH = f"hidden size up to {MOST_COLUMNS:,}"
# The best first; the last of each idea runs everywhere.
KERNELS = (
    Kernel("attention", "fused", "kernels.attention:fused_path", _GPU, _HALF, _head_size,
           "kernels.checks:attention",
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


def choices(model: ModelConfig, device: torch.device, weights: torch.dtype, matmuls: torch.dtype,
            length: int, zero_stage: int = 0, without: tuple[str, ...] = ()
            ) -> dict[str, dict[str, str]]:
    """Return {idea: {"kernel": name, "why": reason}} for training a model.

    weights, matmuls: their dtypes, which differ under autocast. length: of a sequence. without:
    ideas that it does not have. Raises UserError for a kernel that fails its check on this card.
    """
    reach = Geometry(model.largest_distance, model.position_buckets).reach
    long = length > LONGEST_SHORT or make_band(reach, length).far
    terms = ("c2p" in model.position_terms, "p2c" in model.position_terms)
    states = Request(device, matmuls, model.hidden_size, weights)
    separate = "autocast" if weights != matmuls else "ZeRO-3" if zero_stage == 3 else ""
    requests = {
        "attention": Request(device, matmuls, model.head_size, long=long, terms=terms),
        "cross-entropy": Request(device, matmuls, model.hidden_size),
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
            f"{names_of(one.dtypes) if one.dtypes else 'any'} | {one.needs} |" for one in KERNELS]
