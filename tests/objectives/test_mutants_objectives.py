"""What changed a logged number without a test noticing (docs/evidence/reliability.md)."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from data_helpers import tiny_tokenizer
from launching import make_run

from deberta_ds.base.splitmix import GAMMA, MASK64, mix64
from deberta_ds.config import run_config
from deberta_ds.config.model import MODELS
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model import flops
from deberta_ds.model.encoder import Encoder
from deberta_ds.model.init import init_parameters
from deberta_ds.objectives import base, mlm, rtd, rtd_cached
from deberta_ds.objectives.build import build_model, held_parameters

TOTAL = {"masked_loss": 90.0, "masked_correct": 4.0, "targets": 10.0, "tokens": 80.0}


def test_a_masked_lm_is_scored_per_target():
    assert base.masked_scores(TOTAL, "masked") == {
        "masked_loss": 9.0, "masked_accuracy": 0.4, "masked_perplexity": math.exp(9.0)}
    assert base.MINIMAL_PAIRS.baseline_of({}) == 0.5


@pytest.mark.parametrize("layers, absolute, wrong", [
    (1, False, True), (2, False, False), (1, True, False)])
def test_a_decoder_needs_a_layer_below_it(layers, absolute, wrong):
    assert bool(base.decoder_problem(layers, absolute, "model.num_layers")) == wrong


def test_what_better_means_follows_the_metric():
    loss, accuracy, perplexity = base.masked_metrics("masked", "Masked-token", "loss")
    assert [metric.is_better(1.0, 2.0) for metric in (loss, accuracy, perplexity)] == [
        True, False, True]
    assert [metric.is_better(2.0, 1.0) for metric in (loss, accuracy, perplexity)] == [
        False, True, False]


def test_a_part_waits_or_stays_and_a_model_is_told_what_to_recompute(tmp_path):
    run, _ = run_config.load(make_run(tmp_path, kind='"mlm"'))
    names = ["words.weight", "masked_lm.positions.weight"]
    for steps, words, held in (
            (0, False, (set(names), set())), (2, False, (set(), set(names))),
            (2, True, ({names[0]}, {names[1]}))):
        train = dataclasses.replace(run.train, freeze=("embeddings",), freeze_steps=steps,
                                    activation_checkpointing="full",
                                    activation_checkpointing_interval=2)
        one = dataclasses.replace(run, train=train, init=dataclasses.replace(
            run.init, source="somewhere", embeddings_only=words))
        assert held_parameters(one, names) == held
    (encoder,) = (module for module in build_model(one).modules() if isinstance(module, Encoder))
    assert (encoder.checkpointing, encoder.checkpointing_interval) == ("full", 2)


def test_means_and_scores_divide_by_what_was_counted(tmp_path):
    run, _ = run_config.load(make_run(tmp_path))
    weight, share = run.objective.rtd_weight, 8 / 80
    total = {"generator_loss": 90.0, "generator_correct": 4.0, "discriminator_loss": 20.0,
             "discriminator_correct": 72.0, "replaced": 8.0, "targets": 10.0, "tokens": 80.0}
    gain = -share * math.log(share) - (1 - share) * math.log(1 - share) - 0.25
    detection = {"discriminator_loss": 0.25, "discriminator_gain": pytest.approx(gain)}
    assert rtd.means(run, total) == {"loss": 9 + weight * 0.25, "generator_loss": 9.0, **detection}
    assert rtd_cached.means(run, total) == {"loss": weight * 0.25, **detection}
    mask = dataclasses.replace(run.objective.mask, rate=0.4, final_rate=0.2)
    falling = dataclasses.replace(run, objective=dataclasses.replace(run.objective, mask=mask))
    length, half = run.data.seq_len, rtd.encoders(run)["generator"]
    assert half.num_layers == run.model.num_layers // 2
    detector = 3 * flops.detector(run.model, length)  # backward is 2 x forward
    assert rtd_cached.flops_per_token(falling) == detector
    assert rtd.flops_per_token(falling) == pytest.approx(
        detector + 3 * flops.masked_lm(half, length, 0.3))
    assert mlm.flops_per_token(falling) == pytest.approx(
        3 * flops.masked_lm(run.model, length, 0.3))
    assert mlm.means(run, TOTAL) == {"loss": 9.0, "masked_loss": 9.0}
    per_token = {"replaced": torch.tensor([False, True, False, True]),
                 "logits": torch.tensor([0.1, 0.9, 0.5, 0.3])}
    scores = rtd.scores(total, per_token)
    assert scores == base.masked_scores(total, "generator") | detection | {
        "discriminator_accuracy": 0.9, "prior_accuracy": 0.9, "roc_auc": 0.75,
        "average_precision": pytest.approx(5 / 6)}
    assert rtd.detection_scores(total | {"replaced": 60.0}, per_token)["prior_accuracy"] == 0.75
    baselines = {metric.key: metric.baseline_of(scores) for metric in rtd.DETECTION_METRICS}
    assert baselines == {
        "discriminator_loss": pytest.approx(gain + 0.25), "discriminator_gain": 0.0,
        "discriminator_accuracy": 0.9, "roc_auc": 0.5, "average_precision": pytest.approx(share)}


def test_a_model_samples_by_the_seed_of_its_data_and_predicts_no_unused_id(tmp_path):
    run, _ = run_config.load(make_run(tmp_path))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, seed=run.train.seed + 1))
    model = build_model(run, 600)
    assert (model.sampling_seed, model.valid_vocab) == (run.data.seed, 600)
    assert mlm.build(run, 600).valid_vocab == 600
    assert rtd.clip_groups(run) == ("discriminator.",)
    shared = dataclasses.replace(run.objective, embedding_sharing="es")
    assert rtd.clip_groups(dataclasses.replace(run, objective=shared)) == (
        "discriminator.", "words.")


def test_padding_is_in_no_sum_of_a_discriminator():
    logits = torch.tensor([[2.0, -1.0, 3.0, 0.0, 5.0]])
    replaced = torch.tensor([[True, False, False, False, False]])
    real = torch.tensor([[True, True, True, True, False]])
    sums = rtd.detection_sums(logits, replaced, real)
    wanted = torch.nn.functional.softplus(torch.tensor([-2.0, -1.0, 3.0, 0.0])).sum()
    assert sums["discriminator_loss"].item() == pytest.approx(wanted.item())
    assert (sums["discriminator_correct"].item(), sums["replaced"].item()) == (3, 1)


def test_a_sentence_s_score_is_its_log_likelihood():
    """Of a masked LM minus the loss; of a discriminator over the tokens between [CLS] and [SEP]."""
    tokenizer, sentences = tiny_tokenizer(), [[1, 20, 21, 2], [1, 30, 2]]
    assert mlm.sentence_scores(lambda batch: ({"masked_loss": torch.tensor(3.0)}, {}), sentences,
                               tokenizer) == [-3.0, -3.0]
    logits = torch.arange(7.0)
    found = rtd.sentence_scores(lambda batch: ({}, {"logits": logits}), sentences, tokenizer)
    assert found == pytest.approx([-math.log1p(math.e) - math.log1p(math.e**2),
                                   -math.log1p(math.e**5)])


def test_samples_are_the_same_numbers_for_ever():
    """A run that goes on must replace as before: splitmix64 of seed, row and column, 24 bits."""
    def loop(value, *parts):
        for part in parts:
            value = mix64((value + part * GAMMA) & MASK64)
        return (value >> 40) * 2.0**-24

    rows, columns = torch.tensor([0, 1, 2**40, 5]), torch.tensor([0, 511, 7, 100])
    wanted = [loop(7, *pair) for pair in zip(rows.tolist(), columns.tolist(), strict=True)]
    assert rtd.token_uniforms(7, rows, columns).tolist() == wanted


def test_stored_replacements_are_detected_in_real_tokens_alone():
    logits = torch.tensor([[2.0, -1.0, 3.0]])
    model = SimpleNamespace(discriminator=lambda *_: logits, training=False, rtd_weight=2.0)
    batch = SimpleNamespace(labels=torch.tensor([[mlm.IGNORE, 0, mlm.IGNORE]]), input_ids=None,
                            segments=torch.tensor([[1, 1, 0]]))
    loss, sums, per_token = rtd_cached.CachedRtdModel.forward(
        model, batch, {"targets": 1.0, "tokens": 4.0})
    wanted = torch.nn.functional.softplus(torch.tensor([2.0, 1.0])).sum().item()
    assert (loss.item(), sums["discriminator_loss"].item()) == pytest.approx((wanted / 2, wanted))
    assert per_token["replaced"].tolist() == [False, True]
    model.training = True  # where a GPU would be waited for
    assert rtd_cached.CachedRtdModel.forward(model, batch, {"targets": 1.0, "tokens": 4.0})[2] == {}


def test_each_token_of_a_word_is_predicted_by_both_definitions():
    """By word, what follows in it is masked as well; the last token's sequence serves both."""
    tokenizer, sentence = tiny_tokenizer(), [1, 20, 21, 30, 2]
    found = mlm.queries_of([sentence], tokenizer, [[0, 0, 1]])
    assert list(zip(*(column.tolist() for column in dataclasses.astuple(found)), strict=True)) == [
        (0, 1, 3, False, True), (0, 2, 3, True, True), (0, 1, 2, True, False),
        (0, 3, 4, True, True)]
    batch = mlm.masked_batch([(sentence, 1, 3)], tokenizer)
    assert batch.input_ids.tolist() == [[1, tokenizer.mask_id, tokenizer.mask_id, 30, 2]]
    assert batch.labels.tolist() == [[mlm.IGNORE, 20] + 3 * [mlm.IGNORE]]


