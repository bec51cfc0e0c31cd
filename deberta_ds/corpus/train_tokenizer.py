"""Train a tokenizer of any kind with DeBERTa's special ids on a bounded sample."""

import io
import itertools
import json
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
import xxhash
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from deberta_ds.base.errors import UserError, still_at_work, tell
from deberta_ds.base.files import write_atomic
from deberta_ds.base.splitmix import mix64
from deberta_ds.corpus.documents import Extent, ReadOptions
from deberta_ds.corpus.encode import Cleaner, CleanOptions, add_up
from deberta_ds.corpus.readers import read_unit
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.units import FORK, check_unchanged, extents_of
from deberta_ds.data.mixture import temperature_weights
from deberta_ds.files.tables import text_lines
from deberta_ds.tokenizer import MASK_TOKEN, SPACE_MARK, SPECIAL_TOKENS, Tokenizer, normalization
from deberta_ds.tokenizer.files import FORMS, JSON, OTHER_MODELS, SPM
from deberta_ds.tokenizer.normalization import normalizer_tsv
from deberta_ds.tokenizer.publish import publish, special_token
from deberta_ds.tokenizer.spm import RULES_NAME, model_proto
from deberta_ds.tokenizer.text import UNSPACED

# The bounded sample of text that a tokenizer is trained on: from the inputs, or by language.
#
# By language, one with the share p of all characters has the share p ** (1 / temperature) of the
# sample, over the sum of these. Each piece of text is taken with the chance of what its language
# still lacks over what is still to come (Fan, Muller and Rezucha 1962): spread over all of the
# input, exact to one piece. Where a language has less than its share the chance is above 1: pieces
# repeat.
SENTENCE_CHARACTERS = 1000  # SentencePiece drops sentences over 4192 bytes without a word
Languages = dict[str, tuple[int, float]]  # {label: (characters there, characters wanted)}


def sample_texts(units: list[list[Extent]], sample_bytes: int, read: ReadOptions,
                 languages: Languages | None = None, max_bad: int = 0, *, is_raw: bool = False
                 ) -> Iterator[str]:
    """Yield about `sample_bytes` of normalized (`is_raw`: unchanged) text: evenly from the start of
    every unit, or what `languages` says. UserError if there is none, or for more than `max_bad`
    unreadable documents; others are named on stderr.
    """
    cleaner, is_empty = Cleaner(CleanOptions(max_bad=max_bad), is_read=not is_raw), True
    pieces = _by_language(units, read, languages, cleaner) if languages else \
        _evenly(units, read, sample_bytes, cleaner)
    for piece in pieces:
        is_empty = False
        yield piece
    check_unchanged(extents_of(units))
    for line in cleaner.problems:
        tell(f"left out: {line}")
    if is_empty:
        raise UserError(f"{units[0][0].path}: no text in it or in the other inputs")


def _evenly(units: list[list[Extent]], read: ReadOptions, sample_bytes: int, cleaner: Cleaner
            ) -> Iterator[str]:
    quota, spent = sample_bytes / len(units), 0.0
    for number, unit in enumerate(units):
        pieces = _pieces(unit, read, cleaner)
        while spent < (number + 1) * quota and (found := next(pieces, None)):
            spent += len(found[1].encode())
            yield found[1]


def languages_of(units: list[list[Extent]], read: ReadOptions, sample_bytes: int,
                 temperature: float, workers: int = 1, max_bad: int = 0) -> Languages:
    """Return how much there is of each language, and how much of it a sample of `sample_bytes`
    takes (of all bytes, if those are fewer). Reads all of the input; prints the shares.
    """
    reads = [extent.read or read for extent in extents_of(units)]
    if not any(one.label_key or one.label_from_directory for one in reads):
        raise UserError("--temperature needs to know the languages; give --label_key or "
                        "--label_from_directory")
    totals: dict[str, list[int]] = {}
    with ProcessPoolExecutor(workers, FORK) as pool, still_at_work(lambda: "counting languages"):
        for counts in pool.map(partial(_count, read=read, max_bad=max_bad), units):
            add_up(totals, counts)
    if totals.keys() <= {""}:
        raise UserError(f"{units[0][0].path}: no document here or in the other inputs has a label, "
                        "so --temperature has nothing to weigh; name their field with --label_key, "
                        "or leave --temperature out")
    totals = dict(sorted(totals.items()))
    shares = temperature_weights([characters for characters, _ in totals.values()], temperature)
    mean = sum(share * size / characters for share, (characters, size) in zip(
        shares, totals.values(), strict=True))  # bytes of a character of the sample
    wanted = min(sample_bytes, sum(size for _, size in totals.values())) / mean
    found = {label: (characters, wanted * share) for share, (label, (characters, _)) in zip(
        shares, totals.items(), strict=True)}
    for label, (characters, taken) in found.items():
        tell(f"{label or '(no label)'}: {characters:,} characters, {taken / wanted:.2%} of the "
             f"sample ({taken / characters:.2f} times what is there)")
    return found


