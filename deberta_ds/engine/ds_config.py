"""The DeepSpeed JSON: checked by us, completed from the run config.

DeepSpeed 0.19.8 accepts misspelled keys of the top level, keeps the string "auto", reads "no" as
true in some places, and clips gradients at 1.0 unless told otherwise. So a JSON may hold the keys
that were tried with this project, each with its type and limits; any other key is rejected. Each
number has one owner, and the dict that DeepSpeed gets is complete. No torch and no deepspeed in
this module.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deberta_ds.base import command_line
from deberta_ds.base.errors import ConfigError, raise_problems, refuse_pipe
from deberta_ds.base.files import parse_json, typed
from deberta_ds.base.numbers import counted
from deberta_ds.config.options import STRICT, nearest, problems_of
from deberta_ds.config.run_config import RunConfig

# Computed by the run config; in the JSON they may only be absent or "auto".
RUN_KEYS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size / (micro_batch_size x world size)",
    "gradient_clipping": "optim.clip_norm",
}
# What the run config says in its own words.
CODE_KEYS = {
    "optimizer": "optim.name, optim.learning_rate, ...",
    "scheduler": "optim.schedule, optim.warmup_steps, ...",
    "activation_checkpointing": "train.activation_checkpointing",
}
_LARGEST_POWER = 32  # of 2, of a loss scale: far above all that trains; torch takes 62
_UNTRIED = ("not tried with this project; remove it, or add it to deberta_ds/engine/ds_config.py "
            "with a test")
OFFLOADS = {"offload_optimizer": (1, 2, 3), "offload_param": (3,)}  # by the stages that have them


def _whole(value):
    """Return 5e8 as 500000000, as DeepSpeed's own examples write it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Limit = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=1 << 63)]
_Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, lt=1 << 63)]


class _Section(BaseModel):
    model_config = STRICT | ConfigDict(frozen=True)


class Offload(_Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: _Count = 4
    pin_memory: bool = True


class Zero(_Section):
    stage: Annotated[int, Field(ge=0, le=3)] = 0
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    round_robin_gradients: bool = False
    reduce_bucket_size: _Count = 500_000_000
    allgather_bucket_size: Annotated[_Count, Field(multiple_of=2)] = 500_000_000
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None
    sub_group_size: _Count = 1_000_000_000
    stage3_prefetch_bucket_size: _Limit = 50_000_000
    stage3_param_persistence_threshold: _Limit = 100_000
    stage3_max_live_parameters: _Limit = 1_000_000_000
    stage3_max_reuse_distance: _Limit = 1_000_000_000
    stage3_allgather_sequential: bool = False


class Bf16(_Section):
    enabled: bool = False


class Fp16(_Section):
    enabled: bool = False
    loss_scale: Annotated[float, Field(ge=0)] = 0  # 0: dynamic
    initial_scale_power: Annotated[int, Field(ge=0, le=_LARGEST_POWER)] = 16
    loss_scale_window: _Count = 1000
    hysteresis: _Count = 2
    min_loss_scale: Annotated[float, Field(gt=0)] = 1


class _Autocast(_Section):
    enabled: bool = False
    # float16 would need a loss scale: that is the fp16 section.
    dtype: Literal["bfloat16", "torch.bfloat16", "bf16"] = "bfloat16"


class _DataTypes(_Section):
    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None


class _DiskAccess(_Section):
    block_size: _Count = 1 << 20
    queue_depth: _Count = 8
    overlap_events: bool = True


class DeepSpeedConfig(_Section):
    """The keys that a JSON may hold: how a run is run. Defaults are DeepSpeed's."""

    zero_optimization: Zero = Zero()
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    torch_autocast: _Autocast = _Autocast()
    data_types: _DataTypes = _DataTypes()
    aio: _DiskAccess = _DiskAccess()
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.zero_optimization.stage

    @property
    def precision(self) -> str:
        """"bf16", "fp16" or "fp32": the type of the weights that run forward."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def matmul_precision(self) -> str:
        """The type in which matmuls are computed; autocast has bf16 alone."""
        return "bf16" if self.torch_autocast.enabled else self.precision

    def offload(self, section: str = "offload_optimizer") -> Offload:
        """Return where a section of zero_optimization puts its tensors."""
        return getattr(self.zero_optimization, section) or Offload()

    def as_dict(self) -> dict[str, Any]:
        """Return the keys that were given, as DeepSpeed gets them."""
        return self.model_dump(exclude_unset=True)


class CompleteConfig(DeepSpeedConfig):
    """What DeepSpeed gets: a JSON, and what the run says."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    zero_allow_untested_optimizer: bool
    zero_force_ds_cpu_optimizer: bool
    steps_per_print: None  # never: our own log has each step


def load(path: str | Path) -> DeepSpeedConfig:
    """Return the checked JSON of `path`. Raises ConfigError."""
    refuse_pipe(path)
    try:
        text = command_line.find(path).read_text(encoding="utf-8-sig")
        values = parse_json(text, strict=False)  # NaN: said below, with its key
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such DeepSpeed config; see ds_configs/README.md") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a DeepSpeed config is one JSON object")
    return check(values, str(path))


def check(values: dict, place: str) -> DeepSpeedConfig:
    """Return a DeepSpeed JSON, whose file is `place`; ConfigError with every problem of it."""
    owners, known = RUN_KEYS | CODE_KEYS, DeepSpeedConfig.model_fields
    given = {key: value for key, value in values.items()
             if not (key in RUN_KEYS and value == "auto")}
    problems = [f'"{key}": belongs to the run config ({owners[key]}); delete it here'
                for key in given.keys() & owners.keys()]
    problems += [f"{key}: {_UNTRIED}{nearest(key, known)}"
                 for key in given.keys() - owners.keys() - known.keys()]
    problems += [problem.replace(": unknown key", f": {_UNTRIED}") for problem in problems_of(
        DeepSpeedConfig, {key: value for key, value in given.items() if key in known})]
    raise_problems(place, sorted(problems))
    ds = DeepSpeedConfig(**given)
    raise_problems(place, problems_between(ds))
    return ds


