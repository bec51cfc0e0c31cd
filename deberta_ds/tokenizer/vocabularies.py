"""Kinds of tokenizers of vocabulary files, without a tokenizer.json: a row of `VOCABULARIES` each.

What a tokenizer.json would hold is put together as transformers does: GPT-2's byte-level BPE, which
RoBERTa and DeBERTa v1 have too, and BERT's WordPiece.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tokenizers import models

from deberta_ds.base.errors import UserError, first_line
from deberta_ds.base.files import ReadFile
from deberta_ds.tokenizer.words import bytes_of_subword


class Vocabulary(NamedTuple):
    """One kind: its files, and what they mean."""

    files: tuple[str, ...]
    read: Callable[..., dict]  # these -> the content of tokenizer.json
    classes: tuple[str, ...]  # of transformers, which have no rules beyond these


def is_vocabulary(vocabulary: dict | list) -> bool:
    """Return whether it is {piece: id} with no id twice, or [[piece, score], ...] of Unigram."""
    if isinstance(vocabulary, dict):
        ids = list(vocabulary.values())
        return all(type(number) is int and 0 <= number < 1 << 31 for number in ids) and len(
            set(ids)) == len(ids)
    return all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
               and isinstance(entry[1], int | float) for entry in vocabulary)


@contextmanager
def _on_disk(*files: ReadFile) -> Iterator[list[str]]:
    """Context that yields paths for a library which reads no bytes."""
    with TemporaryDirectory() as directory:
        for file in files:
            Path(directory, file.name).write_bytes(file.data)
        yield [f"{directory}/{file.name}" for file in files]


def _byte_level_bpe(vocabulary_path: ReadFile, merges_path: ReadFile) -> dict:
    try:
        with _on_disk(vocabulary_path, merges_path) as paths:
            vocabulary, merges = models.BPE.read_file(*paths)
        models.BPE(vocabulary, merges)
    except Exception as error:  # the library's errors have no class of their own
        raise UserError(f"{vocabulary_path} and {merges_path.name}: not the files of a byte-level "
                        f"BPE, or damaged ({first_line(error)}); fetch them again") from error
    if not is_vocabulary(vocabulary):
        raise UserError(f"{vocabulary_path}: gives an id to two subwords; fetch it again")
    ends = sum(piece.endswith("</w>") for piece in vocabulary)
    if 20 * ends > len(vocabulary):
        raise UserError(f"{vocabulary_path}: marks the ends of words ('</w>'), so an id does not "
                        "say whether a word starts there, which whole-word masks need; use a "
                        "tokenizer with byte-level spaces, a space mark or ##")
    made = set(map("".join, merges))
    lacking = sum(len(piece) > 1 and piece not in made and bytes_of_subword(piece) is not None
                  for piece in vocabulary)
    if lacking > 16 + len(vocabulary) // 100:  # special tokens and fillers have no merges
        raise UserError(f"{merges_path}: makes {lacking:,} of the {len(vocabulary):,} subwords of "
                        f"{vocabulary_path.name} by no merge: one of the two is cut short, or of "
                        "another model; fetch both again")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": dict(byte_level, add_prefix_space=True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
                  "continuing_subword_prefix": "", "end_of_word_suffix": "",
                  "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary,
                  "merges": [list(merge) for merge in merges]},
    }


def _wordpiece(path: ReadFile) -> dict:
    try:
        with _on_disk(path) as paths:
            vocabulary = models.WordPiece.read_file(*paths)
    except Exception as error:  # the library's errors have no class of their own
        raise UserError(f"{path}: not a vocabulary of WordPiece, one subword per line "
                        f"({first_line(error)})") from error
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocabulary},
    }


VOCABULARIES = (
    Vocabulary(("vocab.json", "merges.txt"), _byte_level_bpe,
               ("GPT2", "Roberta", "Deberta", "Bart", "Longformer", "LED", "Mvp", "CodeGen")),
    Vocabulary(("vocab.txt",), _wordpiece,
               ("Bert", "DistilBert", "Electra", "MobileBert", "ConvBert", "SqueezeBert", "MPNet",
                "Funnel", "LayoutLM", "Lxmert", "Nezha", "DPR", "DPRReader", "DPRContextEncoder",
                "DPRQuestionEncoder")),
)