def _count(unit: list[Extent], read: ReadOptions, max_bad: int) -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {}
    for label, piece in _pieces(unit, read, Cleaner(CleanOptions(max_bad=max_bad), is_read=True)):
        add_up(counts, {label: [len(piece), len(piece.encode())]})
    return counts


def _by_language(units: list[list[Extent]], read: ReadOptions, languages: Languages,
                 cleaner: Cleaner) -> Iterator[str]:
    left = {label: list(counts) for label, counts in languages.items()}
    seeds = {label: xxhash.xxh3_64_intdigest(label.encode()) for label in languages}
    pieces = itertools.chain.from_iterable(_pieces(unit, read, cleaner) for unit in units)
    for number, (label, piece) in enumerate(pieces):
        there, wanted = left[label]
        chance = mix64(seeds[label] + number) / 2**64
        copies = int(max(0.0, wanted / there) + chance)
        left[label] = [there - len(piece), wanted - copies * len(piece)]
        yield from [piece] * copies


def _pieces(unit: list[Extent], read: ReadOptions, cleaner: Cleaner) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the documents of a unit, cut as SentencePiece takes them."""
    for document in read_unit(unit, read):  # which may be a whole file
        text = cleaner.texts([document])[0]
        for start in range(0, len(text), SENTENCE_CHARACTERS):
            yield document.label, text[start : start + SENTENCE_CHARACTERS]


# In SentencePiece's messages.
_MOST_PIECES = re.compile(r"<= (\d+)")
_LEAST_PIECES = re.compile(r"required_chars\. \d+ vs (\d+)")
SCORE_UNIT = 1 / 16  # nats: sums of its multiples are exact in float32 up to 2**20


def read_symbols(path: str | Path) -> list[str]:
    """Return the symbols of a file, one a line, none of no file; UserError for a line that cannot
    be a token.
    """
    symbols = list(text_lines(path)) if path else []
    for place, symbol in symbols:
        if len(symbol.split()) != 1 or SPACE_MARK in symbol:
            raise UserError(f"{place}: {symbol!r}: write one symbol a line, without white space "
                            f"and {SPACE_MARK}")
    return list(dict.fromkeys(symbol.strip() for _, symbol in symbols))


def train_tokenizer(units: list[list[Extent]], out: str | Path, wanted: TokenizerRecipe, *,
                    read: ReadOptions, workers: int = 1, max_bad: int = 0,
                    symbols: list[str] | None = None) -> Tokenizer:
    """Write the tokenizer that `wanted` asks for to `out`, a file (unigram) or directory.

    Memory is bounded by its sample_bytes, taken evenly from the start of every unit or, with a
    temperature, by language. `symbols`: those of its add_tokens, if they have been read. UserError
    if the sample is too small for its vocab_size, and for an `out` that is of the other form or
    would be written over something.
    """
    symbols = read_symbols(wanted.add_tokens) if symbols is None else symbols
    if wanted.kind == "unigram":
        if not str(out) or Path(out).is_dir():
            raise UserError(f"{out or '--out'}: a unigram model is one file; name it, such as "
                            f"{Path(out, SPM)}")
        if any(os.path.realpath(one.path) == os.path.realpath(out) for one in extents_of(units)):
            raise UserError(f"{out}: is one of the inputs; name another file")
    elif Path(out).suffix in (".model", ".json") or Path(out).is_file():
        raise UserError(f"{out}: --kind {wanted.kind} writes a directory; give the name of one")
    else:
        check_directory(Path(out))
    languages = languages_of(units, read, wanted.sample_bytes, wanted.temperature, workers,
                             max_bad) if wanted.temperature else None
    sample = _shown(sample_texts(units, wanted.sample_bytes, read, languages, max_bad,
                                 is_raw=wanted.keep_white_space), wanted.sample_bytes)
    train = _train_unigram if wanted.kind == "unigram" else _train_fast
    return train(sample, Path(out), wanted, symbols)


def check_directory(out: Path) -> None:
    """UserError if a directory holds another tokenizer, which would be read or mixed with one of
    tokenizer.json.
    """
    for name in (*itertools.chain(*FORMS), *OTHER_MODELS):
        if name != JSON and (out / name).exists():
            raise UserError(f"{out}: holds another tokenizer ({name}); give another directory")


def _train_unigram(sample: Iterator[str], out: Path, wanted: TokenizerRecipe, symbols: list[str]
                   ) -> Tokenizer:
    """Write the model to `out` and return it: byte fallback, our text rules.

    The rules are SentencePiece's normalizer in the file (tokenizer/normalization.py), next to which
    it keeps case and width; decoding gives normalized text back.
    """
    for symbol in symbols:  # found before the normalizer here, behind it in an export
        plain = unicodedata.normalize("NFKC" if wanted.normalization else "NFC", symbol)
        if symbol != (plain.lower() if wanted.lower_case else plain):
            raise UserError(f"{out}: the normalizer would change the symbol {symbol!r}; give it as "
                            "it is in normalized text")
    model, pieces = io.BytesIO(), wanted.vocab_size
    with TemporaryDirectory() as directory, still_at_work(lambda: f"training {pieces:,} subwords"):
        rules = Path(directory) / "rules.tsv"
        failed: list[Exception | KeyboardInterrupt] = []
        write_atomic(rules, normalizer_tsv(wanted.lower_case))
        named = "nmt_" * (not wanted.keep_white_space) + "nfkc" + "_cf" * wanted.lower_case \
            if wanted.normalization else "identity" * wanted.keep_white_space
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_noting(failed, sample),
                model_writer=model,
                vocab_size=pieces,
                model_type="unigram",
                user_defined_symbols=symbols,
                split_digits=wanted.split_digits,
                remove_extra_whitespaces=not wanted.keep_white_space,
                allow_whitespace_only_pieces=wanted.keep_white_space,
                **{"normalization_rule_name": named} if named else {
                    "normalization_rule_tsv": str(rules)},
                byte_fallback=True,
                character_coverage=wanted.character_coverage,
                pad_id=0, bos_id=1, eos_id=2, unk_id=3,
                pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
                num_threads=wanted.threads,
                minloglevel=2)
        except RuntimeError as error:
            if failed:  # SentencePiece words it again
                raise failed[0] from None
            remedy = f"it says: {error}"
            if most := _MOST_PIECES.search(str(error)):
                remedy = f"ask for fewer with --vocab_size {most[1]}, or give more text"
            elif least := _LEAST_PIECES.search(str(error)):
                remedy = (f"its characters alone are {least[1]}: ask for more with --vocab_size, "
                          "or lower --character_coverage")
            raise UserError(f"SentencePiece cannot make {pieces:,} subwords from this sample; "
                            f"{remedy}") from error
    proto = model_proto(model.getvalue(), out)
    proto.normalizer_spec.ClearField("normalization_rule_tsv")  # a path
    if not (named or wanted.lower_case):
        proto.normalizer_spec.name = RULES_NAME
    # SentencePiece adds scores in float32 from the start of a text: of two ways to cut a word that
    # are nearly as good, what stands before decides. Sums of rounded scores are exact, so that a
    # word has the same ids everywhere, and in the tokenizer.json that is exported, which adds in
    # float64.
    for piece in proto.pieces:
        piece.score = round(piece.score / SCORE_UNIT) * SCORE_UNIT
    write_atomic(out, proto.SerializeToString(deterministic=True))
    return Tokenizer(out)


def _noting(failed: list[Exception | KeyboardInterrupt], sentences: Iterator[str]) -> Iterator[str]:
    """Yield them; what ends them early is kept in `failed`."""
    try:
        yield from sentences
    except (Exception, KeyboardInterrupt) as error:
        failed.append(error)
        raise


def _shown(sample: Iterable[str], sample_bytes: int) -> Iterator[str]:
    """Yield the sentences of a sample, and show how far that is."""
    read = 0
    with still_at_work(
            lambda: f"reading the sample: {read / 1e6:,.0f} of {sample_bytes / 1e6:,.0f} MB"):
        for sentence in sample:
            read += len(sentence.encode())
            yield sentence


# Train byte-level BPE, BPE with a space mark, or WordPiece with Hugging Face `tokenizers`.
#
# The result is a directory that AutoTokenizer reads: tokenizer.json with the text rules as its
# normalizer, and the names of the special tokens, at the ids of DeBERTa's SentencePiece models
# ([PAD] [CLS] [SEP] [UNK] first, [MASK] after the last piece).
# WordPiece takes a word of too many characters for unknown, and scripts without spaces are one word
# to it: they are cut to stretches of at most so many letters, each with its marks.
_UNSPACED = rf"(?:[{UNSPACED}]\p{{M}}*){{1,40}}"
_LONGEST_WORD = 200  # characters


def _train_fast(sample: Iterator[str], out: Path, wanted: TokenizerRecipe, symbols: list[str]
                ) -> Tokenizer:
    """Write the tokenizer to directory `out` and return it: its pieces and [MASK]. The same sample
    gives the same bytes.
    """
    kind, pieces = wanted.kind, wanted.vocab_size
    if wanted.keep_white_space and kind != "byte_bpe":
        raise UserError(f"--kind {kind} keeps no white space; take unigram or byte_bpe")
    fast, trainer = _untrained(wanted)
    texts = list(sample)
    if kind != "byte_bpe":
        alphabet = _alphabet(texts, wanted.character_coverage) + [SPACE_MARK] * (kind == "bpe")
        trainer.initial_alphabet, trainer.limit_alphabet = alphabet, len(alphabet)
    if kind == "wordpiece":  # else their ids come in an order that differs from run to run
        trainer.special_tokens = [*SPECIAL_TOKENS, *(f"##{character}" for character in alphabet)]
    with still_at_work(lambda: f"training {pieces:,} subwords"):
        fast.train_from_iterator(texts, trainer)
    made = fast.get_vocab_size()
    if made != pieces:
        remedy = f"fewer with --vocab_size {made}, or give more text" if made < pieces else \
            f"--vocab_size {made}: its characters alone are as many"
        raise UserError(f"`tokenizers` makes {made:,} of {pieces:,} subwords from this sample; ask "
                        f"for {remedy}")
    parts = json.loads(fast.to_str())
    parts["added_tokens"] = parts["added_tokens"][:len(SPECIAL_TOKENS)]  # bytes are pieces
    parts["added_tokens"].append(special_token(MASK_TOKEN, pieces, is_mask=True))
    parts["added_tokens"] += [special_token(symbol, number, False) | {"special": False}
                              for number, symbol in enumerate(symbols, pieces + 1)]
    return publish(parts, {}, out)


def _untrained(wanted: TokenizerRecipe):
    rules = [normalizers.NFKC()] if wanted.normalization else []
    if wanted.keep_white_space:
        rules = rules or [normalizers.NFC()]
    else:
        ends = normalization.LAST_SPACE if wanted.kind == "bpe" else None
        rules = [*normalization.plain_spaces(), *normalization.characters(), *rules,
                 *normalization.single_spaces(ends)]
    rules += [normalizers.Lowercase()] if wanted.lower_case else []
    options: dict[str, Any] = {"vocab_size": wanted.vocab_size,
                               "show_progress": sys.stderr.isatty(),
                               "special_tokens": list(SPECIAL_TOKENS)}
    if wanted.kind == "wordpiece":
        fast = tokenizers.Tokenizer(models.WordPiece(
            unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD))
        rules.append(normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=True,
                                                strip_accents=False, lowercase=False))
        fast.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(_UNSPACED), "isolated"),
            pre_tokenizers.BertPreTokenizer()])
        fast.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        trainer = trainers.WordPieceTrainer(**options)
    elif wanted.kind == "byte_bpe":
        fast = tokenizers.Tokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                      **options)
    else:
        options["special_tokens"] += [f"<0x{byte:02X}>" for byte in range(256)]
        fast = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=True,
                                               byte_fallback=True))
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        fast.decoder = normalization.decoder()
        trainer = trainers.BpeTrainer(**options)
    fast.normalizer = normalizers.Sequence(rules)
    if wanted.split_digits:
        fast.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True), fast.pre_tokenizer])
    return fast, trainer


def _alphabet(texts: Iterable[str], coverage: float) -> list[str]:
    """Return the most frequent characters, which cover the share `coverage` of the text.

    The trainer's own limit breaks ties by chance.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    del counts[" "]
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    covered = np.cumsum([counts[character] for character in ordered])
    return ordered[: int(covered.searchsorted(coverage * covered[-1:].sum())) + 1]
