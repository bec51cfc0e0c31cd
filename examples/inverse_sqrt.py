"""A learning-rate schedule: a linear warm-up, then 1 / sqrt(step) (Vaswani et al., 2017).

    [optim]
    schedule = "examples/inverse_sqrt.py:inverse_sqrt"

Called before every update with its number (0 .. total_steps - 1), the number of steps of the run
and its [optim]. The result is multiplied by optim.learning_rate. It depends on nothing else, so a
resumed run continues with the same learning rates.
"""


def inverse_sqrt(step: int, total_steps: int, optim) -> float:
    warmup = max(1, optim.warmup_steps)
    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
