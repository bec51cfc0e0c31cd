"""Take every kind of tokenizer from text to predictions, at tiny size, and write what held.

    python tools/faults/tokenizer_pipelines.py --work runs/tokenizer_pipelines \\
        --out benchmarks/results/tokenizer_pipelines.json

Every stage is the commands a user types, and a look at what they left behind. The kinds that
train_tokenizer.py makes are made by it, the others as their authors do.
"""

import argparse
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import deberta_v1_files as public  # noqa: E402
import rank_helpers  # noqa: E402
import tokenizer_cases as cases  # noqa: E402
from data_helpers import SENTENCES, random_documents  # noqa: E402
from launching import losses  # noqa: E402

from deberta_ds.base.errors import UserError, exit_cleanly  # noqa: E402
from deberta_ds.base.files import write_atomic  # noqa: E402

SEQ_LEN, STEPS, SAVED = 64, 8, 4
TEXTS = (*SENTENCES, "naïve café — “quotes”… 3.14 & more", "def f(x):\n    return x  # tab\there",
         "  leading and trailing  ", "e\u0301 ﬁ ½ ™ \u00a0nbsp", "👩‍👩‍👧 🇫🇷 𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "", " ",
         "日本語とEnglish混在", "ไทย ကို ខ្មែរ")
WORD = (r"(?:[A-Za-zÀ-ÿ]"  # letters, any of them perhaps spelled in bytes
        r"|<0x(?:[46][1-9A-F]|[57][0-9A])>|<0xC3><0x[89AB][0-9A-F]>)+")
