"""The run configuration: TOML file + dotted overrides -> one frozen, validated RunConfig.

What is unusual: every value remembers where it came from; unknown keys are errors with the nearest
match; all problems of a file are reported at once. The run config owns what is computed (batch,
learning rate, clipping, steps); the DeepSpeed JSON owns how it is run (ZeRO, precision, offload).
No torch and no deepspeed here: a run can be checked on a login node.
"""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass

from deberta_ds.validation import ConfigError, nearest, validate

_STRICT = ConfigDict(extra="forbid", strict=True)
# Version 0.1.0 called the tiled path "linear"; its runs resume and mean the same.
_AttentionPath = Annotated[Literal["auto", "reference", "tiled", "fused"],
                           BeforeValidator(lambda name: "tiled" if name == "linear" else name)]


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one DeBERTa encoder (numerics: microsoft/DeBERTa config.py and released files)."""

    vocab_size: int  # rows of the word table; may exceed the tokenizer's size
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_position: int = 512  # rows of the absolute position table
    max_relative: int = -1  # -1: max_position
    position_buckets: int = 256  # log buckets on each side; 0: one slot per distance (v1)
    relative_attention: bool = True
    position_terms: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    share_position_projections: bool = True  # relative rows go through query/key projections
    relative_norm: bool = True  # LayerNorm on the relative table
    absolute_input: bool = False  # add absolute positions to the input (BERT); no enhanced decoder
    conv_kernel: int = 0  # v2 convolution beside the first layer; 0: none, else odd
    conv_activation: Literal["gelu", "tanh"] = "gelu"
    key_bias: bool = True  # False: v1, whose key projections have no bias
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-7
    init_std: float = 0.02
    attention: _AttentionPath = "auto"

    def __post_init__(self):
        problems = []
        if self.num_heads < 1 or self.hidden_size % self.num_heads:
            problems.append(
                f"hidden_size = {self.hidden_size} is not divisible by num_heads = {self.num_heads}"
            )
        if self.conv_kernel and self.conv_kernel % 2 == 0:
            problems.append(f"conv_kernel = {self.conv_kernel} must be odd, or 0 for none")
        if len(set(self.position_terms)) != len(self.position_terms):
            problems.append("position_terms names a term twice")
        for name in ("vocab_size", "hidden_size", "num_layers", "intermediate_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} = {getattr(self, name)} must be in [0, 1)")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def relative_span(self) -> int:
        """Half the rows of the relative table: buckets, or the largest distance without them."""
        return self.position_buckets or self.largest_distance

    @property
    def largest_distance(self) -> int:
        return self.max_position if self.max_relative < 1 else self.max_relative


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class MaskConfig:
    """Which tokens become targets, and what the model sees in their place."""

    rate: float = 0.15  # share of the row's real tokens
    max_ngram: int = 1  # words in a masked span: 1..max_ngram with P(n) ~ 1/n
    mask_share: float = 1.0  # of the targets: shown as [MASK]
    random_share: float = 0.0  # of the targets: shown as a random piece; the rest is unchanged
    selection: Literal["uniform", "deberta_window"] = "uniform"

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise ValueError(f"rate = {self.rate} must be in (0, 1)")
        shares = (self.mask_share, self.random_share)
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise ValueError(f"mask_share and random_share = {shares} must be >= 0, sum <= 1")
        if self.max_ngram < 1:
            raise ValueError(f"max_ngram = {self.max_ngram} must be at least 1")


# The published masks (numerics 6.3): v3 hides every target, v1/v2 use n-grams and 80/10/10.
MASK_DEFAULTS = {
    "rtd": {"max_ngram": 1, "mask_share": 1.0, "random_share": 0.0},
    "mlm": {"max_ngram": 3, "mask_share": 0.8, "random_share": 0.1},
}


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is learned: masked LM (v1, v2) or replaced-token detection (v3)."""

    kind: Literal["mlm", "rtd"]
    mask: MaskConfig = MaskConfig()
    generator_layers: int = 0  # 0: half of the discriminator's (the released v3 models)
    embedding_sharing: Literal["gdes", "es", "nes"] = "gdes"
    rtd_weight: float = 50.0  # lambda of DeBERTaV3; the official script uses 10
    temperature: float = 1.0  # of the generator's samples

    def __post_init__(self):
        if self.temperature <= 0:
            raise ValueError(f"temperature = {self.temperature} must be above 0")


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class SourceConfig:
    """One packed corpus and its weight in the mixture.

    The last three are for a second stage; data_prep/mixture.py --after prints them.
    """

    path: str
    weight: float = 1.0
    first_row: int = 0  # rows of it that earlier stages of this length have used
    order: tuple[int, int] | None = None  # (seed, position) of the stage that used it first
    part: tuple[float, float] = (0.0, 1.0)  # stretch of its shards: for stages of other lengths

    def __post_init__(self):
        if self.weight <= 0:
            raise ValueError(f"weight = {self.weight} must be above 0")
        if self.first_row < 0:
            raise ValueError(f"first_row = {self.first_row} must not be negative")
        if not 0 <= self.part[0] < self.part[1] <= 1:
            raise ValueError(f"part = {list(self.part)} must be [from, to], 0 <= from < to <= 1")


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class DataConfig:
    """Which rows are seen, in which order."""

    sources: tuple[SourceConfig, ...]
    tokenizer: str  # SentencePiece model file
    seq_len: int = 512
    eval: str = ""  # held-out corpus; empty: no evaluation
    seed: int = 0
    across_documents: bool = False  # True: pieces of a row see each other (official packing)
    verify: Literal["sizes", "full"] = "sizes"
    workers: int = 1  # loader processes per rank; 0: load in the training process

    def __post_init__(self):
        if not self.sources:
            raise ValueError("sources is empty; name at least one packed corpus")
        if self.seq_len < 8:
            raise ValueError(f"seq_len = {self.seq_len} must be at least 8")


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    lr: float
    name: Literal["adamw", "adam_uncorrected"] = "adamw"  # the second is the official XAdam
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.01
    clip_norm: float = 1.0  # global gradient norm; 0: no clipping
    warmup_steps: int = 0
    schedule: Literal["linear", "cosine", "wsd", "constant", "deberta_linear"] = "linear"
    decay_share: float = 0.1  # wsd: share of all steps spent decaying at the end
    min_lr_share: float = 0.0  # final learning rate as a share of lr

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr = {self.lr} must be above 0")
        if self.clip_norm < 0 or self.weight_decay < 0 or self.warmup_steps < 0:
            raise ValueError("clip_norm, weight_decay and warmup_steps must not be negative")


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at a time, and what is written when."""

    steps: int
    global_batch_rows: int
    micro_batch_rows: int
    seed: int = 0
    checkpoint_layers: int = 0  # recompute every n-th layer in backward; 0: none, 1: all
    recompute: Literal["all", "cheap"] = "all"  # cheap: such layers keep their linear outputs
    log_every: int = 10
    eval_every: int = 1000
    eval_rows: int = 256
    save_every: int = 1000
    keep: int = 3  # newest checkpoints kept
    watchdog_seconds: float = 60.0  # a stuck or dead rank is named within this time; 0: never
    on_spike: Literal["stop", "skip", "rollback"] = "stop"  # what to do about a bad step
    spike_sigmas: float = 0.0  # bad above mean + this many deviations of 100 losses; 0: never
    stop_after: int = 0  # save and stop at this step, as before a time limit; 0: run to the end

    def __post_init__(self):
        positive = ("steps", "global_batch_rows", "micro_batch_rows", "log_every", "save_every",
                    "eval_every", "eval_rows", "keep")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("watchdog_seconds", "spike_sigmas"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative; 0: off")


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class InitConfig:
    """Where a run's first weights come from; empty: random. A resumed run does not read it."""

    source: str = ""  # written `from` in TOML: our run or export, Hugging Face, microsoft files
    generator: str = ""  # its generator, where the source has none
    words_only: bool = False  # take only the word table and keep it fixed

    def __post_init__(self):
        if not self.source and (self.generator or self.words_only):
            raise ValueError("generator and words_only need init.from")
        if self.generator and self.words_only:
            raise ValueError("words_only takes no generator")


