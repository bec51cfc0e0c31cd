"""The one entry to attention: checks the arguments and picks an implementation.

Shape legend: B batch, H heads, Q queries, L keys, D head size, S slots of the relative table.
"""

import logging
from functools import lru_cache

import torch

from deberta_ds.errors import UserError
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.linear import linear_attention
from deberta_ds.model.attention.reference import reference_attention

MODES = ("auto", "reference", "linear")
_IMPLEMENTATIONS = {"reference": reference_attention, "linear": linear_attention}
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
) -> torch.Tensor:
    """Return the attention context [B,Q,H,D].

    segments: integers [B,L]; a query sees the keys of its own segment, and 0 means padding. A
      query that sees no key gives 0.
    query_positions_BQ: row columns of the queries; None means Q == L, query i at column i. The
      relative distance is query column minus key column.
    pos_key_HSD, pos_query_HSD: projected relative tables, or None to leave that term out.
    dropout, seed: pairs to drop are a function of `seed` alone, so a recomputation under
      activation checkpointing sees the same mask. `seed` is required when `dropout` > 0.
    mode: "auto" or one implementation by name. Raises UserError for one that cannot run here.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), not {dropout}")
    if dropout > 0 and seed is None:
        raise ValueError("attention dropout needs a seed")
    if query_positions_BQ is None and q_BHQD.shape[2] != k_BHLD.shape[2]:
        raise ValueError("fewer queries than keys need query_positions_BQ")
    run = _IMPLEMENTATIONS[_choose(mode, q_BHQD.device.type)]
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
    )


@lru_cache
def _choose(mode: str, device: str) -> str:
    """Return the implementation's name, and say it once in the log."""
    if mode not in MODES:
        raise UserError(f"attention = {mode!r}: choose one of {', '.join(MODES)}")
    chosen = "linear" if mode == "auto" else mode
    _LOG.info("attention: %s (asked for: %s) on %s", chosen, mode, device)
    return chosen
