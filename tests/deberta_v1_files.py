"""Directories laid out exactly as the public files of DeBERTa v1, tiny and with random weights.

    hub    microsoft/deberta-base on the Hub: config.json, pytorch_model.bin, vocab.json,
           merges.txt, tokenizer_config.json, bpe_encoder.bin
    zip    the first release of microsoft/DeBERTa: model_config.json, pytorch.model.bin,
           bpe_encoder.bin

Sources: names of tensors, the list that transformers prints for microsoft/deberta-base
(huggingface/transformers issue 15216) and modeling_deberta.py; ids, microsoft/DeBERTa
deberta/gpt2_tokenizer.py: [PAD] [CLS] [SEP] [UNK], then the pieces in the order of a dictionary of
frequencies (not of the merges), three filler words of that dictionary that no text has, [MASK].
bpe_encoder.bin is a pickle: here one that writes a file when somebody loads it.
"""

import functools
import json
import os
import pickle
import random
from pathlib import Path

import torch
from data_helpers import SENTENCES

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 64, "max_position_embeddings": 64}
PIECES = 400  # of the byte-level BPE, special ids not counted
FILLERS = 3
VOCABULARY = 4 + PIECES + FILLERS + 1
# The keys of microsoft/deberta-base's config.json; there is no dtype, no class, no buckets.
CONFIG = {"model_type": "deberta", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
          "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "relative_attention": True,
          "pos_att_type": "c2p|p2c", "layer_norm_eps": 1e-7, "max_relative_positions": -1,
          "position_biased_input": False, "type_vocab_size": 0, "vocab_size": VOCABULARY,
          "padding_side": "right", "pooler_dropout": 0, "pooler_hidden_act": "gelu"} | SHAPE


@functools.cache
def trained_bpe() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (pieces, merges) of a byte-level BPE in GPT-2's form."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=PIECES, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(SENTENCES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    assert len(model["vocab"]) == PIECES
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    return tuple(model["vocab"]), merges


def vocabulary() -> dict[str, int]:
    """Return {piece: id} in v1's order; the filler words have ids but no entry."""
    pieces = sorted(trained_bpe()[0])
    random.Random(0).shuffle(pieces)
    ids = {"[CLS]": 1, "[PAD]": 0, "[SEP]": 2, "[UNK]": 3}
    ids |= {piece: number for number, piece in enumerate(pieces, start=4)}
    return ids | {"[MASK]": VOCABULARY - 1}


def write_vocabulary(directory: Path) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps(vocabulary()), encoding="utf-8")
    (directory / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(trained_bpe()[1]) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": False, "vocab_type": "gpt2"}))


def state_dict(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights under the names of the public pytorch_model.bin."""
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    shapes = {"embeddings.word_embeddings.weight": (VOCABULARY, hidden),
              "embeddings.position_embeddings.weight": (SHAPE["max_position_embeddings"], hidden),
              "encoder.rel_embeddings.weight": (2 * SHAPE["max_position_embeddings"], hidden)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(SHAPE["num_hidden_layers"]):
        place = f"encoder.layer.{layer}"
        attention = f"{place}.attention.self"
        shapes |= {f"{attention}.in_proj.weight": (3 * hidden, hidden),
                   f"{attention}.q_bias": (hidden,), f"{attention}.v_bias": (hidden,),
                   f"{attention}.pos_proj.weight": (hidden, hidden),
                   f"{attention}.pos_q_proj.weight": (hidden, hidden),
                   f"{attention}.pos_q_proj.bias": (hidden,)}
        for name, rows, columns in (("attention.output.dense", hidden, hidden),
                                    ("intermediate.dense", inner, hidden),
                                    ("output.dense", hidden, inner)):
            shapes |= {f"{place}.{name}.weight": (rows, columns), f"{place}.{name}.bias": (rows,)}
        norms += [f"{place}.attention.output.LayerNorm", f"{place}.output.LayerNorm"]
    shapes = {f"deberta.{name}": shape for name, shape in shapes.items()}
    norms = [f"deberta.{name}" for name in norms] + ["lm_predictions.lm_head.LayerNorm"]
    shapes |= {"lm_predictions.lm_head.dense.weight": (hidden, hidden),
               "lm_predictions.lm_head.dense.bias": (hidden,),
               "lm_predictions.lm_head.bias": (VOCABULARY,)}
    shapes |= {f"{name}.{leaf}": (hidden,) for name in norms for leaf in ("weight", "bias")}
    generator = torch.Generator().manual_seed(seed)
    state = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor + name.endswith("LayerNorm.weight") for name, tensor in state.items()}


class _Trap:
    """What runs when somebody unpickles bpe_encoder.bin."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def write_bpe_encoder(directory: Path) -> Path:
    """Write a bpe_encoder.bin; return the directory that appears if it is ever unpickled."""
    mark = directory / "UNPICKLED"
    values = {"encoder": {}, "vocab": [], "dict_map": [("464", 1)], "trap": _Trap(mark)}
    (directory / "bpe_encoder.bin").write_bytes(pickle.dumps(values))
    return mark


def hub_directory(directory: Path, seed: int = 0) -> Path:
    """Write a directory as microsoft/deberta-base is on the Hub."""
    write_vocabulary(directory)
    write_bpe_encoder(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    torch.save(state_dict(seed), directory / "pytorch_model.bin")
    return directory


def zip_directory(directory: Path, seed: int = 0) -> Path:
    """Write a directory as base.zip of the first release of microsoft/DeBERTa unpacks."""
    directory.mkdir(parents=True, exist_ok=True)
    write_bpe_encoder(directory)
    values = {key: value for key, value in CONFIG.items()
              if key not in ("model_type", "padding_side", "pooler_dropout", "pooler_hidden_act")}
    values |= {"padding_idx": 0, "attention_head_size": 8}
    (directory / "model_config.json").write_text(json.dumps(values, indent=2))
    torch.save(state_dict(seed), directory / "pytorch.model.bin")
    return directory
