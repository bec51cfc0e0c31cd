"""The classes of broken input: each makes one case in a directory that holds whole inputs."""

import gzip
import json
import pickle
import shutil
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import zstandard

from tests.fuzz import mutate
from tests.fuzz.commands import ROOT, Command
from tests.fuzz.setting import pretrain

CANARY = "canary"  # what code hidden in an input would write
_BRIEF = ("--train.stop_after=2", "--train.keep=1")


@dataclass(frozen=True)
class Case:
    """A command on a broken input; a refusal must name one of `names`."""

    command: Command
    what: str
    names: tuple[str, ...]
    must_fail: bool = False


def run_file(random: Random, place: Path) -> Case:
    """A run file with a broken value, key, line or byte."""
    path = place / "run.toml"
    if random.random() < 0.25:
        change = mutate.file(random, path)
    else:
        values, change = mutate.tree(random, tomllib.loads(path.read_text()))
        path.write_text(_toml(values))
    brief = _BRIEF if random.random() < 0.9 else ("--check",)
    shutil.rmtree(place / "out")
    return Case(pretrain(*brief), change.text,
                ("run.toml", "command line", "out", "manifest.json", "data.", "tokenizer", "rows"),
                change.nonsense)


_OUT_OF_RANGE = [
    ("optim.min_lr_share", -1), ("optim.min_lr_share", 2.0), ("objective.rtd_weight", -1),
    ("train.stop_after", -5), ("data.workers", 99999999999999999999), ("data.workers", -1),
    ("optim.betas", [2.0, 3.0]), ("optim.betas", [-1.0, 0.9]), ("optim.eps", -1.0),
    ("optim.lr", -1e-3), ("optim.lr", 1e30), ("optim.decay_share", 5.0), ("model.norm_eps", -1.0),
    ("model.num_layers", 10**9), ("model.hidden_size", 10**9), ("model.init_std", -1.0),
    ("model.conv_kernel", -3), ("model.conv_kernel", 10**6 + 1), ("model.max_relative", 1),
    ("objective.generator_layers", 10**6), ("objective.generator_layers", -3),
    ("objective.mask.rate", 1.5), ("objective.mask.max_ngram", 10**9), ("train.keep", 0),
    ("train.checkpoint_layers", -1), ("train.log_every", -1), ("train.micro_batch_rows", 10**9),
    ("data.seq_len", 10**9), ("data.seed", -1), ("train.seed", 2**70), ("model.num_heads", 10**6),
    ("model.vocab_size", 10**15), ("train.steps", 10**40), ("train.eval_rows", 10**12),
    ("train.watchdog_seconds", 1e300), ("model.position_buckets", 10**9), ("name", ""),
    ("objective.temperature", 1e-300), ("optim.clip_norm", -1.0), ("optim.weight_decay", -0.1)]


def override(random: Random, place: Path) -> Case:
    """Options --section.key=value with broken keys and values."""
    values = _flat(tomllib.loads((place / "run.toml").read_text()))
    values |= {"objective.mask.rate": 0.15, "optim.eps": 1e-6, "optim.clip_norm": 1.0,
               "optim.betas": [0.9, 0.98], "objective.temperature": 1.0, "optim.warmup_steps": 0,
               "model.max_relative": -1, "model.conv_kernel": 0, "model.position_buckets": 16,
               "objective.rtd_weight": 50.0, "train.spike_sigmas": 0.0, "optim.schedule": "wsd",
               "optim.min_lr_share": 0.0, "model.norm_eps": 1e-7, "train.checkpoint_layers": 0,
               "objective.generator_layers": 0, "model.hidden_dropout": 0.1, "data.seed": 0}
    key = random.choice(sorted(values))
    new, nonsense = mutate.value(random, values[key])
    if random.random() < 0.25:
        key, new = random.choice(_OUT_OF_RANGE)
        nonsense = True
    text = f"--{key}={_toml_value(new)}"
    if random.random() < 0.2:
        text = random.choice([text.replace("=", " "), text[2:], f"-{text}", f"{text}=1", f"--{key}",
                              f"--{key}.x=1", text.replace(".", "..", 1), "--=", "--.=1"])
        nonsense = False
    kind = random.choice(["mlm", "mlm", "rtd"])
    more = () if kind == "mlm" else ("--objective.kind=rtd", "--model.num_layers=4")
    arguments = (*more, "--out_dir=new", *_BRIEF, text)
    if "\0" in text:
        text, arguments, nonsense = "none", arguments[:-1], False
    return Case(pretrain(*arguments), f"{kind} {text[:90]}", ("run.toml", key, "--", str(new)[:20]),
                nonsense)


