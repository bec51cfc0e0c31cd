"""The run configuration: TOML file + dotted overrides -> one frozen, validated RunConfig.

What is unusual: every value remembers where it came from; unknown keys are errors with the nearest
match; all problems of a file are reported at once. The run config owns what is computed (batch,
learning rate, clipping, steps); the DeepSpeed JSON owns how it is run (ZeRO, precision, offload).
No torch and no deepspeed here: a run can be checked on a login node.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from deberta_ds.base import command_line
from deberta_ds.base.errors import ConfigError
from deberta_ds.base.files import flatten
from deberta_ds.config.model import HOW_COMPUTED, MODELS, ModelConfig
from deberta_ds.config.objective import ObjectiveConfig, mask_defaults
from deberta_ds.config.optim import OptimConfig
from deberta_ds.config.options import (
    STRICT,
    OneOfOrOwn,
    Option,
    check_names,
    nearest,
    option,
    options_of,
    validate,
)
from deberta_ds.config.toml_files import apply_built, read_with_overrides

Complete = Callable[[dict, dict[str, str]], None]  # fills (values, origins) of a run file
_LARGEST = 2**62  # of seeds and row numbers: they are hashed and added as 64-bit integers
_Share = Annotated[float, Field(ge=0, le=1)]
_Minutes = Annotated[float, Field(ge=0, le=1e6)]
_Steps = Annotated[int, Field(ge=0, le=1 << 40)]
_Position = Annotated[int, Field(ge=0, le=_LARGEST)]
_EVAL_NAME = re.compile(r"[\w.-]{1,60}")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SourceConfig:
    """One packed corpus and its weight in the mixture.

    `first_sequence`, `order` and `part` are for a second stage; data_prep/mixture.py --after prints
    them.
    """

    path: str = option("directory of a packed corpus", min_length=1)
    weight: float = option("share of the sequences, relative to the other sources", 1.0, gt=0,
                           le=1e12)
    first_sequence: _Position = option("sequences of this corpus that earlier stages of the same "
                                       "length have used", 0)
    order: tuple[_Position, _Position] | None = option(
        "(seed, position) of the stage that used the corpus first; none: those of this run", None)
    part: tuple[_Share, _Share] = option("range of the shards, as shares, for stages of other "
                                         "lengths", (0.0, 1.0))
    replaced: str = option("rtd_cached: directory that data_prep/replace.py made of this corpus",
                           "")

    def __post_init__(self):
        if not self.part[0] < self.part[1]:
            raise ValueError(f"part = {list(self.part)} must be [from, to], 0 <= from < to <= 1")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DataConfig:
    """Which rows are seen, in which order."""

    sources: tuple[SourceConfig, ...] = option("the mixture: one entry per packed corpus",
                                               min_length=1)
    tokenizer: str = option("SentencePiece model, tokenizer.json, vocab.json next to merges.txt, "
                            "or the directory of one", min_length=1)
    seq_len: int = option("sequence length in tokens", 512, ge=8, le=1 << 20)
    heldout: str | dict[str, str] = option("held-out packed corpus, or several as {name = "
                                           "directory}, scored together and each by name; empty: "
                                           "no evaluation", "")
    heldout_replaced: str | dict[str, str] = option(
        "rtd_cached: directory that data_prep/replace.py made of heldout; for several corpora a "
        "table with the same names", "")
    seed: int = option("seed of the order, the masks and the generator's samples", 0, ge=0,
                       le=_LARGEST)
    cache: str = option("directory on this node for blocks of corpora at a URL",
                        "~/.cache/deberta_ds", min_length=1)
    cache_gigabytes: float = option("size limit of the cache, which may be exceeded for some "
                                    "seconds; 0: no limit", 0.0, ge=0, le=1e9)
    attend_across_documents: bool = option("true: document segments of a sequence attend to each "
                                           "other (as in the official code)", False)
    verify: Literal["sizes", "full"] = option("what is checked of the shards at the start; full: "
                                              "checksums too", "sizes")
    workers: int = option("loader processes per rank; 0: the rank itself loads", 1, ge=0, le=256)

    def __post_init__(self):
        for name in self.heldout_corpora if isinstance(self.heldout, dict) else ():
            if not _EVAL_NAME.fullmatch(name):
                raise ValueError(f"heldout: {name!r} names a held-out corpus in charts and files; "
                                 "use letters, digits, _ . and -")
            if not self.heldout_corpora[name]:
                raise ValueError(f"heldout: {name} is empty; it must be a directory")
        if (self.heldout_replaced
            and self.heldout_replacements.keys() != self.heldout_corpora.keys()):
            raise ValueError("heldout_replaced must have the names of heldout, "
                             f"{', '.join(self.heldout_corpora) or 'which is empty'}")

    @property
    def heldout_corpora(self) -> dict[str, str]:
        """{name: directory} of the held-out corpora; the name of a single one is its path."""
        return _by_name(self.heldout, str(self.heldout))

    @property
    def heldout_replacements(self) -> dict[str, str]:
        """{name: directory of its replacements} of `heldout_corpora`."""
        return _by_name(self.heldout_replaced, str(self.heldout))


def _by_name(value: str | dict[str, str], name: str) -> dict[str, str]:
    return value if isinstance(value, dict) else {name: value} if value else {}


PROFILE_AFTER = 5  # steps in which kernels are compiled and memory is found


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at a time, and what is written when."""

    steps: int = option("number of updates of the run", ge=1, le=1 << 40)
    global_batch_size: int = option("sequences per update, over all ranks", ge=1, le=1 << 22)
    micro_batch_size: int = option("sequences per forward pass on one rank", ge=1, le=1 << 16)
    initial_batch_size: int = option("batch size warm-up: sequences of the first update; 0: no "
                                     "warm-up", 0, ge=0, le=1 << 22)
    batch_warmup_steps: int = option("steps of batch size warm-up, from initial_batch_size to "
                                     "global_batch_size in equal steps of initial_batch_size", 0,
                                     ge=0, le=1 << 40)
    seed: int = option("seed of the initial weights and of dropout", 0, ge=0, le=_LARGEST)
    activation_checkpointing: Literal["none", "full", "selective"] = option(
        "what the backward pass of a layer recomputes; full: the whole layer; selective: all but "
        "the outputs of its linear layers", "none")
    cuda_graph: Literal["auto", "on", "off"] = option(
        "micro-batches as a CUDA graph, so that the GPU does not wait for Python; auto: where "
        "possible (bf16 or fp32 weights, ZeRO-0 to 2)", "auto")
    tf32: bool = option("fp32 matmuls on a GPU in TF32: faster, with 10 bits of mantissa", False)
    activation_checkpointing_interval: int = option("every n-th layer is checkpointed", 1, ge=1,
                                                    le=1000)
    freeze: tuple[str, ...] = option(
        "parts of the model that are not trained: embeddings, encoder, relative, convolution, "
        "layers, layers.0-5, head; also of a network: generator, discriminator.layers.0-5", ())
    freeze_steps: int = option("step from which on train.freeze is trained too; 0: never", 0, ge=0,
                               le=1 << 40)
    planned_tokens_per_second: float = option(
        "speed by new.py; the log says after 20 steps if the run is half as fast; 0: unknown", 0.0,
        ge=0, le=1e12)
    log_every: int = option("steps between two log lines", 10, ge=1, le=1 << 40)
    eval_every: int = option("steps between two evaluations", 1000, ge=1, le=1 << 40)
    eval_sequences: int = option("sequences per held-out corpus in an evaluation", 256, ge=1,
                                 le=1 << 24)
    save_every: int = option("steps between two checkpoints", 1000, ge=1, le=1 << 40)
    save_minutes: Literal["auto"] | _Minutes = option(
        "minutes after which a checkpoint is saved too, checked every log_every steps; auto: by "
        "the number of ranks and the time of a save (Young/Daly); 0: save_every only", "auto")
    save_in_background: bool = option("copy the state to CPU memory and write it while training "
                                      "continues (12 bytes per parameter over all ranks)", True)
    keep: int = option("number of newest checkpoints to keep", 3, ge=1, le=1 << 20)
    keep_every: _Steps | tuple[_Steps, ...] = option(
        "steps whose checkpoints are never deleted: a list, or N for every N steps; 0: none", 0)
    upload: str = option("URL to which checkpoints and metrics are copied in the background, such "
                         "as s3://bucket/run; empty: none", "")
    best_metric: str = option("evaluation score whose best checkpoint is kept too, as OUT/best: a "
                              "key of metrics.jsonl such as minimal_pairs; empty: none", "")
    patience: int = option("evaluations without a better train.best_metric after which the run "
                           "ends; 0: never", 0, ge=0, le=1 << 40)
    watchdog_seconds: float = option("time in which a stuck or dead rank is reported, at least 1; "
                                     "0: no watchdog", 60.0, ge=0, le=1e6)
    on_spike: Literal["stop", "skip", "rollback"] = option("what to do about a bad step", "stop")
    spike_sigmas: float = option("a loss above the mean of 100 losses + this many standard "
                                 "deviations is bad; 0: never", 0.0, ge=0, le=1e6)
    stop_after: int = option("save and stop at this step, for example before a time limit; 0: run "
                             "to the end", 0, ge=0, le=1 << 40)
    after_update: tuple[Annotated[str, OneOfOrOwn()], ...] = option(
        "functions of one's own; each gets the optimizer and the step after every update, on every "
        "rank", ())
    after_save: tuple[Annotated[str, OneOfOrOwn()], ...] = option(
        "functions of one's own; each gets the directory and the step of every checkpoint that is "
        "whole, on the first rank", ())
    profile_steps: int = option(f"steps to record with torch.profiler after the first "
                                f"{PROFILE_AFTER} of a start; 0: none", 0, ge=0, le=100)
    profile_ranks: tuple[int, ...] = option("ranks that write OUT/traces/*-rank-N.json.gz (for "
                                            "ui.perfetto.dev)", (0,), min_length=1)

    def __post_init__(self):
        if self.upload and "://" not in self.upload:
            raise ValueError(f"upload = {self.upload!r} must be a URL, such as s3://bucket/run")
        if bool(self.initial_batch_size) != bool(self.batch_warmup_steps):
            raise ValueError("initial_batch_size and batch_warmup_steps go together; set both, or "
                             "leave both out")
        if self.initial_batch_size and self.global_batch_size % self.initial_batch_size:
            raise ValueError(f"initial_batch_size = {self.initial_batch_size} must divide "
                             f"global_batch_size = {self.global_batch_size}")
        if self.freeze_steps and not self.freeze:
            raise ValueError("freeze_steps needs freeze; set both, or leave freeze_steps out")
        if 0 < self.watchdog_seconds < 1:  # it would end a run before its first beat
            raise ValueError(f"watchdog_seconds = {self.watchdog_seconds} must be 0 or at least 1")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class InitConfig:
    """Where a run's first weights come from; empty: random. A resumed run does not read it."""

    source: str = option("weights to start from: a run or export of this project, Hugging Face or "
                         "microsoft files; a path, a URL, or OWNER/NAME on the Hub; "
                         "random:PLACE: its shape alone", "")
    generator: str = option("generator of the source, if the source has none; rtd_cached without a "
                            "source: generator whose token embeddings the discriminator starts "
                            "from", "")
    embeddings_only: bool = option("load only the token embeddings and keep them fixed", False)
    moments: bool = option("take the optimizer's state of the source too: a checkpoint of this "
                           "project with the same parameters and optimizer", False)
    layers: tuple[_Position, ...] = option(
        "layers of the source that the run's layers start from, counted from 0: [0, 2, 4] drops "
        "some, [0, 0, 1, 1] repeats them; empty: all, once", ())
    generator_layers: tuple[_Position, ...] = option("the same of the generator", ())

    def __post_init__(self):
        layers = self.layers or self.generator_layers
        if not self.source and (self.embeddings_only or layers):
            raise ValueError(f"{'layers' if layers else 'embeddings_only'} needs init.from")
        if self.embeddings_only and (self.generator or layers):
            raise ValueError("embeddings_only takes no generator and no layers")
        if self.moments and (not self.source or self.generator or self.embeddings_only or layers):
            raise ValueError("moments needs init.from, alone")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class LogConfig:
    """Services that get the numbers of a run besides metrics.jsonl and TensorBoard."""

    wandb: str = option("project of Weights & Biases (needs wandb); empty: none", "")
    mlflow: str = option("experiment of MLflow (needs mlflow-skinny); empty: none", "")
    callbacks: tuple[Annotated[str, OneOfOrOwn()], ...] = option(
        "functions of one's own; each gets every train and eval record, on the first rank", ())


