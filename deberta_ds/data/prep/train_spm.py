"""Train a SentencePiece unigram model with DeBERTa's special ids on a bounded sample."""

import io
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from deberta_ds.data.prep.documents import Extent, ReadOptions
from deberta_ds.data.prep.readers import read_unit
from deberta_ds.data.prep.text import BadTextError, normalise
from deberta_ds.errors import UserError
from deberta_ds.files import write_atomic
from deberta_ds.tokenizer import Tokenizer

_SENTENCE_CHARACTERS = 1000  # SentencePiece drops sentences over 4192 bytes without a word


def train_tokenizer(
    units: list[list[Extent]],
    out: str | Path,
    *,
    pieces: int,
    sample_bytes: int,
    read: ReadOptions,
    character_coverage: float = 0.9995,
    threads: int = 2,
) -> Tokenizer:
    """Write the model to `out` and return it: `pieces` pieces, byte fallback, no normaliser.

    Text is normalised by our rules beforehand, so SentencePiece's own normaliser is "identity": it
    keeps case and width, and decoding gives the text back. Memory is bounded by `sample_bytes`,
    taken evenly from the start of every unit. UserError if the sample is too small for `pieces`.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(units, sample_bytes, read),
            model_writer=model,
            vocab_size=pieces,
            model_type="unigram",
            normalization_rule_name="identity",
            byte_fallback=True,
            character_coverage=character_coverage,
            pad_id=0, bos_id=1, eos_id=2, unk_id=3,
            pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"SentencePiece cannot make {pieces} pieces from this sample ({error}); ask for fewer "
            "pieces or give more text"
        ) from error
    write_atomic(out, model.getvalue())
    return Tokenizer(out)


def _sentences(units: list[list[Extent]], sample_bytes: int, read: ReadOptions) -> Iterator[str]:
    quota, spent = sample_bytes / len(units), 0.0
    for number, unit in enumerate(units):
        allowed = (number + 1) * quota
        for document in read_unit(unit, read):
            if spent >= allowed:
                break
            if document.problem:
                continue  # tokenize_corpus names and counts it
            try:
                text = normalise(document.text)
            except BadTextError:
                continue
            spent += len(text.encode())
            for start in range(0, len(text), _SENTENCE_CHARACTERS):
                yield text[start : start + _SENTENCE_CHARACTERS]
