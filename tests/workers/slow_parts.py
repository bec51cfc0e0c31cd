"""launch/pretrain.py of which a part takes a minute: slow_parts.py PART ARGUMENTS ..."""

import os
import runpy
import sys
import time
from pathlib import Path

from deberta_ds.checkpoint import upload
from deberta_ds.training import loop, start

evaluate, open_inputs = loop.evaluate, start.open_inputs


def slow_evaluate(*arguments):
    for _ in range(600):
        time.sleep(0.1)
        arguments[-1]()  # as before each micro-batch
    return evaluate(*arguments)


def slow_open(*arguments):
    if os.environ["RANK"] == "0":  # the others wait for it
        time.sleep(60)
    return open_inputs(*arguments)


part = sys.argv.pop(1)
if part == "evaluation":
    loop.evaluate = slow_evaluate
elif part == "start":
    start.open_inputs = slow_open
elif part == "upload":
    upload.Uploads._attempt = lambda self: time.sleep(60)
runpy.run_path(str(Path(__file__).parents[2] / "launch/pretrain.py"), run_name="__main__")
