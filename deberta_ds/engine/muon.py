"""Muon for the matrices of linear layers, AdamW for all else, under every ZeRO stage.

    m = b m + (1-b) g;  u = (1-b) g + b m;  w -= lr (0.2 sqrt(max(rows, columns)) O(u) + decay w)

O(u) is near the orthogonal matrix closest to u (Newton-Schulz; Keller Jordan, 2024). The factor
gives an update the mean square that AdamW's has, so that AdamW's lr and decay do for both
(Moonlight, arXiv 2502.16982, section 2.2).

DeepSpeed's own Muon (0.19.8) is not used: its ZeRO-1 to 3 orthogonalize before they clip, so that
the clipping norm sets the size of a step, and under 1 and 2 momenta are not cut as weights are.
Here all happens in `step`, after clipping, and momenta lie as the weights lie: checkpoints and
other world sizes know them. A matrix whose pieces lie on several ranks is put together by a sum of
what each has, in which all others have zeros; one rank orthogonalizes it, and the sum of that and
zeros gives it to all.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deberta_ds.cluster import dist
from deberta_ds.engine.state import Piece, buffers, layout_of

_AT_ONCE = 1 << 25  # elements of the matrices that are worked on together
_ROUNDS = 5
_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic, by Jordan


@dataclass(frozen=True)
class Matrix:
    """A matrix of which some rank's buffer holds a part."""

    shape: tuple[int, ...]
    piece: Piece | None  # this rank's; None: it has nothing of it
    is_cut: bool  # over several ranks


@dataclass(frozen=True)
class _Part:
    """A matrix, and this rank's flat buffers in which its piece lies."""

    matrix: Matrix
    direction: Tensor
    weights: Tensor


class Muon(torch.optim.AdamW):
    """Groups whose "matrices" is true are orthogonalized, the others are AdamW's."""

    def __init__(self, groups: list[dict], momentum: float, matmuls: torch.dtype | None = None,
                 **settings):
        """`matmuls`: the type of Newton-Schulz (the author's is bf16), None: the weights' own."""
        super().__init__(groups, fused=True, **settings)
        self._momentum, self._matmuls = momentum, matmuls
        self._held: dict[Tensor, list[Matrix]] = {}  # by the flat buffer they lie in

    def bind(self, engine) -> None:
        """Learn which matrices lie where in ZeRO's flat buffers; call before the first step."""
        layout = layout_of(engine)
        if layout.is_replicated:
            return
        trained = (buffer for buffer in buffers(engine, layout) if not buffer.is_frozen)
        for number, buffer in enumerate(trained):
            mine = dict(buffer.held)
            self._held[buffer.weights] = [
                Matrix(layout.shapes[name], mine.get(name),
                        next(layout.pieces(name)).count < math.prod(layout.shapes[name]))
                for name in layout.groups[number].names]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None
        mine = [(group, p, p.grad) for group in self.param_groups if group["matrices"]
                for p in group["params"] if p.grad is not None]
        for _, weights, _ in mine:
            weights.grad = None  # AdamW skips them
        super().step()
        for _, weights, gradient in mine:
            weights.grad = gradient
        for group in self.param_groups:
            self._update([p for of_group, p, _ in mine if of_group is group], group)

    def _update(self, tensors: list[Tensor], group: dict) -> None:
        """Move the matrices of a group: each a tensor, or flat ones with many."""
        parts = []
        for weights in tensors:
            state = self.state[weights]
            if not state:
                state["exp_avg"] = torch.zeros_like(weights)
            held = self._held[weights] if weights.dim() != 2 else [
                Matrix(weights.shape, Piece(0, 0, 0, 0, weights.numel()), False)]
            average = state["exp_avg"].lerp_(weights.grad, 1 - self._momentum)
            direction = weights.grad.lerp(average, self._momentum)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            parts += [_Part(matrix, direction.view(-1), weights.view(-1)) for matrix in held
                      if matrix.piece or matrix.is_cut]
        for batch in _batches(parts):
            whole = _put_together(batch, self._matmuls or batch[0].weights.dtype)
            updates = _orthogonal_shared(whole) if batch[0].matrix.is_cut else orthogonal(whole)
            rate = -group["lr"] * 0.2 * math.sqrt(max(batch[0].matrix.shape))
            for part, update in zip(batch, updates, strict=True):
                if piece := part.matrix.piece:
                    part.weights[piece.offset:piece.offset + piece.count].add_(
                        update.reshape(-1)[piece.start:piece.start + piece.count], alpha=rate)


def _batches(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Yield the parts of matrices of one shape; cut ones on every rank, in the same order."""

    def kind(part: _Part) -> tuple:
        return part.matrix.shape, part.matrix.is_cut

    for (shape, _), found in itertools.groupby(sorted(parts, key=kind), key=kind):
        alike, size = list(found), max(1, _AT_ONCE // math.prod(shape))
        for start in range(0, len(alike), size):
            yield alike[start:start + size]


def _put_together(parts: list[_Part], dtype: torch.dtype) -> Tensor:
    """Return the whole matrices [N, rows, columns], of which this rank may have a piece."""
    first = parts[0]
    whole = first.weights.new_zeros(len(parts), math.prod(first.matrix.shape), dtype=dtype)
    for row, part in zip(whole, parts, strict=True):
        if piece := part.matrix.piece:
            row[piece.start:piece.start + piece.count] = part.direction[
                piece.offset:piece.offset + piece.count]
    if first.matrix.is_cut:
        dist.all_reduce(whole)
    return whole.view(-1, *first.matrix.shape)


def _orthogonal_shared(matrices: Tensor) -> Tensor:
    """As `orthogonal`, of matrices that every rank has: each takes its share of them."""
    updates = torch.zeros_like(matrices)
    share = slice(dist.rank(), None, dist.world_size())
    if len(mine := matrices[share]):
        updates[share] = orthogonal(mine)
    dist.all_reduce(updates)
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
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x
