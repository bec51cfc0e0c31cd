"""Scale-invariant fine-tuning: adversarial noise on normalized word vectors.

Source: microsoft/DeBERTa sift/sift.py; the DeBERTa paper, section 5. The perturbed quantity is
what the input block normalizes (word vectors, and positions where they are absolute), after a
LayerNorm without parameters, detached; so without noise and step nothing changes. It stays in
fp32 up to the encoder's input: a step of 1e-4 is lost in 16 bits. What is mended here: a regression
output is compared by mean squared error (not by a softmax over the batch), the chosen divergence
shapes the final loss too, and nothing is hooked, so no tensor outlives its step. Cost of a step:
three forward and two backward passes.

Legend: R rows, L length, C hidden, E examples, N classes, K mentions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.finetune.answers import NEVER

_NORM_EPS = 1e-7


@dataclass(frozen=True)
class Sift:
    """Strength and shape of the perturbation; defaults of the official script."""

    weight: float  # lambda; the official recipes use 3 to 5
    step: float = 1e-4
    noise: float = 1e-2
    loss: str = "symmetric_kl"


def adversarial_divergence(
    score: Callable[[Tensor], Tensor], sums_RLC: Tensor, clean_scores: Tensor, sift: Sift
) -> Tensor:
    """Return the divergence of clean from perturbed scores, one fp32 value per example [E] or [K].

    `score` maps the input block's sums, in fp32, to scores. Gradients reach the parameters through
    both branches, and the word table only through the clean one (the perturbed input is detached).
    """
    base_RLC = F.layer_norm(sums_RLC.detach().float(), sums_RLC.shape[-1:], eps=_NORM_EPS)
    noise_RLC = torch.randn_like(base_RLC) * sift.noise
    noise_RLC = noise_RLC.clamp(-2 * sift.noise, 2 * sift.noise).requires_grad_()
    perturbed = score(base_RLC + noise_RLC)
    ascent = divergence(perturbed, clean_scores.detach(), sift.loss).sum()
    # Only the noise gets a gradient: no parameter is touched by the ascent.
    (slope_RLC,) = torch.autograd.grad(ascent, noise_RLC)
    largest_RL1 = slope_RLC.abs().amax(-1, keepdim=True)
    step_RLC = sift.step * slope_RLC / (1e-6 + largest_RL1)
    step_RLC = torch.where(slope_RLC.norm().isfinite(), step_RLC, torch.zeros_like(step_RLC))
    attacked_RLC = base_RLC + noise_RLC.detach() + step_RLC
    return divergence(score(attacked_RLC), clean_scores, sift.loss)


def divergence(scores: Tensor, target: Tensor, kind: str) -> Tensor:
    """Return one non-negative-gradient divergence per row of `scores` against `target`, in fp32.

    [E, N] are class scores, [E, 1] a regression (always MSE), [K] independent yes/no scores.
    Cross-entropies stand for KL: the gradients are equal, the value is offset by an entropy.
    """
    if scores.ndim == 1:  # a yes/no score s is the two-class softmax of (s, 0)
        scores = torch.stack([scores, torch.zeros_like(scores)], -1)
        target = torch.stack([target, torch.zeros_like(target)], -1)
    if kind == "mse" or scores.size(-1) == 1:
        columns = (target > NEVER).sum(-1)  # not those of a longer neighbour in the batch
        return (scores - target).square().sum(-1) / columns
    log_p, log_t = scores.log_softmax(-1), target.log_softmax(-1)
    forward = -(log_t.detach().exp() * log_p).sum(-1)
    if kind == "kl":
        return forward
    return forward - (log_p.detach().exp() * log_t).sum(-1)
