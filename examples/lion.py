"""An optimizer: Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2).

    [optim]
    name = "examples/lion.py:lion"
    learning_rate = 1e-4     # a third to a tenth of AdamW's; raise weight_decay by the same factor

Called once with the parameter groups, as torch's optimizers take them (each has its
"weight_decay"), and the run's [optim]. The group's "lr" is set before every step. Under ZeRO a
"parameter" is a flat part of many parameters, so the update must be elementwise. `state` may hold
tensors of the parameter's shape and numbers; checkpoints save both.
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
