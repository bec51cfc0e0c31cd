"""ONNX files against PyTorch: differences at several lengths, sizes, and time, by family.

    python -m benchmarks.studies.onnx_parity
    python -m benchmarks.studies.onnx_parity --classifier runs/nli/MNLI/seed-1/model --data DIR

Random weights of published widths, with fewer layers and words. With --classifier it is a
fine-tuned classifier that is scored on its validation split instead, in PyTorch, fp32 and int8
(--data: as for finetune.py; an own task knows its table): results/onnx_classifier-cpu.json.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import RESULTS, interleaved_minimum, save
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.config.model import MODELS
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.finetuning.features import collate, encode
from deberta_ds.finetuning.models import finetuned_model, load_finetuned
from deberta_ds.model.backbone import on_meta
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.publish import onnx_files
from deberta_ds.release.networks import Network, build_backbone
from deberta_ds.release.reader import read_release
from deberta_ds.tasks import metrics
from deberta_ds.tasks.readers import read_split

SHAPES = {  # family: (preset, what is not the preset's)
    "v1": ("deberta-base", {"num_layers": 2}),
    "v2 with convolution": ("deberta-v3-base", {"num_layers": 2, "conv_kernel": 3}),
    "v3": ("deberta-v3-base", {"num_layers": 2}),
    "v3 xsmall": ("deberta-v3-xsmall", {"num_layers": 4}),
}
LENGTHS = (16, 128, 600)  # the last is beyond every relative table (512)


def random_network(preset: str, changes: dict) -> Network:
    """Return a discriminator with a masked-LM head and random weights, as at initialization."""
    config = ModelConfig(**MODELS[preset] | changes | {"vocab_size": 8000})
    shapes = {f"mlm_head.{name[5:]}" if name.startswith("head.") else name: parameter.shape
              for name, parameter in on_meta(MaskedLm, config).named_parameters()}
    shapes |= {f"rtd_head.{name}": parameter.shape
               for name, parameter in on_meta(ReplacedTokenHead, config).named_parameters()}
    shapes["words.weight"] = (config.vocab_size, config.hidden_size)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape, generator=generator) + ("norm.weight" in name)
               for name, shape in shapes.items()}
    return Network(config, tensors)


def by_head(full: Network) -> dict[str, Network]:
    """Return the network with each head: none, replaced tokens, masked LM, three classes."""
    def only(*prefixes: str, **more: torch.Tensor) -> Network:
        kept = {name: tensor for name, tensor in full.tensors.items()
                if name.startswith(("words.weight", "trunk.", *prefixes))}
        return Network(full.config, kept | more)

    generator, size = torch.Generator().manual_seed(1), full.config.hidden_size
    shapes = {"pooler.dense.weight": (size, size), "pooler.dense.bias": (size,),
              "classifier.weight": (3, size), "classifier.bias": (3,)}
    classes = {name: torch.randn(shape, generator=generator) / size**0.5
               for name, shape in shapes.items()}
    return {"backbone": only(), "discriminator": full, "masked LM": only("mlm_head.", "positions."),
            "classifier": only(**classes)}


def batch(network: Network, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random ids and a mask of rows of several lengths."""
    generator = torch.Generator().manual_seed(length)
    ids_BL = torch.randint(4, network.config.vocab_size, (rows, length), generator=generator)
    mask_BL = (torch.arange(length) < torch.linspace(1, 0.3, rows)[:, None] * length).long()
    return ids_BL * mask_BL, mask_BL


