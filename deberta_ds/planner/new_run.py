"""A run file for a corpus, devices and hours: a shipped recipe, and what has to differ and why.

The recipe of the largest model is taken for which a few epochs of the text, and the hours, give as
many tokens as it wants at least; that of the smallest models is for all that is less. Of their
shapes a masked LM gets the one whose loss is expected to be lowest after the tokens that it sees.
"""

import math
import re
import shlex
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.base.numbers import fill, format_count, format_duration
from deberta_ds.config import run_config, toml_files
from deberta_ds.config.model import padded_rows
from deberta_ds.data.shards import MANIFEST, planned_lengths, read_manifest
from deberta_ds.engine import ds_config
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.engine.gpus import Gpu, card_of, cpu_ranks
from deberta_ds.model import cpu
from deberta_ds.objectives.build import objective_of
from deberta_ds.planner.epochs import FEW_EPOCHS, MANY_EPOCHS, epochs_worth
from deberta_ds.planner.plan import Choice, make_plan, recommended
from deberta_ds.planner.speed import expected_mfu

RECIPES = (  # (run file, fewest tokens that its model is worth, how to fine-tune that model)
    ("v3_large", 1e11, "--config launch/runs/superglue/large.toml"),
    ("lab/lab_base_8gpu", 2e10, "--config launch/runs/superglue/base.toml"),
    ("lab/lab_small_1gpu", 5e9, "--config launch/runs/superglue/small.toml"),
    ("lab/lab_xsmall_1gpu", 1e9, "--config launch/runs/superglue/xsmall.toml"),
    ("lab/lab_xsmall_cpu", 3e8, "--config launch/runs/superglue/xsmall.toml"),
    ("small_{}", 0, "the default settings, whose learning rate follows its size"))
_USED = 0.85  # of the hours: the rest is for the start, evaluations and saves
_SHAPES = ((4, 128), (6, 192), (7, 256))  # layers and width of the smallest models
# ln of the held-out loss in nats: a constant, and factors of ln of the millions of weights in the
# layers and of ln of the millions of tokens, 8 to 144 (benchmarks/studies/loss_fit.py).
LOSS, _FITTED = (1.53, -0.0273, -0.0581), (8e6, 144e6)
TEXT = "the text"
_FEWEST_STEPS, _ENOUGH_STEPS, _SMALLEST_BATCH = 100, 1000, 2048  # the last in tokens
_MICRO_TOKENS = {True: 2048, False: 65_536}  # by is_cpu: most of a forward pass

Changes = dict[str, tuple[Any, str]]  # {key of a run file: (value, reason)}


@dataclass(frozen=True)
class Text:
    """Keys of [data], its packed corpora, what there is to train on and to evaluate with (in the
    smallest held-out corpus), and the sequence lengths for which all is packed.
    """

    data: dict[str, Any]  # sources, heldout, tokenizer
    directories: list[str]  # the held-out ones too
    tokens: int
    heldout_tokens: int
    vocab_size: int
    packed: list[int]


@dataclass(frozen=True)
class Devices:
    """One rank's card, ranks of a node, threads of each, nodes; a DeepSpeed JSON by its stage."""

    gpu: Gpu
    gpus: int
    threads: int
    nodes: int
    json_name: str


def open_corpus(directory: str, heldout: str | None, tokenizer: str | None) -> Text:
    """Return the corpus of a directory; options go before its corpus.json."""
    is_built = (Path(directory) / toml_files.BUILT).exists()
    if not is_built and not (Path(directory) / MANIFEST).exists():
        raise UserError(f"{directory}: no {toml_files.BUILT} in it; run data_prep/build.py to its "
                        "end, or give the right directory")
    data: dict[str, Any] = {"sources": [{"path": directory}]}
    if is_built:
        data = toml_files.read_built(directory)
    data |= {key: path for key, path in (("heldout", heldout), ("tokenizer", tokenizer)) if path}
    train = [read_manifest(source["path"])[0] for source in data["sources"]]
    for key in ("heldout", "tokenizer"):
        if not data.get(key):
            raise UserError(f"{directory}: no {toml_files.BUILT} in it names its {key}; give "
                            f"--{key} PATH")
    found = data["heldout"]
    held_out = list(found.values()) if isinstance(found, dict) else [found]
    directories = [*(source["path"] for source in data["sources"]), *held_out]
    return Text(data, directories, sum(one.tokens for one in train),
                min(read_manifest(path)[0].tokens for path in held_out), train[0].vocab_size,
                sorted(set.intersection(*map(set, map(planned_lengths, directories)))))


