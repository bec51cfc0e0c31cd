"""Evaluation: corpora scored together and alone; discriminators on one generator's replacements."""

import copy
import dataclasses
import shutil

import export_cases
import numpy as np
import pytest
import report_cases
import thread_ranks
import torch
from data_helpers import flip_a_bit, make_corpus, random_documents, tiny_tokenizer
from launching import make_run

from deberta_ds.base.errors import ConfigError, UserError
from deberta_ds.config import run_config
from deberta_ds.config.objective import MaskConfig
from deberta_ds.data.rows import collate, eval_sequences
from deberta_ds.model.backbone import init_parameters
from deberta_ds.objectives import rtd
from deberta_ds.objectives.build import build_model
from deberta_ds.release.model_files import write_ours
from deberta_ds.release.reader import load_backbone
from deberta_ds.report.rundata import read_run
from deberta_ds.report.tables import evaluation_by_corpus
from deberta_ds.tracking.log import corpora_of
from deberta_ds.training.held_out import evaluate, score_discriminator, score_rows
from deberta_ds.training.inputs import open_inputs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluation")
    make_run(root)
    documents = [tiny_tokenizer().encode(text) for text in random_documents(30, seed=4)]
    make_corpus(root / "other", documents, tiny_tokenizer())
    return root


def loaded(root, *overrides):
    return run_config.load(root / "run.toml", list(overrides))[0]


def rows_of(path, count):
    return eval_sequences(str(path), tiny_tokenizer(), seq_len=64, mask=MaskConfig(), eval_seed=1,
                          num_rows=count)


def test_each_corpus_scores_as_if_it_were_alone_and_all_together_as_one(root):
    run = loaded(root)
    model = build_model(run, tiny_tokenizer().size)
    init_parameters(model, 0.05, seed=1)
    device, first, second = torch.device("cpu"), rows_of(root / "heldout", 7), rows_of(
        root / "other", 5)
    both = evaluate(model, rtd, device, {"one": first, "two": second}, 2)
    assert corpora_of(both) == ["one", "two"]
    for name, rows in (("one", first), ("two", second)):
        alone = evaluate(model, rtd, device, {"any": rows}, 2)
        assert not corpora_of(alone)
        assert {f"{key}/{name}": value for key, value in alone.items()} == {
            key: value for key, value in both.items() if key.endswith(f"/{name}")}
    targets = [sum(int((row.labels >= 0).sum()) for row in rows) for rows in (first, second)]
    pooled = sum(both[f"generator_loss/{name}"] * count
                 for name, count in zip(("one", "two"), targets, strict=True)) / sum(targets)
    assert both["generator_loss"] == pytest.approx(pooled, rel=1e-6)
    in_one = evaluate(model, rtd, device, {"": first[:6] + second[:4]}, 2)
    split = evaluate(model, rtd, device, {"one": first[:6], "two": second[:4]}, 2)
    assert in_one == {key: value for key, value in split.items() if "/" not in key}


def test_a_batch_that_a_rank_repeats_for_company_is_not_counted(root):
    """Seven rows are four batches; of three ranks' six turns two are such repetitions."""
    model = build_model(loaded(root), tiny_tokenizer().size)
    init_parameters(model, 0.05, seed=1)
    device, rows = torch.device("cpu"), {"": rows_of(root / "heldout", 7)}
    alone = evaluate(model, rtd, device, rows, 2)
    models = [copy.deepcopy(model) for _ in range(3)]
    for found in thread_ranks.run(3, lambda rank: evaluate(models[rank], rtd, device, rows, 2)):
        assert found == pytest.approx(alone, rel=1e-6)


def test_a_run_names_several_corpora(root):
    names = f'--data.heldout={{de = "{root}/heldout", en = "{root}/other"}}'
    run = loaded(root, names, "--train.eval_sequences=3")
    held_out = open_inputs(run, {}, "run.toml").held_out
    assert {name: len(rows) for name, rows in held_out.items()} == {"de": 3, "en": 3}
    assert run_config.from_dict(run_config.to_dict(run)) == run
    alone = open_inputs(loaded(root, "--train.eval_sequences=3"), {}, "").held_out
    assert list(alone) == [f"{root}/heldout"]
    assert [row.row for row in alone[f"{root}/heldout"]] == [row.row for row in held_out["de"]]
    for wrong, message in (('{"a/b" = "x"}', "letters"), ('{de = ""}', "directory"),
                           ("3", "data.heldout")):
        with pytest.raises(ConfigError, match=message):
            loaded(root, f"--data.heldout={wrong}")
    with pytest.raises(ConfigError, match="names of heldout"):
        loaded(root, names, "--data.heldout_replaced=x")


