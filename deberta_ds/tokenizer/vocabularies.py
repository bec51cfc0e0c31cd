"""Kinds of tokenizers of vocabulary files, without a tokenizer.json: a row of `VOCABULARIES` each.

What a tokenizer.json would hold is put together as transformers does: GPT-2's byte-level BPE, which
RoBERTa and DeBERTa v1 have too, and BERT's WordPiece.
"""

from collections.abc import Callable
from typing import NamedTuple

from deberta_ds.base.errors import UserError, naming
from deberta_ds.base.files import ReadFile, read_json
from deberta_ds.tokenizer.words import bytes_of_subword


class Vocabulary(NamedTuple):
    """One kind: its files, and what they mean."""

    files: tuple[str, ...]
    read: Callable[..., dict]  # these -> the content of tokenizer.json
    classes: tuple[str, ...]  # of transformers, which have no rules beyond these


def _lines(file: ReadFile) -> list[str]:
    """Return the lines of a text file; they end with \\n or \\r\\n, not with other line ends."""
    with naming(file.path):
        return [line.removesuffix("\r")
                for line in file.data.decode().removesuffix("\n").split("\n")]


def _byte_level_bpe(vocabulary_file: ReadFile, merges_file: ReadFile) -> dict:
    vocabulary = read_json(vocabulary_file)
    merges = [line.split(" ") for line in _lines(merges_file) if not line.startswith("#version")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise UserError(f"{merges_file}: {' '.join(merge)!r} is no merge of subwords of "
                            f"{vocabulary_file.name}; fetch both again")
    marks_ends = 20 * sum(piece.endswith("</w>") for piece in vocabulary) > len(vocabulary)
    made = set(map("".join, merges))
    lacking = sum(len(piece) > 1 and piece not in made and bytes_of_subword(piece) is not None
                  for piece in vocabulary)
    # Special tokens and fillers have no merges; what marks ends is rejected for that.
    if lacking > 16 + len(vocabulary) // 100 and not marks_ends:
        raise UserError(f"{merges_file}: makes {lacking:,} of the {len(vocabulary):,} subwords of "
                        f"{vocabulary_file.name} by no merge: one of the two is cut short, or of "
                        "another model; fetch both again")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": dict(byte_level, add_prefix_space=True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
                  "continuing_subword_prefix": "", "end_of_word_suffix": "</w>" * marks_ends,
                  "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary,
                  "merges": merges},
    }


def _wordpiece(file: ReadFile) -> dict:
    vocabulary = {line.rstrip(): number for number, line in enumerate(_lines(file))}
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
