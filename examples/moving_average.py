"""After each update: a moving average of the weights, which checkpoints keep.

    [train]
    after_update = ["examples/moving_average.py:update"]

    python examples/moving_average.py runs/v3_base OUT     # as a Hugging Face directory

`optimizer.state` is {weights: moments} of this rank's fp32 weights: under ZeRO flat parts of many
parameters. What `update` keeps next to the moments, tensors of the weights' shape and numbers, is
saved and restored as they are, also on another number of ranks or in another ZeRO stage.
"""

from pathlib import Path

import torch

from deberta_ds.base.command_line import local, parser_for
from deberta_ds.base.errors import exit_cleanly

DECAY = 0.999


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, step: int) -> None:
    for weights, moments in optimizer.state.items():
        if moments:  # none before its first gradient
            if "average" not in moments:
                moments["average"] = weights.detach().clone()
            moments["average"].lerp_(weights, 1 - min(DECAY, step / (step + 10)))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("run", help="run or checkpoint directory")
    parser.add_argument("out", type=local, help="new directory")
    options = parser.parse_args()

    from deberta_ds.publish.convert import check_out, write_release
    from deberta_ds.release.reader import read_release

    check_out(options.out)
    write_release(read_release(options.run, key="average"), options.run, Path(options.out), "hf")
    print(f"wrote the moving average of {options.run} to {options.out}")


if __name__ == "__main__":
    exit_cleanly(main)
