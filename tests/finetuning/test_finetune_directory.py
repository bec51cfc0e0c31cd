"""A fine-tuned directory is one of Hugging Face's, with our predictions."""

import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_helpers import run_main
from superglue_helpers import (
    SAMPLE,
    SHAPES,
    predict,
    sample,
    saved_model,
    tiny_start,
    write_lines,
)

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning import heads
from deberta_ds.finetuning.features import collate, encode
from deberta_ds.finetuning.models import (
    build_model,
    finetuned_model,
    load_finetuned,
    open_start,
    start_from,
)
from deberta_ds.finetuning.predict_file import predict_file
from deberta_ds.model.backbone import init_parameters
from deberta_ds.release.reader import load_backbone
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import task_named


def test_a_start_whose_run_kept_position_terms_has_the_shape_of_a_finetuned_one(tmp_path):
    saved_model(tmp_path, "CB")
    start = tiny_start()
    config = dataclasses.replace(start.config, keep_position_terms=True, cross_entropy="chunked",
                                 attention="reference", hidden_dropout=0.3, init_std=0.5)
    found = start_from(dataclasses.replace(start, config=config), load_finetuned(tmp_path), "cb")
    assert found.config == config and found.weights
    other = dataclasses.replace(start, config=dataclasses.replace(config, norm_eps=1e-5))
    with pytest.raises(UserError, match="of another shape"):
        start_from(other, load_finetuned(tmp_path), "cb")


def encoded_by_transformers(directory, pairs):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    first, second = zip(*pairs, strict=True)
    return tokenizer(list(first), list(second), padding=True, return_tensors="pt")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["CB", "MultiRC"])
def test_a_head_on_cls_alone_gives_the_scores_and_gradients_of_whole_rows(shape, name, monkeypatch):
    """The last layer computes [CLS] alone for it: nothing that is learned may change by that."""
    start, task = tiny_start(shape), task_named(name)
    model = build_model(task, start, Settings(), 1).eval()
    init_parameters(model, 0.2, 3)
    length = 64 if start.config.absolute_input else 200  # beyond the short rows of attention
    batch = collate(encode(task, sample(name).examples[:4], start.tokenizer, max_length=length,
                           window_overlap=16))
    assert start.config.absolute_input or (batch.segments_RL == 0).any()
    found = {}
    for whole in (False, True):
        monkeypatch.setattr(heads, "reads_first_only", lambda head, whole=whole: not whole)
        model.zero_grad()
        output = model(batch)
        output.loss_sum.backward()
        found[whole] = [output.scores, *(p.grad.clone() for p in model.parameters())]
    for one, other in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_classifies_as_we_do_from_the_texts_alone(tmp_path, shape):
    from transformers import AutoModelForSequenceClassification

    examples, _, scores = saved_model(tmp_path, "CB", shape)
    theirs, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    inputs = encoded_by_transformers(tmp_path, [example.sequences[0] for example in examples])
    with torch.no_grad():
        found = theirs.eval()(**inputs).logits
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-5)
    assert theirs.config.id2label == {0: "contradiction", 1: "neutral", 2: "entailment"}
    assert theirs.config.problem_type == "single_label_classification"


@pytest.mark.parametrize("name", ["MultiRC", "ReCoRD"])
def test_a_line_with_several_examples_is_not_one_without_a_label(process_group, tmp_path, name):
    saved_model(tmp_path, name)
    out = tmp_path / "preds-0.1"
    predict_file(load_finetuned(tmp_path), SAMPLE / name / "val.jsonl", out, torch.device("cpu"),
                 global_batch_size=8, max_length=256)
    assert json.loads((tmp_path / "preds-0.1.scores.json").read_text())["unlabelled"] == 0


def test_a_kept_column_may_have_a_nan(process_group, tmp_path):
    saved_model(tmp_path / "model", "CB")
    table = pa.table({"premise": ["a"], "hypothesis": ["b"], "size": [float("nan")]})
    pq.write_table(table, tmp_path / "t.parquet")
    lines = predict(load_finetuned(tmp_path / "model"), tmp_path / "t.parquet",
                    tmp_path / "out.jsonl", keep=["size"])
    assert lines[0]["size"] is None  # NaN is no JSON


@pytest.mark.parametrize(("name", "how", "message"), [
    ("WSC", "second", "it has one text"), ("COPA", "windows_mean", "compares whole texts")])