FILL = "The quick brown {mask} jumps over the lazy dog."


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer: made by train_tokenizer.py with `options`, or by a function."""

    name: str
    path: str  # what --tokenizer names, in the working directory of the kind
    options: tuple[str, ...] = ()
    make: Callable[[Path], object] | None = None
    is_public_v1: bool = False  # `path` is a model's directory, and the run starts from it


def with_mask(out: Path) -> None:
    """Write a SentencePiece model without [MASK] and [PAD] next to `out`, and `out` with them."""
    model = cases.sentencepiece_llama(out.with_name("their.model"))
    run_here("data_prep/train_tokenizer.py", ["--add_mask", str(model), "--out", str(out)])


KINDS = (
    Kind("SentencePiece unigram", "spm.model", ("--kind", "unigram", "--vocab_size", "400")),
    Kind("SentencePiece BPE", "spm.model", make=cases.sentencepiece_bpe),
    Kind("SentencePiece unigram as ALBERT's", "spm.model", make=cases.sentencepiece_albert),
    Kind("SentencePiece BPE as Llama's, --add_mask", "tokenizer", make=with_mask),
    Kind(
        "byte-level BPE, tokenizer.json", "tokenizer", ("--kind", "byte_bpe", "--vocab_size", "600")
    ),
    Kind("WordPiece, tokenizer.json", "tokenizer", ("--kind", "wordpiece", "--vocab_size", "400")),
    Kind("Metaspace BPE, tokenizer.json", "tokenizer", ("--kind", "bpe", "--vocab_size", "600")),
    Kind("Metaspace BPE as Llama's", "tokenizer", make=cases.llama),
    Kind("Unigram as XLM-RoBERTa's", "tokenizer", make=cases.unigram),
    Kind("Unigram with bytes", "tokenizer", make=cases.unigram_bytes),
    Kind("byte-level BPE as RoBERTa's", "tokenizer", make=cases.roberta),
    Kind("byte-level BPE with prefix space", "tokenizer", make=cases.roberta_prefix),
    Kind("byte-level BPE as ModernBERT's", "tokenizer", make=cases.modernbert),
    Kind("byte-level BPE as Qwen's, --add_mask", "tokenizer", make=cases.qwen),
    Kind("WordPiece as BERT's, uncased", "tokenizer", make=cases.bert),
    Kind("WordPiece as BERT's, vocab.txt, cased", "tokenizer", make=cases.bert_vocab_txt),
    Kind("WordPiece, another prefix", "tokenizer", make=cases.wordpiece_other),
    Kind("DeBERTa v1, vocab.json + merges.txt", "deberta-base", make=public.hub_directory,
         is_public_v1=True),
)


_WITH_RANKS = ("launch/pretrain.py", "launch/finetune.py", "launch/predict.py")


def run_here(script: str, words: list[str]) -> str:
    """Run a script in this process, as its `if __name__ == "__main__"` would."""
    output, code = io.StringIO(), 0
    before = sys.argv, sys.path
    sys.argv, sys.path = [script, *words], [str((ROOT / script).parent), *sys.path]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as done:
        code = done.code
    finally:
        sys.argv, sys.path = before
    assert not code, f"{script} exited with {code}\n{output.getvalue()[-4000:]}"
    return output.getvalue()


@dataclass
class Pipeline:
    """One kind on its way: where its files are, which commands were run."""

    kind: Kind
    root: Path
    commands: list[str] = field(default_factory=list)

    @property
    def tokenizer(self) -> Path:
        return self.root / self.kind.path

    def run(self, script: str, *arguments) -> str:
        """Run a script; return its output, AssertionError if it failed.

        One that joins a process group has a process of its own; the others share this one, which
        has everything imported.
        """
        words = [str(argument) for argument in arguments]
        shown = [word.replace(f"{self.root}/", "").replace(f"{ROOT}/", "") for word in words]
        self.commands.append(f"python {script} {shlex.join(shown)}")
        log = self.root / f"{Path(script).stem}-{len(self.commands)}.log"
        if script in _WITH_RANKS:
            return rank_helpers.run(1, words, log, ROOT / script)
        return run_here(script, words)


def train(work: Pipeline) -> str:
    text = work.root / "text"
    text.mkdir(parents=True)
    lines = [json.dumps({"text": one}) for one in random_documents(240)]
    (text / "all.jsonl").write_text("\n".join(lines))
    if work.kind.make:
        work.kind.make(work.tokenizer)
        return "imported"
    work.run("data_prep/train_tokenizer.py", text / "all.jsonl", *work.kind.options, "--out",
             work.tokenizer)
    assert work.tokenizer.exists()
    return "trained"


def tokenize(work: Pipeline) -> str:
    corpora = [work.root / "corpus/train", work.root / "corpus/heldout"]
    work.run("data_prep/tokenize_corpus.py", work.root / "text/all.jsonl", "--tokenizer",
             work.tokenizer, "--out", corpora[0], "--heldout_out", corpora[1], "--heldout_share",
             0.2, "--workers", 1)
    work.run("data_prep/pack.py", *corpora, "--tokenizer", work.tokenizer, "--seq_len", SEQ_LEN,
             "--workers", 1)
    manifest = json.loads((corpora[0] / "manifest.json").read_text())
    return f"{sum(shard['tokens'] for shard in manifest['shards']):,} tokens"


def masks(work: Pipeline) -> str:
    """Words of the text, found by a pattern, are masked whole: not one shows a piece of itself."""
    from deberta_ds.config.objective import MaskConfig
    from deberta_ds.config.run_config import SourceConfig
    from deberta_ds.data.rows import RowDataset
    from deberta_ds.tokenizer import Tokenizer

    shown = work.run("data_prep/show.py", work.root / "corpus/train", "--tokenizer",
                     work.tokenizer, "--seq_len", SEQ_LEN, "--rows", 4)
    assert "{" in shown, shown
    tokenizer = Tokenizer(work.tokenizer)
    dataset = RowDataset([SourceConfig(path=str(work.root / "corpus/train"))], tokenizer,
                         seq_len=SEQ_LEN, seed=1, mask=MaskConfig())
    words = targets = real = 0
    for number in range(60):
        row = dataset[number]
        is_target = row.labels >= 0
        originals = [int(label if label >= 0 else shown) for label, shown in
                     zip(row.labels, row.input_ids, strict=True)]
        targets, real = targets + int(is_target.sum()), real + int((row.segments > 0).sum())
        text, token_of = "", []
        for place, piece in enumerate(tokenizer.readable(originals)):
            text, token_of = text + piece, token_of + [place] * len(piece)
        for word in re.finditer(WORD, text):
            tokens = sorted(set(token_of[word.start():word.end()]))
            if len(tokens) >= is_target.sum():  # no room for it, perhaps with a piece of space
                continue
            held = {bool(is_target[token]) for token in tokens}
            assert len(held) == 1, f"half of {word[0]!r} shows: {text}"
            words += len(tokens) > 1
    assert words > 5 and 0.13 < targets / real < 0.17, (words, targets / real)
    return f"{targets / real:.1%} masked, {words} words of several pieces whole"


def run_file(work: Pipeline) -> Path:
    from deberta_ds.tokenizer import Tokenizer

    model = {"vocab_size": -(-Tokenizer(work.tokenizer).size // 64) * 64, "hidden_size": 32,
             "num_layers": 3, "num_heads": 4, "intermediate_size": 64, "max_position": 64,
             "position_buckets": 16}
    if work.kind.is_public_v1:  # [model] preset = "deberta-base", at the size of the fixture
        model |= {"vocab_size": public.VOCABULARY, "position_buckets": 0,
                  "share_position_projections": False, "relative_norm": False, "key_bias": False}
    lines = ["[model]", *(f"{key} = {json.dumps(value)}" for key, value in model.items())]
    if work.kind.is_public_v1:
        lines += ["[init]", f'from = "{work.tokenizer}"']
    lines += ["[objective]", 'kind = "mlm"', "[objective.mask]", "max_ngram = 3", "[data]",
              f'sources = [{{path = "{work.root}/corpus/train"}}]',
              f'heldout = "{work.root}/corpus/heldout"', f'tokenizer = "{work.tokenizer}"',
              f"seq_len = {SEQ_LEN}", "workers = 0", "[optim]", "learning_rate = 1e-3", "[train]",
              f"steps = {STEPS}", "global_batch_size = 4", "micro_batch_size = 4", "log_every = 1",
              "eval_sequences = 8", f"eval_every = {STEPS}", f"save_every = {SAVED}"]
    path = work.root / "run.toml"
    path.write_text("\n".join(['name = "pipeline"', f'out_dir = "{work.root}/run"', *lines]))
    return path


def pretrain_command(work: Pipeline) -> tuple:
    return ("launch/pretrain.py", "--config", work.root / "run.toml", "--deepspeed_config",
            ROOT / "ds_configs/zero1_fp32.json")


def pretrain(work: Pipeline) -> str:
    run_file(work)
    work.run(*pretrain_command(work))
    found = losses(work.root / "run")
    assert list(found) == list(range(1, STEPS + 1))
    return f"loss {found[1]:.3f} to {found[STEPS]:.3f}"


def resume(work: Pipeline) -> str:
    """From a checkpoint in the middle: the steps behind it have the losses of the whole run."""
    middle = work.root / f"run/checkpoints/step-{SAVED:08}"
    work.run(*pretrain_command(work), f"--out_dir={work.root}/resumed", "--resume", middle)
    whole, resumed = losses(work.root / "run"), losses(work.root / "resumed")
    assert resumed == {step: loss for step, loss in whole.items() if step > SAVED}, (whole, resumed)
    return f"{len(resumed)} losses equal the whole run's bit for bit"


def export(work: Pipeline) -> str:
    text = work.run("launch/export.py", "--run", work.root / "run", "--out", work.root / "hf")
    assert "AutoTokenizer gives the ids of the training tokenizer" in text, text
    wanted = "DebertaForMaskedLM" if work.kind.is_public_v1 else "DebertaV2ForMaskedLM"
    assert f"as {wanted}" in text, text
    return wanted


def auto_tokenizer(work: Pipeline) -> str:
    from transformers import AutoTokenizer

    from deberta_ds.tokenizer import Tokenizer

    ours = Tokenizer(work.tokenizer)
    theirs = AutoTokenizer.from_pretrained(work.root / "hf", local_files_only=True,
                                           model_max_length=1 << 20)
    texts = [*TEXTS, *random_documents(200, seed=3)]
    differing = [text for text in texts
                 if theirs(text)["input_ids"] != [ours.cls_id, *ours.encode(text), ours.sep_id]]
    assert not differing, differing[:3]
    return f"0 of {len(texts)} texts differ"


def fine_tune(work: Pipeline) -> str:
    work.run("launch/finetune.py", "--task", "RTE", "--model", work.root / "hf", "--data",
             ROOT / "tests/fixtures/superglue", "--any_size", "--skip_test", "--out",
             work.root / "tuned", "--all.epochs=1", "--all.max_length=64")
    result = json.loads((work.root / "tuned/RTE/seed-1/result.json").read_text())
    accuracy = result["metrics"]["accuracy"]
    assert 0 <= accuracy <= 1
    return f"RTE sample {accuracy:.0%}"


def predict(work: Pipeline) -> str:
    lines = (ROOT / "tests/fixtures/superglue/RTE/val.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    table = work.root / "table.jsonl"
    table.write_text("\n".join(json.dumps(
        {"sentence1": row["premise"], "sentence2": row["hypothesis"]}) for row in rows))
    work.run("launch/predict.py", "--model", work.root / "tuned/RTE/seed-1", "--data", table,
             "--out", work.root / "predicted.jsonl")
    found = len((work.root / "predicted.jsonl").read_text().splitlines())
    assert found == len(rows)
    return f"{found} predictions"


def fill_mask(work: Pipeline) -> str:
    from deberta_ds.tokenizer import Tokenizer

    text = FILL.format(mask=Tokenizer(work.tokenizer).mask_piece)
    shown = work.run("launch/fill_mask.py", "--model", work.root / "hf", text)
    assert re.search(r"mask 1: +\S+ +\d", shown), shown
    return shown.splitlines()[-1].strip()


def convert(work: Pipeline) -> str:
    """To microsoft's form and back: the tokenizer goes along."""
    work.run("launch/convert.py", "--model", work.root / "hf", "--out", work.root / "ms", "--to",
             "ms")
    work.run("launch/convert.py", "--model", work.root / "ms", "--out", work.root / "back",
             "--to", "hf")
    there, back = ((work.root / name / "model.safetensors").read_bytes() for name in ("hf", "back"))
    assert there == back
    from deberta_ds.tokenizer import Tokenizer

    assert Tokenizer(work.root / "back").sha256 == Tokenizer(work.root / "hf").sha256
    return "hf -> ms -> hf: same bytes, same tokenizer"


