"""The files of a model: weights, tokenizer, and our own formats.

Weights from anywhere are safetensors, or a `.bin`, a pickle: it is only ever read with
`weights_only=True`, which builds tensors and plain containers and rejects everything else.

A published directory has the source's own tokenizer files, and what AutoTokenizer needs.
transformers 5 rebuilds `DebertaV2Tokenizer` from the pieces alone: the SentencePiece normalizer and
the byte fallback are lost, and ids differ from those the model was trained on. So `tokenizer.json`
is written here from spm.model itself, with every step of the original. Difference that remains:
transformers finds the names of special tokens ("[MASK]") in text and gives their ids; our tokenizer
never searches text for them.

Our own formats are a training checkpoint (read only), and one directory, which `convert --to ours`
writes: consolidated, exact, without optimizer state.

    DIR/model.json          format version, configuration of each network
    DIR/model.safetensors   tensors under our names, "main." or "generator." before them
    DIR/spm.model ...       the tokenizer's files
"""

import io
import itertools
import json
import pickle
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from deberta_ds.base.errors import UserError, first_line, naming
from deberta_ds.base.files import atomic_path, read_json, write_atomic
from deberta_ds.checkpoint.find import RUN_FILE, list_steps, read_newest, read_run_record
from deberta_ds.checkpoint.saved_state import load_whole_state
from deberta_ds.config.model import computed_anywhere
from deberta_ds.config.run_config import ModelConfig, RunConfig, to_dict
from deberta_ds.objectives.build import objective_of
from deberta_ds.release.foreign import CODE, model_config
from deberta_ds.release.networks import Network, Release
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.files import (
    ADDED,
    FORMS,
    JSON,
    NAMES,
    OTHER_MODELS,
    SETTINGS,
    SPM,
    Files,
    read_known,
)
from deberta_ds.tokenizer.publish import write_tokenizer_json
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json

# What the safe unpickler raises on bytes that are no pickle.
_DAMAGE = (RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError,
           AssertionError, struct.error)
SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
FIRST_RELEASE = "pytorch.model.bin"  # in the archives of the first release of microsoft/DeBERTa


def weight_file(directory: Path) -> Path | None:
    """Return the weight file (or index of several) of a directory; safetensors first."""
    for name in (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLE, f"{PICKLE}.index.json",
                 FIRST_RELEASE):
        if (directory / name).is_file():
            return directory / name
    return None


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of named tensors."""
    found = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return (tensors by name, names of entries that are no tensors) of a file or an index."""
    if path.name.endswith(".index.json"):
        return _read_parts(path)
    with naming(path):
        if path.suffix == ".safetensors":
            with open(path, "rb") as file:
                file.read(1)  # safetensors says of one that may not be read that there is none
            return load_file(path), []
        values = _read_pickle(path)
    if isinstance(values.get("model_state_dict", None), dict):
        values = values["model_state_dict"]
    tensors = {name: value.detach() for name, value in values.items()
               if isinstance(value, Tensor) and isinstance(name, str)}
    if odd := [name for name, tensor in tensors.items() if tensor.layout != torch.strided]:
        raise UserError(f"{path}: {odd[0]} is a sparse tensor; save it as an ordinary one")
    return tensors, sorted(str(name) for name in values.keys() - tensors.keys())


def _read_parts(index: Path) -> tuple[dict[str, Tensor], list[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: no weight_map; not an index of weight files")
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index}: weight_map must name a file for each tensor")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or "\0" in name or name.endswith(".index.json"):
            raise UserError(f"{index}: {name!r} is not a plain file name")
        part, more = read_tensors(index.parent / name)
        tensors |= part
        others += more
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise UserError(f"{index}: {missing[0]} and {len(missing) - 1} more are in no file")
    return tensors, others


def _read_pickle(path: Path) -> dict:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path}: rejected: the pickle holds more than tensors, or is damaged; "
                        "code in it was not run. Ask its author for safetensors") from None
    except _DAMAGE as error:
        raise UserError(f"{path}: damaged or truncated weight file ({first_line(error)}); fetch it "
                        "again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}, not named tensors")
    return values


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file, whole or not at all."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    with atomic_path(path) as temporary:
        save_file(whole, temporary, metadata={"format": "pt"})  # older transformers ask for it


