"""Pretrain a DeBERTa.

    deepspeed launch/pretrain.py --config RUN.toml --deepspeed_config DS.json

Works with deepspeed, torchrun, mpirun, srun, or without a launcher. To override a value of the run
file, write --train.steps=1000. `--explain` lists every key of a run file, `--explain rate` those
that contain "rate".
"""

import argparse
import os
from functools import partial
from pathlib import Path
from threading import Thread

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import UserError, exit_cleanly

_JOIN_SECONDS = 8.0
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--config", metavar="TOML", help="run file (model, data, optimizer, steps)")
    parser.add_argument("--deepspeed_config", metavar="JSON", help="ZeRO stage, precision, offload")
    parser.add_argument("--explain", nargs="?", const="", metavar="KEY",
                        help="explain a key of the run file, or every key, and exit")
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH",
                        help="checkpoint to resume from, also at a URL (default: the newest intact "
                             "one)")
    parser.add_argument("--check", action="store_true",
                        help="validate everything, run one micro-batch, write nothing")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it
    options, overrides = parser.parse_known_args()

    from deberta_ds.cluster.launcher import check_environment, rank_variables
    from deberta_ds.config import run_config
    from deberta_ds.config.options import explain
    from deberta_ds.engine import ds_config
    from deberta_ds.release import shape

    if options.explain is not None:
        explain(run_config.run_options(), options.explain, "run file")
        return 0
    if not (options.config and options.deepspeed_config):
        parser.error("--config and --deepspeed_config are needed")
    check_environment(os.environ | rank_variables(os.environ))
    try:
        run, origins = run_config.load(options.config, overrides,
                                       partial(shape.complete, resume=options.resume))
        ds = ds_config.load(options.deepspeed_config)
    except UserError as error:
        error.on_every_rank = not tell_the_others()
        raise

    from deberta_ds.cluster import dist  # heavy imports only after the configs are known to be good
    from deberta_ds.training import loop, rehearsal

    place = f"{Path(options.config)} with {Path(options.deepspeed_config)}"
    code = 0
    if options.check:
        rehearsal.rehearse(run, ds, resume=options.resume, place=place, origins=origins)
    else:
        code = loop.pretrain(run, ds, resume=options.resume, place=place, origins=origins)
    dist.destroy()
    return code


def tell_the_others() -> bool:
    """Join the group, where the other ranks of a job hear that this one fails; return whether there
    are any.
    """
    from deberta_ds.cluster.launcher import rank_variables

    if int((os.environ | rank_variables(os.environ)).get("WORLD_SIZE", 1)) == 1:
        return False
    from deberta_ds.engine.engine import init_distributed

    joining = Thread(target=init_distributed, daemon=True)  # they may have failed before
    joining.start()
    joining.join(_JOIN_SECONDS)
    return True


if __name__ == "__main__":
    exit_cleanly(main)
