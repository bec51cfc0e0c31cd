"""Run the fused linear cross-entropy in Triton's interpreter next to the chunked one in float64.

Prints one JSON line a case.
"""

import json

import interpret_bf16  # noqa: F401
import torch

from deberta_ds.config.model import MODELS
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.choose import Request
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLmHead
from deberta_ds.model.kernels import checks, fused_cross_entropy
from deberta_ds.model.kernels.fused_cross_entropy import fused_linear_cross_entropy
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

# rows, hidden, vocabulary, valid, temperature, dtype
CASES = (
    (37, 24, 211, None, 1.0, torch.float32),
    (130, 80, 300, 270, 0.7, torch.float32),
    (20, 64, 128, 100, 1.0, torch.float16),
    (33, 40, 300, 257, 0.5, torch.bfloat16),
    (0, 24, 211, None, 1.0, torch.float32),
)


def run(function, leaves, labels, uniforms, temperature, valid):
    """Return loss, gradients, number correct and sampled ids."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    loss, correct, sampled = function(
        *leaves, labels, uniforms, temperature=temperature, valid_vocab=valid)
    return [loss, *torch.autograd.grad(3 * loss, leaves)], correct.item(), sampled


def head_gradients(implementation: str) -> list[torch.Tensor]:
    """Return loss and gradients of a masked LM's head that was asked for one implementation."""
    config = ModelConfig(**MODELS["tiny"], cross_entropy=implementation)
    torch.manual_seed(3)
    words, head = TokenEmbedding(config.vocab_size, config.hidden_size), MaskedLmHead(config)
    leaves = [*words.parameters(), *head.parameters()]
    for leaf in leaves:
        torch.nn.init.normal_(leaf, std=0.3)
    labels = torch.arange(20)
    loss = head(torch.randn(20, config.hidden_size), words, labels, valid_vocab=150)[0]
    return [loss, *torch.autograd.grad(loss, leaves)]


def poisoned() -> list[bool]:
    """Return whether NaN in one row reaches the loss and that row's gradient alone."""
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    hidden[3, 2] = torch.nan
    leaves = [hidden.requires_grad_(), torch.randn(140, 16), torch.randn(140)]
    loss = fused_linear_cross_entropy(*leaves, torch.arange(5))[0]
    (gradient,) = torch.autograd.grad(loss, leaves[:1])
    rows = gradient.isnan().any(1).tolist()
    return [loss.isnan().item(), rows == [False, False, False, True, False]]


def main() -> None:
    fused_cross_entropy._GRADIENT_ELEMENTS = 1 << 12  # backward in several parts of the vocabulary
    pairs = zip(head_gradients("fused"), head_gradients("chunked"), strict=True)
    print(json.dumps([((a - b).norm() / b.norm()).item() for a, b in pairs]), flush=True)
    cpu = torch.device("cpu")
    found = checks.worst(checks.cross_entropy(Request(cpu, (torch.bfloat16,), 24)))
    print(json.dumps({"check": found[0], "poison": poisoned()}), flush=True)
    for rows, size, vocab, valid, temperature, dtype in CASES:
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(rows, size, generator=generator)
        weight = torch.randn(vocab, size, generator=generator) * 0.3
        bias = torch.randn(vocab, generator=generator)
        labels = torch.randint(0, valid or vocab, (rows,), generator=generator)
        labels[:1] = (valid or vocab) - 1  # the last one that may be predicted
        uniforms = torch.rand(rows, generator=generator)
        uniforms[:1], uniforms[1:2] = 0.0, 1.0 - 2.0**-24
        narrow = [x.to(dtype) for x in (hidden, weight, bias)]
        case = (labels, uniforms, temperature, valid)
        ours = run(fused_linear_cross_entropy, narrow, *case)
        again = run(fused_linear_cross_entropy, narrow, *case)
        right = run(linear_cross_entropy, [x.double() for x in narrow], *case)
        errors = [((a.double() - b).norm() / (b.norm().item() or 1)).item()
                  for a, b in zip(ours[0], right[0], strict=True)]
        line = {"rows": rows, "dtype": str(dtype)[6:], "errors": errors}
        line["dtypes_kept"] = [x.dtype for x in ours[0][1:]] == [x.dtype for x in narrow]
        line["same_correct"] = ours[1] == right[1]
        line["same_draws"] = torch.equal(ours[2], right[2])
        line["repeats"] = all(torch.equal(a, b) for a, b in zip(ours[0], again[0], strict=True))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
