"""Models as transformers and microsoft write them, to convert in tests."""

import json

import torch
import transformers
from export_cases import FAMILIES

from deberta_ds.config.run_config import ModelConfig
from deberta_ds.release import foreign

MS_FILES = ("pytorch_model.bin", "model_config.json")


def json_of(path) -> dict:
    return json.loads(path.read_text())


def edit_json(path, **changes) -> None:
    """Write other values into a JSON file; ... takes a key out."""
    values = json_of(path) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def transformers_model(family, head="Model"):
    config = ModelConfig(**FAMILIES[family])
    kind = foreign.V1 if family == "v1" else foreign.V2
    values = foreign.to_hugging_face(config, kind=kind, rest={"legacy": False})
    prefix = {"v1": "Deberta"}.get(family, "DebertaV2")
    model = getattr(transformers, prefix + head)(
        getattr(transformers, prefix + "Config")(**values)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def state_of(directory) -> dict:
    """Return the tensors of a microsoft directory."""
    return torch.load(directory / MS_FILES[0], weights_only=True)


def microsoft_directory(path, family, *, key_bias=0.0, **tensors):
    """Write a microsoft pair for a masked LM, from transformers' weights and names."""
    path.mkdir()
    config = ModelConfig(**FAMILIES[family])
    model = transformers_model("v1_key_bias" if family == "v1" else family, "ForMaskedLM")
    state = dict(model.state_dict())
    state["deberta.embeddings.position_embeddings.weight"] = torch.randn(
        config.max_position, config.hidden_size)
    for name in state:
        if name.endswith("key_proj.bias") and family == "v1":
            state[name] = torch.full_like(state[name], key_bias)
    torch.save(state | tensors, path / MS_FILES[0])
    values = foreign.to_microsoft(config, {}) | {
        "pooling": {"hidden_size": 32, "dropout": 0.2, "hidden_act": "gelu"}, "cls_drop_out": 0.3}
    (path / MS_FILES[1]).write_text(json.dumps(values))
    return path
