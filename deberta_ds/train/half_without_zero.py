"""Three faults of DeepSpeed 0.19.8 in bf16 and fp16 without ZeRO (FP16_UnfusedOptimizer), mended.

Its wrapper takes a step with gradients of zero while it is built: Adam's counter starts at one, and
weights have decayed. And `engine.backward` scales the loss for the wrappers of ZeRO alone, while
this one divides by the scale too: at the first scale of 2^16, Adam's eps is larger than what is
left of most gradients, and the run learns next to nothing without an error. It reports the norm of
the scaled gradient.
"""

import torch
from torch import Tensor

from deberta_ds.formats.engine_state import base_optimizer


@torch.no_grad()
def mend_half_without_zero(engine) -> None:
    """Put counters and fp32 weights of a new engine back to where a run starts; mend its norm."""
    optimizer = engine.optimizer
    if not _is_concerned(optimizer):
        return
    for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for half, master in zip(halves, masters, strict=True):
            master.copy_(half)
    for entry in base_optimizer(engine).state.values():
        if "step" in entry:
            entry["step"].zero_()
    step = optimizer.step

    def step_and_report(closure=None) -> None:
        scale = optimizer.loss_scale_config.cur_scale  # of this step's loss
        step(closure)
        if not optimizer.overflow:
            optimizer._global_grad_norm = optimizer._global_grad_norm / scale

    optimizer.step = step_and_report


def backward(engine, loss: Tensor) -> None:
    """Take the backward pass of one micro-batch's loss, at the loss scale that the step expects."""
    optimizer = engine.optimizer
    engine.backward(loss * optimizer.loss_scale_config.cur_scale if _is_concerned(optimizer)
                    else loss)


def _is_concerned(optimizer) -> bool:
    return type(optimizer).__name__ == "FP16_UnfusedOptimizer"
