"""RTD: who trains which table, what the discriminator sees, and samples that belong to a row."""

import copy
import math
from dataclasses import astuple, replace
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_helpers import make_corpus, random_documents, tiny_tokenizer
from launching import make_run

from deberta_ds.base.splitmix import GAMMA, MASK64, mix64
from deberta_ds.config import run_config
from deberta_ds.config.model import MODELS, decoder_problems
from deberta_ds.config.objective import KINDS, MaskConfig, mask_defaults
from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig, SourceConfig
from deberta_ds.data.rows import RowDataset, collate
from deberta_ds.model import flops
from deberta_ds.model.backbone import init_parameters
from deberta_ds.model.encoder import Encoder
from deberta_ds.objectives import base, mlm, rtd, rtd_cached
from deberta_ds.objectives.base import Objective, masked_headline
from deberta_ds.objectives.build import build_model, held_parameters, objective_named
from deberta_ds.objectives.rtd import RtdModel, replace_targets, token_uniforms

CONFIG = ModelConfig(**MODELS["tiny"] | {"vocab_size": 640, "hidden_dropout": 0.0,
                                         "attention_dropout": 0.0})
NEVER = torch.tensor(float("inf"))  # as a count, it takes a loss out of the sum


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    documents = [tiny_tokenizer().encode(text) for text in random_documents(60)]
    corpus = make_corpus(tmp_path_factory.mktemp("rtd") / "corpus", documents, tiny_tokenizer())
    dataset = RowDataset([SourceConfig(path=str(corpus))], tiny_tokenizer(), seq_len=64, seed=3,
                         mask=MaskConfig())
    return [dataset[g] for g in range(6)]


def model_of(sharing: str, **options) -> RtdModel:
    objective = ObjectiveConfig(kind="rtd", embedding_sharing=sharing, **options)
    model = RtdModel(CONFIG, CONFIG, objective, sampling_seed=3, valid_vocab=tiny_tokenizer().size)
    init_parameters(model, 0.05, seed=1)
    return model


def gradients(sharing: str, rows, of: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of E_G and of the discriminator's own table for one of the losses."""
    model, batch = model_of(sharing), collate(rows)
    normalizers = {"targets": NEVER, "tokens": NEVER}
    normalizers[{"generator": "targets", "discriminator": "tokens"}[of]] = torch.tensor(100.0)
    model(batch, normalizers)[0].backward()
    own = None if sharing == "es" else model.discriminator.words.weight.grad
    return model.words.weight.grad, own


@pytest.mark.parametrize("sharing", ["gdes", "nes"])
def test_each_loss_reaches_only_its_own_table(rows, sharing):
    shared, own = gradients(sharing, rows, "discriminator")
    assert own.norm() > 0 and not shared.any()
    shared, own = gradients(sharing, rows, "generator")
    assert shared.norm() > 0 and not own.any()


def test_under_es_both_losses_reach_the_one_table(rows):
    for loss in ("generator", "discriminator"):
        assert gradients("es", rows, loss)[0].norm() > 0


def test_the_discriminator_sees_the_sum_of_both_tables(rows):
    model, batch = model_of("gdes"), collate(rows)
    with torch.no_grad():
        model.discriminator.words.weight.normal_(0, 0.05)
    merged = copy.deepcopy(model)
    merged.discriminator.sharing = "nes"
    merged.discriminator.words.weight.data += model.words.weight.data
    ids = batch.input_ids
    torch.testing.assert_close(model.discriminator(model.words, ids, batch),
                               merged.discriminator(merged.words, ids, batch))


def test_replacements_do_not_depend_on_the_batch(rows):
    model = model_of("gdes").eval()

    def replaced(batch):
        return replace_targets(model.words, model.generator, batch, seed=model.sampling_seed,
                               temperature=1.0, valid_vocab=model.valid_vocab)[2]

    with torch.no_grad():
        together = replaced(collate(rows))
        alone = torch.cat([replaced(collate([row])) for row in rows])
        backwards = replaced(collate(rows[::-1])).flip(0)
    assert torch.equal(together, alone) and torch.equal(together, backwards)
    changed = together != collate(rows).input_ids
    assert torch.equal(changed, collate(rows).labels >= 0)  # every [MASK], and nothing else


def test_a_temperature_is_that_of_the_step_s_place_in_the_run(rows):
    normalizers = {"targets": torch.tensor(9.0), "tokens": torch.tensor(9.0)}

    def seen(share, **temperatures):
        model, inputs = model_of("gdes", **temperatures), []
        model.discriminator.register_forward_hook(lambda _, given, __: inputs.append(given[1]))
        model(replace(collate(rows), run_fraction=share), normalizers)
        return inputs[0]

    falling = {"temperature": 4.0, "final_temperature": 0.5}
    for share, temperature in ((0.0, 4.0), (0.5, 2.25), (1.0, 0.5), (1.5, 0.5)):
        assert torch.equal(seen(share, **falling), seen(share, temperature=temperature)), share
    assert not torch.equal(seen(0.0, **falling), seen(1.0, **falling))
    assert collate(rows).run_fraction == 1.0  # evaluations


def test_no_unused_id_is_sampled_in_training(rows):
    model, seen = model_of("gdes"), []
    model.discriminator.register_forward_hook(lambda _, given, __: seen.append(given[1]))
    with torch.no_grad():
        model.generator.head.bias[model.valid_vocab:] = 10.0
        model(collate(rows), {"targets": 1.0, "tokens": 1.0})
    assert seen[0].max() < model.valid_vocab


def test_padding_counts_for_nothing(rows, monkeypatch):
    batch, counted = collate(rows), []
    batch.segments[:, -20:] = 0
    detection = rtd.detection
    monkeypatch.setattr(rtd, "detection",
                        lambda *given: counted.append(given[2]) or detection(*given))
    model_of("gdes")(batch, {"targets": torch.tensor(9.0), "tokens": torch.tensor(9.0)})
    assert torch.equal(counted[0], batch.segments != 0) and not counted[0][:, -20:].any()


@pytest.mark.parametrize(("gain", "area", "dead"), [(3.5e-4, 0.504, True), (-1e-6, 0.5, True),
                                                    (5e-4, 0.6, False), (0.06, 0.72, False),
                                                    (-0.5, 0.5, False)])
def test_a_headline_says_that_a_discriminator_has_died(gain, area, dead):
    said = rtd.headline({"discriminator_gain": gain, "roc_auc": area})
    assert (
        "has died; start again with a lower optim.learning_rate" in " ".join(said.split())) == dead


def test_a_headline_needs_both_of_its_numbers():
    numbers = {"masked_accuracy": 0.3, "unigram_accuracy": 0.05}
    said = masked_headline(numbers, "masked", "model")
    assert "names 30.0%" in said and "would name 5.0%" in said
    for name in numbers:
        assert masked_headline({name: 0.3}, "masked", "model") == ""


def test_token_uniforms_are_uniform_and_tell_tokens_apart():
    grid = torch.cartesian_prod(torch.arange(400), torch.arange(500))
    values = token_uniforms(7, grid[:, 0], grid[:, 1]).double()
    assert 0 <= values.min() and values.max() < 1
    counts = torch.histc(values, 100, 0, 1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom
    table = values.view(400, 500) - 0.5
    for neighbor in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1]):
        assert abs(neighbor.mean() * 12) < 0.01  # correlation; standard error 0.0022
    assert not torch.equal(values, token_uniforms(8, grid[:, 0], grid[:, 1]).double())