def test_a_flipped_byte_of_a_held_out_corpus_is_found_when_all_is_verified(root, tmp_path):
    """data.verify = "full" looked at the sizes of held-out corpora alone."""
    shutil.copytree(root / "other", tmp_path / "damaged")
    shard = sorted((tmp_path / "damaged/tokens").iterdir())[0]
    flip_a_bit(shard)
    run = loaded(root, f"--data.heldout={tmp_path}/damaged", "--train.eval_sequences=3")
    open_inputs(run, {}, "")  # sizes alone do not show it
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, verify="full"))
    with pytest.raises(UserError, match=f"{shard.name}: xxh3 checksum differs"):
        open_inputs(run, {}, "")


def test_the_page_shows_each_corpus(root, tmp_path):
    records = report_cases.make_records()
    for record in records:
        if record["kind"] == "eval":
            record |= {f"{key}/{name}": value for name in ("de", "en")
                       for key, value in record.items() if key.startswith("generator")}
    run = read_run(report_cases.make_run(tmp_path / "run", records, extras=False,
                                         **run_config.to_dict(loaded(root))))
    assert [row[0].text for row in evaluation_by_corpus(run).rows] == ["de", "en"]
    plain = dataclasses.replace(run, evals=[{"kind": "eval", "step": 1, "roc_auc": 0.5}])
    assert evaluation_by_corpus(plain) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_ours(export_cases.make_release("v3"), path)
    return path


@pytest.fixture(scope="module")
def rows(root):
    return rows_of(root / "other", 8)


def test_own_generator_gives_the_scores_of_the_run_itself(model, rows):
    """With the run's own seed the common generator is its own: evaluate's numbers, all of them."""
    run = export_cases.run_config("v3", "rtd")
    whole = build_model(run, tiny_tokenizer().size)
    whole.load_state_dict(export_cases.random_state(whole))
    corpora = {"one": rows[:5], "other": rows[5:]}
    expected = evaluate(whole, rtd, torch.device("cpu"), corpora, 4)
    found = score_discriminator(model, model, corpora)
    assert found.keys() == expected.keys() and "roc_auc/other" in found
    assert run.data.seed == 0  # of the samples, in both
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-5), name
    assert 0 < found["roc_auc"] < 1


def test_a_discriminator_that_knows_the_answer_is_perfect_on_any_generator(model, rows):
    judge = load_backbone(model)
    batch = collate(rows)
    _, _, ids_BL = rtd.replace_targets(*judge.masked_lm, batch, seed=0, temperature=1.0,
                                       valid_vocab=tiny_tokenizer().size)
    original_BL = torch.where(batch.labels >= 0, batch.labels, batch.input_ids)
    answers = dict(zip((tuple(ids) for ids in ids_BL.tolist()),
                       (ids_BL != original_BL).float() * 20 - 10, strict=True))

    class Oracle(torch.nn.Module):
        def forward(self, ids_BL, segments_BL, positions_BL):
            return torch.stack([answers[tuple(ids)] for ids in ids_BL.tolist()]).unsqueeze(-1)

    perfect = dataclasses.replace(judge, backbone=Oracle(),
                                  replaced_token_head=lambda states, positions: states[..., 0])
    scores = score_rows(perfect, judge, {"": rows})
    assert scores["roc_auc"] == 1.0 and scores["discriminator_accuracy"] == 1.0


def test_models_without_the_heads_are_refused(model, rows, tmp_path):
    write_ours(export_cases.make_release("v3", "mlm"), tmp_path / "mlm")
    with pytest.raises(UserError, match="no discriminator's head"):
        score_discriminator(tmp_path / "mlm", model, {"": rows})
    # Any masked LM writes.
    assert score_discriminator(model, tmp_path / "mlm", {"": rows})["roc_auc"] > 0
    release = export_cases.make_release("v3")
    release.generator = None
    write_ours(release, tmp_path / "alone")
    with pytest.raises(UserError, match="no masked LM"):
        score_discriminator(model, tmp_path / "alone", {"": rows})


def test_rows_that_are_too_long_or_without_a_masked_token_are_refused(model, rows):
    longer = [dataclasses.replace(rows[0], input_ids=np.zeros(65, np.int64))]
    empty = [dataclasses.replace(row, labels=np.full_like(row.labels, -100)) for row in rows]
    for bad, message in ((longer, "has 64 positions, but the sequences have up to 65 tokens"),
                         (empty, "the 8 held-out sequences have no masked token")):
        with pytest.raises(UserError, match=message):
            score_discriminator(model, model, {"": bad})
