"""New tokens for a tokenizer of any kind, as a tokenizer.json; the ids of its old ones stay.

Symbols are found in text as they are written. Learned subwords continue the tokenizer's training:
of adjacent tokens within words the most frequent pair is merged, again and again (continued BPE,
Purason et al. 2025, arXiv 2512.03989). A BPE gets the merges, a Unigram pieces that score just
above their parts, WordPiece, which takes the longest piece first, the pieces alone.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, trainers

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.train_tokenizer import SCORE_UNIT, check_directory
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.files import NAMES, SPM, find_files, read_settings
from deberta_ds.tokenizer.kinds import add_tokens, subword_kind
from deberta_ds.tokenizer.publish import publish, special_token
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json
from deberta_ds.tokenizer.spm import check_settings
from deberta_ds.tokenizer.text import LETTERS, UNSPACED_LETTER
from deberta_ds.tokenizer.words import byte_of

_WORD = re.compile(f" ?(?:{LETTERS}|(?:{UNSPACED_LETTER})+)")
_FIRST_CODE = 0x10000  # of the characters that stand for tokens while they are merged
Merges = list[tuple[str, str]]


def extend_tokenizer(path: str | Path, out: str | Path, symbols: list[str], learn: int,
                     texts: Iterable[str]) -> tuple[Tokenizer, str]:
    """Write the tokenizer at `path` to directory `out` with the tokens that transformers wrote next
    to it, with `symbols`, and with `learn` subwords of `texts`; return it and what was done.
    """
    path, out = Path(path), Path(out)
    check_directory(out)
    files = find_files(path)
    settings = read_settings(files)
    if SPM in files and settings["added_tokens"]:  # with which the model is not read
        bare = {name: files[name] for name in (SPM, NAMES) if name in files}
        old = Tokenizer(path, bare)
        check_settings(settings | {"added_tokens": {}}, old.subwords(range(old.size)),
                       dict(old.special_ids), files[SPM].path)
    else:
        old = Tokenizer(path)
    specification = deepcopy(old.specification) or json.loads(build_tokenizer_json(old))
    add_tokens(specification, settings["added_tokens"])
    known = {*old.subwords(range(old.size)),
             *(token["content"] for token in specification["added_tokens"])}
    new = [symbol for symbol in symbols if symbol not in known]
    first = max([old.size, *(token["id"] + 1 for token in specification["added_tokens"])])
    specification["added_tokens"] += [special_token(symbol, number, False) | {"special": False}
                                      for number, symbol in enumerate(new, first)]
    words = Counter(word for text in texts for word in _WORD.findall(text)) if learn else Counter()
    if learn:
        merges, pieces = _learned(old, specification, words, learn, {*known, *new})
        _add_merges(specification, merges, pieces, path)
    made = publish(specification, old.special_names, out)
    said = f"added {made.size - old.size - learn:,} tokens"
    if len(new) < len(symbols):
        said += f" ({len(symbols) - len(new):,} were there already)"
    if not learn:
        return made, said
    before, after = (sum(len(one.encode_after(word)) * count for word, count in words.items())
                     for one in (old, made))
    return made, (f"{said}, learned {learn:,}: the words of the sample take {after:,} tokens "
                  f"instead of {before:,} ({after / before - 1:+.1%})")


def _learned(tokenizer: Tokenizer, specification: dict, words: Counter[str], count: int,
             known: set[str]) -> tuple[Merges, list[str]]:
    """Return merges of a tokenizer's pieces in order, and the `count` new pieces that they give."""
    pieces = tokenizer.subwords(range(tokenizer.size))
    added = {token["content"] for token in specification["added_tokens"]}
    barred = tokenizer.is_special() | np.array([byte_of(piece) is not None or piece in added
                                                for piece in pieces])
    fast = tokenizers.Tokenizer.from_str(json.dumps(specification))
    runs: Counter[str] = Counter()
    for word, times in words.items():
        text = fast.normalizer.normalize_str(word) if fast.normalizer else word
        if fast.pre_tokenizer and len(fast.pre_tokenizer.pre_tokenize_str(text)) > 1:
            continue  # its parts would never merge
        for is_barred, run in itertools.groupby(tokenizer.encode_after(word), barred.__getitem__):
            if not is_barred:
                runs["".join(chr(_FIRST_CODE + number) for number in run)] += times
    codes = sorted(set().union(*runs))
    merger = tokenizers.Tokenizer(models.BPE())
    merger.train_from_iterator(
        itertools.chain.from_iterable(itertools.repeat(run, times) for run, times in runs.items()),
        trainers.BpeTrainer(vocab_size=len(codes) + 2 * count + 100, initial_alphabet=codes,
                            show_progress=False))
    _, prefix = subword_kind(specification, tokenizer.path)
    merges: Merges = []
    new: list[str] = []
    for pair in json.loads(merger.to_str())["model"]["merges"]:
        first, second = (_joined([pieces[ord(code) - _FIRST_CODE] for code in part], prefix)
                         for part in pair)
        merges.append((first, second))
        if (piece := _joined([first, second], prefix)) not in known:
            new.append(piece)
            known.add(piece)
        if len(new) == count:
            return merges, new
    raise UserError(f"{tokenizer.path}: the words of this sample give only {len(new):,} new "
                    f"subwords; ask for {len(new)} with --learn, or give more text")


def _joined(pieces: list[str], prefix: str) -> str:
    return pieces[0] + "".join(piece.removeprefix(prefix) for piece in pieces[1:])


def _add_merges(specification: dict, merges: Merges, new: list[str], place: Path) -> None:
    """Add the pieces `new`, which `merges` make, with the ids behind all others."""
    model = specification["model"]
    added = {token["content"]: token["id"] for token in specification["added_tokens"]}
    known = dict(map(tuple, model["vocab"])) if model["type"] == "Unigram" else model["vocab"]
    outside = sorted(added.keys() - known.keys(), key=added.__getitem__)
    if model["type"] == "WordLevel" or [added[name] for name in outside] != list(
            range(len(known), len(known) + len(outside))):
        raise UserError(f"{place}: --learn needs a tokenizer of subwords without gaps in its ids; "
                        "give whole words with --add_tokens")
    if model["type"] == "Unigram":
        lowest, best = min(known.values()), dict(known)
        for first, second in merges:  # a piece that was known may score below its parts
            best[first + second] = max(best[first] + best[second] + SCORE_UNIT,
                                       best.get(first + second, -math.inf))
        model["vocab"] += [[name, lowest if name in added else best[name]]
                           for name in (*outside, *new)]
    else:
        known |= {name: number for number, name in enumerate([*outside, *new], len(known))}
    if model["type"] == "BPE":
        model["merges"] += map(list, merges)
