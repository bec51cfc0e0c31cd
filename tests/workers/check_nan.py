"""launch/pretrain.py --check over weights that hold one NaN: check_nan.py RUN.toml DS.json."""

import sys

import torch

from deberta_ds.base.errors import exit_cleanly
from deberta_ds.config import run_config
from deberta_ds.engine import ds_config
from deberta_ds.training import rehearsal, start


def main() -> None:
    run, origins = run_config.load(sys.argv[1])
    words = torch.zeros(run.model.vocab_size, run.model.hidden_size)
    words[7, 3] = torch.nan
    start.first_weights = lambda run, tokenizer: ({"words.weight": words}, [])
    rehearsal.rehearse(run, ds_config.load(sys.argv[2]), resume="auto", place=sys.argv[1],
                       origins=origins)


if __name__ == "__main__":
    exit_cleanly(main)
