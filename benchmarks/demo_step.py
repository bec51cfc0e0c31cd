"""The demo's training steps the plain way and ours: seconds a step, and the losses of both.

The plain way takes the reference attention, whole logits of the masked rows with their float64
softmax for the draw, and products as torch comes; model, rows and optimizer are the same, one step
of each in turn. A draw close to the edge between two words may fall on either side, after which two
runs differ in their inputs: so ours gets the draws of the plain way, and those that it would have
made otherwise are counted. The losses must agree: it fails if they do not. Writes
benchmarks/results/demo_step-cpu.json.

  make demo                              # leaves runs/demo/corpus
  python -m benchmarks.demo_step
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.measure import save
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.config import run_config
from deberta_ds.data.rows import Batch, RowDataset, collate
from deberta_ds.engine.optim import build_optimizer
from deberta_ds.model import cpu, embeddings
from deberta_ds.model.backbone import init_parameters
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy
from deberta_ds.objectives.build import build_model
from deberta_ds.tokenizer import Tokenizer

DEMO = "launch/runs/demo.toml"
TOLERANCE = 1e-5  # of the loss, relative, at every step
PLAIN, OURS = "reference attention, whole logits", "ours"


def whole_logits(hidden_TC, weight_VC, bias_V, labels_T, uniforms_T=None, temperature=1.0,
                 valid_vocab=None, gradient=None):
    """Return what `linear_cross_entropy` does, the plain way; `gradient` is left alone."""
    logits_TV = hidden_TC @ weight_VC[:valid_vocab].t() + bias_V[:valid_vocab]
    loss_sum = F.cross_entropy(logits_TV, labels_T, reduction="sum")
    correct = (logits_TV.argmax(-1) == labels_T).sum()
    cumulative_TV = (logits_TV.detach().double() / temperature).softmax(-1).cumsum(-1)
    drawn_T = torch.searchsorted(cumulative_TV, uniforms_T.double()[:, None], right=True)[:, 0]
    return loss_sum, correct, drawn_T.clamp_(max=logits_TV.shape[1] - 1)


class Draws:
    """The draws of the plain way, handed to ours in the same order."""

    def __init__(self):
        self.ours = linear_cross_entropy
        self.waiting: list[torch.Tensor] = []
        self.total = self.different = 0

    def plain_head(self, *arguments, **options):
        """Return what `whole_logits` does; keep its draw."""
        results = whole_logits(*arguments, **options)
        self.waiting.append(results[2])
        return results

    def our_head(self, *arguments, **options):
        """Return what `linear_cross_entropy` does, with the draw of the plain way."""
        loss_sum, correct, drawn_T = self.ours(*arguments, **options)
        kept_T = self.waiting.pop(0)
        self.total += len(kept_T)
        self.different += int((drawn_T != kept_T).sum())
        return loss_sum, correct, kept_T


class Trainer:
    """One of the two ways: its model, its optimizer, and what it has measured."""

    def __init__(self, run: run_config.RunConfig, attention: str, head, valid_vocab: int):
        run = replace(run, model=replace(run.model, attention=attention))
        self.run, self.head = run, head
        self.model = build_model(run, valid_vocab)
        init_parameters(self.model, run.model.init_std, run.train.seed)
        self.optimizer = build_optimizer(self.model, run.optim)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, micro_batches: list[Batch]) -> None:
        """Run one optimizer step."""
        embeddings.loss_function = lambda *_: self.head
        targets = sum(batch.num_targets for batch in micro_batches)
        tokens = sum(batch.num_tokens for batch in micro_batches)
        normalizers = {"targets": torch.tensor(float(targets)),
                       "tokens": torch.tensor(float(tokens))}
        start, total = time.process_time(), 0.0
        for batch in micro_batches:
            loss = self.model(batch, normalizers)[0]
            loss.backward()
            total += loss.item()
        optim = self.run.optim
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip_norm)
        rate = optim.learning_rate * min(1.0, (len(self.losses) + 1) / optim.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(time.process_time() - start)
        self.losses.append(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run, _ = run_config.load(DEMO)
    source = run.data.sources[0]
    if not Path(source.path).exists():
        raise UserError(f"{source.path}: no such corpus; run `make demo` first")
    tokenizer = Tokenizer(run.data.tokenizer)
    dataset = RowDataset(
        run.data.sources, tokenizer, seq_len=run.data.seq_len,
        seed=run.data.seed, mask=run.objective.mask)
    draws = Draws()
    ways = {PLAIN: Trainer(run, "reference", draws.plain_head, tokenizer.size),
            OURS: Trainer(run, "tiled", draws.our_head, tokenizer.size)}
    cpu.use_onednn()  # both as the demo does
    cpu.keep_heap()
    rows, micro = run.train.global_batch_size, run.train.micro_batch_size
    for step in range(options.steps):
        first = step * rows
        batches = [collate([dataset[number] for number in range(start, start + micro)])
                   for start in range(first, first + rows, micro)]
        with cpu.mkl_matmuls():
            ways[PLAIN].step(batches)
        ways[OURS].step(batches)
    plain, ours = ways[PLAIN], ways[OURS]
    pairs = zip(plain.losses, ours.losses, strict=True)
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    results = {"steps": options.steps, "largest_relative_loss_difference": difference}
    results |= {"draws": draws.total, "draws_that_differ": draws.different}
    for name, way in ways.items():
        median = sorted(way.seconds)[len(way.seconds) // 2]
        results[name] = {"median_seconds": median, "losses": way.losses}
        print(f"{name:36} {median * 1e3:7.1f} ms per step, last loss {way.losses[-1]:.5f}")
    print(f"losses of {options.steps} steps differ by {difference:.1e} at most; "
          f"{draws.different} of {draws.total} draws differ")
    print(f"wrote {save('demo_step', 'cpu', results)}")
    if difference > TOLERANCE:
        raise UserError(f"the two ways differ by {difference:.1e}, above {TOLERANCE:.0e}")


if __name__ == "__main__":
    exit_cleanly(main)
