"""Ranks and collectives: the only module that talks to torch.distributed.

Everything also works in a single process that never initialized a process group.
"""

import os
import threading
from contextlib import suppress

import torch
import torch.distributed as torch_dist
from torch import Tensor

from deberta_ds.errors import UserError, user_message

_LEAVE_SECONDS = 3.0
_SMALL = 1 << 16  # numbers of a rank: below, a broadcast from each costs more than a gather


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
        torch_dist.all_reduce(values)
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


def sum_within(values: Tensor, group=None) -> None:
    """Add up `values` in place over a group of `group_of`, or over all ranks."""
    torch_dist.all_reduce(values, group=group)


def swap(values: Tensor, partner: int) -> None:
    """Send `values` to another rank and take as many from it, both at once."""
    theirs = torch.empty_like(values)
    work = torch_dist.batch_isend_irecv([torch_dist.P2POp(torch_dist.isend, values, partner),
                                         torch_dist.P2POp(torch_dist.irecv, theirs, partner)])
    for one in work:
        one.wait()


class _Works:
    """Several collectives that are waited for as one."""

    def __init__(self, works: list):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def gather_by_broadcasts(output_tensor: Tensor, input_tensor: Tensor, group=None,
                         async_op: bool = False):
    """As torch's all_gather_into_tensor, by one broadcast from every rank; the same numbers.

    gloo gathers into new memory and copies from there: 256 MiB between two ranks of a host go at
    0.7 GB/s, and at 1.9 by broadcasts into their place.
    """
    size = torch_dist.get_world_size(group)
    assert output_tensor.numel() == size * input_tensor.numel()  # or ranks wait for each other
    assert output_tensor.dtype == input_tensor.dtype
    if input_tensor.numel() < _SMALL:
        return torch_dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    parts = output_tensor.view(-1).tensor_split(size)
    mine = parts[torch_dist.get_rank(group)]
    if mine.data_ptr() != input_tensor.data_ptr():
        mine.copy_(input_tensor.view(-1))
    works = _Works([torch_dist.broadcast(part, group=group, group_src=source, async_op=True)
                    for source, part in enumerate(parts)])
    return works if async_op else works.wait()


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


def abandon() -> None:
    """Leave the process group without the others, as a rank does that ends on an error.

    gloo's threads may abort an interpreter that ends beside them; NCCL would wait for the others.
    So would gloo where a collective is still under way, hence a thread and a time.
    """
    def leave() -> None:
        with suppress(Exception):  # what ends the rank has been said
            torch_dist.destroy_process_group()

    if uses_gloo():
        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)


def destroy() -> None:
    """Leave the process group, all ranks together."""
    if is_distributed():
        torch_dist.barrier()
        torch_dist.destroy_process_group()
