"""The token embeddings of a source for a run with another tokenizer, of any kind (`[init] from`).

A token of both tokenizers (the same text, with or without a space before it, however the two mark
that) keeps its vector; special tokens go by their role. Any other starts at the plain mean of the
vectors of what the source's tokenizer makes of its text (Fast Vocabulary Transfer, Gee et al. 2022,
arXiv 2402.09977); one of which that knows nothing, or bytes alone, starts as in a new model. So a
tokenizer with tokens added keeps all that it had.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import counted
from deberta_ds.base.splitmix import mix64
from deberta_ds.config.run_config import RunConfig
from deberta_ds.data.corpus import Corpus
from deberta_ds.files.remote import Cache
from deberta_ds.release.networks import Network, Release, derive_words
from deberta_ds.release.read_back import SENTENCES
from deberta_ds.release.reader import read_release, read_tokenizer
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.words import byte_of, bytes_of_subword, character_starts_word

REPORT = "vocabulary.json"
CLASSES = ("shared", "composed", "random", "bytes")  # bytes: of bytes alone, so random, too
_APART = 0.1  # of a new model's deviation: noise on what is composed of the same as another token
_BY_ID = ("words.weight", "words.delta", "mlm_head.bias")
_ROWS_COUNTED = 1000  # of a corpus


def read_in_vocabulary(run: RunConfig, source: str, own: Tokenizer, report: str = REPORT
                       ) -> Release:
    """Return the release at `source` with a row for each token of the run's tokenizer, `own`; its
    notes say what was done, OUT/`report` how each token begins.
    """
    release, rows = read_release(source), run.model.vocab_size
    theirs = release.tokenizer
    if theirs is None:
        return release
    is_same, texts = has_same_tokens(own, theirs), list(SENTENCES)
    if is_same and theirs.encode_batch(texts) != own.encode_batch(texts):
        release.notes.append(f"WARNING: {run.data.tokenizer} has the tokens of the source's "
                             "tokenizer, but cuts texts otherwise: its normalizer, merges or "
                             "scores are others")
    before = release.main.config.vocab_size
    if is_same and rows == before:
        return release
    parts, kinds = starting_points(own, theirs)
    starts = list(zip(own.subwords(range(own.size)), map(theirs.subwords, parts), strict=True))
    if is_same:  # rows of no token stay too
        parts = [[number] for number in range(min(rows, before))]
    for network in release.networks().values():
        _change_vocabulary(network, parts, rows, run.train.seed)
    if release.generator and "words.delta" in release.main.tensors:
        del release.main.tensors["words.weight"]
        derive_words(release)  # to the bit the generator's + delta
    release.notes.append(f"token embedding of {source}: {before:,} rows -> {rows:,}; its tokens "
                         "stay" if is_same else _report(run, source, starts, kinds, report))
    return release


def has_other_tokens(source: str, own: Tokenizer) -> bool:
    """Return whether the model at `source` has a tokenizer of other tokens than `own`."""
    theirs = read_tokenizer(source)
    return theirs is not None and not has_same_tokens(own, theirs)


def has_same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether each id is the same token in both."""
    return first.special_ids == second.special_ids and first.size == second.size and (
        first.subwords(range(first.size)) == second.subwords(range(second.size)))


def starting_points(own: Tokenizer, theirs: Tokenizer) -> tuple[list[list[int]], np.ndarray]:
    """Return (for each id of `own` those of `theirs` at whose mean it starts, none: at random; for
    each which of CLASSES that is).
    """
    pieces, texts = theirs.subwords(range(theirs.size)), _texts(theirs)
    exact = {pair: number for number, pair in enumerate(zip(pieces, texts, strict=True))
             if number not in theirs.special_ids.values()}
    by_text: dict[str, int] = {}
    for number in np.flatnonzero(~theirs.is_special()).tolist():
        by_text.setdefault(texts[number], number)
    by_role = {number: theirs.special_ids.get(role) for role, number in own.special_ids.items()}
    parts: list[list[int]] = []
    kinds = np.zeros(own.size, np.int8)
    for number, pair in enumerate(zip(own.subwords(range(own.size)), _texts(own), strict=True)):
        found = by_role[number] if number in by_role else exact.get(pair, by_text.get(pair[1]))
        if found is not None:
            parts.append([found])
            continue
        parts.append([] if number in by_role or not pair[0].strip() else
                     _parts(theirs, pair[1], by_text))
        kinds[number] = 1 if parts[-1] else 2
        if parts[-1] and all(
                _is_broken(texts[part]) or not texts[part].strip() for part in parts[-1]):
            parts[-1], kinds[number] = [], 3
    return parts, kinds


