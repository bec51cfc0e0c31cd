"""Train a SentencePiece unigram model with DeBERTa's special ids on a bounded sample."""

import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
from tqdm import tqdm

from deberta_ds.data.prep.documents import Extent, ReadOptions
from deberta_ds.data.prep.sampling import Languages, sample_texts
from deberta_ds.data.prep.spm_rules import normalizer_tsv
from deberta_ds.errors import UserError
from deberta_ds.files import write_atomic
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.files import SPM
from deberta_ds.tokenizer.spm import RULES_NAME

# In SentencePiece's messages.
_MOST_PIECES = re.compile(r"<= (\d+)")
_LEAST_PIECES = re.compile(r"required_chars\. \d+ vs (\d+)")
_SCORE_UNIT = 1 / 16  # nats: sums of its multiples are exact in float32 up to 2**20


def train_tokenizer(
    units: list[list[Extent]],
    out: str | Path,
    *,
    pieces: int,
    sample_bytes: int,
    read: ReadOptions,
    character_coverage: float = 0.9995,
    threads: int = 2,
    languages: Languages | None = None,
    max_bad: int = 0,
) -> Tokenizer:
    """Write the model to `out` and return it: `pieces` pieces, byte fallback, our text rules.

    The rules are SentencePiece's normalizer in the file (spm_rules.py), beside which it keeps case
    and width; decoding gives normalised text back. Scores are rounded (`_finished`). Memory is
    bounded by `sample_bytes`, taken evenly from the start of every unit, or as `languages` says.
    UserError if the sample is too small for `pieces`.
    """
    if not str(out) or Path(out).is_dir():
        raise UserError(f"{out or '--out'}: a unigram model is one file; name it, such as "
                        f"{Path(out, SPM)}")
    if any(os.path.realpath(extent.path) == os.path.realpath(out)
           for unit in units for extent in unit):
        raise UserError(f"{out}: is one of the inputs; name another file")
    model = io.BytesIO()
    with TemporaryDirectory() as directory:
        rules, failed = Path(directory) / "rules.tsv", []
        write_atomic(rules, normalizer_tsv())
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_noting(failed, _sample(units, sample_bytes, read, pieces,
                                                          languages, max_bad)),
                model_writer=model,
                vocab_size=pieces,
                model_type="unigram",
                normalization_rule_tsv=str(rules),
                byte_fallback=True,
                character_coverage=character_coverage,
                pad_id=0, bos_id=1, eos_id=2, unk_id=3,
                pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
                num_threads=threads,
                minloglevel=2,
            )
        except RuntimeError as error:
            if failed:  # SentencePiece words it anew
                raise failed[0] from None
            raise UserError(f"SentencePiece cannot make {pieces:,} pieces from this sample; "
                            f"{_remedy(str(error))}") from error
    write_atomic(out, _finished(model.getvalue()))
    return Tokenizer(out)


def _remedy(message: str) -> str:
    if most := _MOST_PIECES.search(message):
        return f"ask for fewer with --pieces {most[1]}, or give more text"
    if least := _LEAST_PIECES.search(message):
        return (f"its characters alone are {least[1]}: ask for more with --pieces, or lower "
                "--character_coverage")
    return f"it says: {message}"


def _finished(model: bytes) -> bytes:
    """Return the model with the name of our rules in place of "user_defined", no path, and scores
    in whole units.

    SentencePiece adds scores in float32 from the start of a text: of two ways to cut a word that
    are nearly as good, what stands before decides. Sums of rounded scores are exact, so that a word
    has the same ids everywhere, and in the tokenizer.json that is exported, which adds in float64.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.normalizer_spec.name = RULES_NAME
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    for piece in proto.pieces:
        piece.score = round(piece.score / _SCORE_UNIT) * _SCORE_UNIT
    return proto.SerializeToString(deterministic=True)


def _noting(failed: list[Exception | KeyboardInterrupt], sentences: Iterator[str]) -> Iterator[str]:
    """Yield them; what ends them early is kept in `failed`."""
    try:
        yield from sentences
    except (Exception, KeyboardInterrupt) as error:
        failed.append(error)
        raise


def _sample(units: list[list[Extent]], sample_bytes: int, read: ReadOptions, pieces: int,
            languages: Languages | None, max_bad: int) -> Iterator[str]:
    """Yield sentences of about `sample_bytes` in all, and show how far that is."""
    size = 0
    with tqdm(total=sample_bytes, desc="reading the sample", unit="B", unit_scale=True,
              disable=None) as bar:
        for sentence in sample_texts(units, sample_bytes, read, languages, max_bad):
            bar.update(len(sentence.encode()))
            size += len(sentence.encode())
            yield sentence
    print(f"SentencePiece makes {pieces:,} pieces of {size / 1e6:.1f} MB of text, which takes "
          f"{'minutes' if size > 1e7 else 'seconds'} and shows nothing", file=sys.stderr)
