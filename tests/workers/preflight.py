"""Worker: preflight on four ranks that pretend to be hosts; rank 2 is slow to swap."""

import sys
import time

from deberta_ds.cluster import dist
from deberta_ds.engine import engine
from deberta_ds.training.rehearsal import preflight

device = engine.init_distributed()
rank = dist.rank()
cases = {"two hosts of two": f"node{rank // 2}", "four hosts": f"node{rank}"}
real_swap = dist.swap


def swap(values, partner):
    if rank == 2:
        time.sleep(0.2)
    real_swap(values, partner)


dist.swap = swap
for name, host in cases.items():
    lines = preflight(device, host)
    if dist.is_main():
        print(name, "|", " | ".join(lines), flush=True)
dist.destroy()
sys.exit(0)