@dataclass(config=STRICT, frozen=True, kw_only=True)
class EvaluateConfig:
    """What an evaluation measures besides the objective's own scores."""

    minimal_pairs: str = option("minimal pairs to score: a file, directory or archive as "
                                "launch/minimal_pairs.py reads it; empty: none", "")
    pairs_per_paradigm: int = option("minimal pairs per paradigm; the same sample in all runs", 25,
                                     ge=1, le=1 << 20)
    metrics: tuple[Annotated[str, OneOfOrOwn()], ...] = option(
        "functions of one's own, a score each under its NAME; higher is better", ())


@dataclass(config=STRICT, frozen=True, kw_only=True)
class RunConfig:
    """Everything that one pretraining run computes."""

    name: str = option("name in the log and in the HTML report", min_length=1)
    out_dir: str = option("directory for checkpoints, metrics and the HTML report", min_length=1)
    model: ModelConfig
    objective: ObjectiveConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    init: InitConfig = InitConfig()
    log: LogConfig = LogConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    def __post_init__(self):
        if "\0" in self.out_dir:
            raise ValueError("out_dir holds a NUL character")
        if "://" in self.out_dir:
            raise ValueError(f"out_dir = {self.out_dir!r} is a URL; name a local directory, and "
                             f'set train.upload = "{self.out_dir}" for copies there')
        if self.init.generator and not self.init.source and self.objective.kind != "rtd_cached":
            raise ValueError("init.generator needs init.from")
        if self.init.embeddings_only and self.objective.kind != "mlm":
            raise ValueError("init.embeddings_only is the first stage of two and needs "
                             'objective.kind = "mlm" (docs/how-to/adapt-a-public-model.md)')
        stored = [f"data.sources[{number}].replaced"
                  for number, source in enumerate(self.data.sources) if source.replaced]
        stored += ["data.heldout_replaced"] * bool(self.data.heldout_replaced)
        if stored and self.objective.kind != "rtd_cached":
            raise ValueError(f'{" and ".join(stored)}: for objective.kind = "rtd_cached" alone, '
                             f"not {self.objective.kind!r}; leave it out")


