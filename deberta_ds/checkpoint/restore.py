"""Put a checkpoint into an engine of any world size and ZeRO stage.

Each rank reads the slices that it owns and writes them into DeepSpeed's buffers, one at a time, so
memory stays at one buffer (one sub-group when the optimizer is on NVMe). DeepSpeed's own loaders
are not used: they unpickle, and each is wrong in a way that does not raise (0.19.8): the universal
one shares one step counter between sub-groups, copies group 0's hyper-parameters to every group,
drops buffers and cannot change the stage; the plain one brings back the saved clipping and weight
decay; and with an optimizer on NVMe the moments are lost. Hyper-parameters are always the run's.
"""

import torch
from torch import Tensor

from deberta_ds.checkpoint.saved_state import SavedState
from deberta_ds.cluster import dist
from deberta_ds.engine.layout import CheckpointError, Layout
from deberta_ds.engine.state import (
    MASTER,
    Buffer,
    base_optimizer,
    buffers,
    layout_of,
    write_loss_scale,
)


@torch.no_grad()
def restore(engine, state: SavedState) -> None:
    """Write `state` into a freshly built engine: weights, moments, counters, loss scale, buffers.

    Call on every rank. Raises CheckpointError if the engine has other parameters.
    """
    layout = layout_of(engine)
    # What may fail comes first, on all ranks together: writing into an engine has collectives.
    dist.together(lambda: _open_files(layout, state))
    optimizer = base_optimizer(engine)
    for number, buffer in enumerate(buffers(engine, layout, writing=True)):
        names = [name for name, _ in buffer.held] or layout.groups[number].names
        # A parameter that never had a gradient may lack what the others of its buffer have.
        _fill(buffer, max(names, key=lambda name: len(state.state_keys(name))), optimizer, state)
    write_loss_scale(engine, state.loss_scale())
    for name, value in state.counters.items():
        setattr(engine, name, value)
    for name, value in engine.module.named_buffers():
        if name in state.buffers:
            value.copy_(state.buffers[name])


def _open_files(layout: Layout, state: SavedState) -> None:
    """Check the parameters, and open the files that hold what this rank will own."""
    _check_parameters(layout.shapes, state)
    everything = [(name, 0, None) for name in layout.shapes]
    mine = [(name, piece.start, piece.count) for number in range(len(layout.groups))
            for name, piece in layout.held_by(dist.rank(), number)]
    ranks = {piece.rank for wanted in (everything if layout.is_replicated else mine)
             for piece in state.layout.pieces(*wanted)}
    for rank in sorted(ranks):
        state.open(rank)


def _check_parameters(shapes: dict, state: SavedState) -> None:
    if shapes != state.shapes:
        differing = sorted(name for name in shapes.keys() | state.shapes.keys()
                           if shapes.get(name) != state.shapes.get(name))
        raise CheckpointError(f"{state.directory}: its parameters are not the model's: "
                              f"{', '.join(differing[:5])}"
                              f"{' ...' if len(differing) > 5 else ''}")


def _fill(buffer: Buffer, name: str, optimizer: torch.optim.Optimizer,
          state: SavedState) -> None:
    """Write a buffer's weights and its entry in the optimizer's state, which is that of `name`."""
    target = buffer.weights
    _copy(target.data, MASTER, buffer, state)
    entry = {}
    for key in state.state_keys(name):
        entry[key] = torch.zeros_like(target.data)
        _copy(entry[key], key, buffer, state)
    on_device = any(group.get("fused") or group.get("capturable")
                    for group in optimizer.param_groups)
    for key, value in state.scalars(name).items():
        if torch.is_tensor(value):  # a tensor of its own: the optimizer counts in place
            value = value.clone().to(target.device if on_device else "cpu")
        entry[key] = value
    optimizer.state[target] = entry


def _copy(target: Tensor, key: str, buffer: Buffer, state: SavedState) -> None:
    flat = target.view(-1)
    for name, piece in buffer.held:
        flat[piece.offset:piece.offset + piece.count] = state.read(
            name, key, piece.start, piece.count)
