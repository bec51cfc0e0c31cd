"""The optimizers.

AdamW is PyTorch's. `AdamUncorrected` is the official XAdam: Adam without bias correction, decoupled
weight decay scaled by the learning rate (microsoft/DeBERTa optims/xadam.py), which AdamW cannot
express. `Muon` is for the matrices of linear layers, with AdamW for all else, under every stage:

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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.cluster import dist
from deberta_ds.config.optim import OptimConfig
from deberta_ds.engine.state import Piece, buffers, layout_of
from deberta_ds.model.backbone import places

_AT_ONCE = 1 << 25  # elements of the matrices that are worked on together
_ROUNDS = 5
_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic, by Jordan


def build_optimizer(model: nn.Module, optim: OptimConfig, waiting: Collection[str] = (),
                    apart: tuple[str, ...] = (), matmuls: torch.dtype | None = None
                    ) -> torch.optim.Optimizer:
    """Return the run's optimizer over the parameters of `model` that have gradients.

    A group's "rate_share" is what its learning rate is multiplied by (engine.set_learning_rate),
    "waits" whether its parameters are among `waiting`; its "network" is the prefix among `apart` of
    their names, or "" (clipping.py). `matmuls` is the type in which an optimizer multiplies
    matrices; None: that of the weights.
    """
    groups = decay_groups(model, optim.weight_decay)
    names = [name for name, _ in model.named_parameters()]
    if optim.layer_decay != 1.0:
        groups = _split(model, groups, "rate_share", layer_shares(names, optim.layer_decay))
    if waiting:
        groups = _split(model, groups, "waits", {name: name in waiting for name in names})
    if apart:
        groups = _split(model, groups, "network",
                        {name: next(filter(name.startswith, apart), "") for name in names})
    if optim.name == "muon":  # a single row, which scores a token, is no matrix
        matrices = {f"{prefix}.weight" for prefix, module in model.named_modules()
                    if isinstance(module, nn.Linear) and module.out_features > 1}
        groups = _split(model, groups, "matrices", {name: name in matrices for name in names})
    settings: dict[str, Any] = {
        "lr": optim.learning_rate, "betas": tuple(optim.betas), "eps": optim.eps}
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=True)
    if optim.name == "muon":
        return Muon(groups, optim.momentum, matmuls, **settings)
    if optim.name == "adam_uncorrected":
        return AdamUncorrected(groups, **settings)
    optimizer = user_code.function("optim.name", optim.name)(groups, optim)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optim.name: {optim.name} returned {type(optimizer).__name__}; it must "
                        "return a torch.optim.Optimizer")
    return optimizer


def layer_shares(names: Collection[str], decay: float) -> dict[str, float]:
    """Return {parameter: its learning rate as a share}: lower layers move less (ELECTRA, 3.1).

    A head 1, the top layer `decay`, each layer below that times `decay`, and what lies below the
    first layer (tables, their norms) once more.
    """
    found = places(names)
    depths = {"": 0}
    for place in found.values():
        for network in ("", place.network):
            depths[network] = max(depths.get(network, 0), place.layer + 1)
    return {name: 1.0 if place.part == "head" else decay ** (depths[place.network] - place.layer)
            for name, place in found.items()}


def _split(model: nn.Module, groups: list[dict], key: str, values: Mapping[str, float | str | bool]
           ) -> list[dict]:
    """Return `groups` cut so that every group has one of the parameters' `values`, as `key`."""
    value_of = {id(p): values[name] for name, p in model.named_parameters()}
    split = []
    for group in groups:
        for value in sorted({value_of[id(p)] for p in group["params"]}):
            params = [p for p in group["params"] if value_of[id(p)] == value]
            split.append(group | {"params": params, key: value})
    return split


class AdamUncorrected(torch.optim.Optimizer):
    """m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= lr (m / (sqrt(v) + eps) + decay w)."""

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float,
                 weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)

    def _update(self, params: list[nn.Parameter], group: dict) -> None:
        for parameter in params:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in params]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, grads, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_add_(scales, group["eps"])
        updates = torch._foreach_div(means, scales)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-group["lr"])


def thaw_factor(optim: OptimConfig, step: int) -> float:
    """Return the largest update after `step` without gradients, in learning rates, under a steady
    gradient: Adam's moments begin at zero there, and its corrections count from the run's start.
    """
    first, second = optim.betas
    return max((1 - first ** k) / (1 - second ** k) ** 0.5 * (1 - second ** (step + k)) ** 0.5
               / (1 - first ** (step + k)) for k in range(1, 1000))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return the groups of what has gradients: decayed weights, biases with LayerNorm weights."""
    plain = [parameter for module in model.modules()
             for name, parameter in module.named_parameters(recurse=False)
             if parameter.requires_grad and (isinstance(module, nn.LayerNorm) or name == "bias")]
    seen = set(map(id, plain))
    decayed = [p for p in model.parameters() if p.requires_grad and id(p) not in seen]
    groups = [{"params": decayed, "weight_decay": weight_decay},
              {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


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
