"""Train byte-level BPE, BPE with a space mark, or WordPiece with Hugging Face `tokenizers`.

The result is a directory that AutoTokenizer reads: tokenizer.json with the text rules as its
normalizer, and the names of the special tokens, at the ids of DeBERTa's SentencePiece models
([PAD] [CLS] [SEP] [UNK] first, [MASK] after the last piece).
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from deberta_ds.data.prep import fast_rules
from deberta_ds.data.prep.documents import Extent, ReadOptions
from deberta_ds.data.prep.sampling import Languages, sample_texts
from deberta_ds.data.prep.words import UNSPACED
from deberta_ds.errors import UserError
from deberta_ds.files import write_atomic
from deberta_ds.tokenizer import MASK_PIECE, SPACE_MARK, SPECIAL_PIECES, Tokenizer
from deberta_ds.tokenizer.files import JSON, MERGES, OTHER_MODELS, SPM, VOCAB, WORDPIECES
from deberta_ds.tokenizer.publish import special_token, write_tokenizer_json

KINDS = ("byte_bpe", "bpe", "wordpiece")
# WordPiece takes a word of too many characters for unknown, and scripts without spaces are one word
# to it: they are cut to stretches of at most so many letters, each with its marks.
_UNSPACED = rf"(?:[{UNSPACED}]\p{{M}}*){{1,40}}"
_LONGEST_WORD = 200  # characters


def train_fast(
    units: list[list[Extent]], out: str | Path, *, kind: str, pieces: int, sample_bytes: int,
    read: ReadOptions, character_coverage: float = 0.9995, languages: Languages | None = None,
    max_bad: int = 0,
) -> Tokenizer:
    """Write the tokenizer to directory `out` and return it: `pieces` pieces and [MASK].

    Memory is bounded by `sample_bytes`, taken evenly from the start of every unit, or as
    `languages` says. The same sample gives the same bytes. UserError if it is too small.
    """
    out = Path(out)
    if out.suffix in (".model", ".json") or out.is_file():
        raise UserError(f"{out}: --kind {kind} writes a directory; give the name of one")
    other = [name for name in (SPM, VOCAB, MERGES, WORDPIECES, *OTHER_MODELS)
             if (out / name).exists()]
    if other:  # that one would be read, or the two be mixed
        raise UserError(f"{out}: holds another tokenizer ({other[0]}); give another directory")
    fast, trainer = _untrained(kind, pieces)
    sample = list(sample_texts(units, sample_bytes, read, languages, max_bad))
    if kind != "byte_bpe":
        alphabet = _alphabet(sample, character_coverage) + ([SPACE_MARK] if kind == "bpe" else [])
        trainer.initial_alphabet, trainer.limit_alphabet = alphabet, len(alphabet)
    if kind == "wordpiece":  # else their ids come in an order that differs from run to run
        trainer.special_tokens = [*SPECIAL_PIECES, *(f"##{character}" for character in alphabet)]
    fast.train_from_iterator(sample, trainer)
    made = fast.get_vocab_size()
    if made != pieces:
        remedy = f"fewer with --pieces {made}, or give more text" if made < pieces else \
            f"--pieces {made}: its characters alone are as many"
        raise UserError(f"`tokenizers` makes {made:,} of {pieces:,} pieces from this sample; ask "
                        f"for {remedy}")
    parts = json.loads(fast.to_str())
    parts["added_tokens"] = parts["added_tokens"][:len(SPECIAL_PIECES)]  # bytes are pieces
    parts["added_tokens"].append(special_token(MASK_PIECE, pieces, is_mask=True))
    write_atomic(out / JSON, json.dumps(parts, ensure_ascii=False) + "\n")
    write_tokenizer_json(Tokenizer(out / JSON), out)
    return Tokenizer(out)


def _untrained(kind: str, pieces: int):
    rules = [*fast_rules.plain_spaces(), *fast_rules.characters(),
             *fast_rules.single_spaces(fast_rules.LAST_SPACE if kind == "bpe" else None)]
    options = {"vocab_size": pieces, "show_progress": sys.stderr.isatty(),
               "special_tokens": list(SPECIAL_PIECES)}
    if kind == "wordpiece":
        fast = tokenizers.Tokenizer(models.WordPiece(
            unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD))
        rules.append(normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=True,
                                                strip_accents=False, lowercase=False))
        fast.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(_UNSPACED), "isolated"),
            pre_tokenizers.BertPreTokenizer()])
        fast.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        trainer = trainers.WordPieceTrainer(**options)
    elif kind == "byte_bpe":
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
        fast.decoder = fast_rules.decoder()
        trainer = trainers.BpeTrainer(**options)
    fast.normalizer = normalizers.Sequence(rules)
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