def deepspeed_json(random: Random, place: Path) -> Case:
    """A shipped DeepSpeed JSON, broken."""
    source = random.choice(sorted(path for path in (ROOT / "ds_configs").glob("*.json")
                                  if "nvme" not in path.name))
    path = place / "ds.json"
    shutil.copy(source, path)
    if random.random() < 0.2:
        change = mutate.file(random, path)
    else:
        values = json.loads(path.read_text())
        if random.random() < 0.5:
            values |= random.choice([
                {"aio": {"block_size": 4096}}, {"torch_autocast": {"enabled": False}},
                {"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}},
                {"flops_profiler": {"enabled": True, "profile_step": 1}}, {"tensorboard": {}},
                {"communication_data_type": "fp32"}, {"data_types": {"grad_accum_dtype": "fp32"}},
                {"gradient_predivide_factor": 2.0, "prescale_gradients": True}])
        values, change = mutate.tree(random, values)
        path.write_text(json.dumps(values))
    command = pretrain("--out_dir=new", "--train.stop_after=1")
    if random.random() < 0.2:
        command = Command("launch/plan.py", ("--config", "run.toml", "--deepspeed_config",
                                             "ds.json", "--gpu", "h200", "--gpus", "1"))
    return Case(command, f"{source.stem}: {change.text}", ("ds.json",),
                change.nonsense)


def environment(random: Random, place: Path) -> Case:
    """Rank variables and others that a shell or a launcher gets wrong."""
    whole = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": "0"}
    names = [*whole, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR",
             "GLOO_SOCKET_IFNAME", "NO_COLOR", "LOCAL_WORLD_SIZE", "TMPDIR"]
    name = random.choice(names)
    text = random.choice(["foo", "", "-1", "1.5", "0x10", "9" * 25, "0", "65536", "\u0661", "a b",
                          "None", "nan", "1,,2", "/nonexistent"])
    given = whole | {name: text} if random.random() < 0.7 else {name: text}
    command = pretrain("--out_dir=new", *_BRIEF, environment=given)
    if random.random() < 0.3:
        command = replace(_finetune("CB"), environment=given)
    return Case(command, f"{name}={text!r}", (name, "RANK", "WORLD_SIZE", "MASTER"),
                name in whole and text in ("foo", "nan", "a b", "1.5", "None"))


def corpus(random: Random, place: Path) -> Case:
    """Text files of every kind, broken, and options of data_prep with broken values."""
    path = _as_some_format(random, place)
    script, arguments = random.choice([
        ("tokenize_corpus", ["--out", "new", "--tokenizer", "spm.model", "--workers", "1"]),
        ("tokenize_corpus", ["--out", "new", "--tokenizer", "spm.model", "--workers", "2",
                             "--heldout_out", "new2", "--heldout_share", "0.3"]),
        ("train_tokenizer", ["--out", "new.model", "--pieces", "400"]),
        ("dedup", ["--out", "new", "--workers", "1"]),
    ])
    what, nonsense = f"{path.name} as it is", False
    if random.random() < 0.6:
        change = mutate.file(random, path)
        what, nonsense = change
    else:
        arguments += random.choice([
            ["--documents", "match:["], ["--documents", "page"], ["--documents", "match:"],
            ["--text_key", "nothing"], ["--text_key", ""], ["--max_document_bytes", "0"],
            ["--max_document_bytes", "-5"], ["--unit_bytes", "-1"], ["--unit_bytes", "1"],
            ["--workers", "0"], ["--workers", "-2"], ["--heldout_share", "2"],
            ["--heldout_share", "nan"], ["--heldout_share", "-1", "--heldout_out", "new2"],
            ["--heldout_out", "new"], ["--pieces", "0"], ["--pieces", "-7"], ["--pieces", "10"],
            ["--sample_bytes", "0"], ["--character_coverage", "nan"], ["--threads", "0"],
            ["--character_coverage", "5"], ["--near", "nan"], ["--near", "2"], ["--near", "-1"],
            ["--max_bad", "-1"], ["--min_letter_share", "nan"], ["--min_letter_share", "2"],
            ["--min_characters", "-1"], ["--duplicates", "train"], ["--duplicates", "nowhere"],
            ["--label_key", "none"], ["--max_bad", "100000"], ["--out", "train"],
            ["--out", "train.jsonl"], ["--out", "/proc/new"]])
        what = f"{path.name} {' '.join(arguments[-2:])}"
        nonsense = arguments[-2:] in _NONSENSE_OPTIONS
    return Case(Command(f"data_prep/{script}.py", (path.name, *arguments)), f"{script} {what}",
                (path.name, "--", "new", "train"), nonsense)


_NONSENSE_OPTIONS = [["--unit_bytes", "-1"], ["--max_document_bytes", "0"],
                     ["--max_document_bytes", "-5"], ["--heldout_share", "2"],
                     ["--heldout_share", "nan"], ["--heldout_out", "new"], ["--workers", "-2"],
                     ["--near", "nan"], ["--near", "2"], ["--min_letter_share", "nan"],
                     ["--max_bad", "-1"], ["--pieces", "-7"]]


def shards(random: Random, place: Path) -> Case:
    """A prepared corpus with a broken file."""
    command = _reader_of_shards(random)
    corpus_name = random.choice(["train", "train", "heldout"])
    path = random.choice(mutate.files_under(place / corpus_name))
    if path.name == "manifest.json" and random.random() < 0.7:
        values, change = mutate.tree(random, json.loads(path.read_text()))
        path.write_text(json.dumps(values))
    else:
        change = mutate.file(random, path)
    return Case(command, f"{corpus_name}/{path.relative_to(place / corpus_name)} {change.text}",
                (corpus_name,))


def _reader_of_shards(random: Random) -> Command:
    tokenizer = ("--tokenizer", "spm.model")
    return random.choice([
        pretrain("--out_dir=new", *_BRIEF),
        pretrain("--out_dir=new", "--data.verify=full", *_BRIEF),
        Command("data_prep/verify.py", ("train", "heldout", *tokenizer)),
        Command("data_prep/stats.py", ("train", "heldout", *tokenizer)),
        Command("data_prep/show.py", ("train", "--seq_len", "64", "--rows", "50", *tokenizer)),
        Command("data_prep/pack.py", ("train", "heldout", "--seq_len", "32", "--workers", "1",
                                      *tokenizer)),
        Command("data_prep/mixture.py", ("train", "heldout", "--seq_len", "64")),
        Command("launch/evaluate.py", ("--checkpoint", "out"))])


def checkpoint(random: Random, place: Path) -> Case:
    """A run's checkpoint with a broken file, or with code in it."""
    command = random.choice([
        pretrain("--train.steps=3"), pretrain("--train.steps=3"),
        pretrain("--train.steps=3", "--resume=out/checkpoints/step-00000002", "--out_dir=new"),
        Command("launch/evaluate.py", ("--checkpoint", "out")),
        Command("launch/export.py", ("--checkpoint", "out", "--out", "new"))])
    step = place / "out/checkpoints/step-00000002"
    path = random.choice(mutate.files_under(step))
    hidden = random.random() < 0.3
    if hidden:
        path = random.choice([p for p in mutate.files_under(step) if p.suffix != ".json"])
        _hide_code(random, path, place)
        change = mutate.Change("holds code", False)
    elif path.suffix == ".json" and random.random() < 0.8:
        values, change = mutate.tree(random, json.loads(path.read_text()))
        path.write_text(json.dumps(values))
    else:
        change = mutate.file(random, path)
    if path.name != "manifest.json" and path.is_file() and not path.is_symlink() \
            and random.random() < 0.6:
        _write_manifest_anew(step)
        change = mutate.Change(f"{change.text}, fresh manifest", False)
    return Case(command, f"{path.relative_to(step)} {change.text}", ("out", path.name))


class _Code:
    """What a stranger would hide in a pickle."""

    def __init__(self, canary: Path):
        self._canary = str(canary)

    def __reduce__(self):
        return open, (self._canary, "w")


def _hide_code(random: Random, path: Path, place: Path) -> None:
    code = _Code(place / CANARY)
    if random.random() < 0.4 or not zipfile.is_zipfile(path):
        path.write_bytes(pickle.dumps({"module": code}))
        return
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, pickle.dumps({"module": code}, 2) if name.endswith("data.pkl")
                             else content)


