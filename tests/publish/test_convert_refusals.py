"""What convert.py refuses, what it leaves alone, and what it says."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from convert_cases import MS_FILES, edit_json, json_of, microsoft_directory, transformers_model
from data_helpers import run_main, tokenizer_path
from export_cases import make_release
from safetensors.torch import load_file, save_file

from deberta_ds.base.errors import UserError
from deberta_ds.publish import convert as module
from deberta_ds.publish.convert import convert, write_release
from deberta_ds.release.reader import read_release, read_shapes


class Payload:
    """A pickle that would create a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickle_with_code_is_refused_and_not_run(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3")
    torch.save({"deberta.x": Payload(str(tmp_path / "ran"))}, source / MS_FILES[0])
    with pytest.raises(UserError, match="code in it was not run"):
        convert(source, tmp_path / "out", "hf")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def break_truncated(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def edit(**changes):
    def apply(path):
        tensors = load_file(path / "model.safetensors")
        tensors = {name: tensor for name, tensor in (tensors | changes).items()
                   if tensor is not None}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return apply


def edit_config(**changes):
    return lambda path: edit_json(path / "config.json", **changes)


def remove(name):
    return lambda path: (path / name).unlink()


HOSTILE = {
    "truncated": (break_truncated, "damaged or cut short"),
    "wrong shape": (edit(**{"embeddings.word_embeddings.weight": torch.zeros(5, 32)}), "shape"),
    "missing key": (edit(**{"encoder.layer.3.output.dense.weight": None}),
                    "encoder.layer.3.output.dense.weight missing"),
    "not finite": (edit(**{"encoder.layer.1.output.dense.bias": torch.full((32,), torch.inf)}),
                   "encoder.layer.1.output.dense.bias holds NaN or infinity"),
    "foreign key": (edit(**{"encoder.layer.0.mystery": torch.zeros(2)}), "mystery"),
    "integers": (edit(**{"embeddings.LayerNorm.bias": torch.arange(32)}),
                 "embeddings.LayerNorm.bias holds torch.int64, not floats"),
    "config of BERT": (edit_config(model_type="bert"), "not a DeBERTa"),
    "config of another size": (edit_config(hidden_size=64), "shape"),
    "fewer layers": (edit_config(num_hidden_layers=2), "unknown tensors"),
    "more layers": (edit_config(num_hidden_layers=6), "missing"),
    "token types": (edit_config(type_vocab_size=2), "type_vocab_size = 2"),
    "factorized": (edit_config(embedding_size=16), "embedding_size = 16"),
    "p2p": (edit_config(pos_att_type="p2c|p2p"), "p2p"),
    "terms of attention that is not relative": (
        edit_config(relative_attention=False), 'only "none" is supported'),
    "relu": (edit_config(hidden_act="relu"), "hidden_act"),
    "text for a number": (edit_config(num_hidden_layers="four"), "num_hidden_layers"),
    "text for buckets": (edit_config(position_buckets="many"), "position_buckets"),
    "an empty term of v1, which its scale counts": (
        edit_config(model_type="deberta", pos_att_type=["c2p", "none"]), "empty term"),
    "text for true": (edit_config(share_att_key="false"), "share_att_key = 'false' is not true or"),
    "labels not by number": (edit_config(id2label=["no", "yes"]), "is not an object"),
    "a number for a class": (edit_config(architectures=3), "architectures = 3 is not a list"),
    "terms not a list": (edit_config(pos_att_type=[3]), "pos_att_type"),
    "no config": (remove("config.json"), "not a model"),
    "no weights": (remove("model.safetensors"), "no weight file"),
    "config not JSON": (lambda path: (path / "config.json").write_text("{"), "not valid JSON"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "hf"
    transformers_model("v3").save_pretrained(path)
    return path


@pytest.mark.parametrize("case", HOSTILE)
def test_broken_source_is_one_clear_error(tmp_path, sound, case):
    spoil, wanted = HOSTILE[case]
    source = shutil.copytree(sound, tmp_path / "source")
    spoil(source)
    with pytest.raises(UserError) as error:
        convert(source, tmp_path / "out", "hf")
    assert wanted in str(error.value) and str(tmp_path) in str(error.value)
    assert list(tmp_path.iterdir()) == [source]  # nothing half-written is left


def test_a_run_that_has_saved_nothing_yet_is_named_as_such(tmp_path):
    """It was "no weight file; model.safetensors or pytorch_model.bin is expected"."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"run": {}}')
    (run / "metrics.jsonl").write_text("")
    for directories in ((), ("checkpoints",), ("checkpoints/step-00000010",)):
        for name in directories:  # of the last one the manifest is missing: its save was killed
            (run / name).mkdir()
        with pytest.raises(UserError, match="run: this run has saved no checkpoint yet; .*Ctrl-C"):
            convert(run, tmp_path / "out", "hf")
    with pytest.raises(UserError, match="this run has saved no checkpoint yet"):
        read_shapes(run)


def test_truncated_pickle_and_foreign_content_are_refused(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3")
    data = (source / MS_FILES[0]).read_bytes()
    for content in (data[: len(data) // 2], b"", b"not a pickle at all"):
        (source / MS_FILES[0]).write_bytes(content)
        with pytest.raises(UserError, match="pytorch_model.bin"):
            read_release(source)
    torch.save([torch.zeros(2)], source / MS_FILES[0])
    with pytest.raises(UserError, match="not named tensors"):
        read_release(source)


def test_damaged_directory_of_ours_is_one_clear_error(tmp_path, sound):
    convert(sound, tmp_path / "ours", "ours")
    file = tmp_path / "ours/model.json"
    values = json_of(file)
    for damaged in ({}, values | {"format": "deberta_ds-9"}, values | {"networks": {}},
                    values | {"networks": {"main": {"config": {}}}},
                    values | {"networks": {"main": {"config": {"hidden_size": 3}, "rest": {}}}}):
        file.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="model.json"):
            read_release(tmp_path / "ours")


def test_what_is_there_is_not_replaced(tmp_path, sound, monkeypatch):
    """Neither a model, nor what is put there while one is written; a link is followed."""
    (tmp_path / "out").mkdir()
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(NotADirectoryError, match=f"'{tmp_path}/thesis.txt/new'"):
        convert(sound, tmp_path / "thesis.txt/new", "ours")
    check = module._check
    monkeypatch.setattr(module, "_check", lambda *arguments: (
        (tmp_path / "out/LICENSE").write_text("mine"), check(*arguments))[1])
    with pytest.raises(UserError, match="out: is not empty"):
        convert(sound, tmp_path / "out", "ours")
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "LICENSE", "thesis.txt"}
    monkeypatch.undo()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    convert(sound, tmp_path / "link", "ours")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "model.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in ("../out", "../there", "../link", "..", "."):
        with pytest.raises(UserError, match="is not empty, or is the working directory"):
            convert(tmp_path / "there", out, "hf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_export_saved_again_in_another_precision_is_read(tmp_path, dtype):
    """transformers leaves the file beside it, with the rows of the table that it reads alone."""
    write_release(make_release("v3"), "test", tmp_path / "hf", "hf")
    before = read_release(tmp_path / "hf").main.tensors
    transformers.AutoModel.from_pretrained(tmp_path / "hf", dtype=dtype).save_pretrained(
        tmp_path / "hf")
    after = read_release(tmp_path / "hf").main.tensors
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        torch.testing.assert_close(tensor.float(), before[name].float(), rtol=1e-2, atol=1e-3)


def test_leftovers_of_a_killed_conversion_are_cleaned_up_by_the_next(tmp_path, sound):
    ended = subprocess.Popen(["true"])
    ended.wait()
    at_work = f".out.{os.getppid()}.tmp"
    for name in (f".out.{ended.pid}.tmp", f".out.{os.getpid()}.tmp", at_work, ".out.notes.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    convert(sound, tmp_path / "out", "ms")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", at_work, ".out.notes.tmp"}


def detection_head():
    """Return random tensors of a discriminator's head, under microsoft's names."""
    shapes = {"dense.weight": (32, 32), "dense.bias": 32, "LayerNorm.weight": 32,
              "LayerNorm.bias": 32, "classifier.weight": (1, 32), "classifier.bias": 1}
    return {f"mask_predictions.{name}": torch.randn(shape) for name, shape in shapes.items()}


def test_command_prints_what_became_of_every_part(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3", **detection_head())
    (source / "spm.model").write_bytes(Path(tokenizer_path()).read_bytes())
    said = run_main("launch/convert.py", "--model", source, "--out", tmp_path / "out", "--to", "hf")
    for wanted in ("replaced-token head", "kept aside: mask_predictions.dense.weight",
                   "kept aside: lm_predictions", "position_embeddings", "AutoModel",
                   "AutoTokenizer gives the ids", "wrote"):
        assert wanted in said, wanted


def _fine_tuned(path, head, family="v3", **labels):
    """Write a model with a classifier's head as transformers saves it, some values changed."""
    transformers_model(family, head).save_pretrained(path)
    edit_json(path / "config.json", **labels)
    return path


LABELS = {"id2label": {"0": "A", "1": "B"}, "label2id": {"A": 0, "B": 1}}


@pytest.mark.parametrize(("family", "head", "labels", "change", "expected"), [
    # transformers does not write labels where there are two, and it became a regression.
    ("v3", "ForMultipleChoice", {}, lambda path: None, "DebertaV2ForMultipleChoice"),
    # The heads of pretraining that the export had left aside made it a bare encoder.
    ("v3", "ForSequenceClassification", {}, lambda path: save_file(
        detection_head(), path / "pretraining_heads.safetensors", {"format": "pt"}),
     "DebertaV2ForSequenceClassification"),
    # transformers has no class for it, and loading what does not exist was a traceback.
    ("v1", "ForSequenceClassification", LABELS, edit(**{
        "classifier.weight": torch.randn(1, 32), "classifier.bias": torch.randn(1)}),
     "DebertaForSequenceClassification")], ids=["choice", "over an export", "choice of v1"])
def test_a_fine_tuned_model_stays_of_its_class(tmp_path, family, head, labels, change, expected):
    source = _fine_tuned(tmp_path / "source", head, family, **labels)
    assert labels or "id2label" not in json_of(source / "config.json")
    change(source)
    convert(source, tmp_path / "out", "hf")
    values = json_of(tmp_path / "out/config.json")
    assert values["architectures"] == [expected]
    assert not labels or len(values["id2label"]) == 1  # a choice: one score for each


@pytest.mark.parametrize(("spoil", "message"), [
    (edit(**{"classifier.weight": torch.randn(3, 32)}), "classifier.weight has .*asks for .2,"),
    (edit(**{"pooler.dense.weight": torch.randn(16, 32)}), "pooler.dense.weight has shape .16,"),
    (edit(**{"classifier.weight": torch.randn(2, 32).to(torch.float8_e4m3fn)}), "not floats of"),
], ids=["labels", "pooler", "float8"])
def test_heads_of_another_shape_are_one_clear_error(tmp_path, spoil, message):
    source = _fine_tuned(tmp_path / "source", "ForSequenceClassification", **LABELS)
    spoil(source)
    with pytest.raises(UserError, match=message):
        convert(source, tmp_path / "out", "hf")


def test_unusual_heads_and_settings_are_no_traceback(tmp_path):
    source = _fine_tuned(tmp_path / "null", "ForSequenceClassification", id2label=None)
    convert(source, tmp_path / "out", "hf")
    tensors = load_file(source / "model.safetensors")
    for end in ("weight", "bias"):
        tensors[f"classifier.out_proj.{end}"] = tensors.pop(f"classifier.{end}")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "other", "hf")
    source = _fine_tuned(tmp_path / "quantized", "Model", quantization_config={"bits": 8})
    with pytest.raises(UserError, match=r"config.json: quantization_config: .*as it was before"):
        convert(source, tmp_path / "third", "hf")
    source = _fine_tuned(tmp_path / "act", "Model", conv_kernel_size=3, conv_act="relu")
    with pytest.raises(UserError, match=r"config.json: conv_act: "):
        convert(source, tmp_path / "third", "hf")
