"""Our own formats: a training checkpoint (read only), and one directory of plain safetensors.

    DIR/model.json          format version, configuration of each network
    DIR/model.safetensors   tensors under our names, "main." or "generator." before them
    DIR/spm.model ...       the tokenizer's files

The second form is what `convert --to ours` writes: consolidated, exact, without optimizer state.
"""

import json
from functools import partial
from pathlib import Path

from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.base.json_files import read_json
from deberta_ds.checkpoint.find import RUN_FILE, list_steps, read_newest, read_run_record
from deberta_ds.checkpoint.saved_state import load_whole_state
from deberta_ds.config.model import computed_anywhere
from deberta_ds.config.run_config import ModelConfig, RunConfig, to_dict
from deberta_ds.objectives.build import objective_of
from deberta_ds.release import configs
from deberta_ds.release.networks import Network, Release
from deberta_ds.release.tensors import SAFETENSORS, read_tensors, write_safetensors
from deberta_ds.release.tokenizer_files import copy_tokenizer_files, find_tokenizer_files

MODEL_FILE, FORMAT = "model.json", "deberta_ds-1"


def read_ours(directory: Path) -> Release:
    """Return the release of a consolidated directory."""
    tensors, _ = read_tensors(directory / SAFETENSORS)
    networks = {}
    for name, (config, rest) in describe_ours(directory).items():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()
               if key.startswith(prefix)}
        networks[name] = Network(config, own, rest)
    return Release(networks["main"], networks.get("generator"), find_tokenizer_files(directory))


def describe_ours(directory: Path) -> dict[str, tuple[ModelConfig, dict]]:
    """Return (shape, keys of other programs) of each network of a consolidated directory."""
    place = directory / MODEL_FILE
    values = read_json(place)
    if values.get("format") != FORMAT or not isinstance(values.get("networks"), dict):
        raise UserError(f"{place}: format {values.get('format')!r}, but this version reads "
                        f"{FORMAT!r}")
    found = {}
    for name, described in values["networks"].items():
        if not isinstance(described, dict) or not all(
                isinstance(described.get(key), dict) for key in ("config", "rest")):
            raise UserError(f"{place}: networks.{name} lacks config or rest; the file is damaged")
        config = configs.model_config(described["config"], str(place))
        found[name] = computed_anywhere(config), described["rest"]
    if not {"main"} <= found.keys() <= {"main", "generator"}:
        raise UserError(f"{place}: networks are {', '.join(found)}; main is needed, and "
                        "generator is the only other")
    return found


def write_ours(release: Release, out: Path) -> list[str]:
    """Write a consolidated directory; return notes on what was written."""
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict] = {}
    for name, network in release.networks().items():
        described[name] = {"config": to_dict(network.config), "rest": network.rest}
        tensors |= {f"{name}.{key}": tensor for key, tensor in network.tensors.items()}
    write_safetensors(out / SAFETENSORS, tensors)
    values = {"format": FORMAT, "networks": described}
    write_atomic(out / MODEL_FILE, json.dumps(values, indent=1) + "\n")
    notes = [f"written: {out / SAFETENSORS} ({len(tensors)} tensors)"]
    return notes + copy_tokenizer_files(release.tokenizer_files, out)


def read_checkpoint(path: Path) -> Release:
    """Return the release of a training checkpoint, or of a run directory's newest one."""
    return read_newest(path, partial(_read_checkpoint, path))


def _read_checkpoint(path: Path, directory: Path) -> Release:
    state, run = load_whole_state(directory)
    release = release_of_state(state, run)
    if directory != path:
        skipped = [step.name for step in list_steps(path) if step.name > directory.name]
        also = f" (newer, but unfinished: {', '.join(skipped)})" if skipped else ""
        release.notes.append(f"read: the run's newest checkpoint, {directory.name}{also}")
    release.tokenizer_files, release.place = find_tokenizer_files(directory), directory
    return release


def shapes_of_checkpoint(path: Path) -> dict[str, ModelConfig]:
    """Return the shape of each network of a training checkpoint, or of a run's newest one."""
    run = read_newest(path, lambda found: read_run_record(found).run(found / RUN_FILE))
    return objective_of(run).encoders(run)


def release_of_state(state: dict, run: RunConfig) -> Release:
    """Return the release of a model's state dict."""
    objective = objective_of(run)
    tensors, notes = objective.networks(run, state)
    networks = {name: Network(config, tensors[name])
                for name, config in objective.encoders(run).items()}
    return Release(networks["main"], networks.get("generator"), notes=notes)
