"""launch/finetune.py, ended by SIGKILL: finetune_killed.py STEP NAN_ROW ARGUMENTS ...

It saves after each update. The last rank kills itself before update STEP (-1: it does not). The
loss of the training example at NAN_ROW is NaN (-1: of none).
"""

import math
import os
import runpy
import signal
import sys
from pathlib import Path

import torch

from deberta_ds.cluster import dist
from deberta_ds.finetuning import loop

STEP, NAN_ROW = int(sys.argv[1]), int(sys.argv[2])
loop.MOST_OF_TIME, loop.SAVE_SECONDS = math.inf, 0.0
take_step, collate = loop.train_step, loop.collate


def step_or_die(engine, batches, *, step, **options):
    if step == STEP and dist.rank() == dist.world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(engine, batches, step=step, **options)


def collate_with_nan(features, weights):
    batch = collate(features, weights)
    batch.weights_E[torch.tensor([row == NAN_ROW for row in batch.rows])] = torch.nan
    return batch


loop.train_step, loop.collate = step_or_die, collate_with_nan
sys.argv = sys.argv[:1] + sys.argv[3:]
runpy.run_path(str(Path(__file__).parents[2] / "launch/finetune.py"), run_name="__main__")
