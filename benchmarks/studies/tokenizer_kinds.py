"""Kinds of tokenizers compared on one text, each trained on the same sample of it.

    python -m benchmarks.studies.tokenizer_kinds --text novels/ --scratch DIR [--kinds bpe] \
        [--vocab_size 8000]

fertility: tokens a word and bytes a token, on held-out text; speed: MB of text a second of
processor time, a whole batch in the tokenizer's engine; bits a byte: of a small masked LM after one
pass over the same bytes (its loss a masked token, times tokens a byte). Rows are written as they
come; rows that the file has already are kept, so that the same command goes on after a stop.
"""

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.config import run_config
from deberta_ds.config.batch_schedule import Stretch
from deberta_ds.config.model import padded_rows
from deberta_ds.config.options import validate
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.tokenize import CleanOptions, tokenize_corpus
from deberta_ds.corpus.train_tokenizer import train_tokenizer
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import RowDataset, eval_sequences
from deberta_ds.engine.optim import build_optimizer, learning_rate
from deberta_ds.model.init import init_parameters
from deberta_ds.objectives.build import build_model, objective_of
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.text import normalise
from deberta_ds.training.held_out import evaluate
from deberta_ds.training.step import seed_step

KINDS = ("unigram", "bpe", "byte_bpe", "wordpiece")
READ = ReadOptions("match:(CHAPTER|Chapter) ")
SEQ_LEN, ROWS = 128, 8
MODEL = {"hidden_size": 128, "num_layers": 2, "num_heads": 2, "intermediate_size": 512,
         "max_position": SEQ_LEN, "init_std": 0.05}


def split_text(source: Path, scratch: Path, sample_bytes: int, learn_bytes: int) -> list[Path]:
    """Write four directories of text, each evenly from all files: the sample for tokenizers, its
    front for the masked LM, a tenth as much from behind the sample, which neither has seen, and
    behind that as much as the sample, for a tokenizer of which it does not give enough pieces.
    """
    files = sorted(source.rglob("*.txt"))
    sample, learn = sample_bytes // len(files), learn_bytes // len(files)
    held_out = learn // 10
    spans = {"sample": (0, sample), "learn": (0, learn), "heldout": (sample, sample + held_out),
             "more": (sample + held_out, 2 * sample + held_out)}
    for path in files:
        text = path.read_text(encoding="utf-8-sig")
        for name, (begin, end) in spans.items():
            if not (scratch / name / path.name).exists():
                write_atomic(scratch / name / path.name, text[begin:end])
    return [scratch / name for name in spans]


def train(kind: str, pieces: int, sources: list[Path], out: Path) -> Tokenizer:
    """Return the tokenizer at `out`, trained if it is not there: on the first of the sources, or on
    both if SentencePiece finds too few pieces in it.
    """
    out = out.with_suffix(".model") if kind == "unigram" else out
    if out.exists():
        return Tokenizer(out)
    units = plan_units([str(sources[0])], READ, 0)
    wanted = TokenizerRecipe(kind=kind, vocab_size=pieces, sample_bytes=1 << 40, threads=1)
    try:
        return train_tokenizer(units, out, wanted, read=READ)
    except UserError as error:
        if kind != "unigram":
            raise
        print(f"{error}\nfrom twice the sample:", flush=True)
        units = plan_units([str(source) for source in sources], READ, 0)
        return train_tokenizer(units, out, wanted, read=READ)


def fertility(tokenizer: Tokenizer, source: Path) -> dict:
    texts = [normalise(path.read_text(encoding="utf-8")) for path in sorted(source.iterdir())]
    seconds = float("inf")
    for _ in range(3):
        begin = time.process_time()
        found, lengths = tokenizer.encode_joined(texts)
        seconds = min(seconds, time.process_time() - begin)
    num_bytes, words = sum(len(text.encode()) for text in texts), sum(len(t.split()) for t in texts)
    tokens = sum(lengths)
    unknown = int((found == tokenizer.unk_id).sum())
    return {"tokens_a_word": tokens / words, "bytes_a_token": num_bytes / tokens,
            "mb_a_second": num_bytes / 1e6 / seconds, "unknown_share": unknown / tokens}


