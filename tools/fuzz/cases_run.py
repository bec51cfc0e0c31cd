"""Broken run files, options, DeepSpeed JSONs and environments of the training command."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from random import Random

from tools.fuzz import mutate
from tools.fuzz.case import BRIEF, Case
from tools.fuzz.commands import ROOT, Command
from tools.fuzz.readers import finetune, pretrain
from tools.fuzz.toml_text import toml, toml_value


def run_file(random: Random, place: Path) -> Case:
    """A run file with a broken value, key, line or byte."""
    path = place / "run.toml"
    if random.random() < 0.35:
        change = mutate.file(random, path)
    else:
        values, change = mutate.tree(random, tomllib.loads(path.read_text()))
        text = toml(values)
        if random.random() < 0.1:
            text, change = _toml_trick(random, text)
        path.write_text(text)
    brief = BRIEF if random.random() < 0.9 else ("--check",)
    shutil.rmtree(place / "out")
    return Case(pretrain(*brief), change.text,
                ("run.toml", "command line", "out", "manifest.json", "data.", "tokenizer", "rows"),
                change.nonsense)


def _toml_trick(random: Random, text: str) -> tuple[str, mutate.Change]:
    """Return TOML with what TOML itself forbids, or types that JSON does not have."""
    name, new = random.choice(
        [
            ("a key twice",
             text.replace("learning_rate = ", "learning_rate = 1e-3\nlearning_rate = ")),
            ("a table twice", f"{text}[optim]\nlearning_rate = 1e-3\n"),
            ("brackets without end",
             text.replace("learning_rate = ", f"learning_rate = {'[' * 50_000}")),
            ("a date", text.replace('name = "small"', "name = 1979-05-27T07:32:00Z")),
            (
                "a time as the rate",
                text.replace("learning_rate = 0.001", "learning_rate = 07:32:00")),
            ("thousands of digits", text.replace("steps = 2", f"steps = {'9' * 5000}")),
            ("a dotted key over a table", f"optim.learning_rate = 1\n{text}"),
            ("underscores in a number", text.replace("steps = 2", "steps = 2__0")),
            ("a NUL", text.replace("small", "sm\0all")),
        ])
    return new, mutate.Change(name, new != text)


_OUT_OF_RANGE = [
    ("optim.min_learning_rate_share", -1),
    ("optim.min_learning_rate_share", 2.0),
    ("objective.rtd_weight", -1),
    ("train.stop_after", -5),
    ("data.workers", 99999999999999999999),
    ("data.workers", -1),
    ("optim.betas", [2.0, 3.0]),
    ("optim.betas", [-1.0, 0.9]),
    ("optim.eps", -1.0),
    ("optim.learning_rate", -1e-3),
    ("optim.learning_rate", 1e30),
    ("optim.decay_share", 5.0),
    ("model.norm_eps", -1.0),
    ("model.num_layers", 10**9),
    ("model.hidden_size", 10**9),
    ("model.init_std", -1.0),
    ("model.conv_kernel", -3),
    ("model.conv_kernel", 10**6 + 1),
    ("model.max_relative", 1),
    ("objective.generator_layers", 10**6),
    ("objective.generator_layers", -3),
    ("objective.mask.rate", 1.5),
    ("objective.mask.max_ngram", 10**9),
    ("train.keep", 0),
    ("train.activation_checkpointing_interval", -1),
    ("train.log_every", -1),
    ("train.micro_batch_size", 10**9),
    ("data.seq_len", 10**9),
    ("data.seed", -1),
    ("train.seed", 2**70),
    ("model.num_heads", 10**6),
    ("model.vocab_size", 10**15),
    ("train.steps", 10**40),
    ("train.eval_sequences", 10**12),
    ("train.watchdog_seconds", 1e300),
    ("model.position_buckets", 10**9),
    ("name", ""),
    ("objective.temperature", 1e-300),
    ("optim.clip_norm", -1.0),
    ("optim.weight_decay", -0.1),
]


def override(random: Random, place: Path) -> Case:
    """Options --section.key=value with broken keys and values."""
    values = _flat(tomllib.loads((place / "run.toml").read_text()))
    values |= {"objective.mask.rate": 0.15, "optim.eps": 1e-6, "optim.clip_norm": 1.0,
               "optim.betas": [0.9, 0.98], "objective.temperature": 1.0, "optim.warmup_steps": 0,
               "model.max_relative": -1, "model.conv_kernel": 0, "model.position_buckets": 16,
               "objective.rtd_weight": 50.0, "train.spike_sigmas": 0.0, "optim.schedule": "wsd",
               "optim.min_learning_rate_share": 0.0, "model.norm_eps": 1e-7,
               "train.activation_checkpointing_interval": 1, "objective.generator_layers": 0,
               "model.hidden_dropout": 0.1, "data.seed": 0}
    key = random.choice(sorted(values))
    new, nonsense = mutate.value(random, values[key])
    if random.random() < 0.25:
        key, new = random.choice(_OUT_OF_RANGE)
        nonsense = True
    text = f"--{key}={toml_value(new)}"
    if random.random() < 0.2:
        text = random.choice([text.replace("=", " "), text[2:], f"-{text}", f"{text}=1", f"--{key}",
                              f"--{key}.x=1", text.replace(".", "..", 1), "--=", "--.=1"])
        nonsense = False
    kind = random.choice(["mlm", "mlm", "rtd"])
    more = () if kind == "mlm" else ("--objective.kind=rtd", "--model.num_layers=4")
    arguments = (*more, "--out_dir=new", *BRIEF, text)
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
    if random.random() < 0.4:
        change = mutate.json_file(random, path)
    else:
        values = json.loads(path.read_text())
        if random.random() < 0.5:
            values |= random.choice([
                {"aio": {"block_size": 4096}}, {"torch_autocast": {"enabled": False}},
                {"tensorboard": {}}, {"communication_data_type": "fp32"},
                {"data_types": {"grad_accum_dtype": "fp32"}}])
        values, change = mutate.tree(random, values)
        path.write_text(json.dumps(values))
    command = pretrain("--out_dir=new", "--train.stop_after=1")
    if random.random() < 0.2:
        command = Command("launch/plan.py", ("--config", "run.toml", "--deepspeed_config",
                                             "ds.json", "--devices", "h200"))
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
    command = pretrain("--out_dir=new", *BRIEF, environment=given)
    if random.random() < 0.3:
        command = replace(finetune("CB"), environment=given)
    return Case(command, f"{name}={text!r}", (name, "RANK", "WORLD_SIZE", "MASTER"),
                name in whole and text in ("foo", "nan", "a b", "1.5", "None"))


def _flat(values: dict, prefix: str = "") -> dict:
    found = {}
    for key, child in values.items():
        found |= _flat(child, f"{prefix}{key}.") if isinstance(child, dict) \
            else {f"{prefix}{key}": child}
    return found