def open_devices(words: str, *figures: float | None) -> Devices:
    """Return the devices of "2 cpu" (cores), "4 x a100", "16 x h100" (nodes of 8), "2 x 4 x a100"
    (2 nodes of 4) or "a100". `figures`: as of `card_of`.
    """
    found = re.fullmatch(r"(?:(\d+) *x *(?=\d))?(?:(\d+)\s*x?\s*)?([a-zA-Z].*)", words.strip())
    nodes, count = (int(found[1] or 1), int(found[2] or 1)) if found else (0, 0)
    name = found[3] if found else ""
    is_cpu = name.lower() in ("cpu", "cpus")
    if not nodes * count or count > 8 and count % 8 and not is_cpu:
        raise UserError(f'--devices {words}: give a number and a name, such as "2 cpu" (cores) or '
                        '"4 x a100"; above 8 GPUs a multiple of 8, or "2 x 4 x a100": 2 nodes of 4')
    gpu = card_of("cpu" if is_cpu else name, *figures)
    if is_cpu:
        return Devices(*cpu_ranks(gpu, count), nodes, cpu.deepspeed_json())
    precision, gpus = "bf16" if gpu.peak("bf16") else "fp16", min(count, 8)
    return Devices(gpu, gpus, 1, nodes * (count // gpus), f"zero{{}}_{precision}")


def choose(text: Text, devices: Devices, hours: float, objective: str, name: str
           ) -> tuple[str, int]:
    """Return (a run file, the ZeRO stage to run it with).

    `objective` may be "": what learns more at the size. UserError if too few updates remain.
    """
    ds = ds_config.load(f"ds_configs/{devices.json_name.format(1)}.json")
    seconds, larger, gpu = _USED * 3600 * hours, "", devices.gpu
    ranks, tokens = devices.gpus * devices.nodes, text.tokens
    for recipe, least, finetune in RECIPES:
        file = f"launch/runs/{recipe.format(objective or 'mlm')}.toml"
        changes = _of_text(file, text, objective or ("rtd" if least else "mlm"), name)
        run = _run(file, changes)
        most = epochs_worth(tokens) * tokens
        if (about := min(most, seconds * _speed(run, devices, ds))) >= least:
            hint = f"Fine-tune the model with {finetune}."
            break
        larger = f"; {file} wants {format_count(least)} tokens in all"
    if not least and run.objective.kind == "mlm":
        about, changes = _best_shape(file, changes, most, seconds, devices, ds)
    length, given = run.data.seq_len, _run(file, {})
    per_step = given.train.global_batch_size * given.data.seq_len
    while per_step > _SMALLEST_BATCH and about / per_step < _ENOUGH_STEPS:
        per_step //= 2
    of_rank = max(1, per_step // length // ranks)
    fitting = max(1, min(of_rank, _MICRO_TOKENS[gpu.is_cpu] // length))
    micro, best, chosen = 1 << fitting.bit_length() - 1, None, 0
    batch = ranks * micro * max(1, round(of_rank / micro))
    changes |= {"train.global_batch_size": (batch, f"{batch * length:,} tokens per update")}
    # Smaller ones are only faster while they need less recomputation.
    while micro and (best is None or best.checkpointing != "none"):
        run = _run(file, changes | {"train.micro_batch_size": (micro, "")})
        found = recommended(make_plan(run, ds, gpu=gpu, gpus=devices.gpus, nodes=devices.nodes,
                                      mfu=expected_mfu(run, gpu, ds)))
        if found and (best is None or found.tokens_per_second > best.tokens_per_second):
            best, chosen = found, micro
        micro //= 2
    if best is None:
        raise UserError(f"{file}: its model does not fit; use devices with more memory")
    changes |= {"train.micro_batch_size": (chosen, "")}
    seen = min(most, seconds * best.tokens_per_second)
    changes |= _of_steps(int(seen / (batch * length)), batch * length, tokens, best,
                         TEXT if seen == most else f"{hours:g} h")
    idle = ""
    if seen == most and ranks > 1 and not gpu.is_cpu:
        alone = recommended(make_plan(_run(file, changes), ds, gpu=gpu, gpus=1, nodes=1,
                                      mfu=expected_mfu(run, gpu, ds)))
        wanted = format_count(seconds * best.tokens_per_second / FEW_EPOCHS)
        idle = f" The text is the limit: {wanted} tokens of it would keep {ranks} GPUs busy" + (
            f"; one takes {format_duration(seen / alone.tokens_per_second)}, all of them "
            f"{format_duration(seen / best.tokens_per_second)}." if alone else ".")
    return _file(file, changes, (
        f"{name}: {file}, the largest recipe for {format_count(tokens)} tokens of text, "
        f"{FEW_EPOCHS} epochs and {hours:g} h{larger}. Values without a reason are that "
        f"file's. {hint}{idle}")), best.stage


def _run(file: str, changes: Changes) -> run_config.RunConfig:
    overrides = [toml_files.as_override(key, value) for key, (value, _) in changes.items()]
    return run_config.load(file, overrides)[0]


def _speed(run: run_config.RunConfig, devices: Devices, ds: DeepSpeedConfig) -> float:
    """Return tokens per second without communication: the plan, which takes its time, is for the
    size that is chosen.
    """
    peak = devices.gpu.peak(ds.matmul_precision) or 0.0
    return (devices.gpus * devices.nodes * peak * expected_mfu(run, devices.gpu, ds)
            / objective_of(run).flops_per_token(run))


def _best_shape(file: str, changes: Changes, most: float, seconds: float, devices: Devices,
                ds: DeepSpeedConfig) -> tuple[float, Changes]:
    """Return (tokens that it sees, `changes` with the shape of the lowest expected loss)."""
    found = []
    for layers, width in _SHAPES:
        mine = changes | {"model.num_layers": (layers, ""), "model.hidden_size": (width, ""),
                          "model.num_heads": (width // 64, ""),
                          "model.intermediate_size": (4 * width, "")}
        about = min(most, seconds * _speed(_run(file, mine), devices, ds))
        loss = math.exp(sum(map(mul, LOSS, loss_terms(layers, width, about))))
        found.append((loss, about, mine))
    loss, about, mine = min(found, key=lambda one: one[0])
    low, high = _FITTED
    certain = "+- 0.04" if low <= about <= high else (
        f"(extrapolated: measured from {format_count(low)} to {format_count(high)} tokens)")
    shapes = ", ".join(f"{layers} x {width}" for layers, width in _SHAPES)
    return about, mine | {"model.num_layers": (mine["model.num_layers"][0], (
        f"of {shapes} the one with the lowest expected loss after {format_count(about)} tokens: on "
        f"novels {loss:.2f} nats {certain}; the losses of other text differ "
        "(docs/evidence/novels.md)"))}


def loss_terms(layers: int, width: int, tokens: float) -> tuple[float, float, float]:
    """Return what the numbers of `LOSS` are factors of."""
    return 1.0, math.log(12 * layers * width**2 / 1e6), math.log(tokens / 1e6)


def _of_text(file: str, text: Text, kind: str, name: str) -> Changes:
    given, held_out = _run(file, {}), text.heldout_tokens
    length = min(text.packed or [given.data.seq_len], key=lambda n: abs(n - given.data.seq_len))
    return {
        "name": (name, ""), "out_dir": (f"runs/{name}", ""), "objective.kind": (
            kind, "mlm is ahead after few tokens, rtd after many (docs/evidence/novels.md)"),
        "model.vocab_size": (padded_rows(text.vocab_size),
                             f"the {text.vocab_size:,} ids of the tokenizer, padded"),
        "model.max_position": (max(length, given.model.max_position), ""),
        **{f"data.{key}": (value, "") for key, value in text.data.items()},
        "data.seq_len": (length, "as packed" if text.packed else "as in the recipe"),
        "train.eval_sequences": (max(1, min(512, held_out // length)),
                                 f"of {format_count(held_out)} tokens held out")}


def _of_steps(steps: int, per_step: int, tokens: int, best: Choice, limit: str) -> Changes:
    if steps < _FEWEST_STEPS:
        more = "more --hours or devices" if limit != TEXT else (
            f"at least {_FEWEST_STEPS * per_step // MANY_EPOCHS:,} tokens of text")
        raise UserError(f"{steps:,} updates of {per_step:,} tokens are too few to learn from (the "
                        f"limit is {limit}): give {more}")
    steps -= steps % 10 ** (len(str(steps)) - 2)
    tenth, rate, epochs = steps // 10, best.tokens_per_second, steps * per_step / tokens
    often = (f" Beyond {FEW_EPOCHS} epochs repeated text teaches less, but of so little text fewer "
             "would teach nothing.") * (epochs > FEW_EPOCHS)
    return {
        "optim.warmup_steps": (steps // 20, "5 % of the steps"),
        "train.steps": (steps, f"{format_count(steps * per_step)} tokens, {epochs:.1f} epochs; "
                               f"about {format_duration(steps * per_step / rate)} at "
                               f"{format_count(rate)} tokens/s. The limit is {limit}.{often}"),
        "train.activation_checkpointing": (
            best.checkpointing, f"{best.memory.peak / 1e9:.1f} GB of a rank's memory"),
        "train.log_every": (max(1, steps // 200), ""),
        "train.planned_tokens_per_second": (float(round(rate)), "a run half as fast says so"),
        "train.eval_every": (tenth, "ten evaluations"), "train.save_every": (tenth, "")}


def _file(file: str, changes: Changes, head: str) -> str:
    """Return a run file with the values of another and `changes`, each with its reason."""
    values, lines = toml_files.read_toml(file, "run file", file), [_comment(head)]
    for key, (value, _) in changes.items():
        toml_files.set_value(values, key, value)
    for section, table in values.items():
        in_table = isinstance(table, dict)
        lines += ["", f"[{section}]"] * in_table
        for key, value in table.items() if in_table else [(section, table)]:
            _, reason = changes.get(f"{section}.{key}" if in_table else key, (value, ""))
            lines += [_comment(reason)] * bool(reason) + [f"{key} = {toml_files.as_toml(value)}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in fill(text, 96).splitlines())


def commands(out: str, text: Text, devices: Devices, stage: int) -> str:
    """Return the commands that pack the corpus where it is not, check the run, and train."""
    length = _run(out, {}).data.seq_len
    words = [*text.directories, "--tokenizer", text.data["tokenizer"], "--seq_len", str(length)]
    pack = f"python data_prep/pack.py {shlex.join(words)}\n" * (length not in text.packed)
    cores = f"DS_ACCELERATOR=cpu OMP_NUM_THREADS={devices.threads} " * devices.gpu.is_cpu
    start = (f"{cores}deepspeed --num_gpus {devices.gpus} launch/pretrain.py --config "
             f"{shlex.quote(out)} --deepspeed_config "
             f"ds_configs/{devices.json_name.format(max(1, stage))}.json")
    more = f"  (on {devices.nodes} nodes: docs/how-to/several-nodes.md)" * (devices.nodes > 1)
    return f"{pack}{start} --check\n{start}{more}"
