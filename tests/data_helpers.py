"""A tiny tokenizer and tiny corpora, made in-process for the data tests; what holds of a batch."""

import contextlib
import functools
import io
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from deberta_ds.base.files import xxh3
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.readers import read_unit
from deberta_ds.corpus.tokenize import CleanOptions, tokenize_corpus
from deberta_ds.data.corpus import map_array
from deberta_ds.data.masking import IGNORE, LONGEST_WORD, word_spans
from deberta_ds.data.rows import Batch, RowDataset
from deberta_ds.data.shards import (
    Manifest,
    ShardWriter,
    read_manifest,
    token_dtype,
    write_manifest,
)
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.normalization import normalizer_tsv
from deberta_ds.tokenizer.spm import RULES_NAME, model_proto

READ = ReadOptions()
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
TEXTS = ["First document.", "Zweites, mit Ümlaut.", "第三个文件。", "fourth \U0001f600"]


@functools.cache
def tokenizer_path() -> str:
    directory = Path(tempfile.mkdtemp(prefix="deberta_ds_tests_"))
    generator = random.Random(0)
    text = directory / "text.txt"
    text.write_text("\n".join(generator.choice(SENTENCES) for _ in range(400)), encoding="utf-8")
    rules, model, path = directory / "rules.tsv", io.BytesIO(), directory / "spm.model"
    rules.write_text(normalizer_tsv(), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_writer=model, vocab_size=620, minloglevel=2,
        model_type="unigram", pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]",
        bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]", byte_fallback=True,
        normalization_rule_tsv=str(rules), num_threads=1, hard_vocab_limit=False)
    proto = model_proto(model.getvalue(), path)
    proto.normalizer_spec.name = RULES_NAME
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return str(path)


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_path())


def random_documents(count: int, seed: int = 0, longest: int = 12) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choice(SENTENCES) for _ in range(generator.randint(1, longest)))
            for _ in range(count)]


# What every run.json of a checkpoint holds, beside its config.
RUN_RECORD = {"step": 100, "world_size": 1, "sequences_seen": 0, "tokens_seen": 0, "seconds": 0.0,
              "deepspeed": {}, "content_hashes": {}, "tokenizer_sha256": "", "recent_losses": [],
              "since_line": {}, "time_use": {}, "begun_from": "",
              "best": {"score": "", "scored": ""}, "versions": {}}


# What every layout.json holds, beside its map.
STATE = {"counters": {"global_steps": 3, "global_samples": 24, "skipped_steps": 0}, "keys": [],
         "loss_scale": {}, "aliases": {}, "scalars": {}, "buffers": {}, "without": {}}


def make_corpus(path: Path, documents: list[list[int]], tokenizer: Tokenizer, seq_lens=(64,),
                shards: int = 3) -> Path:
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


def dataset_of(*sources, seed: int = 7, **options) -> RowDataset:
    """Return the dataset of corpora, each a path or as in a run file."""
    sources = [source if isinstance(source, SourceConfig) else SourceConfig(path=str(source))
               for source in sources]
    return RowDataset(sources, tiny_tokenizer(), seed=seed,
                      **{"seq_len": 64, "mask": MaskConfig(), **options})


_A_DATASET = """
import sys
from deberta_ds.config.batch_schedule import Phase
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import RowDataset
from deberta_ds.tokenizer import Tokenizer

def batches_of(phase, workers):
    sources = [SourceConfig(path=path) for path in sys.argv[2:]]
    dataset = RowDataset(sources, Tokenizer(sys.argv[1]), seq_len=64, seed=0, mask=MaskConfig())
    return build_loader(dataset, phases=[phase], micro_batch_size=4, rank=0, world_size=1,
                        num_workers=workers)
"""


