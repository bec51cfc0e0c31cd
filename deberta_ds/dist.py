"""Ranks and collectives: the only module that talks to torch.distributed.

Everything also works in a single process that never initialized a process group.
"""

import itertools
import os

import torch
import torch.distributed as torch_dist
from torch import Tensor

from deberta_ds import host_memory
from deberta_ds.errors import UserError, user_message

_host: host_memory.HostMemory | None = None
_left_gloo = False
_ONE_ADDS = 4  # ranks whose numbers one rank adds up in the time that sharing the work would take


def is_distributed() -> bool:
    return torch_dist.is_available() and torch_dist.is_initialized()


def uses_gloo() -> bool:
    return is_distributed() and torch_dist.get_backend() == "gloo"


def rank() -> int:
    return torch_dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return torch_dist.get_world_size() if is_distributed() else 1


def local_rank() -> int:
    """Return the rank within this host, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if is_distributed():
        torch_dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks; the input is left alone."""
    values = values.clone()
    if is_distributed():
        all_reduce(values)
    return values


def gather_number(value: float, device) -> list[float]:
    """Return every rank's number in rank order, on all ranks; 8 bytes a rank travel."""
    if not is_distributed():
        return [value]
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    values = mine.new_empty(world_size())
    torch_dist.all_gather_into_tensor(values, mine)
    return values.tolist()


def gather_objects(value) -> list:
    """Return every rank's picklable `value`, in rank order, on all ranks."""
    if not is_distributed():
        return [value]
    values = [None] * world_size()
    torch_dist.all_gather_object(values, value)
    return values


def gather_to_main(value) -> list | None:
    """Return every rank's picklable `value`, in rank order, on rank 0; None elsewhere."""
    if not is_distributed():
        return [value]
    values = [None] * world_size() if is_main() else None
    torch_dist.gather_object(value, values)
    return values


def broadcast_object(value):
    """Return rank 0's picklable `value` on every rank."""
    if not is_distributed():
        return value
    values = [value]
    torch_dist.broadcast_object_list(values, src=0)
    return values[0]


def group_of(groups: list[list[int]]):
    """Return this rank's process group among `groups` of ranks; call on every rank."""
    made = [torch_dist.new_group(ranks) for ranks in groups]
    return next((group for group, ranks in zip(made, groups, strict=True) if rank() in ranks), None)


def swap(values: Tensor, partner: int) -> None:
    """Send `values` to another rank and take as many from it, both at once."""
    theirs = torch.empty_like(values)
    work = torch_dist.batch_isend_irecv([torch_dist.P2POp(torch_dist.isend, values, partner),
                                         torch_dist.P2POp(torch_dist.irecv, theirs, partner)])
    for one in work:
        one.wait()


class _Done:
    """What an asynchronous collective returns that has ended already."""

    def wait(self) -> None:
        pass


def share_memory(seconds: float) -> bool:
    """Let ranks that are all on one host add and gather through memory; return whether they do.

    Every rank calls it, with gloo. `seconds`: how long a rank waits for another.
    """
    global _host
    _host = host_memory.connect(rank(), world_size(), gather_objects, seconds)
    return _host is not None


def _through_memory(values: Tensor, op, group) -> bool:
    """Return whether a collective goes through the host's memory: the same on every rank."""
    return (_host is not None and (op is None or op == torch_dist.ReduceOp.SUM)
            and values.numel() > 0 and values.is_cpu and values.layout == torch.strided
            and values.is_floating_point() and torch_dist.get_world_size(group) == world_size())


def _shares(numel: int) -> host_memory.Spans:
    """Return which of so many numbers each rank adds up."""
    return list(itertools.pairwise(numel * each // world_size()
                                   for each in range(world_size() + 1)))


# .data, so that what autograd has saved is not found changed: neither does gloo tell it.


