"""Ranks and collectives: the only module that talks to torch.distributed.

Everything also works in a single process that never initialized a process group.
"""

import os
import socket
import threading
from concurrent.futures import Future, wait

import torch
import torch.distributed as torch_dist
from torch import Tensor

from deberta_ds.base.errors import UserError, user_message
from deberta_ds.cluster import alarm

_left_gloo = False


def is_distributed() -> bool:
    return torch_dist.is_available() and torch_dist.is_initialized()


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
    if is_distributed():  # NCCL warns where it must guess the device
        on_gpu = torch_dist.get_backend() == "nccl"
        torch_dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)


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


def from_main(function):
    """Return rank 0's picklable `function()` on every rank; the others do not call it."""
    return broadcast_object(function() if is_main() else None)


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


def all_reduce(values: Tensor, group=None) -> None:
    """Replace `values` by their sum over the ranks of `group`, or over all of them."""
    torch_dist.all_reduce(values, group=group)


def together(function):
    """Return `function()`; if the user's doing stops any rank, raise that UserError on every rank,
    with the name of the rank unless all say the same.

    Without this, the ranks that were spared would wait in their next collective for ever.
    """
    value, problem = None, None
    try:
        value = function()
    except Exception as error:
        problem = user_message(error)
        if problem is None:
            raise
    problems = gather_objects(problem and (problem, socket.gethostname()))
    if any(problems):
        number = next(number for number, one in enumerate(problems) if one)
        text, host = problems[number]
        alike = all(one and one[0] == text for one in problems)
        common = UserError(text if alike or number == 0 else f"rank {number} on {host}: {text}")
        common.on_every_rank = True
        raise common
    return value


def attended(function, look):
    """Return rank 0's `function()`, which a thread computes, and on all ranks `look()` once a
    second meanwhile: what that raises ends the wait, and the thread with the process.
    """
    task: Future = Future()

    def work() -> None:
        try:
            task.set_result(function())
        except BaseException as error:  # SystemExit, too
            task.set_exception(error)

    if is_main():
        threading.Thread(target=work, daemon=True).start()
    while not from_main(lambda: bool(wait([task], 1.0).done)):
        look()
    return broadcast_object(together(lambda: task.result() if is_main() else None))


def on_main(function) -> None:
    """Call `function` on rank 0; if the user's doing stops it, raise that UserError on every rank.
    """
    together(lambda: function() if is_main() else None)


def destroy() -> None:
    """Leave the process group, all ranks together."""
    global _left_gloo
    if is_distributed():
        barrier()
        alarm.end()
        _left_gloo = has_gloo_threads()
        torch_dist.destroy_process_group()


def has_gloo_threads() -> bool:
    """Return whether gloo's threads may be at work: they outlive the group while anyone holds it.

    Of a rank alone they are not, and it may be part of another program.
    """
    return _left_gloo or world_size() > 1 and torch_dist.get_backend() == "gloo"
