"""Evaluation: several held-out corpora are scored together, and each as if it were alone."""

import copy
import dataclasses
import shutil

import pytest
import report_cases
import thread_ranks
import torch
from data_helpers import flip_a_bit, make_corpus, random_documents, tiny_tokenizer
from launching import make_run

from deberta_ds.base.errors import ConfigError, UserError
from deberta_ds.config import run_config
from deberta_ds.config.objective import MaskConfig
from deberta_ds.data.rows import eval_sequences
from deberta_ds.model.backbone import init_parameters
from deberta_ds.objectives import rtd
from deberta_ds.objectives.build import build_model
from deberta_ds.report.rundata import read_run
from deberta_ds.report.tables import evaluation_by_corpus
from deberta_ds.tracking.log import corpora_of
from deberta_ds.training.held_out import evaluate
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
