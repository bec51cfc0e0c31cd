"""Every implementation of disentangled attention under one call: same tensors in, context out.

A peer is given the projected tensors of one layer, so what is timed is attention alone. Those that
need a GPU, or a package that is not installed, say so instead of running.

Shape legend: B batch, H heads, L length, D head size, S slots of the relative table.
"""

import importlib.util
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from deberta_ds.model.attention import Geometry, attend

GEOMETRY = Geometry(512, 256)


class UnavailableError(RuntimeError):
    """Why a peer cannot run here."""


class NoBackwardError(UnavailableError):
    """Why a peer cannot train here; `forward` is what it can do, without a graph."""

    def __init__(self, reason: str, forward: Callable[[], Tensor]):
        super().__init__(reason)
        self.forward = forward


@dataclass(frozen=True)
class Problem:
    """One layer's worth of attention: full rows, v3 geometry."""

    q_BHLD: Tensor
    k_BHLD: Tensor
    v_BHLD: Tensor
    pos_key_HSD: Tensor
    pos_query_HSD: Tensor
    grad_BLHD: Tensor
    dropout: float

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q_BHLD, self.k_BHLD, self.v_BHLD, self.pos_key_HSD, self.pos_query_HSD]

    @property
    def device(self) -> torch.device:
        return self.q_BHLD.device


def make_problem(batch: int, length: int, heads: int, size: int, dtype: torch.dtype, device: str,
                 dropout: float) -> Problem:
    """Return random tensors laid out as a linear projection leaves them."""
    generator = torch.Generator().manual_seed(length)

    def draw(first, rows):
        flat = torch.randn(first, rows, heads, size, generator=generator)
        return flat.to(device, dtype).transpose(1, 2).requires_grad_()

    planes = [draw(batch, length) for _ in range(3)]
    tables = [draw(1, GEOMETRY.num_slots).detach()[0].requires_grad_() for _ in range(2)]
    grad = torch.randn(batch, length, heads, size, generator=generator).to(device, dtype)
    return Problem(*planes, *tables, grad, dropout)


def ours(mode: str, explicit_columns: bool = False) -> Callable[[Problem], Callable[[], Tensor]]:
    """Return the builder of one of our implementations.

    explicit_columns: name the queries' columns, though all are there; the fused kernels then gather
    the position terms pair by pair, which is what the dense tiles have to beat.
    """

    def build(problem: Problem) -> Callable[[], Tensor]:
        if mode == "fused":
            _needs("triton", problem)
        if mode == "tiled" and problem.device.type == "cuda":
            raise UnavailableError("is for CPUs")
        batch, _, length, _ = problem.q_BHLD.shape
        segments = torch.ones(batch, length, dtype=torch.int32, device=problem.device)
        columns = torch.arange(length, device=problem.device).expand(batch, length)
        return lambda: attend(*problem.leaves, geometry=GEOMETRY, segments=segments,
                              query_positions_BQ=columns if explicit_columns else None,
                              dropout=problem.dropout, seed=1, mode=mode)

    return build


def hugging_face(problem: Problem) -> Callable[[], Tensor]:
    """Return transformers' DisentangledSelfAttention, its projections replaced by our tensors."""
    batch, heads, length, size = problem.q_BHLD.shape
    config = DebertaV2Config(hidden_size=heads * size, num_attention_heads=heads,
                             relative_attention=True, pos_att_type=["c2p", "p2c"],
                             position_buckets=GEOMETRY.position_buckets,
                             max_relative_positions=GEOMETRY.max_relative, share_att_key=True,
                             attention_probs_dropout_prob=problem.dropout, hidden_dropout_prob=0.0)
    module = DisentangledSelfAttention(config)
    q, k, v = (x.transpose(1, 2).flatten(2) for x in problem.leaves[:3])
    pos_key, pos_query = (x.transpose(0, 1).flatten(1)[None] for x in problem.leaves[3:])
    hidden = torch.zeros_like(q)
    table = hidden.new_zeros(GEOMETRY.num_slots, heads * size)
    mask = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=problem.device)
    module.query_proj, module.key_proj = _Given(hidden, q, pos_query), _Given(hidden, k, pos_key)
    module.value_proj = _Given(hidden, v, None)
    return lambda: module(hidden, mask, rel_embeddings=table)[0].unflatten(2, (heads, size))


class _Given(torch.nn.Module):
    """A projection that returns what it was given: one tensor for tokens, one for positions."""

    def __init__(self, hidden, tokens, positions):
        super().__init__()
        self.hidden, self.tokens, self.positions = hidden, tokens, positions

    def forward(self, inputs):
        return self.tokens if inputs is self.hidden else self.positions


def sdpa_with_bias(problem: Problem) -> Callable[[], Tensor]:
    """Return scaled_dot_product_attention with the position terms as an additive bias."""
    q, k, v, pos_key, pos_query = problem.leaves
    scale = 1 / math.sqrt(3 * q.shape[-1])
    index = _slot_index(problem)

    def run():
        bias = (q * scale @ pos_key.transpose(1, 2)).gather(-1, index)
        bias = bias + (pos_query * scale @ k.transpose(-1, -2)).gather(-2, index)
        options = {"attn_mask": bias, "dropout_p": problem.dropout, "scale": scale}
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return run