def write_bin(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as a `.bin` (PyTorch's zip pickle), whole or not at all.

    Through memory: when a write fails, on a full disk say, PyTorch's zip writer raises again in its
    destructor, which aborts (exit code -6, no message).
    """
    whole = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


# Everything that a published directory may keep its tokenizer in.
KNOWN_FILES = (*itertools.chain(*FORMS), SETTINGS, NAMES, ADDED, "bpe_encoder.bin", "dict.txt")


def find_tokenizer_files(directory: Path) -> Files:
    """Return the tokenizer files in a directory, read. A SentencePiece model that lies there alone
    under another usual name gets the name that it is published under.
    """
    found = read_known(directory, KNOWN_FILES)
    if found.keys() & {names[0] for names in FORMS}:
        return found
    others = list(read_known(directory, OTHER_MODELS).values())
    return ({SPM: others[0]} if others else {}) | found


def open_tokenizer(files: Files) -> Tokenizer | None:
    """Return the tokenizer among a directory's files; None if there is none that is read."""
    for names in FORMS:
        if set(names) <= files.keys():
            return Tokenizer(files[names[0]].path.parent, files)
    return None


def pad_id_of(files: Files) -> dict[str, int]:
    """Return {"pad_token_id": id} of the tokenizer among a directory's files, {} without one."""
    tokenizer = open_tokenizer(files)
    return {"pad_token_id": tokenizer.pad_id} if tokenizer else {}


def copy_tokenizer_files(files: Files, out: Path) -> list[str]:
    """Write tokenizer files, as they were read, to `out`; return a note for each. Of settings that
    name code of a stranger ("auto_map") the rest is written.
    """
    for name, file in files.items():
        data = file.data
        if name == SETTINGS and CODE.encode() in data:
            values = {key: value for key, value in read_json(file).items() if key != CODE}
            data = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
        write_atomic(out / name, data)
    return [f"copied: {name}" for name in files]


def write_tokenizer_files(files: Files, out: Path, max_length: int) -> list[str]:
    """Write tokenizer files to `out`, adding what AutoTokenizer needs; return a note for each."""
    notes = copy_tokenizer_files(files, out)
    tokenizer = open_tokenizer(files)
    if tokenizer is None or {SPM, JSON} <= files.keys():
        return notes
    text = build_tokenizer_json(tokenizer) if tokenizer.specification is None else None
    write_tokenizer_json(tokenizer, out, max_length, text)
    made_of = ", ".join(tokenizer.files)
    return [*notes, f"derived: {JSON} and {SETTINGS} from {made_of}"]


def exported_word_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return `word_ids()` of the exported tokenizer for each text, without [CLS] and [SEP]."""
    import tokenizers

    with TemporaryDirectory() as out:
        write_tokenizer_files(tokenizer.files, Path(out), max_length=0)
        exported = tokenizers.Tokenizer.from_file(str(Path(out) / JSON))
    found = exported.encode_batch(texts, add_special_tokens=False)
    for text, encoding, ids in zip(texts, found, tokenizer.encode_batch(texts), strict=True):
        if encoding.ids != ids or " " in text.strip() and not any(encoding.word_ids):
            raise UserError(f"{text!r}: the exported tokenizer gives it other tokens, or takes it "
                            "for one word; use --scoring word, or take the sentence out")
    return [encoding.word_ids for encoding in found]


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
        config = model_config(described["config"], str(place))
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


def read_checkpoint(path: Path, key: str) -> Release:
    """Return the release of a training checkpoint, or of a run directory's newest one."""
    return read_newest(path, partial(_read_checkpoint, path, key))


def _read_checkpoint(path: Path, key: str, directory: Path) -> Release:
    state, run = load_whole_state(directory, key)
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
