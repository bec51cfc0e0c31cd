"""Muon for the matrices of linear layers, AdamW for all else; exact under every ZeRO stage.

    m = b m + (1-b) g;  u = (1-b) g + b m;  w -= lr (0.2 sqrt(max(rows, columns)) O(u) + decay w)

O(u) is near the orthogonal matrix closest to u (Newton-Schulz; Keller Jordan, 2024). The factor
gives an update the mean square that AdamW's has, so that AdamW's lr and decay do for both
(Moonlight, arXiv 2502.16982, section 2.2).

DeepSpeed's own Muon (0.19.8) is not used: under ZeRO-1 to 3 it orthogonalises before it clips, so
that the clipping norm sets the size of a step, and its momenta are not cut as the weights are. Here
all happens in `step`, after clipping, and momenta lie as the weights lie: checkpoints and other
world sizes know them. A matrix whose pieces lie on several ranks is put together by a sum of what
each has, in which all others have zeros; one rank orthogonalises it, and the sum of that and zeros
gives it to all.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deberta_ds import dist
from deberta_ds.formats.engine_state import buffers, layout_of
from deberta_ds.formats.layout import Layout, Piece

_AT_ONCE = 1 << 25  # elements of the matrices that are worked on together
_ROUNDS = 5
_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic, by Jordan


@dataclass(frozen=True)
class _Matrix:
    """A matrix of which some rank's buffer holds a part."""

    shape: tuple[int, int]
    piece: Piece | None  # this rank's; None: it has nothing of it
    is_cut: bool  # over several ranks


class Muon(torch.optim.AdamW):
    """Groups whose "matrices" is true are orthogonalised, the others are AdamW's."""

    def __init__(self, groups: list[dict], momentum: float, **settings):
        super().__init__(groups, fused=True, **settings)
        self._momentum = momentum
        self._held: dict[Tensor, list[_Matrix]] | None = None  # by the flat buffer they lie in

    def bind(self, engine) -> None:
        """Learn which matrices lie where in ZeRO's flat buffers; these do not move before."""
        layout, self._held = layout_of(engine), {}
        if layout.is_replicated:
            return
        for number, buffer in enumerate(buffers(engine, layout)):
            mine = dict(buffer.held)
            self._held[buffer.weights] = [
                _Matrix(layout.shapes[name], mine.get(name), _is_cut(layout, name))
                for name in layout.groups[number].names]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None
        mine = [(p, group, p.grad) for group in self.param_groups if group["matrices"]
                for p in group["params"] if p.grad is not None]
        for weights, *_ in mine:
            weights.grad = None  # AdamW passes them over
        super().step()
        for weights, group, gradient in mine:
            weights.grad = gradient
            self._update(weights, group)

    def _update(self, weights: Tensor, group: dict) -> None:
        state = self.state[weights]
        if not state:
            state["exp_avg"] = torch.zeros_like(weights)
        if weights.dim() == 2:
            matrices = [_Matrix(weights.shape, Piece(0, 0, 0, 0, weights.numel()), False)]
        elif self._held is None:  # DeepSpeed tries a step while it is built
            return
        else:
            matrices = self._held[weights]
        average = state["exp_avg"].lerp_(weights.grad, 1 - self._momentum)
        direction = weights.grad.lerp(average, self._momentum).view(-1)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        for batch in _batches(matrices):
            whole = _put_together(direction, batch)
            updates = _orthogonal_in_turn(whole) if batch[0].is_cut else orthogonal(whole)
            scale = -group["lr"] * 0.2 * math.sqrt(max(batch[0].shape))
            for matrix, update in zip(batch, updates, strict=True):
                if piece := matrix.piece:
                    weights.view(-1)[piece.offset:piece.offset + piece.count].add_(
                        update.reshape(-1)[piece.start:piece.start + piece.count], alpha=scale)


def _is_cut(layout: Layout, name: str) -> bool:
    return next(layout.pieces(name)).count < math.prod(layout.shapes[name])


def _batches(matrices: list[_Matrix]) -> Iterator[list[_Matrix]]:
    """Yield matrices of one shape at a time; cut ones on every rank, in the same order."""
    chosen = [matrix for matrix in matrices if matrix.piece or matrix.is_cut]
    for (shape, _), alike in itertools.groupby(
            sorted(chosen, key=lambda matrix: (matrix.shape, matrix.is_cut)),
            key=lambda matrix: (matrix.shape, matrix.is_cut)):
        yield from _in_parts(list(alike), max(1, _AT_ONCE // math.prod(shape)))


def _in_parts(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start:start + size]


def _put_together(flat: Tensor, matrices: list[_Matrix]) -> Tensor:
    """Return the whole matrices [N, rows, columns], of which `flat` has this rank's pieces."""
    kind = torch.bfloat16 if _has_bf16(flat.device) else flat.dtype
    whole = flat.new_zeros(len(matrices), math.prod(matrices[0].shape), dtype=kind)
    for row, matrix in zip(whole, matrices, strict=True):
        if piece := matrix.piece:
            row[piece.start:piece.start + piece.count] = flat[
                piece.offset:piece.offset + piece.count]
    if matrices[0].is_cut:
        dist.sum_within(whole)
    return whole.view(-1, *matrices[0].shape)


def _has_bf16(device: torch.device) -> bool:
    """Return whether to compute in bf16, as the author does; a processor may be slower in it."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _orthogonal_in_turn(matrices: Tensor) -> Tensor:
    """As `orthogonal`, of matrices that every rank has: each takes its share of them."""
    updates = torch.zeros_like(matrices)
    share = slice(dist.rank(), None, dist.world_size())
    if len(mine := matrices[share]):
        updates[share] = orthogonal(mine)
    dist.sum_within(updates)
    return updates


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the matrices [N, rows, columns] with singular values near 1, by five rounds."""
    a, b, c = _COEFFICIENTS
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    exact = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=exact)
    x = x / (norms + 1e-7).to(x.dtype)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x