@torch.no_grad()
def all_reduce(tensor: Tensor, op=torch_dist.ReduceOp.SUM, group=None, async_op: bool = False):
    """As torch's."""
    if not _through_memory(tensor, op, group):
        return torch_dist.all_reduce(tensor, op, group, async_op)
    chunk = host_memory.ring_chunk(tensor.numel(), tensor.element_size(), world_size())
    _reduce_to(None, tensor.data, chunk)
    return _Done() if async_op else None


@torch.no_grad()
def reduce(tensor: Tensor, dst: int, op=torch_dist.ReduceOp.SUM, group=None,
           async_op: bool = False):
    """As torch's: other ranks' tensors end up as anything."""
    if not _through_memory(tensor, op, group):
        return torch_dist.reduce(tensor, dst, op, group, async_op)
    chunk = host_memory.ring_chunk_of_reduce(tensor.numel(), tensor.element_size(), world_size())
    _reduce_to(dst, tensor.data, chunk)
    return _Done() if async_op else None


def _reduce_to(owner: int | None, tensor: Tensor, chunk: int) -> None:
    """Add up `tensor` for one rank or, with None, for all of them."""
    flat = tensor.contiguous().view(-1)
    if owner is not None and world_size() <= _ONE_ADDS:
        shares = [(0, len(flat) if each == owner else 0) for each in range(world_size())]
        _host.add(flat, shares, flat, chunk)
    else:
        shares = _shares(len(flat))
        _host.add(flat, shares, flat[slice(*shares[rank()])], chunk)
        _host.gather(flat, shares, owner)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view_as(tensor))


@torch.no_grad()
def reduce_scatter(output_tensor: Tensor, input_tensor: Tensor, op=torch_dist.ReduceOp.SUM,
                   group=None, async_op: bool = False):
    """As torch's reduce_scatter_tensor."""
    if not _through_memory(input_tensor, op, group):
        return torch_dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
    numel, size = input_tensor.numel(), input_tensor.element_size()
    assert output_tensor.is_contiguous() and numel == output_tensor.numel() * world_size()
    chunk = host_memory.ring_chunk(numel, size, world_size())  # gloo scatters what it sums up whole
    _host.add(input_tensor.data.contiguous().view(-1), _shares(numel),
              output_tensor.data.view(-1), chunk)
    return _Done() if async_op else None


@torch.no_grad()
def all_gather(output_tensor: Tensor, input_tensor: Tensor, group=None, async_op: bool = False):
    """As torch's all_gather_into_tensor."""
    if not _through_memory(input_tensor, None, group):
        return torch_dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    assert output_tensor.is_contiguous() and output_tensor.dtype == input_tensor.dtype
    assert output_tensor.numel() == input_tensor.numel() * world_size()
    flat = output_tensor.data.view(-1)
    shares = _shares(len(flat))
    mine = flat[slice(*shares[rank()])]
    if mine.data_ptr() != input_tensor.data_ptr():
        mine.copy_(input_tensor.reshape(-1))
    _host.gather(flat, shares)
    return _Done() if async_op else None


def together(function):
    """Return `function()`; if the user's doing stops any rank, raise that UserError on every rank.

    Without this, the ranks that were spared would wait in their next collective for ever.
    """
    value, problem = None, None
    try:
        value = function()
    except Exception as error:
        problem = user_message(error)
        if problem is None:
            raise
    problems = [text for text in gather_objects(problem) if text is not None]
    if problems:
        error = UserError(problems[0])
        error.on_every_rank = True
        raise error
    return value


def destroy() -> None:
    """Leave the process group, all ranks together."""
    global _host, _left_gloo
    if is_distributed():
        torch_dist.barrier()
        if _host is not None:
            _host.close()
            _host = None
        _left_gloo = has_gloo_threads()
        torch_dist.destroy_process_group()


def has_gloo_threads() -> bool:
    """Return whether gloo's threads may be at work: they outlive the group while anyone holds it.

    Of a rank alone they are not, and it may be part of another program.
    """
    return _left_gloo or uses_gloo() and world_size() > 1
