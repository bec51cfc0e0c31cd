"""dist.gather_by_broadcasts beside torch's all_gather_into_tensor, in every type that is sent."""

import torch
import torch.distributed as torch_dist

from deberta_ds import dist
from deberta_ds.train.engine import init_distributed

init_distributed()
half = torch_dist.new_group([0, 2])
for group in (None, half):
    if group and dist.rank() == 1:
        continue
    size = torch_dist.get_world_size(group)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for numel in (0, 1, 4096, dist._SMALL, dist._SMALL + 7):
            mine = torch.randn(numel).mul(100).to(dtype) + dist.rank()
            expected, found = (torch.empty(numel * size, dtype=dtype) for _ in range(2))
            torch_dist.all_gather_into_tensor(expected, mine, group)
            assert dist.gather_by_broadcasts(found, mine, group) is None
            assert torch.equal(found, expected), (dtype, numel)
            found.zero_()
            place = found.view(size, -1)[torch_dist.get_rank(group)] if numel else mine
            place.copy_(mine)  # as ZeRO-1 does: its own part lies in the output
            dist.gather_by_broadcasts(found, place, group, async_op=True).wait()
            assert torch.equal(found, expected), (dtype, numel)
if dist.is_main():
    print("equal")
dist.destroy()