def measure_family(preset: str, changes: dict, directory: Path, rounds: int) -> dict:
    """Return differences by head and length, and the time of a batch as a ratio to PyTorch's."""
    full = random_network(preset, changes)
    result = {"layers": full.config.num_layers, "hidden_size": full.config.hidden_size, "heads": {}}
    for name, network in by_head(full).items():
        onnx_files.write_network(network, directory, "int8")
        head = onnx_files.graph_head(network)
        limit = network.config.max_position if head == "ForMaskedLM" else max(LENGTHS)
        entry = result["heads"][name] = {}
        for length in sorted({min(length, limit) for length in LENGTHS}):
            for precision, file in (("fp32", onnx_files.MODEL), ("int8", onnx_files.QUANTIZED)):
                largest, mean_square, _ = onnx_files.compare(network, head, directory / file,
                                                             [batch(network, 2, length)])
                entry.setdefault(precision, {})[str(length)] = (
                    largest if precision == "fp32" else mean_square)
        entry["bytes"] = {file: (directory / file).stat().st_size
                          for file in (onnx_files.MODEL, onnx_files.QUANTIZED)}
        if name == "discriminator":
            result["times"] = measure_time(network, directory, rounds)
    return result


def measure_time(network: Network, directory: Path, rounds: int) -> dict:
    """Return processor seconds of 2 x 128 tokens: PyTorch's encoder and both files."""
    ids_BL, mask_BL = batch(network, 2, 128)
    backbone = build_backbone(network).requires_grad_(False)
    inputs = {"input_ids": ids_BL.numpy(), "attention_mask": mask_BL.numpy()}
    sessions = {file: onnx_files.open_session(directory / file)
                for file in (onnx_files.MODEL, onnx_files.QUANTIZED)}
    variants = {"PyTorch": lambda: backbone(ids_BL, mask_BL)}
    for file, session in sessions.items():
        variants[file] = lambda session=session: session.run(["last_hidden_state"], inputs)
    return interleaved_minimum(variants, rounds)


def measure_classifier(source: Path, data: Path, directory: Path) -> dict:
    """Return the scores of a fine-tuned classifier on its validation split in fp32 and int8."""
    saved = load_finetuned(source)
    task, network = saved.task, read_release(source).main
    onnx_files.write_network(network, directory, "int8")
    examples = read_split(task, data, "val", any_size=True).examples
    features = encode(task, examples, saved.tokenizer, max_length=saved.settings.max_length,
                      window_overlap=saved.settings.window_overlap)
    model = finetuned_model(saved, torch.device("cpu"))
    files = {"fp32": onnx_files.MODEL, "int8": onnx_files.QUANTIZED}
    sessions = {name: onnx_files.open_session(directory / file) for name, file in files.items()}
    guesses: dict[str, list[int]] = {name: [] for name in ("PyTorch", *files)}
    for first in range(0, len(features), 16):
        batch = collate(features[first : first + 16])
        with torch.no_grad():
            guesses["PyTorch"] += model(batch).scores.argmax(-1).tolist()
        inputs = {"input_ids": batch.input_ids_RL.numpy(),
                  "attention_mask": batch.segments_RL.long().numpy()}
        for name, session in sessions.items():
            guesses[name] += session.run(["logits"], inputs)[0].argmax(-1).tolist()
    shared = np.equal(guesses["fp32"], guesses["int8"]).mean()
    return {"task": task.name, "examples": len(examples), "labels": len(task.labels),
            "majority": metrics.score(task, examples, metrics.baseline(task, examples)),
            **{name: metrics.score(task, examples, found) for name, found in guesses.items()},
            "same_class_fp32_int8": float(shared)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--families", nargs="+", default=list(SHAPES), choices=list(SHAPES),
                        help="these alone; what is known of the others stays")
    parser.add_argument("--classifier", type=Path, help="a fine-tuned directory")
    parser.add_argument("--data", type=Path, default=Path("."), help="the task's files")
    options = parser.parse_args()
    known = RESULTS / "onnx_parity-cpu.json"
    results = json.loads(known.read_text())["results"] if known.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        if options.classifier:
            found = measure_classifier(options.classifier, options.data, Path(scratch))
            print(found)
            print(save("onnx_classifier", "cpu", found))
            return
        for name in options.families:
            results[name] = measure_family(*SHAPES[name], Path(scratch), options.rounds)
            print(name, results[name], save("onnx_parity", "cpu", results), flush=True)


if __name__ == "__main__":
    exit_cleanly(main)
