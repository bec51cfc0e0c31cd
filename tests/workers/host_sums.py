"""Sums and gathers through the host's memory beside gloo's own: the same bits, in every type."""

import torch
import torch.distributed as torch_dist

from deberta_ds import dist, host_memory
from deberta_ds.train.engine import init_distributed

SLOT = host_memory._SLOT
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
init_distributed()
size, rank = dist.world_size(), dist.rank()
assert dist._host is not None
torch.manual_seed(rank)


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many sizes, so that another order of a sum is another sum."""
    return (torch.randn(numel) * torch.exp2(torch.randint(-9, 9, (numel,)))).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)), (found.dtype, found.shape)


for dtype in FLOATS:
    large = SLOT // dtype.itemsize
    for part in (1, 5, 4096, large // size + 1, large + 3):
        whole = numbers(part * size, dtype)
        for numel in {part, part * size}:  # those of all_reduce and reduce need not divide
            expected, found = whole[:numel].clone(), whole[:numel].clone()
            torch_dist.all_reduce(expected)
            assert dist.all_reduce(found) is None
            same(found, expected)
            for owner in {0, size - 1}:
                expected, found = whole[:numel].clone(), whole[:numel].clone()
                torch_dist.reduce(expected, owner)
                dist.reduce(found, owner)
                if rank == owner:
                    same(found, expected)
        expected, found = torch.empty(part, dtype=dtype), torch.empty(part, dtype=dtype)
        before = whole.clone()
        torch_dist.reduce_scatter_tensor(expected, whole.clone())
        dist.reduce_scatter(found, whole, async_op=True).wait()
        same(found, expected)
        same(whole, before)
        place = whole[part * rank : part * (rank + 1)]  # as ZeRO-3 does: into the input
        dist.reduce_scatter(place, whole)
        same(place, expected)
        mine = numbers(part, dtype)
        expected, found = torch.empty_like(whole), torch.empty_like(whole)
        torch_dist.all_gather_into_tensor(expected, mine)
        dist.all_gather(found, mine)
        same(found, expected)
        place = found.zero_()[part * rank : part * (rank + 1)]  # as ZeRO-1 does
        place.copy_(mine)
        dist.all_gather(found, place, async_op=True).wait()
        same(found, expected)

# Infinities, columns, other operations, other groups and whole numbers.
strange = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38, -0.0, 1e-42])
expected, found = strange * (1 - 2 * (rank % 2)), strange * (1 - 2 * (rank % 2))
torch_dist.all_reduce(expected)
dist.all_reduce(found)
same(found, expected)
columns = numbers(35, torch.float32).view(5, 7)
expected = columns.t().contiguous()
torch_dist.all_reduce(expected)
dist.all_reduce(columns.t())
same(columns.t(), expected)
most = torch.tensor([float(rank)])
dist.all_reduce(most, torch_dist.ReduceOp.MAX)
assert most.item() == size - 1
two = torch_dist.new_group([0, size - 1])
if rank in (0, size - 1):
    one = torch.ones(3)
    dist.all_reduce(one, group=two)
    assert one.tolist() == [2, 2, 2]
counts = torch.tensor([rank, 1])
dist.all_reduce(counts)
assert counts.tolist() == [size * (size - 1) // 2, size]
saved = torch.ones(3, requires_grad=True)
squared = (doubled := saved * 2) ** 2
dist.all_reduce(doubled)  # as gloo's, autograd does not see it
squared.sum().backward()
parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
dist.all_reduce(parameter)
assert parameter.tolist() == [size * (size - 1) / 2] * 3
if dist.is_main():
    print("equal")
dist.destroy()