def test_a_truncation_that_a_task_has_not_is_refused_by_predict_too(tmp_path, name, how, message):
    saved_model(tmp_path, name)
    with pytest.raises(UserError, match=message):
        run_main("launch/predict.py", "--model", tmp_path, "--data", SAMPLE / name / "val.jsonl",
                 "--out", tmp_path / "out.jsonl", "--truncation", how)


def test_rows_longer_than_the_absolute_positions_are_named_when_a_file_is_predicted(tmp_path):
    saved_model(tmp_path, "CB", "absolute")
    saved, out = load_finetuned(tmp_path), tmp_path / "out.jsonl"
    data = tmp_path / "long.jsonl"
    write_lines(data, [{"premise": "one two " * 50, "hypothesis": "three"}])
    with pytest.raises(UserError, match=r"long\.jsonl: the longest .* 64 absolute positions\. Set"):
        predict(saved, data, out, max_length=128)
    assert not out.exists()
    assert predict(saved, data, out, max_length=64)


@pytest.mark.parametrize("shape", ["v3", "v1"])
def test_transformers_scores_choices_as_we_do(tmp_path, shape):
    from transformers import AutoModelForMultipleChoice, AutoModelForSequenceClassification

    examples, _, scores = saved_model(tmp_path, "COPA", shape)
    pairs = [texts for example in examples for texts in example.sequences]
    inputs = encoded_by_transformers(tmp_path, pairs)
    if shape == "v1":  # transformers has no multiple choice of v1; the numbers are the same
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    else:
        theirs = AutoModelForMultipleChoice.from_pretrained(tmp_path).eval()
        inputs = {key: value.view(len(examples), 2, -1) for key, value in inputs.items()}
    with torch.no_grad():
        found = theirs(**inputs).logits.view(len(examples), 2)
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["WiC", "WSC", "ReCoRD"])
def test_heads_without_a_class_leave_an_encoder_for_automodel(tmp_path, name):
    from transformers import AutoModel

    _, features, scores = saved_model(tmp_path, name)
    theirs, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(key.startswith("head.") for key in report["unexpected_keys"])
    saved = load_finetuned(tmp_path)
    batch = collate(features)
    with torch.no_grad():
        model = finetuned_model(saved, torch.device("cpu"))
        hidden = theirs.eval()(batch.input_ids_RL, batch.segments_RL).last_hidden_state
        torch.testing.assert_close(model.head(hidden, batch), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["CB", "COPA", "WSC", "ReCoRD"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_directory_read_back_gives_the_same_scores(tmp_path, name, shape):
    _, features, scores = saved_model(tmp_path, name, shape)
    saved = load_finetuned(tmp_path)
    assert saved.task == task_named(name) and saved.settings == Settings()
    going_on = start_from(tiny_start(shape), saved, name)
    build_model(task_named("RTE"), going_on, Settings(), 1)  # its weights fit its configuration
    with torch.no_grad():
        found = finetuned_model(saved, torch.device("cpu"))(collate(features)).scores
    # What is written has a row less for distances that are never met: other sums in fp32.
    tolerance = 2e-6 if shape == "a row a distance" else 0
    torch.testing.assert_close(found, scores, rtol=tolerance, atol=tolerance)
    words = open_start(str(tmp_path)).weights["words.weight"]
    assert torch.equal(words, load_backbone(tmp_path).backbone.words.weight)


def test_damage_is_named(tmp_path):
    saved_model(tmp_path, "CB")
    facts = json.loads((tmp_path / "finetuned.json").read_text())

    def refused(message, **changes):
        (tmp_path / "finetuned.json").write_text(json.dumps(facts | changes))
        with pytest.raises(UserError, match=message) as caught:
            load_finetuned(tmp_path)
        assert str(tmp_path) in str(caught.value)

    refused("format 3", format=3)
    refused("head = 'x'", task=facts["task"] | {"head": "x"})
    refused("epochs = 0", settings=facts["settings"] | {"epochs": 0})
    refused("unknown key", settings=facts["settings"] | {"epoch": 1})
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused("damaged or cut short")
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "spm.model").unlink()
    (tmp_path / "tokenizer.json").unlink()
    refused("no tokenizer next to")
    (tmp_path / "finetuned.json").write_text("[1]")
    with pytest.raises(UserError, match="not a JSON object"):
        load_finetuned(tmp_path)
