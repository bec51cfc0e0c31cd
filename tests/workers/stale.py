"""DeepSpeed alone: two layers used in turn under plain SGD; prints how far the unused one moved.

    stale.py STAGE
"""

import sys

import deepspeed
import torch
from torch import nn

from deberta_ds.train.engine import init_distributed


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, inputs, number):
        return self.layers[number](inputs).square().mean()


def main() -> None:
    init_distributed()
    torch.manual_seed(0)
    stage = int(sys.argv[1])
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    model = Turns()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_batch_size": 1, "zero_optimization": zero, "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True}, dist_init_required=False)
    moved = []
    for number in (0, 1):
        first = model.layers[0].weight
        gather = deepspeed.zero.GatheredParameters if stage == 3 else _Whole
        with gather([first]):
            before = first.detach().clone()
        engine.backward(engine(torch.ones(1, 8), number))
        engine.step()
        with gather([first]):
            moved.append((first.detach() - before).norm().item())
    print(f"moved {moved[0]} {moved[1]}")


class _Whole:
    def __init__(self, _parameters):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


if __name__ == "__main__":
    main()