def _texts(tokenizer: Tokenizer) -> list[str]:
    """Return the text of each id, behind a space if it begins a word; bytes of no whole character
    as lone surrogates. Marks that WordPiece sets apart have no space, as in other tokenizers.
    """
    numbers, texts = range(tokenizer.size), []
    starts = tokenizer.word_starts()
    for number, piece, text in zip(numbers, tokenizer.subwords(numbers),
                                   tokenizer.readable(numbers), strict=True):
        is_broken = tokenizer.kind == "byte_level" and "\\x" in text
        data = (bytes_of_subword if is_broken else byte_of)(piece)
        if data is not None:
            text = data.decode("utf-8", "surrogateescape")
        elif tokenizer.kind in ("wordpiece", "words") and text[1:] and character_starts_word(
                text[1]):
            text = text.removeprefix(" ")
        elif starts[number] and text[:1].isalnum() and not character_starts_word(text[0]):
            text = " " + text  # a token that was added
        texts.append(text)
    return texts


def _is_broken(text: str) -> bool:
    """Return whether a token's text has bytes of no whole character."""
    return any("\udc80" <= character <= "\udcff" for character in text)


def _parts(tokenizer: Tokenizer, text: str, by_text: dict[str, int]) -> list[int]:
    """Return the known ids of a token's text, as it continues a word if it can."""
    if _is_broken(text):  # byte by byte
        return [by_text[character] for character in text if character in by_text]
    for lead in ("", " "):
        if found := [part for part in tokenizer.encode_after(lead + text)
                     if part != tokenizer.unk_id]:
            return found
    return []


def _change_vocabulary(network: Network, parts: list[list[int]], rows: int, seed: int) -> None:
    """Give all that is indexed by id `rows` rows, those of several parts no two alike."""
    sizes = torch.tensor([0, *map(len, parts)])
    flat = torch.tensor([part for one in parts for part in one], dtype=torch.long)
    at_random = [number for number in range(rows) if number >= len(parts) or not parts[number]]
    seen: set[tuple[int, ...]] = set()
    apart = [number for number, part in enumerate(map(tuple, parts)) if len(part) > 1 and (
        part in seen or seen.add(part))]  # type: ignore[func-returns-value]
    for salt, name in enumerate(_BY_ID):
        if (table := network.tensors.get(name)) is None:
            continue
        old_VC = table.float().view(len(table), -1)
        new_VC = torch.zeros(rows, old_VC.size(1))
        new_VC[:len(parts)] = F.embedding_bag(flat, old_VC, sizes.cumsum(0)[:-1],
                                                mode="mean")
        for number in (*at_random, *apart) if name == "words.weight" else ():
            generator = torch.Generator().manual_seed(mix64(mix64(seed + salt) + number) >> 1)
            new_VC[number] += (network.config.init_std * (_APART if number in apart else 1.0)
                               * torch.randn(old_VC.size(1), generator=generator))
        network.tensors[name] = new_VC.view(rows, *table.shape[1:]).to(table.dtype)
    network.config = replace(network.config, vocab_size=rows)


def _report(run: RunConfig, source: str, starts: list[tuple[str, list[str]]],
            kinds: np.ndarray, report: str) -> str:
    """Write OUT/`report` and return what it says in short."""
    path, frequencies = Path(run.out_dir) / report, _frequencies(run, len(kinds))
    counts = np.bincount(kinds, minlength=4).tolist()
    shares = (np.bincount(kinds, frequencies, 4) / max(1, frequencies.sum())).tolist()
    figures: dict[str, dict] = {name: {"tokens": count, "share_of_text": round(share, 6)}
                                for name, count, share in zip(CLASSES, counts, shares,
                                                              strict=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    figures["not_shared"] = {piece: parts for (piece, parts), kind in zip(
        starts, kinds, strict=True) if kind}
    write_atomic(path, json.dumps({"source": source, "tokenizer": run.data.tokenizer} | figures,
                                  ensure_ascii=False, indent=1) + "\n")
    said = ", ".join(f"{counted(count, 'token')} {name} ({share:.2%} of the text)"
                     for name, count, share in zip(CLASSES, counts, shares, strict=True)
                     ).replace(" bytes (", " of bytes alone, random (")
    return (f"WARNING: {run.data.tokenizer} has other tokens than the tokenizer of {source}; token "
            f"embeddings: {said}; {report} in the run's directory lists them")


def _frequencies(run: RunConfig, size: int) -> np.ndarray:
    """Return how often each id stands in sequences of the held-out corpora, else of the sources."""
    paths = list(run.data.heldout_corpora.values()) or [one.path for one in run.data.sources]
    frequencies = np.zeros(size)
    for path in paths:
        corpus = Corpus(path, seq_len=run.data.seq_len,
                        cache=Cache(run.data.cache, run.data.cache_gigabytes))
        for row in range(0, corpus.num_rows, -(-corpus.num_rows // _ROWS_COUNTED)):
            frequencies += np.bincount(np.concatenate(corpus.row(row)), minlength=size)
    return frequencies
