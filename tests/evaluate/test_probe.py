"""The frozen probe, and discriminators compared on one generator's replacements."""

import dataclasses
import json

import export_cases
import numpy as np
import pytest
import torch
from data_helpers import make_corpus, random_documents, run_main, tiny_tokenizer

from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig
from deberta_ds.data.batch import collate
from deberta_ds.data.rows import eval_sequences
from deberta_ds.evaluate.held_out import evaluate, score_discriminator, score_rows
from deberta_ds.evaluate.probe import features, probe, read_examples
from deberta_ds.objectives import rtd
from deberta_ds.objectives.build import build_model
from deberta_ds.release.ours import write_ours
from deberta_ds.release.reader import load_backbone


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


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_features_are_pooled_states_of_one_text_at_a_time(model, pooling, capsys):
    loaded, tokenizer = load_backbone(model), tiny_tokenizer()
    texts = [("A row holds words.", "Numbers like 42."), ("The lazy dog.", "A fox!"), ("It", "is")]
    found = features(loaded, texts, pooling)
    for row, (first, second) in zip(found, texts, strict=True):
        ids = [tokenizer.cls_id, *tokenizer.encode(first), tokenizer.sep_id,
               *tokenizer.encode(second), tokenizer.sep_id]
        with torch.no_grad():
            states = loaded.backbone(torch.tensor([ids]), torch.ones(1, len(ids)).int())[0]
        expected = states[0] if pooling == "cls" else states[1:-1].mean(0)
        assert row == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5)
    assert "were cut" not in capsys.readouterr().err
    assert features(loaded, [("word " * 200, "short")], pooling).shape == (1, 32)
    assert "1 of 1 inputs were cut to the model's 64 positions" in capsys.readouterr().err


def test_probe_separates_what_is_separable_and_not_what_is_noise():
    generator = np.random.default_rng(0)
    labels = ["no" if k % 2 else "yes" for k in range(300)]
    noise = generator.normal(size=(300, 5))
    signal = noise + np.array([[3.0 * (label == "yes")] + [0] * 4 for label in labels])
    found = probe(signal[:200], labels[:200], signal[200:], labels[200:])
    assert found["accuracy"] > 0.85 and found["majority"] == 0.5
    assert found["interval"][0] < found["accuracy"] < found["interval"][1]
    found = probe(noise[:200], labels[:200], noise[200:], labels[200:])
    assert found["interval"][0] < 0.5 < found["interval"][1]


def test_the_majority_of_equal_classes_is_the_first_by_name():
    """It was the first of a set, so another one in each process."""
    states = np.random.default_rng(0).normal(size=(40, 3))
    found = probe(states, ["b", "a"] * 20, states[:4], ["a", "a", "a", "b"])
    assert found["majority"] == 0.75
    with pytest.raises(UserError, match="1 of 4 labels are none of --train's, such as 'A'"):
        probe(states, ["b", "a"] * 20, states[:4], ["a", "A", "a", "b"])


def test_rows_longer_than_a_model_s_positions_are_refused(model, rows):
    longer = [dataclasses.replace(rows[0], input_ids=np.zeros(65, np.int64))]
    with pytest.raises(UserError, match="has 64 positions, but the rows have up to 65 tokens"):
        score_discriminator(model, model, {"": longer})


def test_rows_without_a_masked_token_are_refused(model, rows):
    empty = [dataclasses.replace(row, labels=np.full_like(row.labels, -100)) for row in rows]
    with pytest.raises(UserError, match="the 8 held-out sequences have no masked token"):
        score_discriminator(model, model, {"": empty})


@pytest.mark.parametrize("line, message", [
    ('{"text": " ", "label": 1}', ":2: must have text"),
    ("{", ":2: not a JSON object"), ("3", ":2: must be a JSON object"),
    ('{"text": "a"}', ":2: no 'label' .found: text."),
    ('{"text": 3, "label": 1}', ":2: must have text"),
    ('{"text": "a", "label": true}', "the label must be"), ("", "2 classes|at least two classes")])
def test_bad_examples_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine", "label": 0}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        read_examples(path, ["text"], "label")


def test_the_command_prints_accuracy_next_to_the_majority(model, tmp_path):
    for name, count in (("train", 24), ("test", 12)):
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"sentence": "The lazy dog." if k % 2 else "Numbers like 1917!",
                        "label": k % 2}) + "\n" for k in range(count)))
    printed = run_main("launch/probe.py", "--model", model, "--text", "sentence",
                       "--train", tmp_path / "train.jsonl", "--test", tmp_path / "test.jsonl")
    assert json.loads(printed)["accuracy"] == 1.0
