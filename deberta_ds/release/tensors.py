"""Reading weight files from anywhere: safetensors, and `.bin` without running what is in it.

A `.bin` is a pickle; it is only ever read with `weights_only=True`, which builds tensors and plain
containers and rejects everything else.
"""

import io
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from deberta_ds.base.errors import UserError, first_line, naming, refuse_pipe
from deberta_ds.base.files import atomic_path
from deberta_ds.base.json_files import read_json

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
    if path.suffix == ".safetensors":
        with naming(path), open(path, "rb") as file:
            file.read(1)  # safetensors says of one that may not be read that there is none
            return load_file(path), []
    refuse_pipe(path)
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
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
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