def recorded(values: dict) -> DeepSpeedConfig:
    """Return the stage and precision of a checkpoint's record, of any version; else ValueError,
    TypeError or AttributeError.
    """
    return typed(DeepSpeedConfig, {
        section: {key: values[section][key]} for section, key in (
            ("zero_optimization", "stage"), ("bf16", "enabled"), ("fp16", "enabled"))
        if key in values.get(section, {})})


def problems_on_this_node(ds: DeepSpeedConfig) -> list[str]:
    """Return what is wrong with the paths of a DeepSpeed JSON here."""
    return [f"zero_optimization.{name}.nvme_path = {path!r}: no such directory on this node; make "
            "it, or name another" for name in OFFLOADS if ds.offload(name).device == "nvme"
            and (path := ds.offload(name).nvme_path) and not Path(path).is_dir()]


def problems_between(ds: DeepSpeedConfig) -> list[str]:
    """Return what is wrong between keys that are right by themselves; the planner asks too."""
    stage, problems = ds.stage, []
    for name, stages in OFFLOADS.items():
        offload, where = ds.offload(name), f"zero_optimization.{name}"
        if offload.device != "none" and stage not in stages:
            problems.append(f"{where}: needs ZeRO stage {' or '.join(map(str, stages))}, not "
                            f"{stage}")
        if offload.device == "nvme" and stage != 3:
            problems.append(f'{where}.device = "nvme": needs ZeRO stage 3, not {stage}')
        if offload.device == "nvme" and not offload.nvme_path:
            problems.append(f'{where}.nvme_path: missing; "nvme" needs a fast local directory')
    on = [f'"{name}"' for name in ("bf16", "fp16", "torch_autocast") if getattr(ds, name).enabled]
    if len(on) > 1:
        problems.append(f"{' and '.join(on)}: only one of them can be enabled")
    if stage == 0 and ds.precision != "fp32":
        problems.append(f"zero_optimization.stage = 0 with {ds.precision}: use stage 1, it "
                        "computes the same (DeepSpeed 0.19.8 trains wrongly there)")
    return problems


def problems_with_optimizer(name: str, ds: DeepSpeedConfig) -> list[str]:
    """Return why optim.name cannot go with a checked JSON."""
    if name == "muon" and ds.offload().device != "none":
        return ["optim.name = 'muon': its matrices are on the GPU; leave "
                "zero_optimization.offload_optimizer out, or use adamw"]
    return []


def _what_divides(micro_batch_size: int, rows: int, world_size: int) -> str:
    """Return the nearest batches, smaller micro-batches and fewer ranks that would do."""
    at_once = micro_batch_size * world_size
    totals = [str(total) for total in (rows // at_once * at_once, rows // at_once * at_once
                                       + at_once) if total]
    micro = next((size for size in range(micro_batch_size - 1, 0, -1)
                  if rows % (size * world_size) == 0), None)
    ranks = next((count for count in range(min(world_size - 1, rows // micro_batch_size), 0, -1)
                  if rows % (count * micro_batch_size) == 0), None)
    smaller = f", or micro_batch_size = {micro}" if micro else ""
    fewer = f", or {counted(ranks, 'rank')}" if ranks else ""
    return f"{' or '.join(totals)} sequences would be{smaller}{fewer}"


def accumulation_steps(run: RunConfig, world_size: int) -> int:
    """Return micro-batches per step; raises ConfigError where the batch does not divide."""
    train = run.train
    at_once, rows = train.micro_batch_size * world_size, train.global_batch_size
    if rows % at_once:
        raise ConfigError(f"train.global_batch_size = {rows}: not divisible by micro_batch_size x "
                          f"world size = {train.micro_batch_size} x {world_size} = {at_once}; "
                          f"{_what_divides(train.micro_batch_size, rows, world_size)}")
    return rows // at_once


def resolve(run: RunConfig, ds: DeepSpeedConfig, world_size: int) -> CompleteConfig:
    """Return what DeepSpeed gets, from a checked JSON and the run."""
    return complete(ds, world_size, run.train.micro_batch_size,
                    accumulation_steps(run, world_size), run.optim.clip_norm)


def complete(ds: DeepSpeedConfig, world_size: int, micro_rows: int, accumulation: int,
             clip_norm: float) -> CompleteConfig:
    """Return it of a step of `accumulation` micro-batches of `micro_rows` on each rank."""
    values, own = ds.as_dict(), {}
    if world_size == 1 and ds.stage:
        # One rank has nothing to overlap, and DeepSpeed would wait for the device at each update.
        own["zero_optimization"] = values["zero_optimization"] | {"overlap_comm": False}
    # In bf16 each addition loses bits; under ZeRO-1 `passes` adds in fp32. Under ZeRO-2 with
    # offload DeepSpeed 0.19.8 would add to the NaN that a bad step has left.
    kept = ds.stage == 2 and ds.offload().device != "none"
    if accumulation > 1 and ds.precision == "bf16" and ds.stage > 1 and not kept:
        own["data_types"] = {"grad_accum_dtype": "fp32"} | values.get("data_types", {})
    return CompleteConfig(**{
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None, "train_batch_size": micro_rows * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_rows, "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm} | values | own)
