"""ONNX files compute what PyTorch and transformers do, at any length, in fp32 and int8."""

import dataclasses
import json
import sys

import pytest
import torch
import transformers
from export_cases import FAMILIES, make_release, with_classifier
from superglue_helpers import saved_model

from deberta_ds.base.errors import UserError
from deberta_ds.publish import onnx_files
from deberta_ds.publish.convert import convert, write_release
from deberta_ds.publish.hf import write_hugging_face
from deberta_ds.release.networks import Network
from deberta_ds.release.reader import read_release

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

BERT = {"relative_attention": False, "position_terms": (), "absolute_input": True,
        "relative_norm": False, "share_position_projections": False, "position_buckets": 0}
SHAPES = {**{name: {} for name in ("v1", "v1_key_bias", "v2", "v3")},
          "v2 tanh, wide": {"conv_kernel": 5, "conv_activation": "tanh"},
          "v3 c2p": {"position_terms": ("c2p",)}, "v3 p2c": {"position_terms": ("p2c",)},
          "v3 odd buckets": {"position_buckets": 15}}


def batch(rows, length, seed=0):
    """Return ids and a mask with padding of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 600, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, 1 + (length - 1) * row // rows:] = 0
    return ids * mask, mask


def run(path, ids, mask):
    inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    return [torch.from_numpy(out) for out in onnx_files.open_session(path).run(None, inputs)]


@pytest.mark.parametrize("shape", SHAPES)
def test_encoder_agrees_with_transformers_at_any_length(tmp_path, monkeypatch, shape):
    """Lengths of one token up to several times the reach of the relative table (64 here)."""
    family = shape if shape in FAMILIES else shape[:2]
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | SHAPES[shape] | {"num_layers": 2})
    release = make_release(family)
    write_hugging_face(release, tmp_path)
    onnx_files.write_network(release.main, tmp_path, "fp32")
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    for rows, length in ((1, 1), (3, 2), (2, 63), (3, 64), (2, 65), (4, 130), (1, 300)):
        ids, mask = batch(rows, length, length)
        hidden, logits = run(tmp_path / "model.onnx", ids, mask)
        with torch.no_grad():
            wanted = theirs(ids, attention_mask=mask).last_hidden_state
        real = mask.bool()
        torch.testing.assert_close(hidden[real], wanted[real], rtol=1e-5, atol=1e-5)
        assert logits.shape == ids.shape


def test_absolute_positions_end_where_the_table_does(tmp_path):
    config = dataclasses.replace(make_release("v3", "mlm").main.config, **BERT)
    release = make_release("v3", "mlm")
    tensors = {name: tensor for name, tensor in release.main.tensors.items()
               if "relative" not in name}
    tensors["trunk.input.positions.weight"] = tensors.pop("positions.weight")
    onnx_files.write_network(Network(config, tensors), tmp_path, "fp32")
    assert len(run(tmp_path / "model.onnx", *batch(2, 64))[0]) == 2
    with pytest.raises(Exception, match="64 by 65|out of data bounds"):
        run(tmp_path / "model.onnx", *batch(2, 65))


@pytest.mark.parametrize("family", ["v1", "v2", "v3"])
def test_masked_lm_and_discriminator_agree_with_training(tmp_path, family):
    """The oracle is the model in PyTorch: its decoder in every column, and its detection head."""
    mlm, rtd = make_release(family, "mlm").main, make_release(family).main
    for number, network in enumerate((mlm, rtd)):
        directory = tmp_path / str(number)
        directory.mkdir()
        onnx_files.write_network(network, directory, "fp32")
        head = onnx_files.graph_head(network)
        for rows, length in ((3, 1), (3, 40), (2, 64)):
            ids, mask = batch(rows, length)
            wanted = onnx_files.expected(network, head, ids, mask)
            found = run(directory / "model.onnx", ids, mask)
            for ours, theirs in zip(wanted, found, strict=True):
                torch.testing.assert_close(theirs[mask.bool()], ours[mask.bool()], rtol=1e-4,
                                           atol=1e-5)


@pytest.mark.parametrize("shape", ["v3", "v2 convolution", "v1"])
def test_fine_tuned_directories_give_the_logits_of_transformers(tmp_path, shape):
    for name in ("CB", "COPA"):
        source, out = tmp_path / name, tmp_path / f"{name} out"
        saved_model(source, name, shape)
        convert(source, out, "hf", onnx="fp32")
        architecture = json.loads((out / "config.json").read_text())["architectures"][0]
        assert architecture.endswith("MultipleChoice") == (name == "COPA" and shape != "v1")
        theirs = getattr(transformers, architecture).from_pretrained(out).eval()
        for length in (3, 100):
            ids, mask = batch(4, length)
            if architecture.endswith("MultipleChoice"):
                ids, mask = ids.view(2, 2, -1), mask.view(2, 2, -1)
            with torch.no_grad():
                wanted = theirs(ids, attention_mask=mask).logits
            found, = run(out / "onnx" / "model.onnx", ids, mask)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", ["TokenClassification", "QuestionAnswering"])
def test_token_and_answer_heads_of_transformers_are_exported(tmp_path, cls):
    write_hugging_face(make_release("v3"), tmp_path / "encoder")
    theirs = getattr(transformers, f"AutoModelFor{cls}").from_pretrained(
        tmp_path / "encoder", num_labels=5 if cls == "TokenClassification" else 2).eval()
    theirs.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", "hf", onnx="fp32")
    ids, mask = batch(3, 70)
    with torch.no_grad():
        output = theirs(ids, attention_mask=mask)
    found = run(tmp_path / "out" / "onnx" / "model.onnx", ids, mask)
    for ours, other in zip(found, output.to_tuple(), strict=True):
        torch.testing.assert_close(ours[mask.bool()], other[mask.bool()], rtol=1e-5, atol=1e-5)


def test_export_writes_both_networks_in_both_precisions(tmp_path):
    summary = write_release(make_release("v3"), "test", tmp_path / "hf", "hf", onnx="int8")
    for directory in (tmp_path / "hf" / "onnx", tmp_path / "hf" / "generator" / "onnx"):
        whole, small = (directory / name for name in ("model.onnx", "model_quantized.onnx"))
        assert small.stat().st_size < whole.stat().st_size
        ids, mask = batch(3, 50)
        ours, theirs = run(whole, ids, mask)[0][mask.bool()], run(small, ids, mask)[0][mask.bool()]
        assert 0 < (ours - theirs).norm() / ours.norm() < 0.1
    assert sum("from PyTorch at lengths 5, 64, 96" in line for line in summary.checks) == 1
    assert sum("int8" in line for line in summary.checks) == 2
    assert read_release(tmp_path / "hf").generator  # still the same directory to everyone else


def test_a_graph_of_other_values_is_refused(tmp_path, monkeypatch):
    """The mask of the tokens hid those of a row's last classes, of as many classes as tokens."""
    real, other = onnx_files.expected, make_release("v3").main
    other.tensors["trunk.encoder.layers.1.ffn_in.bias"] += 0.5
    for network, expected in (
            (make_release("v3").main, lambda _, *inputs: real(other, *inputs)),
            (with_classifier(make_release("v3"), 5).main, lambda *inputs: (
                real(*inputs)[0] + torch.tensor([0.0] * 4 + [1e3]) * (inputs[2][:, -1:] == 0),))):
        monkeypatch.setattr(onnx_files, "expected", expected)
        with pytest.raises(UserError, match="other values than PyTorch"):
            onnx_files.write_network(network, tmp_path, "fp32")
        monkeypatch.setattr(onnx_files, "sample_batches", lambda *_: [batch(2, 5)])


def test_large_weights_lie_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_files, "_INLINE_BYTES", 1000)
    onnx_files.write_network(with_classifier(make_release("v2")).main, tmp_path, "int8")
    assert (tmp_path / "model.onnx.data").stat().st_size > (tmp_path / "model.onnx").stat().st_size
    assert len(run(tmp_path / "model_quantized.onnx", *batch(3, 20))[0]) == 3


def test_missing_packages_have_one_error_that_says_how_to_install_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"package onnxruntime, .*pip install .deberta_ds\[onnx\]"):
        convert(tmp_path / "nothing", tmp_path / "out", "hf", onnx="fp32")
