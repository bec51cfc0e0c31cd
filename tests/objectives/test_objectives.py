"""RTD: who trains which table, what the discriminator sees, and samples that belong to a row."""

import copy
from dataclasses import replace

import pytest
import rank_helpers
import torch
from data_helpers import make_corpus, random_documents, tiny_tokenizer
from launching import ROOT, make_run

from deberta_ds.config.model import MODELS
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig, SourceConfig
from deberta_ds.data.batch import collate
from deberta_ds.data.rows import RowDataset
from deberta_ds.model.init import init_parameters
from deberta_ds.objectives import rtd
from deberta_ds.objectives.base import masked_headline
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
    sums = rtd.detection_sums
    monkeypatch.setattr(rtd, "detection_sums",
                        lambda *tensors: counted.append(tensors[2]) or sums(*tensors))
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


@pytest.mark.multi
@pytest.mark.slow
def test_isolation_holds_under_zero3_on_two_ranks(tmp_path):
    """Without the discriminator's loss E_G moves exactly as with it, and delta stays at zero."""
    tables = {}
    for weight in ("50.0", "0.0"):
        run_file = make_run(tmp_path / weight, steps="3")
        text = run_file.read_text().replace('kind = "rtd"', f'kind = "rtd"\nrtd_weight = {weight}')
        text = text.replace("warmup_steps = 5",
                            "warmup_steps = 1\nclip_norm = 0.0\nweight_decay = 0.0")
        run_file.write_text(text)
        rank_helpers.run(2, [str(run_file), str(tmp_path / f"{weight}.pt"), "3"], tmp_path / "log",
                         ROOT / "tests/workers/trajectory.py")
        tables[weight] = torch.load(tmp_path / f"{weight}.pt", weights_only=True)[3]
    assert torch.equal(tables["50.0"]["words"], tables["0.0"]["words"])
    assert not tables["0.0"]["delta"].any() and tables["50.0"]["delta"].norm() > 0