def learn(tokenizer: Tokenizer, train_text: Path, held_out: Path, scratch: Path) -> dict:
    """Return what a small masked LM has learned after one pass over the text."""
    begin = time.process_time()
    corpora, facts = {}, {}
    for name, source in (("train", train_text), ("heldout", held_out)):
        units = plan_units([str(source)], READ, 0)
        corpora[name] = scratch / f"{tokenizer.path.stem}-{name}"
        manifest = tokenize_corpus(units, corpora[name], tokenizer, read=READ,
                                   clean=CleanOptions())[str(corpora[name])]
        facts[name] = manifest.counts
        pack_corpus(corpora[name], tokenizer, SEQ_LEN)
    run = validate(run_config.RunConfig, {
        "name": "kinds", "out_dir": str(scratch),
        "model": MODEL | {"vocab_size": padded_rows(tokenizer.size)},
        "data": {"sources": [{"path": str(corpora["train"])}], "tokenizer": str(tokenizer.path),
                 "seq_len": SEQ_LEN, "eval": str(corpora["heldout"])},
        "objective": {"kind": "mlm"}, "optim": {"lr": 2e-3, "warmup_steps": 30},
        "train": {"steps": 1, "global_batch_size": ROWS,
                                "micro_batch_size": ROWS}}, "run")
    mask = run.objective.mask
    dataset = RowDataset(run.data.sources, tokenizer, seq_len=SEQ_LEN, seed=0, mask=mask)
    steps = sum(dataset.num_rows.values()) // ROWS
    model = build_model(run, tokenizer.size)
    init_parameters(model, run.model.init_std, 0)
    optimizer = build_optimizer(model, run.optim)
    loader = build_loader(dataset, stretches=[Stretch(0, ROWS, steps)], micro_batch_size=ROWS,
                          rank=0, world_size=1, num_workers=0)
    for step, batch in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, steps)
        with seed_step(batch.rows.device, 0, step, 0, 0):
            counts = {"targets": batch.num_targets, "tokens": batch.num_tokens}
            model(batch, counts)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    rows = eval_sequences(
        str(corpora["heldout"]), tokenizer, seq_len=SEQ_LEN, mask=mask, eval_seed=1)
    scores = evaluate(model, objective_of(run), torch.device("cpu"), {"heldout": rows}, ROWS)
    texts = [normalise(path.read_text(encoding="utf-8")) for path in sorted(held_out.iterdir())]
    tokens_a_byte = facts["heldout"]["tokens"] / sum(len(text.encode()) for text in texts)
    bits = scores["masked_loss"] * tokens_a_byte / math.log(2)
    return {"steps": steps, "learn_seconds": time.process_time() - begin,
            "masked_loss": scores["masked_loss"], "masked_accuracy": scores["masked_accuracy"],
            "bits_a_byte": bits}


def earlier_rows(out: Path, settings: dict) -> list[dict]:
    """Return the rows that an earlier call with these settings has left."""
    if not out.is_file():
        return []
    record = json.loads(out.read_text())
    if {name: record.get(name) for name in settings} != settings:
        raise SystemExit(f"{out}: its rows have other settings; name another file")
    return record["kinds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--vocab_size", type=int, nargs="+", default=(8000, 16000, 32000))
    parser.add_argument("--sample_bytes", type=int, default=4_000_000, help="for tokenizers")
    parser.add_argument("--learn_bytes", type=int, default=1_500_000, help="for the masked LM")
    parser.add_argument("--out", type=Path, default="benchmarks/results/tokenizer_kinds.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"sample_bytes": args.sample_bytes, "learn_bytes": args.learn_bytes,
                "model": MODEL, "seq_len": SEQ_LEN, "rows": ROWS}
    rows = earlier_rows(args.out, settings)
    sample, text, held_out, more = split_text(args.text, args.scratch, args.sample_bytes,
                                              args.learn_bytes)
    for step in ("fertility", "learn"):
        for pieces, kind in itertools.product(args.pieces, args.kinds):
            row = next((row for row in rows if (row["kind"], row["pieces"]) == (kind, pieces)), {})
            if ("fertility" if not row else "learn" if "steps" not in row else "") != step:
                continue
            tokenizer = train(kind, pieces, [sample, more],
                              args.scratch / f"{kind}-{pieces}")
            if step == "fertility":
                row |= {"kind": kind, "pieces": pieces} | fertility(tokenizer, held_out)
                rows.append(row)
            else:
                row |= learn(tokenizer, text, held_out, args.scratch)
            row |= {name: round(value, 4) for name, value in row.items()
                    if isinstance(value, float)}
            rows.sort(key=lambda row: (row["pieces"], KINDS.index(row["kind"])))
            print(json.dumps(row), flush=True)
            write_atomic(args.out, json.dumps(settings | {"kinds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