def flex_attention(problem: Problem) -> Callable[[], Tensor]:
    """Return compiled FlexAttention whose score_mod looks both position terms up."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    if problem.dropout:
        raise UnavailableError("has no dropout")
    on_cpu = problem.device.type == "cpu"
    leaves = [x.detach() for x in problem.leaves] if on_cpu else problem.leaves
    q, k, v, pos_key, pos_query = leaves
    scale = 1 / math.sqrt(3 * q.shape[-1])
    length = q.shape[2]
    distances = torch.arange(-(length - 1), length, device=problem.device)
    slots = GEOMETRY.slots(distances)
    compiled = torch.compile(flex, dynamic=False)

    def run():
        key_term = q * scale @ pos_key.transpose(1, 2)
        query_term = k * scale @ pos_query.transpose(1, 2)

        def score(value, b, h, i, j):
            slot = slots[i - j + length - 1]
            return value + key_term[b, h, i, slot] + query_term[b, h, j, slot]

        return compiled(q, k, v, score_mod=score, scale=scale).transpose(1, 2)

    if on_cpu:
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            raise UnavailableError("needs a C++ compiler, and has no backward on the CPU")
        raise NoBackwardError("has no backward on the CPU", run)
    return run


def flashdeberta(problem: Problem) -> Callable[[], Tensor]:
    """Return flashdeberta's fixed-length kernel (it has no attention dropout)."""
    _needs("flashdeberta", problem)
    if problem.dropout:
        raise UnavailableError("has no attention dropout")
    from flashdeberta.ops.flash_attention import flash_attention_with_disentangled

    q, k, v, pos_key, pos_query = problem.leaves
    scale = 1 / math.sqrt(3 * q.shape[-1])
    return lambda: flash_attention_with_disentangled(
        q, k, v, None, pos_key[None], pos_query[None], False, scale, 256, 512).transpose(1, 2)


def disentangled_flash(problem: Problem) -> Callable[[], Tensor]:
    """Return disentangled-flash's training kernels, in the tiles its own H200 profile names."""
    _needs("disentangled_flash", problem)
    from disentangled_flash.position import SharedPositionPlanCache, pad_position_table
    from disentangled_flash.training._kernels import training_attention

    q, k, v, pos_key, pos_query = problem.leaves
    length = q.shape[2]
    plans = SharedPositionPlanCache(
        position_buckets=256, max_relative_positions=512, position_embedding_size=256)
    plan = plans.compact(length, problem.device)
    mask = torch.ones(q.shape[0], length, dtype=torch.bool, device=problem.device)
    tiles = _profiled_tiles(problem)

    def run():
        tables = [pad_position_table(x.index_select(1, plan.active_slots))
                  for x in (pos_key, pos_query)]
        context = training_attention(
            q, k, v, *tables, plan.delta_to_local, mask, score_scale=1 / math.sqrt(3 * q.shape[-1]),
            has_padding=False, strict_fp32=True, forward_config=tiles.get("training_forward"),
            dq_config=tiles.get("backward_dq"), dkv_config=tiles.get("backward_dkv"),
            dropout_p=problem.dropout, gradient_band=plan.gradient_band)
        return context.unflatten(-1, q.shape[1::2])

    return run


def _profiled_tiles(problem: Problem) -> dict[str, object]:
    """Return disentangled-flash's kernel configurations by phase; its autotuner does the rest.

    Its automatic choice takes the profile only with the very compiler it was made with, and
    searching takes minutes; the tiles are the best that its author found on an H200.
    """
    from disentangled_flash.tuning import (
        load_bundled_profiles,
        tuning_batch_heads,
        tuning_sequence_length,
    )

    batch, heads, length, size = problem.q_BHLD.shape
    wanted = {"length_regime": tuning_sequence_length(length), "head_dim": size,
              "occupancy_regime": tuning_batch_heads(batch * heads),
              "dtype": "half" if problem.q_BHLD.dtype != torch.float32 else "float32",
              "has_c2p": True, "has_p2c": True, "layout": "padded", "uses_padding_mask": False,
              "has_dropout": problem.dropout > 0}
    tiles = {}
    for profile in load_bundled_profiles():
        for entry in profile.entries:
            workload = entry.workload.to_dict()
            if all(workload[name] == value for name, value in wanted.items()):
                tiles[workload["phase"]] = entry.config
    return tiles


def _needs(package: str, problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise UnavailableError("needs a GPU")
    if importlib.util.find_spec(package) is None:
        raise UnavailableError("is not installed")


def _slot_index(problem: Problem) -> Tensor:
    batch, heads, length, _ = problem.q_BHLD.shape
    columns = torch.arange(length, device=problem.device)
    slots = GEOMETRY.slots(columns[:, None] - columns)
    return slots.expand(batch, heads, length, length)


BUILDERS: dict[str, Callable[[Problem], Callable[[], Tensor]]] = {
    "Hugging Face eager": hugging_face,
    "SDPA + bias": sdpa_with_bias,
    "FlexAttention": flex_attention,
    "flashdeberta 0.0.8": flashdeberta,
    "disentangled-flash 1.1.1": disentangled_flash,
    "ours, reference": ours("reference"),
    "ours, tiled": ours("tiled"),
    "ours, dense": ours("dense"),
    "ours, fused, gathering": ours("fused", explicit_columns=True),
    "ours, fused": ours("fused"),
}
