"""A gradient norm for each network, under every DeepSpeed wrapper.

The official code gives generator and discriminator an optimizer each and clips each by its own
norm. DeepSpeed clips all parameters by one, and with lambda = 50 that is the discriminator's: the
generator's gradient is scaled by a factor that changes from step to step and has nothing to do with
it (docs/explanation/numerics.md). Here no group of the optimizer holds parameters of two
networks (a table with gradients of both losses counts as a third), and where DeepSpeed 0.19.8
scales a group's gradient, the norm of its network takes the place of the common one. What is
reported, and tested for not being finite, stays the common norm.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TINY = 1e-6  # DeepSpeed's and torch's
_PIECE = 1 << 16  # numbers whose fp64 copy stays in cache


def clip_networks_apart(engine, networks: list[str]) -> None:
    """Have `engine` clip the networks of its optimizer's groups apart; call before the first step.

    `networks` has a name for each group (optim.build_optimizer); of one network nothing changes.
    """
    optimizer, largest = engine.optimizer, engine.gradient_clipping()
    if len(set(networks)) == 1 or not largest:
        return
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        groups = (optimizer.sub_group_to_group_id[n] for n in range(len(optimizer.fp16_groups)))
        _exchange_norms(optimizer, [networks[group] for group in groups], optimizer.fp16_groups,
                        lambda number: number)
    elif kind == "DeepSpeedZeroOptimizer":
        flats = optimizer.single_partition_of_fp32_groups
        _exchange_norms(optimizer, networks, optimizer.params_in_partition,
                        lambda gradients: _place(gradients[0], [flat.grad for flat in flats]))
    elif kind == "BF16_Optimizer":
        _clip_before_step(optimizer, networks, largest)
    else:
        engine.clip_fp32_gradients = lambda: clip_gradients(optimizer, largest)


def measure_in_pieces(optimizer) -> None:
    """ZeRO-1 to 3 on a CPU: have DeepSpeed measure a large gradient piece by piece.

    It makes an fp64 copy of what it measures, and fresh pages for the copy take longer than the
    norm. Call before `clip_networks_apart`.
    """
    measure = optimizer.get_grad_norm_direct

    def measure_pieces(gradients: list[Tensor], parameters: list, *arguments, **named) -> Tensor:
        pieces, owners = [], []
        real = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        for gradient, parameter in zip(real, parameters):  # noqa: B905  as DeepSpeed: then padding
            parts = gradient.reshape(-1).split(_PIECE)
            pieces += parts
            owners += [parameter] * len(parts)
        return measure(pieces, owners, *arguments, **named)

    optimizer.get_grad_norm_direct = measure_pieces


def check_all_at_once(optimizer) -> None:
    """ZeRO-1 and 2: have DeepSpeed look for inf and NaN in all gradients together.

    One by one that is half of the kernels that a step of a small model launches on a GPU.
    """
    def find_overflow() -> Tensor:
        gradients = [gradient for group in optimizer.averaged_gradients.values() if group
                     for gradient in group if gradient is not None and gradient.numel()]
        if not gradients:  # of a rank that has nothing of the model
            return torch.zeros(1, dtype=torch.bool)
        largest = torch._foreach_norm(gradients, math.inf)
        return ~torch.stack(largest).isfinite().all().reshape(1)

    optimizer.has_overflow_partitioned_grads_serial = find_overflow


def reduce_nothing(optimizer) -> None:
    """ZeRO-1 and 2 on one rank: have DeepSpeed take the gradients as they are.

    It would copy each twice and divide it by one: 600 launches of the host for v3-base.
    """
    if optimizer.cpu_offload or optimizer.gradient_accumulation_dtype != optimizer.dtype:
        return  # there the copies are the sums
    optimizer.reduce_bucket_size = 1  # of memory that nothing is copied to
    for name in ("reduce_independent_p_g_buckets_and_remove_grads", "reduce_ipg_grads"):
        setattr(optimizer, name, lambda *_, **__: None)


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float) -> None:
    """Clip each network of a plain optimizer's groups."""
    groups = optimizer.param_groups
    if largest:
        _clip([[p.grad for p in group["params"]] for group in groups],
              [group.get("network", "") for group in groups], largest)


def _place(wanted, things: list) -> int:
    return next(number for number, thing in enumerate(things) if thing is wanted)


def _exchange_norms(optimizer, networks: list[str], parameters: list[list],
                    group_of: Callable[[Any], int]) -> None:
    """ZeRO-1 to 3: a step measures every (sub-)group, then scales every one.

    `parameters` are the lists that are measured; group_of(first argument of a scaling) is the
    number of its group.
    """
    norms: dict[int, Tensor] = {}
    scaled: set[int] = set()

    def remembered(measure):
        def measure_group(*arguments, **named) -> Tensor:
            number = _place(arguments[-1], parameters)
            if number in norms:  # of a step before, whose update was not made
                norms.clear()
            norms[number] = measure(*arguments, **named)
            return norms[number]
        return measure_group

    for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
        setattr(optimizer, name, remembered(getattr(optimizer, name)))
    unscale_and_clip = optimizer.unscale_and_clip_grads

    def clip_group(group, common_norm: Tensor) -> None:
        number = group_of(group)
        assert len(norms) == len(networks) and number not in scaled, (number, norms, scaled)
        own = torch.stack([norms[other] for other, name in enumerate(networks)
                           if name == networks[number]])
        # A group whose norm is not finite measures -1.
        unscale_and_clip(group, torch.where((own >= 0).all(), own.norm(),
                                            common_norm.to(own.device)))
        scaled.add(number)
        if len(scaled) == len(networks):
            norms.clear()
            scaled.clear()

    optimizer.unscale_and_clip_grads = clip_group


def _clip_before_step(optimizer, networks: list[str], largest: float) -> None:
    """BF16_Optimizer: every rank has the whole gradient, in fp32."""
    step = optimizer.step

    def clip_and_step(closure=None) -> None:
        common_norm = _clip(optimizer.fp32_groups_gradients, networks, largest)
        optimizer.clip_grad = 0.0  # or it would clip what is left once more
        try:
            step(closure)
        finally:
            optimizer.clip_grad = largest
        if not optimizer.overflow:
            optimizer._global_grad_norm = common_norm

    optimizer.step = clip_and_step


@torch.no_grad()
def _clip(groups: list[list[Tensor | None]], networks: list[str], largest: float) -> Tensor:
    """Clip each network's gradients; return the norm of all before it."""
    norms = []
    for network in sorted(set(networks)):
        mine = [gradient for group, name in zip(groups, networks, strict=True) if name == network
                for gradient in group if gradient is not None]
        if not mine:
            continue
        # In fp64, so that it is finite where all tensors' norms are, which is what others look at.
        norms.append(torch.stack(torch._foreach_norm(mine)).double().norm())
        too_large = ((norms[-1] + _TINY) / largest).clamp(min=1.0)
        # Not 1 / inf = 0 for a norm that is not finite: the step must see that and be skipped.
        factor = torch.where(norms[-1].isfinite(), 1.0 / too_large, torch.nan)
        torch._foreach_mul_(mine, factor)
    return torch.stack(norms).norm()