def test_a_sentence_of_unknown_tokens_has_no_target():
    tokenizer = tiny_tokenizer()
    assert mlm.masked_copies([1, tokenizer.unk_id, 2], tokenizer).num_targets == 0


def test_no_table_but_a_delta_starts_at_zero():
    config = ModelConfig(**MODELS["tiny"] | {"vocab_size": 640})
    for model, zero in ((rtd.Discriminator(config, "gdes"), True),
                        (rtd.Discriminator(config, "nes"), False),
                        (rtd_cached.CachedRtdModel(config, 50.0).discriminator, False)):
        init_parameters(model, 0.02, 1)
        assert bool(model.words.weight.any()) != zero


@pytest.mark.parametrize("sharing, tables", [
    ("es", {"words.weight": 5}), ("nes", {"words.weight": 3, "discriminator.words.weight": 5}),
    ("gdes", {"words.weight": 3, "discriminator.words.weight": 2})])
def test_two_tables_of_a_file_become_those_of_a_run(tmp_path, sharing, tables):
    run, _ = run_config.load(make_run(tmp_path, kind=f'"rtd"\nembedding_sharing = "{sharing}"'))
    networks = {"main": {"words.weight": torch.tensor(5.0)},
                "generator": {"words.weight": torch.tensor(3.0)}}
    assert rtd.parameters(run, networks)[0] == tables
