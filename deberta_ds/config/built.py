"""data.corpus of a run file: a directory that data_prep/build.py has made.

Its corpus.json stands for data.sources, data.heldout and data.tokenizer, with paths from there.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from deberta_ds.base.errors import UserError
from deberta_ds.base.json_files import read_json, typed
from deberta_ds.config.options import ConfigError

BUILT = "corpus.json"


@dataclass(frozen=True)
class Built:
    """Keys of [data]; `sources` {path: weight}."""

    sources: dict[str, float]
    heldout: dict[str, str]
    tokenizer: str


def read_built(directory: str) -> dict:
    """Return the keys of [data] that a built directory stands for."""
    path = Path(directory) / BUILT
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; data.corpus must be a local directory that "
                          "data_prep/build.py has finished")
    try:
        built = typed(Built, read_json(path))
    except (UserError, ValueError) as error:
        raise ConfigError(f"{path}: damaged ({error}); run data_prep/build.py again") from None
    heldout = {name: os.path.join(directory, one) for name, one in built.heldout.items()}
    return {"sources": [{"path": os.path.join(directory, one), "weight": weight}
                        for one, weight in built.sources.items()],
            "heldout": heldout if len(heldout) > 1 else "".join(heldout.values()),
            "tokenizer": os.path.join(directory, built.tokenizer)}


def apply_built(data: dict, origins: dict) -> None:
    """Put what data.corpus stands for into `data`; other keys may choose from its sources alone.

    One of the command line wins over these keys of the file.
    """
    directory, origin = data.pop("corpus"), origins.pop("data.corpus")
    built = read_built(str(directory))
    for key in built:
        if origin == "command line" != origins.get(f"data.{key}"):
            data.pop(key, None)
    known, given = [source["path"] for source in built["sources"]], data.get("sources")
    wrong = [f"data.{key}" for key in ("tokenizer", "heldout") if key in data] + [
        f"data.sources ({one.get('path')})" for one in (given if isinstance(given, list) else ())
        if isinstance(one, dict) and one.get("path") not in known]
    if wrong:
        raise ConfigError(f"{origin}: data.corpus = {directory!r} has its own tokenizer, held-out "
                          f"corpora and sources ({', '.join(known)}), so {' and '.join(wrong)} must"
                          " be left out; or write all three without data.corpus")
    for key in [key for key in built if key not in data]:
        data[key] = built[key]
        origins[f"data.{key}"] = f"data.corpus {directory}"
