"""SiFT: directions, formula, gradients, mended defects; and the stream of fine-tuning's batches."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from superglue_helpers import sample, tiny_start

from deberta_ds.finetuning import loop
from deberta_ds.finetuning.features import collate, encode
from deberta_ds.finetuning.heads import NEVER, TaskModel, adversarial_divergence, divergence
from deberta_ds.finetuning.loop import stream
from deberta_ds.model.backbone import Backbone, init_parameters
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import task_named


def model_and_batch(name: str, settings: Settings, shape: str = "v3"):
    start = tiny_start(shape)
    config = dataclasses.replace(start.config, hidden_dropout=0.0, attention_dropout=0.0,
                                 max_position=256)
    model = TaskModel(task_named(name), Backbone(config),
                      dataclasses.replace(settings, head_dropout=0.0))
    init_parameters(model, 0.1, 3)
    features = encode(task_named(name), sample(name).examples, start.tokenizer,
                      max_length=128, window_overlap=16)
    return model.train(), collate(features[:8])


def test_divergences_are_their_formulas():
    torch.manual_seed(0)
    p, t = torch.randn(5, 3), torch.randn(5, 3)
    soft_p, soft_t = p.softmax(-1), t.softmax(-1)
    kl = -(soft_t * soft_p.log()).sum(-1)
    torch.testing.assert_close(divergence(p, t, "kl"), kl)
    both = kl - (soft_p * soft_t.log()).sum(-1)
    torch.testing.assert_close(divergence(p, t, "symmetric_kl"), both)
    torch.testing.assert_close(divergence(p, t, "mse"), (p - t).square().mean(-1))
    s, u = torch.randn(4), torch.randn(4)
    wanted = F.binary_cross_entropy_with_logits(s, torch.sigmoid(u), reduction="none")
    torch.testing.assert_close(divergence(s, u, "kl"), wanted)
    padding = torch.full((5, 7), NEVER)  # what a longer neighbor pads an answer with weighs nothing
    padded = [torch.cat([values, padding], 1) for values in (p, t)]
    torch.testing.assert_close(divergence(*padded, "mse"), divergence(p, t, "mse"))
    scores, target = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [5.0]])
    for kind in ("symmetric_kl", "kl", "mse"):  # of a regression per row, no softmax over a batch
        assert divergence(scores, target, kind).tolist() == [0.0, 9.0]


def test_gradients_are_those_of_symmetric_kl():
    torch.manual_seed(1)
    p, t = (torch.randn(6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(divergence(p, t, "symmetric_kl").sum(), (p, t))
    log_p, log_t = p.log_softmax(-1), t.log_softmax(-1)
    # Each half lets only its own student move.
    for student, teacher, scores, gradient in ((log_p, log_t, p, found[0]),
                                               (log_t, log_p, t, found[1])):
        kl = (teacher.detach().exp() * (teacher.detach() - student)).sum()
        (wanted,) = torch.autograd.grad(kl, scores, retain_graph=True)
        torch.testing.assert_close(gradient, wanted)
    assert torch.autograd.grad(divergence(p, t, "kl").sum(), t, allow_unused=True) == (None,)


def test_the_step_goes_uphill_and_is_bounded():
    torch.manual_seed(2)
    weight = torch.randn(8, 3, dtype=torch.float64)
    words = torch.randn(2, 4, 8, dtype=torch.float64)
    seen = []

    def score(vectors):
        seen.append(vectors.detach().clone())
        return vectors.double().mean(1) @ weight

    base = F.layer_norm(words.float(), (8,), eps=1e-7)
    clean = base.double().mean(1) @ weight  # of the unmoved input: the noise alone lies between
    adversarial_divergence(score, words, clean, Settings(sift_step=0.3, sift_noise=0.1))
    before, after = seen
    moving = before.double().requires_grad_()
    log_p, log_t = (moving.mean(1) @ weight).log_softmax(-1), clean.log_softmax(-1)
    # Of symmetric KL each half lets its own student move: here that of the moving scores.
    (uphill,) = torch.autograd.grad((log_t.exp() * (log_t - log_p)).sum(), moving)
    wanted = 0.3 * uphill / (1e-6 + uphill.abs().amax(-1, keepdim=True))
    torch.testing.assert_close((after - before).double(), wanted, rtol=1e-3, atol=1e-4)
    moved = (after - before).abs().amax(-1)
    torch.testing.assert_close(moved, torch.full_like(moved, 0.3), rtol=1e-3, atol=1e-4)
    assert ((before - base).abs() <= 0.2 + 1e-6).all()
    values = [divergence(x.double().mean(1) @ weight, clean, "symmetric_kl").sum() for x in seen]
    assert values[1] > values[0]


@pytest.mark.parametrize("name", ["RTE", "COPA", "ReCoRD", "WiC", "MultiRC"])
@pytest.mark.parametrize("kind", ["symmetric_kl", "kl", "mse"])
def test_the_loss_option_reaches_the_final_loss(name, kind):
    settings = Settings(sift_weight=2.0, sift_loss=kind, sift_noise=0.2)
    model, batch = model_and_batch(name, settings)
    torch.manual_seed(5)
    total = model(batch).loss_sum
    model.settings = Settings()
    clean = model(batch)
    torch.manual_seed(5)
    words = model.sums(batch)
    parts = adversarial_divergence(lambda v: model.scores(v, batch), words, clean.scores, settings)
    if name == "ReCoRD":
        group = batch.slot_example_K
        parts = torch.stack([parts[group == e].mean() for e in range(batch.labels_E.numel())])
    torch.testing.assert_close(total, clean.loss_sum + 2.0 * parts.sum(), rtol=1e-4, atol=1e-5)
    assert bool(total.isfinite())


def test_the_ascent_leaves_no_gradient_and_evaluation_is_plain():
    model, batch = model_and_batch("RTE", Settings(sift_weight=1.0))
    output = model(batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    output.loss_sum.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    with torch.no_grad():
        evaluated = model(batch)
    model.settings = Settings()
    torch.testing.assert_close(evaluated.loss_sum, model(batch).loss_sum)


@pytest.mark.parametrize("shape", ["v3", "absolute"])
def test_without_noise_and_step_the_encoder_sees_what_it_saw(shape):
    model, batch = model_and_batch("RTE", Settings(), shape)
    clean = model.scores(model.sums(batch), batch)
    seen = []

    def score(sums_RLC):
        seen.append(model.backbone.trunk.encode(sums_RLC, batch.segments_RL))
        return model.scores(sums_RLC, batch)

    adversarial_divergence(score, model.sums(batch), clean,
                           Settings(sift_step=0.0, sift_noise=0.0))
    hidden = model.backbone(batch.input_ids_RL, batch.segments_RL)
    for found in seen:
        torch.testing.assert_close(found, hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_step_is_not_lost_in_16_bits(kind):
    """With the noise of the official script some slopes are too small for 16 bits; not with thirty
    times as much.
    """
    model, batch = model_and_batch("RTE", Settings())
    model = model.to(kind)
    torch.manual_seed(0)
    seen = []

    def score(sums_RLC):
        seen.append(sums_RLC.detach())
        return model.scores(sums_RLC, batch)

    clean = model.scores(model.sums(batch), batch)
    adversarial_divergence(score, model.sums(batch), clean, Settings(sift_noise=0.3))
    before, after = seen
    assert before.dtype == torch.float32
    real = batch.segments_RL > 0
    assert float((before != after)[real].float().mean()) > 0.99
    assert float((after - before).abs().amax()) == pytest.approx(1e-4, rel=0.05)


def rows_of_stream(lengths, updates, global_batch_size, group_updates, seed=3) -> list[list[int]]:
    return [
        stream(lengths, seed, step, global_batch_size, group_updates) for step in range(updates)]


def test_the_stream_is_every_epoch_a_permutation_and_knows_its_place():
    lengths = np.arange(12)
    rows = [row for batch in rows_of_stream(lengths, 9, 4, 1) for row in batch]
    for epoch in range(3):
        assert sorted(rows[12 * epoch : 12 * epoch + 12]) == list(range(12))
    assert rows[:12] != rows[12:24]
    assert rows[8:12] == stream(lengths, 3, 2, 4, 1)
    assert sorted(stream(np.arange(5), 1, 0, 8, 1)[:5]) == list(range(5))  # a batch above the data


@pytest.mark.parametrize("num_rows", [96, 100, 7, 3])
@pytest.mark.parametrize("group_updates", [2, 5, 16])
def test_batches_of_like_lengths_still_see_every_row_once_an_epoch(num_rows, group_updates):
    lengths = np.random.default_rng(0).integers(5, 300, num_rows)
    plain = rows_of_stream(lengths, 60, 4, 1)
    dealt = rows_of_stream(lengths, 60, 4, group_updates)
    assert plain == rows_of_stream(lengths, 60, 4, 1) and all(len(batch) == 4 for batch in dealt)
    for epoch in range(60 * 4 // num_rows):
        # Whole updates of an epoch are dealt among themselves, so the counts at its end agree.
        seen = [row for batch in dealt for row in batch][: (epoch + 1) * num_rows]
        assert sorted(seen) == sorted([row for batch in plain for row in batch][: len(seen)])
    if num_rows >= 96:
        def padded(batches):
            return sum(len(batch) * max(lengths[batch]) for batch in batches)

        assert padded(dealt) < (0.9 if group_updates == 2 else 0.8) * padded(plain)


def test_updates_of_a_group_are_dealt_by_length_and_made_in_the_groups_own_order():
    """A run that goes on must find the same batches: the formula of the docstring, as a loop."""
    lengths = np.random.default_rng(1).integers(5, 90, 24)
    order = np.random.default_rng([3, 0]).permutation(24)
    for step in range(12):
        low = step // 4 * 4
        rows = sorted(order[2 * low:2 * low + 8].tolist(), key=lambda row: lengths[row])
        turn = np.random.default_rng([3, 0, low]).permutation(4)[step - low]
        assert loop.stream(lengths, 3, step, 2, 4) == rows[2 * turn:2 * turn + 2]
