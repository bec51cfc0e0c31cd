"""doctor.py --model: public directories are read right, and what differs is a problem."""

import dataclasses
import json
import shutil

import pytest
import torch
from convert_cases import transformers_model
from data_helpers import tokenizer_path
from deberta_v1_files import hub_directory
from launching import ROOT

from deberta_ds.base.errors import UserError
from deberta_ds.evaluate import public_model
from deberta_ds.evaluate.public_model import examine_model


@pytest.fixture
def xsmall(tmp_path):
    """The layout of microsoft/deberta-v3-xsmall: fp16 in a .bin, spm.model, no architectures."""
    model = transformers_model("v3")
    torch.save({f"deberta.{name}": value.half() for name, value in model.state_dict().items()},
               tmp_path / "pytorch_model.bin")
    values = model.config.to_dict()
    values.pop("architectures", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    shutil.copy(tokenizer_path(), tmp_path / "spm.model")
    return tmp_path


def test_a_public_layout_is_right(xsmall):
    lines = list(examine_model(str(xsmall)))
    assert any(line.startswith("hidden states differ from transformers' by") for line in lines)
    assert any("beyond 64 tokens transformers reads other rows" in line for line in lines)
    assert any("no masked-LM head" in line for line in lines)  # the generator is another file
    assert not [line for line in lines if line.startswith("PROBLEM")], lines


def test_deberta_base_of_the_hub_is_right(tmp_path):
    lines = list(examine_model(str(hub_directory(tmp_path))))
    assert not [line for line in lines if line.startswith("PROBLEM")], lines
    assert not (tmp_path / "UNPICKLED").exists()


def test_the_models_of_this_project_are_right_and_fill_a_mask():
    lines = list(examine_model(str(ROOT / "examples/models/novels_7m")))
    assert "tokens: 5 of 5 texts as AutoTokenizer" in lines
    assert lines[-1].startswith("Paris is the [MASK] of France.  ") and "%" in lines[-1]


def test_other_hidden_states_are_a_problem(xsmall, monkeypatch):
    read = public_model.read_release

    def other(path):
        release = read(path)
        release.main = dataclasses.replace(release.main, tensors={
            name: tensor * (1.01 if "layers.1" in name else 1.0)
            for name, tensor in release.main.tensors.items()})
        return release

    monkeypatch.setattr(public_model, "read_release", other)
    assert any(line.startswith("PROBLEM: hidden states differ") for line in
               examine_model(str(xsmall)))


def test_what_is_no_model_is_one_error(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}.*"):
        list(examine_model(str(tmp_path)))
