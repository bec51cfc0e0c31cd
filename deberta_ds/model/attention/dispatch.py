"""The one entry to attention: checks the arguments and picks an implementation.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots of the relative table.
"""

import logging
from functools import lru_cache

import torch

from deberta_ds.errors import UserError
from deberta_ds.model import kernel_check
from deberta_ds.model.attention import selfcheck
from deberta_ds.model.attention.band import make_band, padded
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import reference_attention
from deberta_ds.model.attention.tiled import tiled_attention

MODES = ("auto", "reference", "tiled", "fused")
LARGEST_SIZE = 128  # of a head; sizes that are no power of 2 are filled with zeros
SHORT_ROW = 512  # longer rows may have pairs beyond the reach of the relative table
_GRID = 65_535  # programs along the second axis of a launch, which has one for each row and head
_LOG = logging.getLogger("deberta_ds")


def attend(
    q_BHQD: torch.Tensor,
    k_BHLD: torch.Tensor,
    v_BHLD: torch.Tensor,
    pos_key_HSD: torch.Tensor | None,
    pos_query_HSD: torch.Tensor | None,
    *,
    geometry: Geometry,
    segments: torch.Tensor,
    query_positions_BQ: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    mode: str = "auto",
    keep_terms: bool = False,
) -> torch.Tensor:
    """Return the attention context [B,Q,H,D] in the one dtype of queries, keys and values.

    segments: integers [B,L]; a query sees the keys of its own segment, and 0 means padding. A
      query that sees no key gives 0.
    query_positions_BQ: row columns of the queries; None means Q == L, query i at column i. The
      relative distance is query column minus key column.
    pos_key_HSD, pos_query_HSD: projected relative tables, or None to leave that term out.
    dropout, seed: pairs to drop are a function of `seed` alone, so a recomputation under
      activation checkpointing sees the same mask. `seed` is required when `dropout` > 0.
    mode: "auto" or one implementation by name. Raises UserError for one that cannot run here.
    keep_terms: "fused" keeps its position terms for backward instead of computing them again.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), not {dropout}")
    if dropout > 0 and seed is None:
        raise ValueError("attention dropout needs a seed")
    if query_positions_BQ is None and q_BHQD.shape[2] != k_BHLD.shape[2]:
        raise ValueError("fewer queries than keys need query_positions_BQ")
    (batch, heads, keys, size), band = k_BHLD.shape, make_band(geometry.reach, k_BHLD.shape[2])
    # Elements of a plane, and of the gradients of picked queries' scores, are counted in 32 bits.
    plane = max(2 * padded(keys) * band.radius(keys), padded(keys) * padded(q_BHQD.shape[2]))
    chosen = _choose(
        mode, q_BHQD.device, q_BHQD.dtype, size, keys > SHORT_ROW or band.far,
        (pos_key_HSD is not None, pos_query_HSD is not None),
        batch * heads > _GRID or plane >= 1 << 31,
    )
    assert q_BHQD.dtype == k_BHLD.dtype == v_BHLD.dtype
    run = _implementation(chosen)
    kept = {"keep_terms": keep_terms} if chosen == "fused" else {}
    return run(
        q_BHQD,
        k_BHLD,
        v_BHLD,
        pos_key_HSD,
        pos_query_HSD,
        geometry=geometry,
        segments_BL=segments,
        query_positions_BQ=query_positions_BQ,
        dropout=dropout,
        seed=seed,
        **kept,
    )


def _implementation(name: str):
    if name == "fused":  # needs Triton, so imported only where it is used
        from deberta_ds.model.attention.fused import fused_path

        return fused_path
    return {"reference": reference_attention, "tiled": tiled_attention}[name]


@lru_cache
def _choose(mode: str, device: torch.device, dtype: torch.dtype, size: int, long: bool,
            terms: tuple[bool, bool] = (True, True), too_large: bool = False) -> str:
    """Return the implementation's name, and say it once in the log."""
    if mode not in MODES:
        raise UserError(f"attention = {mode!r}: choose one of {', '.join(MODES)}")
    obstacle = _why_not_fused(device, dtype, size)
    if too_large and not obstacle:
        obstacle = f"more than {_GRID:,} rows times heads, or planes of more than 2^31 elements"
    if mode == "fused" and obstacle:
        raise UserError(f"attention = 'fused' cannot run here: {obstacle}; use 'auto' or 'tiled'")
    chosen, reason = mode, ""
    if mode == "auto":
        chosen, reason = _choose_itself(obstacle, device, dtype, size, long, terms)
    slow = mode == "auto" and chosen == "tiled" and device.type == "cuda"
    _LOG.log(logging.WARNING if slow else logging.INFO, "attention: %s on %s, asked for: %s%s%s",
             chosen, device.type, mode, reason, "; this is several times slower" if slow else "")
    return chosen


def _choose_itself(obstacle: str, device, dtype, size: int, long: bool,
                   terms: tuple[bool, bool]) -> tuple[str, str]:
    """Return the implementation that suits the device and is right on it, and why."""
    if obstacle or device.type != "cuda":
        return "tiled", f" (not fused: {obstacle})" if obstacle else ""
    verdict = selfcheck.check(device, dtype, size, long, _implementation("fused"), terms)
    if not verdict.passed:
        return "tiled", f" (not fused: it fails its check on this card: {verdict.text})"
    return "fused", f" ({verdict.text})"


def _why_not_fused(device: torch.device, dtype: torch.dtype, size: int) -> str:
    """Return what keeps the Triton kernels from running, or an empty string."""
    if missing := kernel_check.obstacle(device):
        return missing
    if size > LARGEST_SIZE:
        return f"heads of {size} are larger than {LARGEST_SIZE}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{dtype} is not supported"
    if dtype == torch.float32 and not kernel_check.interpreted():
        return "in fp32 its tiles do not fit into registers; it takes bf16 and fp16"
    return ""
