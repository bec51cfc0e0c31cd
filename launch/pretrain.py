"""Pretrain a DeBERTa: `deepspeed launch/pretrain.py --config RUN.toml --deepspeed_config DS.json`.

Works the same under deepspeed, torchrun, mpirun, srun, or alone. Any value of the run file can be
overridden: --train.steps=1000
"""

import argparse
import os
from pathlib import Path

from deberta_ds.errors import exit_cleanly

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="TOML", help="what is computed")
    parser.add_argument("--deepspeed_config", required=True, metavar="JSON", help="how it is run")
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH",
                        help="which checkpoint to go on from (default: the newest whole one)")
    parser.add_argument("--check", action="store_true",
                        help="check everything, run one micro-batch, write nothing")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it
    options, overrides = parser.parse_known_args()

    from deberta_ds import config, deepspeed_config

    run, origins = config.load(options.config, overrides)
    ds_values = deepspeed_config.load(options.deepspeed_config)

    from deberta_ds import dist  # heavy imports only after the configs are known to be good
    from deberta_ds.train import loop

    place = f"{Path(options.config)} with {Path(options.deepspeed_config)}"
    code = 0
    if options.check:
        loop.rehearse(run, ds_values, place=place, origins=origins)
    else:
        code = loop.pretrain(run, ds_values, resume=options.resume, place=place, origins=origins)
    dist.destroy()
    return code


if __name__ == "__main__":
    exit_cleanly(main)