STAGES = (train, tokenize, masks, pretrain, resume, export, auto_tokenizer, fine_tune, predict,
         fill_mask, convert)


def take(kind: Kind, root: Path, stages=STAGES) -> dict[str, dict]:
    """Take the stages of one kind; return {stage: {seen, commands} or {problem, commands}}.

    Stops at the first that fails, because the next ones need what it should have left.
    """
    found = {}
    work = Pipeline(kind, root)
    for step in stages:
        work.commands, begin = [], time.perf_counter()
        try:
            found[step.__name__] = {"seen": step(work), "commands": work.commands}
        except Exception as error:  # the table says so, and the next kind is tried
            traceback.print_exc()
            found[step.__name__] = {"problem": str(error)[-2000:], "commands": work.commands}
            break
        found[step.__name__]["seconds"] = round(time.perf_counter() - begin, 1)
    return found


def table(found: dict[str, dict[str, dict]]) -> str:
    """Return the table as Markdown."""
    names = [step.__name__ for step in STAGES]
    lines = ["| kind | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, stages in found.items():
        cells = ["yes" if "seen" in stages.get(name, {}) else
                 "NO" if name in stages else "not reached" for name in names]
        if stages["train"].get("seen") == "imported":
            cells[0] = "imported"
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="new directory for all files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--kinds", nargs="+", default=[kind.name for kind in KINDS],
                        help="begin with these words")
    arguments = parser.parse_args()
    chosen = [kind for kind in KINDS if kind.name.startswith(tuple(arguments.kinds))]
    if arguments.work.exists():
        raise UserError(f"{arguments.work}: is there already; name a new directory")
    found = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for number, kind in enumerate(chosen):
        print(f"== {kind.name}", flush=True)
        found[kind.name] = take(kind, arguments.work.resolve() / str(number))
        for name, result in found[kind.name].items():
            print(f"   {name}: {result.get('seen') or 'FAILED'}", flush=True)
        write_atomic(arguments.out, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(table(found))
    return any("problem" in result for stages in found.values() for result in stages.values())


if __name__ == "__main__":
    exit_cleanly(main)