TOTAL = {"masked_loss": 90.0, "masked_correct": 4.0, "targets": 10.0, "tokens": 80.0}


def test_a_masked_lm_is_scored_per_target():
    assert base.masked_scores(TOTAL, "masked") == {
        "masked_loss": 9.0, "masked_accuracy": 0.4, "masked_perplexity": math.exp(9.0)}
    assert base.MINIMAL_PAIRS.baseline_of({}) == 0.5


@pytest.mark.parametrize("layers, absolute, wrong", [
    (1, False, True), (2, False, False), (1, True, False)])
def test_a_decoder_needs_a_layer_below_it(layers, absolute, wrong):
    config = SimpleNamespace(absolute_input=absolute)
    assert bool(decoder_problems(layers, config, "model.num_layers")) == wrong


def test_a_part_waits_or_stays_and_a_model_is_told_what_to_recompute(tmp_path):
    run, _ = run_config.load(make_run(tmp_path, kind='"mlm"'))
    names = ["words.weight", "masked_lm.positions.weight"]
    for steps, words, held in (
            (0, False, (set(names), set())), (2, False, (set(), set(names))),
            (2, True, ({names[0]}, {names[1]}))):
        train = replace(run.train, freeze=("embeddings",), freeze_steps=steps,
                                    activation_checkpointing="full",
                                    activation_checkpointing_interval=2)
        one = replace(run, train=train, init=replace(
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
    mask = replace(run.objective.mask, rate=0.4, final_rate=0.2)
    falling = replace(run, objective=replace(run.objective, mask=mask))
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
    run = replace(run, data=replace(run.data, seed=run.train.seed + 1))
    model = build_model(run, 600)
    assert (model.sampling_seed, model.valid_vocab) == (run.data.seed, 600)
    assert mlm.build(run, 600).valid_vocab == 600
    assert rtd.clip_groups(run) == ("discriminator.",)
    shared = replace(run.objective, embedding_sharing="es")
    assert rtd.clip_groups(replace(run, objective=shared)) == (
        "discriminator.", "words.")


def test_padding_is_in_no_sum_of_a_discriminator():
    logits = torch.tensor([[2.0, -1.0, 3.0, 0.0, 5.0]])
    replaced = torch.tensor([[True, False, False, False, False]])
    real = torch.tensor([[True, True, True, True, False]])
    sums, _ = rtd.detection(logits, replaced, real, training=True)
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
    assert list(zip(*(column.tolist() for column in astuple(found)), strict=True)) == [
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


def test_areas_are_those_of_scikit_learn():
    from sklearn.metrics import average_precision_score, roc_auc_score

    generator = np.random.default_rng(0)
    for levels in (2, 7, 100_000):  # many logits are equal, or none
        labels = generator.random(5000) < 0.15
        logits = (generator.integers(0, levels, 5000) + labels).astype(np.float32)
        assert rtd.areas(labels, logits) == pytest.approx(
            (roc_auc_score(labels, logits), average_precision_score(labels, logits)), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_of_objectives_is_an_objective(kind):
    assert getattr(objective_named(kind), "MASK_DEFAULTS", {}) == mask_defaults(kind)
    for name, wanted in vars(Objective).items():
        if name[0] != "_":
            found = getattr(objective_named(kind), name)
            assert [*signature(found).parameters] == [*signature(wanted).parameters][1:], name
