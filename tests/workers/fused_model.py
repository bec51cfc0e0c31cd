"""Train and evaluate a tiny model through all Triton kernels in the interpreter, next to the CPU's.

Dropout is on: every path drops the same elements. Prints one JSON line a case: the largest relative
distance of losses and gradients.
"""

import json
from contextlib import nullcontext
from dataclasses import replace

import interpret_bf16  # noqa: F401
import numpy as np
import torch

from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig
from deberta_ds.data.rows import Row, collate
from deberta_ds.model import choose
from deberta_ds.model.backbone import init_parameters
from deberta_ds.model.choose import pick
from deberta_ds.objectives.mlm import MlmModel
from deberta_ds.objectives.rtd import RtdModel

CONFIG = ModelConfig(vocab_size=150, hidden_size=32, num_layers=2, num_heads=2,
                     intermediate_size=48, max_position=64, position_buckets=8)
CASES = {  # settings, checkpointing, autocast, training
    "rtd, terms kept, recomputed": (dict(keep_position_terms=True), "full", False, True),
    "mlm with a convolution under autocast": (dict(conv_kernel=3), "selective", True, True),
    "evaluation": (dict(), None, False, False),
}


def batch_of_a_packed_row():
    generator = np.random.default_rng(5)
    ids, labels = generator.integers(4, 140, 24), np.full(24, -100)
    targets = generator.choice(21, 4, replace=False)
    labels[targets], ids[targets] = ids[targets], 3
    segments = np.repeat([1, 2, 0], [14, 7, 3]).astype(np.int32)
    positions = np.concatenate([np.arange(14), np.arange(7), np.arange(3)]).astype(np.int32)
    return collate([Row(3, ids, labels, segments, positions)])


def run(name: str, fused: bool) -> list[torch.Tensor]:
    """Return the loss and all gradients, or in evaluation the loss and the logits."""
    settings, checkpointing, autocast, training = CASES[name]
    paths = ("fused", "fused") if fused else ("reference", "chunked")
    config = replace(CONFIG, **settings, attention=paths[0], cross_entropy=paths[1])
    if name.startswith("mlm"):
        model = MlmModel(config, 140)
    else:
        model = RtdModel(replace(config, num_layers=1), config, ObjectiveConfig(kind="rtd"),
                         sampling_seed=0)
    for module in model.modules():
        if checkpointing and hasattr(module, "checkpointing"):
            module.checkpointing = checkpointing
    init_parameters(model, 0.1, 0)
    model.train(training)
    torch.manual_seed(7)
    one = torch.ones(())
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with context, torch.set_grad_enabled(training):
        loss, _, per_token = model(batch_of_a_packed_row(), {"targets": one, "tokens": one})
    if not training:
        return [loss, per_token["logits"]]
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def main() -> None:
    interpreted = choose.interpreted
    for name in CASES:
        choose.interpreted = lambda: False
        pick.cache_clear()
        right = run(name, False)
        choose.interpreted = interpreted
        pick.cache_clear()
        found = run(name, True)
        scale = max(x.norm().item() for x in right[1:])
        errors = [(a.double() - b.double()).norm().item() / max(b.norm().item(), 1e-3 * scale)
                  for a, b in zip(found, right, strict=True)]
        worst = torch.tensor(errors).max().item()  # NaN if one is, unlike Python's max()
        print(json.dumps({"name": name, "error": worst, "tensors": len(errors)}), flush=True)


if __name__ == "__main__":
    main()
