"""Minimal pairs: two sentences of which a model that knows the language prefers the first.

Formats, told apart by the files' names and keys, in a directory, a tar archive or one file:
    BLiMP   .jsonl with sentence_good, sentence_bad, UID, linguistics_term (Warstadt et al. 2020)
    own     .jsonl with sentence_good, sentence_bad and, if you like, paradigm and phenomenon
    Zorro   .txt, named PHENOMENON-PARADIGM.txt: a bad line, then its good one, and so on

A paradigm is a set of pairs made alike; a phenomenon holds paradigms. Without names the paradigm is
the file's name (with its directory, where several files have one name), and the phenomenon is the
paradigm. In a directory or an archive README.txt, LICENSE.txt and their like are no pairs.
"""

import io
import json
import random
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from deberta_ds.base import command_line
from deberta_ds.base.errors import UserError, looked_in, naming
from deberta_ds.files.tables import read_table, text_lines
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.text import BadTextError, normalize

# Scores that differ by less, relatively, are equal: fp32 resolves no more.
TIE = 1e-6
_MOST_UNDECIDED = 0.05
Pairs = list[tuple[list[int], list[int]]]  # ids of the good and of the bad sentence
_MOST_BYTES = 1 << 28  # of all pairs; BLiMP has 2**24
_SUFFIXES = (".jsonl", ".txt")
_ABOUT = ("readme", "license", "licence", "notice", "citation", "manifest", "changelog")
# BLiMP's files call two paradigms of its paper's (and its results') argument structure so.
_SAME_PHENOMENON = {"s-selection": "argument_structure"}
# BLiMP's name first; others of its kind (minimal pairs of other languages) turn it around.
_SENTENCES = tuple((f"sentence_{kind}", f"{kind}_sentence") for kind in ("good", "bad"))
_KEYS = {"paradigm": ("paradigm", "UID"), "phenomenon": ("phenomenon", "linguistics_term")}


@dataclass(frozen=True)
class MinimalPair:
    """Two sentences under the text rules of the corpus, and where they belong."""

    good: str
    bad: str
    paradigm: str
    phenomenon: str


def read_pairs(path: str | Path) -> list[MinimalPair]:
    """Return the pairs of `path`, files in the order of their names; UserError names a bad line."""
    pairs: list[MinimalPair] = []
    files = list(_files(command_line.find(path)))
    known = Counter(Path(name).stem for _, name, _ in files)
    for place, name, data in files:
        stem = Path(name).stem
        if known[stem] > 1:
            stem = Path(name).with_suffix("").as_posix()
        pairs += (_zorro if name.endswith(".txt") else _of_table)(place, stem, io.BytesIO(data))
    if not pairs:
        raise UserError(f"{path}: no pairs; a .jsonl with sentence_good and sentence_bad, a .txt "
                        "of Zorro, or a directory or tar archive of such files is expected")
    phenomena: dict[str, str] = {}
    for pair in pairs:  # a paradigm of two phenomena would count twice
        if phenomena.setdefault(pair.paradigm, pair.phenomenon) != pair.phenomenon:
            raise UserError(f"{path}: paradigm {pair.paradigm!r} is of phenomenon "
                            f"{phenomena[pair.paradigm]!r} and of {pair.phenomenon!r}; rename one "
                            "of the two")
    return pairs


def sample_pairs(pairs: list[MinimalPair], per_paradigm: int, seed: int = 0) -> list[MinimalPair]:
    """Return `per_paradigm` pairs of each paradigm (or all it has), drawn with `seed`."""
    by_paradigm: dict[str, list[MinimalPair]] = {}
    for pair in pairs:
        by_paradigm.setdefault(pair.paradigm, []).append(pair)
    chosen = []
    for paradigm, found in by_paradigm.items():
        order = random.Random(f"{seed} {paradigm}").sample(range(len(found)), len(found))
        chosen += [found[index] for index in sorted(order[:per_paradigm])]
    return chosen


def outcomes(scores: np.ndarray) -> np.ndarray:
    """Return 1 (the good sentence scores higher), 0.5, 0 or NaN for each of [pairs, 2]."""
    are_numbers = np.isfinite(scores).all(axis=1)
    good, bad = np.where(are_numbers[:, None], scores, 0.0).T
    tie = np.abs(good - bad) <= TIE * np.maximum(np.abs(good), np.abs(bad))
    return np.where(are_numbers, np.where(tie, 0.5, good > bad), np.nan)


