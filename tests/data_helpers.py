"""A tiny tokenizer and tiny corpora, made in-process for the data tests."""

import functools
import random
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece

from deberta_ds.data.prep.pack import pack_corpus
from deberta_ds.data.shards import Manifest, ShardWriter, token_dtype, write_manifest
from deberta_ds.tokenizer import Tokenizer

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Pretraining a masked language model needs a great deal of ordinary text.",
    "Numbers like 1917 and 42, and symbols (such as these) are words of their own!",
    "Unbelievably, internationalization is a long word; so is disentanglement.",
    "A row holds whole pieces of documents; a piece never starts inside a word.",
    "Der schnelle braune Fuchs springt: naive Grossmutter, schoene Straße, Übermut.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "中文没有空格，所以每个词片都是一个词。日本語も同じです。",
)


@functools.cache
def tokenizer_path() -> str:
    directory = Path(tempfile.mkdtemp(prefix="deberta_ds_tests_"))
    generator = random.Random(0)
    text = directory / "text.txt"
    text.write_text("\n".join(generator.choice(SENTENCES) for _ in range(400)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(directory / "spm"), vocab_size=620, minloglevel=2,
        model_type="unigram", pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]",
        bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]", byte_fallback=True,
        normalization_rule_name="identity", num_threads=1, hard_vocab_limit=False,
    )
    return str(directory / "spm.model")


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_path())


def random_documents(count: int, seed: int = 0, longest: int = 12) -> list[str]:
    generator = random.Random(seed)
    return [
        " ".join(generator.choice(SENTENCES) for _ in range(generator.randint(1, longest)))
        for _ in range(count)
    ]


# What every run.json of a checkpoint holds, beside its config.
RUN_RECORD = {"step": 100, "world_size": 1, "tokens_seen": 0, "seconds": 0.0, "deepspeed": {},
              "fingerprints": {}, "tokenizer_sha256": ""}


def make_corpus(
    path: Path, documents: list[list[int]], tokenizer: Tokenizer, seq_lens=(64,), shards: int = 3
) -> Path:
    """Write a finished corpus of token-id documents, split over `shards` shards."""
    infos = []
    dtype = token_dtype(tokenizer.size)
    for number, part in enumerate(np.array_split(np.arange(len(documents)), shards)):
        writer = ShardWriter(path, f"{number:05d}-000", dtype)
        for document in part:
            writer.append(np.array(documents[document], dtype=dtype))
        infos.append(writer.finish())
    special = {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": tokenizer.mask_id}
    manifest = Manifest(dtype.str, tokenizer.size, tokenizer.sha256, special, {}, {}, tuple(infos))
    write_manifest(path, manifest)
    for seq_len in seq_lens:
        pack_corpus(path, tokenizer, seq_len)
    return path
