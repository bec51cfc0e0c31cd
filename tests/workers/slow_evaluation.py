"""launch/pretrain.py whose evaluations take a minute: slow_evaluation.py ARGUMENTS ..."""

import runpy
import time
from pathlib import Path

from deberta_ds.training import loop

evaluate = loop.evaluate


def slowly(*arguments):
    for _ in range(600):
        time.sleep(0.1)
        arguments[-1]()  # as before each micro-batch
    return evaluate(*arguments)


loop.evaluate = slowly
runpy.run_path(str(Path(__file__).parents[2] / "launch/pretrain.py"), run_name="__main__")