def _write_manifest_anew(step: Path) -> None:
    from deberta_ds.files import xxh3

    path = step / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        for name in manifest["files"]:
            file = step / name
            manifest["files"][name] = {"bytes": file.stat().st_size, "xxh3": xxh3(file)}
        path.write_text(json.dumps(manifest))
    except (OSError, ValueError, KeyError, TypeError):
        pass


def tokenizer(random: Random, place: Path) -> Case:
    """A SentencePiece model with a broken byte."""
    change = mutate.file(random, place / "spm.model")
    command = _reader_of_shards(random)
    read = "spm.model" in command.arguments or "pretrain" in command.script
    return Case(command, change.text, ("spm.model", "train", "heldout", "out"),
                change.nonsense and read)


def model(random: Random, place: Path) -> Case:
    """An exported model with a broken file, read by whoever reads models."""
    path = random.choice(mutate.files_under(place / "hf"))
    if path.suffix == ".json" and path.stat().st_size < 5000 and random.random() < 0.7:
        values, change = mutate.tree(random, json.loads(path.read_text()))
        path.write_text(json.dumps(values))
    else:
        change = mutate.file(random, path)
    command = random.choice([
        Command("launch/convert.py", ("hf", "new", "--to", "ms")),
        Command("launch/convert.py", ("hf", "new", "--to", "hf")),
        Command("launch/fill_mask.py", ("--model", "hf", "the [MASK] of")),
        pretrain("--out_dir=new", "--init.from=hf", *_BRIEF), _finetune("CB")])
    return Case(command, f"{path.relative_to(place / 'hf')} {change.text}", ("hf",))


