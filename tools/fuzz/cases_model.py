"""Broken checkpoints and model directories of every format, and code hidden in them."""

import json
import pickle
import zipfile
from pathlib import Path
from random import Random

from tools.fuzz import mutate
from tools.fuzz.case import CANARY, Case
from tools.fuzz.readers import READERS


def checkpoint(random: Random, place: Path) -> Case:
    """A run's checkpoint with a broken file, or with code in it."""
    command = random.choice(READERS["checkpoint"])
    step = place / "out/checkpoints/step-00000002"
    path = random.choice(mutate.files_under(step))
    if random.random() < 0.2:
        path = random.choice([p for p in mutate.files_under(step) if p.suffix != ".json"])
        _hide_code(random, path, place)
        change = mutate.Change("holds code", False)
    elif random.random() < 0.1:
        change = mutate.directory(random, random.choice([step, step.parent]))
        return Case(command, change.text, ("out",))
    else:
        change = (mutate.json_file if path.suffix == ".json" else mutate.file)(random, path)
    if path.name != "manifest.json" and path.is_file() and not path.is_symlink() \
            and random.random() < 0.6:
        _write_manifest_anew(step)
        change = mutate.Change(f"{change.text}, fresh manifest", False)
    return Case(command, f"{path.relative_to(step)} {change.text}", ("out", path.name))


def model(random: Random, place: Path) -> Case:
    """An exported model with a broken file, read by whoever reads models."""
    return _directory(random, place, "hf", "model")


def microsoft(random: Random, place: Path) -> Case:
    """A model with its generator in microsoft's format: pickles and model_config.json."""
    return _directory(random, place, "ms", "microsoft")


def official(random: Random, place: Path) -> Case:
    """What the official training writes: discriminator/ and generator/."""
    return _directory(random, place, "official", "official")


def ours(random: Random, place: Path) -> Case:
    """A consolidated directory of our own."""
    return _directory(random, place, "ours", "ours")


def _directory(random: Random, place: Path, name: str, kind: str) -> Case:
    command = random.choice(READERS[kind])
    pickles = sorted((place / name).rglob("*.bin"))
    if pickles and random.random() < 0.4:
        path = random.choice(pickles)
        if random.random() < 0.3:
            _hide_code(random, path, place)
            change = mutate.Change(f"{path.name} holds code", False)
        else:
            change = _change_pickle(random, path)
    else:
        change = mutate.something_in(random, place / name)
    return Case(command, change.text, (name, "new"))


class _Code:
    """What a stranger would hide in a pickle."""

    def __init__(self, canary: Path):
        self._canary = str(canary)

    def __reduce__(self):
        return open, (self._canary, "w")


def _hide_code(random: Random, path: Path, place: Path) -> None:
    code = _Code(place / CANARY)
    if random.random() < 0.4 or not zipfile.is_zipfile(path):
        path.write_bytes(pickle.dumps({"module": code}))
        return
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, pickle.dumps({"module": code}, 2) if name.endswith("data.pkl")
                             else content)


def _change_pickle(random: Random, path: Path) -> mutate.Change:
    """Change one value in a pickle of tensors and plain values, and write it again."""
    import torch

    whole = torch.load(path, map_location="cpu", weights_only=True)
    nodes = list(_nodes(whole, ()))
    where, parent, key = random.choice(nodes)
    old = parent[key]
    if torch.is_tensor(old) and random.random() < 0.7:
        first = old[:1] if old.dim() else old[None]
        parent[key], what = random.choice([
            (first, "its first row"), (old.double(), "doubles"), (old.flatten(), "flat"),
            (old * float("nan"), "NaN"), (old.long(), "whole numbers"), (old.new_empty(0), "empty"),
            (old.new_zeros(()), "one number"), (old.to_sparse(), "sparse"), (old.half(), "halves")])
    elif random.random() < 0.3:
        del parent[key]
        what = "deleted"
    elif random.random() < 0.2 and isinstance(parent, dict):
        parent[random.choice([7, None, ("a", 1), "x.weight", "\ud800"])] = parent.pop(key)
        what = "under another name"
    else:
        parent[key] = mutate.value(random, 0 if torch.is_tensor(old) else old)[0]
        what = f"{str(parent[key])[:40]!a}"
    torch.save(whole, path)
    return mutate.Change(f"{path.name}: {'.'.join(map(str, where))[-60:]}: {what}", False)


def _nodes(node, path: tuple):
    items = node.items() if isinstance(node, dict) else \
        enumerate(node) if isinstance(node, list) else ()
    for key, child in list(items):
        yield (*path, key), node, key
        yield from _nodes(child, (*path, key))


def _write_manifest_anew(step: Path) -> None:
    from deberta_ds.base.files import xxh3

    path = step / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        for name in manifest["files"]:
            file = step / name
            manifest["files"][name] = {"bytes": file.stat().st_size, "xxh3": xxh3(file)}
        path.write_text(json.dumps(manifest))
    except (OSError, ValueError, KeyError, TypeError):
        pass
