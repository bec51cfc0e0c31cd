"""An optimizer: Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2).

    [optim]
    name = "examples/lion.py:lion"
    learning_rate = 1e-4     # a third to a tenth of AdamW's, with as much more weight_decay

Called once with the groups of parameters, as torch's optimizers take them (each has its
"weight_decay"), and the run's [optim]. Every step the group's "lr" is set anew. Under ZeRO a
"parameter" is a flat stretch of many, so what is computed must treat every number by itself; what
is kept of it in `state` are tensors of its shape, and numbers: those are in the checkpoints.
"""

import torch


def lion(groups: list[dict], optim) -> torch.optim.Optimizer:
    return Lion(groups, {"lr": optim.learning_rate, "betas": optim.betas})


class Lion(torch.optim.Optimizer):
    """w -= lr (sign(b1 m + (1 - b1) g) + decay w); m = b2 m + (1 - b2) g."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weights)
                direction = state["exp_avg"].lerp(weights.grad, 1 - beta1).sign_()
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.add_(direction, alpha=-group["lr"])
                state["exp_avg"].lerp_(weights.grad, 1 - beta2)
