"""Put a checkpoint into an engine of any world size and ZeRO stage.

Each rank reads the slices that it owns and writes them into DeepSpeed's flat buffers, group by
group: memory stays at one group (one sub-group when the optimizer is on NVMe). DeepSpeed's own
loaders are not used, because each is wrong in a way that does not raise (0.19.8): the universal one
shares one step counter between sub-groups, copies group 0's hyper-parameters to every group, drops
buffers and cannot change the stage; the plain one brings back the saved clipping and weight decay;
and with an optimizer on NVMe the moments are lost. Hyper-parameters are always the run's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deberta_ds.formats.shards import MASTER, CheckpointError, ShardedState


@dataclass(frozen=True)
class Span:
    """`count` elements from `start` of a parameter lie at `offset` of a flat buffer."""

    name: str
    start: int
    count: int
    offset: int


@torch.no_grad()
def restore(engine, state: ShardedState) -> None:
    """Write `state` into a freshly built engine: weights, moments, counters, loss scale, buffers.

    Call on every rank. Raises CheckpointError if the engine has other parameters, or an optimizer
    wrapper that is not known here.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    _check_parameters(engine, state)
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        _restore_stage3(zero, names, state)
    elif engine.zero_optimization_stage() > 0 and hasattr(zero, "single_partition_of_fp32_groups"):
        _restore_stage12(zero, names, state)
    elif isinstance(zero, torch.optim.Optimizer):
        _restore_plain(engine.module, zero, names, state)
    else:
        raise CheckpointError(
            f"{state.directory}: cannot be loaded into {type(zero).__name__}; use ZeRO-1, 2 or 3, "
            "without data_types.grad_accum_dtype")
    _restore_loss_scale(zero, state)
    for name, value in state.counters.items():
        setattr(engine, name, value)
    for name, buffer in engine.module.named_buffers():
        if name in state.buffers:
            buffer.copy_(state.buffers[name])


def _check_parameters(engine, state: ShardedState) -> None:
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape))
              for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    if shapes != state.shapes:
        differing = sorted(name for name in shapes.keys() | state.shapes.keys()
                           if shapes.get(name) != state.shapes.get(name))
        raise CheckpointError(f"{state.directory}: its parameters are not the model's: "
                              f"{', '.join(differing[:5])}"
                              f"{' ...' if len(differing) > 5 else ''}")


def _restore_stage3(zero, names: dict[int, str], state: ShardedState) -> None:
    zero.checkpoint_event_prologue()  # every parameter partitioned
    if zero.swap_optimizer:
        zero.optimizer_swapper.purge_state()  # else the swapper keeps the moments it knows
    for group, parameters in enumerate(zero.fp16_groups):
        on_nvme = zero._swappable_optimizer_subgroup(group)
        if on_nvme:
            zero._optimizer_states_and_gradient_swap_in(group)
        spans, offset = [], 0
        for parameter in parameters:
            size = parameter.partition_numel()
            start = zero._get_param_partition_rank(parameter) * size
            count = max(0, min(size, parameter.ds_numel - start))
            spans.append(Span(names[id(parameter)], start, count, offset))
            offset += size
        _fill(zero.fp32_partitioned_groups_flat[group], zero.optimizer, spans, state)
        zero._reassign_or_swap_out_partitioned_parameters(group)
        if on_nvme:
            zero._optimizer_states_and_gradient_swap_out(group)
    zero.checkpoint_event_epilogue()  # small parameters whole again


def _restore_stage12(zero, names: dict[int, str], state: ShardedState) -> None:
    for group, flat in enumerate(zero.single_partition_of_fp32_groups):
        spans = []
        for parameter in zero.bit16_groups[group]:
            mapping = parameter._hp_mapping
            if mapping is not None:  # else it lies on other ranks
                spans.append(Span(names[id(parameter)], mapping.lp_fragment_address.start,
                                  mapping.lp_fragment_address.numel,
                                  mapping.hp_fragment_address.start))
        _fill(flat, zero.optimizer, spans, state)
    zero.update_lp_params()


def _restore_plain(module, optimizer, names: dict[int, str], state: ShardedState) -> None:
    for parameter in module.parameters():
        span = Span(names[id(parameter)], 0, parameter.numel(), 0)
        _fill(parameter, optimizer, [span], state)


def _fill(target: Tensor, optimizer: torch.optim.Optimizer, spans: list[Span],
          state: ShardedState) -> None:
    """Write the spans' weights into `target` and its entry in the optimizer's state."""
    _copy(target.data, MASTER, spans, state)
    any_name = spans[0].name if spans else next(iter(state.shapes))
    entry = {}
    for key in state.state_keys(any_name):
        entry[key] = torch.zeros_like(target.data)
        _copy(entry[key], key, spans, state)
    on_device = any(group.get("fused") or group.get("capturable")
                    for group in optimizer.param_groups)
    for key, value in state.scalars(any_name).items():
        if torch.is_tensor(value):  # a tensor of its own: the optimizer counts in place
            value = value.clone().to(target.device if on_device else "cpu")
        entry[key] = value
    optimizer.state[target] = entry


def _copy(flat: Tensor, key: str, spans: list[Span], state: ShardedState) -> None:
    flat = flat.view(-1)
    for span in spans:
        if span.count:
            flat[span.offset:span.offset + span.count] = state.read(
                span.name, key, span.start, span.count)


def _restore_loss_scale(zero, state: ShardedState) -> None:
    """Go on with the saved dynamic fp16 scale; a static scale is the JSON's."""
    scaler, saved = getattr(zero, "loss_scaler", None), state.loss_scaler()
    if scaler is not None and getattr(scaler, "dynamic", False) and saved.get("dynamic"):
        for field in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if field in saved:
                setattr(scaler, field, saved[field])