@dataclass(config=_STRICT, frozen=True, kw_only=True)
class RunConfig:
    """Everything that one pretraining run computes."""

    name: str
    out_dir: str
    model: ModelConfig
    objective: ObjectiveConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    init: InitConfig = InitConfig()

    def __post_init__(self):
        if self.init.words_only and self.objective.kind != "mlm":
            raise ValueError("init.words_only is the first stage of two and needs "
                             'objective.kind = "mlm" (docs/interop.md)')


# A resumed run must agree with its checkpoint in these, but for FREE_FIELDS, and in the content of
# its corpora and tokenizer (train/check.py); the rest may change and is logged.
IDENTITY_FIELDS = ("model", "objective", "data.seq_len", "data.seed", "data.across_documents",
                   "train.seed", "train.global_batch_rows", "optim.name", "init.words_only")
FREE_FIELDS = ("model.attention",)


def to_dict(config: Any) -> dict:
    """Return a config as plain JSON-compatible values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(values: dict, place: str = "config") -> RunConfig:
    """Return the RunConfig of plain values (as written by `to_dict`, also by version 0.1.0)."""
    train = values.get("train")
    if isinstance(train, dict) and "compile" in train:  # changed how a step ran, not its meaning
        values = values | {"train": {key: train[key] for key in train if key != "compile"}}
    return validate(RunConfig, values, place)


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Return {"section.key": value} for nested values; lists stay whole."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def load(path: str | Path, overrides: list[str] = (), models: dict[str, dict] | None = None
         ) -> tuple[RunConfig, dict[str, str]]:
    """Return (RunConfig, origin of every value) of a TOML file and `--section.key=value` overrides.

    `models` maps preset names to ModelConfig values (default: `presets.MODELS`). Later wins:
    default, preset, file, override. Raises ConfigError with all problems at once.
    """
    from deberta_ds import presets  # presets build on this module

    models = presets.MODELS if models is None else models
    values = read_toml(path, "run config", "launch/runs/demo.toml")
    origins = {key: str(path) for key in flatten(values)}
    for override in overrides:
        key, value = parse_override(override)
        set_value(values, key, value)
        origins[key] = "command line"
    _apply_defaults(values, origins, models)
    _refuse_compile(values, origins, path)
    config = validate(RunConfig, values, str(path))
    for key in flatten(to_dict(config)):
        origins.setdefault(key, "default")
    return config, origins


def _apply_defaults(values: dict, origins: dict, models: dict[str, dict]) -> None:
    init = values.get("init")
    if isinstance(init, dict) and "from" in init:  # no name for a Python attribute
        init["source"] = init.pop("from")
        origins["init.source"] = origins.pop("init.from")
    model = values.get("model")
    if isinstance(model, dict) and "preset" in model:
        name = model.pop("preset")
        origins.pop("model.preset", None)
        if name not in models:
            raise ConfigError(f"model.preset = {name!r}: unknown{nearest(name, models)}; "
                              f"one of {', '.join(models)}")
        _merge_under(values, origins, "model", models[name], f"preset {name}")
    objective = values.get("objective")
    if isinstance(objective, dict) and objective.get("kind") in MASK_DEFAULTS:
        kind = objective["kind"]
        objective.setdefault("mask", {})
        _merge_under(values, origins, "objective.mask", MASK_DEFAULTS[kind], f"{kind} recipe")


def _refuse_compile(values: dict, origins: dict, path: str | Path) -> None:
    """Take train.compile = false of a run file for version 0.1.0 as what it is, nothing."""
    train = values.get("train")
    if isinstance(train, dict) and "compile" in train:
        if train.pop("compile") is not False:
            raise ConfigError(f"{path}: train.compile is gone: torch.compile made steps slower; "
                              "leave it out")
        del origins["train.compile"]


def _merge_under(values: dict, origins: dict, section: str, defaults: dict, origin: str) -> None:
    target = values
    for part in section.split("."):
        target = target[part]
    for key, value in defaults.items():
        if key not in target:
            target[key] = value
            origins[f"{section}.{key}"] = origin


def read_toml(path: str | Path, what: str, example: str) -> dict:
    """Return the tables of a TOML file; `what` and `example` help a user who named no such file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}; name a TOML file, such as {example}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); a {what} is a TOML file, "
                          f"such as {example}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """Return (dotted key, TOML value) of "--section.key=value"; what is no TOML is a string."""
    key, separator, value = text.removeprefix("--").partition("=")
    if not text.startswith("--") or not separator or not key:
        raise ConfigError(f"{text!r}: not an option; overrides are written --section.key=value")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value  # a bare string


def set_value(values: dict, key: str, value: Any) -> None:
    """Set the value at a dotted key in nested tables, making those that are missing."""
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--{key}: {section} is a value, not a section")
    values[last] = value