def undecided(pairs: Pairs, unknown: int | None) -> np.ndarray:
    """Return which pairs are equal, or have unlike numbers of tokens `unknown`, bool [pairs].

    A likelihood leaves these tokens out, so its sums would have unlike numbers of terms: such a
    pair counts one half. UserError if they are more than one in 20.
    """
    found = np.array([one == other or unknown is not None and (
        one.count(unknown) != other.count(unknown)) for one, other in pairs], bool)
    if found.sum() > _MOST_UNDECIDED * len(found):
        raise UserError(f"{found.sum():,} of {len(found):,} minimal pairs have two equal sentences,"
                        " or one with a word that the tokenizer does not know, and cannot be "
                        "decided; take them out, or train a tokenizer that knows all characters")
    return found


def encode_sentences(sentences: list[str], tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """Return [CLS] sentence [SEP] as ids; UserError for one of more than `longest` tokens."""
    encoded = [[tokenizer.cls_id, *ids, tokenizer.sep_id]
               for ids in tokenizer.encode_batch(sentences)]
    for sentence, ids in zip(sentences, encoded, strict=True):
        if len(ids) > longest:
            raise UserError(f"a sentence has {len(ids)} tokens, but the model has {longest} "
                            f"positions: {sentence[:60]!r}...; shorten it or take it out")
    return encoded


def _files(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (place for errors, name below `path`, contents) in the order of the names."""
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and _holds_pairs(file)]
        _check_size(path, sum(file.stat().st_size for file in files))
        for file in files:
            with naming(file):
                yield str(file), str(file.relative_to(path)), file.read_bytes()
    elif not path.exists():
        raise UserError(f"{path}: no such file or directory{looked_in(path)}; name minimal pairs, "
                        "such as BLiMP's data directory")
    elif path.suffix in _SUFFIXES:
        with naming(path):
            _check_size(path, path.stat().st_size)
            data = path.read_bytes()
        yield str(path), path.name, data
    else:
        try:
            with naming(path), tarfile.open(path) as archive:
                members = sorted(archive.getmembers(), key=lambda member: member.name)
                _check_size(path, sum(member.size for member in members if member.isfile()
                                      and _holds_pairs(Path(member.name))))
                for member in members:
                    if member.isfile() and _holds_pairs(Path(member.name)):
                        content = archive.extractfile(member)
                        assert content is not None  # of a regular file
                        yield f"{path}, {member.name}", member.name, content.read()
        except tarfile.TarError:
            raise UserError(f"{path}: neither .jsonl nor .txt nor a whole tar archive") from None


def _check_size(path: Path, num_bytes: int) -> None:
    if num_bytes > _MOST_BYTES:
        raise UserError(f"{path}: holds {num_bytes / 1e9:,.1f} GB of pairs, and at most "
                        f"{_MOST_BYTES / 1e9:,.1f} are read; give a part of them")


def _holds_pairs(file: Path) -> bool:
    is_about = file.stem.lower().startswith(_ABOUT) and file.suffix == ".txt"
    return file.suffix in _SUFFIXES and not is_about and not file.name.startswith(".")


def _of_table(place: str, stem: str, file: BinaryIO) -> Iterator[MinimalPair]:
    for at, values in read_table(place, file):
        if not isinstance(values, dict) or not any(values.keys() & keys for keys in _SENTENCES):
            raise UserError(f"{at}: must be a JSON object with sentence_good and sentence_bad, "
                            f"it is {json.dumps(values)[:60]}")
        good, bad = (_sentence(values.get(next((key for key in keys if key in values), keys[0])),
                               f"{at}, {keys[0]}") for keys in _SENTENCES)
        paradigm = _name(values, "paradigm", stem, at)
        yield MinimalPair(good, bad, paradigm, _name(values, "phenomenon", paradigm, at))


def _zorro(place: str, stem: str, file: BinaryIO) -> list[MinimalPair]:
    lines = list(text_lines(place, file))
    while lines and not lines[-1][1].strip():
        lines = lines[:-1]
    if len(lines) % 2:
        raise UserError(f"{place}: {len(lines)} lines; Zorro's files hold a bad line and then its "
                        "good one, so their number is even")
    sentences = [_sentence(line, at) for at, line in lines]
    phenomenon = stem.rpartition("-")[0] or stem
    return [MinimalPair(good, bad, stem, phenomenon)
            for bad, good in zip(sentences[::2], sentences[1::2], strict=True)]


def _sentence(value, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: must be a sentence, it is {json.dumps(value)[:60]}")
    try:
        sentence = normalize(value)
    except BadTextError as error:
        raise UserError(f"{place}: {error}") from None
    if not sentence:
        raise UserError(f"{place}: is empty; a pair needs two sentences")
    return sentence


def _name(values: dict, what: str, default: str, place: str) -> str:
    for key in _KEYS[what]:
        if key in values:
            if not isinstance(values[key], str) or not values[key]:
                raise UserError(f"{place}, {key}: must be a name, it is {values[key]!r}")
            return _SAME_PHENOMENON.get(values[key], values[key])
    return default
