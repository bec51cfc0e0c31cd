"""Write microsoft/DeBERTa files: `.bin` and `model_config.json`, the generator beside them.

Names as on the Hub: pytorch_model.bin, model_config.json; pytorch_model.generator.bin,
generator_config.json. The official code (HEAD) gives v1 models zero key biases, so they are added.
"""

import json
from pathlib import Path

from torch import Tensor

from deberta_ds.base.files import write_atomic
from deberta_ds.release import configs, names
from deberta_ds.release.release import Network, Release, with_zero_key_biases
from deberta_ds.release.tensors import PICKLE, write_bin
from deberta_ds.release.tokenizer_files import copy_tokenizer_files, pad_id_of

FILES = {"main": (PICKLE, "model_config.json"),
         "generator": ("pytorch_model.generator.bin", "generator_config.json")}


def write_microsoft(release: Release, out: Path) -> list[str]:
    """Write a directory in microsoft's format; return notes on what was written and derived."""
    out.mkdir(parents=True, exist_ok=True)
    notes: list[str] = []
    own = pad_id_of(release.tokenizer_files)
    for name, network in release.networks().items():
        weights, config = FILES[name]
        tensors = microsoft_tensors(network, notes)
        write_bin(out / weights, tensors)
        values = configs.to_microsoft(network.config, network.rest | own)
        write_atomic(out / config, json.dumps(values, indent=2) + "\n")
        notes.append(f"written: {out / weights} ({len(tensors)} tensors)")
        if not network.config.absolute_input and "positions.weight" not in network.tensors:
            notes.append(f"absent: {name} has no absolute position table in the source; the "
                         "official code starts it at random")
    return notes + copy_tokenizer_files(release.tokenizer_files, out)


def microsoft_tensors(network: Network, notes: list[str]) -> dict[str, Tensor]:
    """Return a network's tensors under microsoft's names."""
    config = network.config
    tensors = network.tensors
    if not config.key_bias:
        tensors = with_zero_key_biases(network)
        notes.append("derived: zero key biases, which the official code gives v1 models")
    theirs = names.to_theirs(tensors, config.num_layers, config.absolute_input)
    return {(names.PREFIX if names.is_encoder_name(name) else "") + name: tensor
            for name, tensor in theirs.items()}
