"""Run to the end with one step made bad on purpose; write digests of the weights by step.

    pass_over.py RUN.toml DS.json OUT.json BAD_STEP
"""

import json
import sys
from pathlib import Path

from deberta_ds import config, deepspeed_config, dist
from deberta_ds.train import engine, loop


def main() -> None:
    run, origins = config.load(sys.argv[1], sys.argv[5:])
    bad_step, real_step, digests = int(sys.argv[4]), loop.train_step, {}

    def step_with_one_spike(model_engine, batches, *, step, ceiling, **options):
        parameters = list(model_engine.module.parameters())
        with engine.gathered(parameters):
            digests[step] = [float(p.double().sum()) for p in parameters]
        return real_step(model_engine, batches, step=step,
                         ceiling=-1.0 if step == bad_step else ceiling, **options)

    loop.train_step = step_with_one_spike
    loop.pretrain(run, deepspeed_config.load(sys.argv[2]), resume="auto", place="test",
                  origins=origins)
    Path(sys.argv[3]).write_text(json.dumps(digests))
    dist.destroy()


if __name__ == "__main__":
    main()