def run_with_batches(code: str, *corpora) -> subprocess.CompletedProcess:
    """Run code that calls `batches_of(phase, workers)` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", _A_DATASET + code, tokenizer_path(), *map(str, corpora)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}, timeout=120,
        capture_output=True, text=True)


def documents_of(*inputs, unit_bytes=0, **options):
    read = ReadOptions(**options)
    units = plan_units(list(map(str, inputs)), read, unit_bytes)
    return [document for unit in units for document in read_unit(unit, read)]


def texts_of(inputs, unit_bytes=0, **options):
    return [d.text.strip() for d in documents_of(*inputs, unit_bytes=unit_bytes, **options)]


def problems_of(path, **options):
    documents = documents_of(path, **options)
    return [f"{d.place()}: {d.problem}" for d in documents if d.problem], documents


def write_json_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def planned(path, texts, unit_bytes=0):
    """Write texts as JSON lines and return the work units of the file."""
    write_json_lines(path, texts)
    return plan_units([str(path)], READ, unit_bytes)


def tokenize(source, out, workers=1, clean=None, unit_bytes=20_000, read=READ, tokenizer=None,
             **options):
    """Make a corpus of a file, or of work units."""
    units = source if isinstance(source, list) else plan_units([str(source)], read, unit_bytes)
    return tokenize_corpus(units, out, tokenizer or tiny_tokenizer(), read=read, workers=workers,
                           clean=clean or CleanOptions(), **options)


def tree(directory):
    """Return {name: content} of all files but hidden ones, which are what a restart needs."""
    names = [(path.relative_to(directory), path) for path in sorted(Path(directory).rglob("*"))]
    return {str(name): path.read_bytes() for name, path in names
            if path.is_file() and not any(part.startswith(".") for part in name.parts)}


def stored_texts(corpus):
    texts = []
    for shard in read_manifest(corpus)[0].shards:
        tokens = map_array(Path(corpus) / "tokens" / f"{shard.name}.npy")
        begin = 0
        for end in map_array(Path(corpus) / "ends" / f"{shard.name}.npy").tolist():
            texts.append(tiny_tokenizer().decode(tokens[begin:end]))
            begin = end
    return texts


def check_batch(batch: Batch, tokenizer: Tokenizer) -> None:
    """AssertionError naming the row and the broken invariant, if there is one (not for the masks
    of "deberta_window", whose words are others).

    Invariants: labels are -100 or an ordinary id; positions without a label keep their id; targets
    form whole words, unless those are too long; segments are contiguous from 1, start with [CLS]
    and end with [SEP]; padding only at the end, with [PAD]; positions count up from 0 in each
    segment; the target index agrees.
    """
    word_start, special = tokenizer.word_starts(), tokenizer.is_special()
    labels_BL = batch.labels.cpu().numpy()
    inputs_BL = batch.input_ids.cpu().numpy()
    segments_BL, positions_BL = batch.segments.cpu().numpy(), batch.positions.cpu().numpy()
    for b, row in enumerate(batch.rows.tolist()):
        labels, inputs = labels_BL[b], inputs_BL[b]
        target = labels != IGNORE
        _check(row, not special[labels[target]].any(), "a special token is a target")
        _check(row, bool((inputs < tokenizer.size).all() and (inputs >= 0).all()), "id range")
        original = np.where(target, labels, inputs)
        _check(row, not (original == tokenizer.mask_id).any(), "[MASK] without a label")
        _check_segments(row, original, segments_BL[b], positions_BL[b], tokenizer)
        starts, lengths = word_spans(word_start[original], special[original])
        hidden = np.add.reduceat(target, starts, dtype=np.int64) if len(starts) else lengths
        # `target` is False between words, so that a word's sum reaches to the next word's start.
        split = (hidden > 0) & (hidden < lengths)
        split &= lengths <= min(LONGEST_WORD, int(target.sum()))
        _check(row, not split.any(), "targets do not form whole words")
        columns = np.flatnonzero(target)
        stored = batch.target_positions[b, : len(columns)].cpu().numpy()
        _check(row, np.array_equal(columns, stored), "target_positions disagree with labels")
        unused = batch.target_positions[b, len(columns):].cpu().numpy()
        _check(row, bool((labels[unused] == IGNORE).all()), "a slot counts a target again")
    _check(-1, batch.num_targets == int((labels_BL != IGNORE).sum()), "num_targets")
    _check(-1, batch.num_tokens == int((segments_BL > 0).sum()), "num_tokens")


def _check_segments(row: int, original, segments, positions, tokenizer: Tokenizer) -> None:
    real = int((segments > 0).sum())
    _check(row, bool((segments[:real] > 0).all()), "padding inside the row")
    _check(row, bool((original[real:] == tokenizer.pad_id).all()), "padding that is not [PAD]")
    steps = np.diff(segments[:real], prepend=0)
    _check(row, real > 0 and set(steps.tolist()) <= {0, 1}, "segments are not contiguous from 1")
    starts = np.flatnonzero(steps)
    _check(row, bool((original[starts] == tokenizer.cls_id).all()), "segment without [CLS]")
    ends = np.append(starts[1:], real) - 1
    _check(row, bool((original[ends] == tokenizer.sep_id).all()), "segment without [SEP]")
    expected = np.arange(real) - np.repeat(starts, ends + 1 - starts)
    _check(row, np.array_equal(positions[:real], expected), "positions do not restart at 0")


def _check(row: int, holds: bool, invariant: str) -> None:
    if not holds:
        raise AssertionError(f"row {row}: {invariant}")


def fake_checkpoint(path: Path, *, step: int | None = None, text: str = "", **record) -> Path:
    """Make a directory that is whole by its manifest, of `step` instead of that of its name: a
    run.json with `record`, and `text` for a layout and the tensors of one rank.
    """
    from deberta_ds.checkpoint import find

    record = RUN_RECORD | {"step": find.step_of(path) if step is None else step} | record
    contents = {find.RUN_FILE: json.dumps(record), find.LAYOUT_FILE: text, find.rank_file(0): text}
    path.mkdir(parents=True)
    for name, content in contents.items():
        (path / name).write_text(content)
    files = {name: {"bytes": (path / name).stat().st_size, "xxh3": xxh3(path / name)}
             for name in contents}
    (path / find.MANIFEST).write_text(json.dumps({
        "version": find.VERSION, "world_size": record["world_size"], "step": record["step"],
        "files": files}))
    return path


def flip_a_bit(path: Path) -> None:
    """Damage a file without changing its size."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def run_main(script: str, *arguments) -> str:
    """Return what a script of launch/ or data_prep/ prints, run in this process."""
    path, printed = Path(__file__).parents[1] / script, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(path.parent))
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path), run_name="a_test")["main"]()
    return printed.getvalue()