def task(random: Random, place: Path) -> Case:
    """A SuperGLUE file with a broken record or byte."""
    name = random.choice(["CB", "RTE", "COPA", "BoolQ", "WiC", "WSC", "MultiRC", "ReCoRD"])
    found = [path for path in mutate.files_under(place / "superglue") if name in path.parts]
    path = random.choice(found)
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else []
    if lines and random.random() < 0.7:
        number = random.randrange(len(lines))
        record, change = mutate.tree(random, json.loads(lines[number]))
        lines[number] = json.dumps(record)
        path.write_text("\n".join(lines) + "\n")
    else:
        change = mutate.file(random, path)
    return Case(_finetune(name), f"{name}/{path.name} {change.text}", ("superglue", name))


def page(random: Random, place: Path) -> Case:
    """metrics.jsonl, config.json or results of a run, broken, and drawn as a page."""
    path = random.choice([place / "out/metrics.jsonl", place / "out/metrics.jsonl",
                          place / "out/config.json"])
    if random.random() < 0.8:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        number = random.randrange(len(lines))
        record, change = mutate.tree(random, json.loads(lines[number]))
        lines[number] = json.dumps(record)
        path.write_text("\n".join(lines) + "\n")
    else:
        change = mutate.file(random, path)
    command = random.choice([Command("launch/report.py", ("--run", "out", "--out", "new.html")),
                             pretrain("--train.steps=3")])
    return Case(command, f"{path.name} {change.text}", ("out/",))


CLASSES: dict[str, Callable[[Random, Path], Case]] = {
    function.__name__: function for function in (
        run_file, override, deepspeed_json, environment, corpus, shards, checkpoint, tokenizer,
        model, task, page)}


def _finetune(name: str) -> Command:
    return Command("launch/finetune.py", (
        "--task", name, "--model", "hf", "--data", "superglue", "--any_size", "--out", "new",
        "--set", "epochs=1", "max_length=64", "window_overlap=16", "train_rows=4"))


def _as_some_format(random: Random, place: Path) -> Path:
    """Write the small corpus in one of the known formats; return the file."""
    source = place / "heldout.jsonl"
    text = source.read_bytes()
    kind = random.choice(["jsonl", "jsonl", "txt", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
    path = place / f"text.{kind}"
    if kind == "jsonl":
        path.write_bytes(text)
    elif kind == "txt":
        path.write_text("\n\n".join(json.loads(line)["text"] for line in text.splitlines()))
    elif kind.endswith("gz"):
        path.write_bytes(gzip.compress(text, mtime=0))
    elif kind.endswith("zst"):
        path.write_bytes(zstandard.ZstdCompressor().compress(text))
    else:
        _write_arrow([json.loads(line)["text"] for line in text.splitlines()], path)
    return path


def _write_arrow(texts: list[str], path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": texts})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


def _flat(values: dict, prefix: str = "") -> dict:
    found = {}
    for key, child in values.items():
        found |= _flat(child, f"{prefix}{key}.") if isinstance(child, dict) \
            else {f"{prefix}{key}": child}
    return found


def _toml(values: dict, prefix: str = "") -> str:
    """Return nested values as TOML; values that TOML does not have become texts."""
    plain = [f"{_toml_key(key)} = {_toml_value(child)}" for key, child in values.items()
             if not isinstance(child, dict)]
    tables = [f"[{prefix}{_toml_key(key)}]\n{_toml(child, f'{prefix}{_toml_key(key)}.')}"
              for key, child in values.items() if isinstance(child, dict)]
    return "\n".join([*plain, *tables]) + "\n"


def _toml_key(key: str) -> str:
    return key if key and key.isascii() and key.replace("_", "a").isalnum() else json.dumps(key)


def _toml_value(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value) if value is not None else '""'