FREE_FIELDS = tuple(f"model.{name}" for name in HOW_COMPUTED)


def to_dict(config: Any) -> dict:
    """Return a config as plain JSON-compatible values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(values: dict, place: str = "config") -> RunConfig:
    """Return the RunConfig of plain values (as written by `to_dict`)."""
    return validate(RunConfig, values, place)


def run_options() -> list[Option]:
    """Return the keys of a run file as they are written in one."""
    found = []
    for one in options_of(RunConfig):
        if one.key == "model.vocab_size":
            found.append(Option(
                "model.preset", "text", False, None, "", "a published shape, for what the other "
                f"keys of [model] leave open: {', '.join(MODELS)}"))
            one = dataclasses.replace(one, follows="the tokenizer's ids padded to 64")
        elif one.required and one.key.startswith("model."):
            one = dataclasses.replace(one, follows="of the preset, or the source of [init]")
        elif one.key == "data.sources":
            found.append(Option("data.corpus", "text", False, None, "", "directory made by "
                                "data_prep/build.py, for sources, heldout and tokenizer"))
        if one.key in ("data.sources", "data.tokenizer"):
            one = dataclasses.replace(one, follows="of data.corpus")
        found.append(dataclasses.replace(one, key=one.key.replace("init.source", "init.from")))
    return found


def load(path: str | Path, overrides: Sequence[str] = (), complete: Complete | None = None
         ) -> tuple[RunConfig, dict[str, str]]:
    """Return (RunConfig, origin of every value) of a TOML file and `--section.key=value` overrides.

    Later wins: default, preset, file, override. `complete` fills in what they leave open, such as
    release/shape.py; without it a vocabulary is the preset's. Raises ConfigError with all problems
    at once.
    """
    path = command_line.find(path)
    values, origins = read_with_overrides(path, overrides, "run config", "launch/runs/demo.toml")
    _apply_defaults(values, origins, str(path))
    try:
        if complete:  # after the names: it may import torch, to look into a checkpoint
            check_names(RunConfig, values, str(path))
            complete(values, origins)
        config = validate(RunConfig, values, str(path))
    except ConfigError as error:
        raise ConfigError(str(error).replace("init.source", "init.from")) from None
    for key in flatten(to_dict(config)):
        origins.setdefault(key, "default")
    return config, origins


def _apply_defaults(values: dict, origins: dict, place: str) -> None:
    if isinstance(values.get("data"), dict) and "corpus" in values["data"]:
        apply_built(values["data"], origins)
    init = values.get("init")
    if isinstance(init, dict) and "from" in init:  # no name for a Python attribute
        init["source"] = init.pop("from")
        origins["init.source"] = origins.pop("init.from", place)
    model = values.get("model")
    if isinstance(model, dict) and "preset" in model:
        name = model.pop("preset")
        origin = origins.pop("model.preset", place)
        if not isinstance(name, str) or name not in MODELS:
            raise ConfigError(f"{origin}: model.preset = {name!r}: "
                              f"unknown{nearest(str(name), MODELS)}; one of {', '.join(MODELS)}")
        _merge_under(model, origins, "model", MODELS[name], f"preset {name}")
    objective = values.get("objective")
    # If it is missing, or something else, `validate` says so.
    if isinstance(objective, dict) and isinstance(kind := objective.get("kind"), str):
        mask = objective.setdefault("mask", {})
        if isinstance(mask, dict):  # if not, `validate` says so
            _merge_under(mask, origins, "objective.mask", mask_defaults(kind), f"{kind} recipe")


def _merge_under(target: dict, origins: dict, section: str, defaults: dict, origin: str) -> None:
    for key, value in defaults.items():
        if key not in target:
            target[key] = value
            origins[f"{section}.{key}"] = origin
