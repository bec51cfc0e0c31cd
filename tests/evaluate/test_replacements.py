"""Discriminators compared on one generator's replacements."""

import dataclasses

import export_cases
import numpy as np
import pytest
import torch
from data_helpers import make_corpus, random_documents, tiny_tokenizer

from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig
from deberta_ds.data.rows import collate, eval_sequences
from deberta_ds.objectives import rtd
from deberta_ds.objectives.build import build_model
from deberta_ds.release.model_files import write_ours
from deberta_ds.release.reader import load_backbone
from deberta_ds.training.held_out import evaluate, score_discriminator, score_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_ours(export_cases.make_release("v3"), path)
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    documents = [tiny_tokenizer().encode(text) for text in random_documents(30)]
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), documents, tiny_tokenizer())
    return eval_sequences(str(corpus), tiny_tokenizer(), seq_len=64, mask=MaskConfig(), eval_seed=1,
                     num_rows=8)


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
