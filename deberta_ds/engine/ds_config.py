"""The DeepSpeed JSON: checked by us, completed from the run config.

DeepSpeed 0.19.8 accepts misspelled keys of the top level, keeps the string "auto", reads "no" as
true in some places, and clips gradients at 1.0 unless told otherwise. So a JSON may hold the keys
that were tried with this project, each with its type and limits; any other key is rejected. Each
number has one owner, and the dict that DeepSpeed gets is complete. No torch and no deepspeed in
this module.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from deberta_ds.base import command_line
from deberta_ds.base.errors import ConfigError, raise_problems, refuse_pipe
from deberta_ds.base.files import parse_json
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


def _whole(value):
    """Return 5e8 as 500000000, as DeepSpeed's own examples write it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Limit = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=1 << 63)]
_Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, lt=1 << 63)]


@dataclass(config=STRICT, frozen=True)
class Offload:
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: _Count = 4
    pin_memory: bool = True


@dataclass(config=STRICT, frozen=True)
class Zero:
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


@dataclass(config=STRICT, frozen=True)
class Bf16:
    enabled: bool = False


@dataclass(config=STRICT, frozen=True)
class Fp16:
    enabled: bool = False
    loss_scale: Annotated[float, Field(ge=0)] = 0  # 0: dynamic
    initial_scale_power: Annotated[int, Field(ge=0, le=_LARGEST_POWER)] = 16
    loss_scale_window: _Count = 1000
    hysteresis: _Count = 2
    min_loss_scale: Annotated[float, Field(gt=0)] = 1


@dataclass(config=STRICT, frozen=True)
class _Autocast:
    enabled: bool = False
    # float16 would need a loss scale: that is the fp16 section.
    dtype: Literal["bfloat16", "torch.bfloat16", "bf16"] = "bfloat16"


@dataclass(config=STRICT, frozen=True)
class _DataTypes:
    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None


@dataclass(config=STRICT, frozen=True)
class _DiskAccess:
    block_size: _Count = 1 << 20
    queue_depth: _Count = 8
    overlap_events: bool = True


@dataclass(config=STRICT, frozen=True)
class Schema:
    """The keys that a JSON may hold: how a run is run. Defaults are DeepSpeed's."""

    zero_optimization: Zero = Zero()
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    torch_autocast: _Autocast = _Autocast()
    data_types: _DataTypes = _DataTypes()
    aio: _DiskAccess = _DiskAccess()
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None


def load(path: str | Path) -> dict:
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
    check(values, str(path))
    return values


def check(values: dict, place: str) -> None:
    """Raise ConfigError with every problem of a DeepSpeed JSON; `place` names its file."""
    owners, known = RUN_KEYS | CODE_KEYS, Schema.__dataclass_fields__
    given = {key: value for key, value in values.items()
             if not (key in RUN_KEYS and value == "auto")}
    problems = [f'"{key}": belongs to the run config ({owners[key]}); delete it here'
                for key in given.keys() & owners.keys()]
    problems += [f"{key}: {_UNTRIED}{nearest(key, known)}"
                 for key in given.keys() - owners.keys() - known.keys()]
    problems += [problem.replace(": unknown key", f": {_UNTRIED}") for problem in problems_of(
        Schema, {key: value for key, value in given.items() if key in known})]
    raise_problems(place, sorted(problems) or problems_between(values))


def problems_on_this_node(values: dict) -> list[str]:
    """Return what is wrong with the paths of a DeepSpeed JSON here."""
    return [f"zero_optimization.{name}.nvme_path = {path!r}: no such directory on this node; make "
            "it, or name another" for name in ("offload_optimizer", "offload_param")
            if offload_device(values, name) == "nvme"
            and (path := values["zero_optimization"][name].get("nvme_path"))
            and not Path(path).is_dir()]


def problems_between(values: dict) -> list[str]:
    """Return what is wrong between keys that are right by themselves; the planner asks too."""
    zero, stage, problems = values.get("zero_optimization", {}), zero_stage(values), []
    for name, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        device, where = offload_device(values, name), f"zero_optimization.{name}"
        if device != "none" and stage not in stages:
            problems.append(f"{where}: needs ZeRO stage {' or '.join(map(str, stages))}, not "
                            f"{stage}")
        if device == "nvme" and stage != 3:
            problems.append(f'{where}.device = "nvme": needs ZeRO stage 3, not {stage}')
        if device == "nvme" and not zero[name].get("nvme_path"):
            problems.append(f'{where}.nvme_path: missing; "nvme" needs a fast local directory')
    on = [f'"{name}"' for name in ("bf16", "fp16", "torch_autocast")
          if values.get(name, {}).get("enabled")]
    if len(on) > 1:
        problems.append(f"{' and '.join(on)}: only one of them can be enabled")
    if stage == 0 and precision(values) != "fp32":
        problems.append(f"zero_optimization.stage = 0 with {precision(values)}: use stage 1, it "
                        "computes the same (DeepSpeed 0.19.8 trains wrongly there)")
    return problems


def zero_stage(values: dict) -> int:
    """Return the ZeRO stage of a DeepSpeed dict."""
    return int(values.get("zero_optimization", {}).get("stage", 0))


def offload_device(values: dict, section: str = "offload_optimizer") -> str:
    """Return where a section of a DeepSpeed dict puts its tensors: "none", "cpu" or "nvme"."""
    return (values.get("zero_optimization", {}).get(section) or {}).get("device", "none")


def precision(values: dict) -> str:
    """Return "bf16", "fp16" or "fp32": the type of the weights that run forward."""
    for name in ("bf16", "fp16"):
        if values.get(name, {}).get("enabled", False):
            return name
    return "fp32"


def problems_with_optimizer(name: str, values: dict) -> list[str]:
    """Return why optim.name cannot go with a checked JSON."""
    if name == "muon" and offload_device(values) != "none":
        return ["optim.name = 'muon': its matrices are on the GPU; leave "
                "zero_optimization.offload_optimizer out, or use adamw"]
    return []


def matmul_precision(values: dict) -> str:
    """Return "bf16", "fp16" or "fp32": the type in which matmuls are computed."""
    autocast = values.get("torch_autocast", {}).get("enabled", False)  # which has bf16 alone
    return "bf16" if autocast else precision(values)


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


def resolve(run: RunConfig, values: dict, world_size: int) -> dict:
    """Return the complete dict for `deepspeed.initialize` from a checked JSON and the run."""
    return complete(values, rows=run.train.global_batch_size,
                    micro_rows=run.train.micro_batch_size,
                    accumulation=accumulation_steps(run, world_size),
                    clip_norm=run.optim.clip_norm)


def complete(values: dict, *, rows: int, micro_rows: int, accumulation: int, clip_norm: float
             ) -> dict:
    """Return the complete dict of a step of `rows`: `accumulation` micro-batches on each rank."""
    own: dict[str, Any] = {}
    zero = values.get("zero_optimization", {})
    if rows == micro_rows * accumulation and zero.get("stage"):
        # One rank has nothing to overlap, and DeepSpeed would wait for the device at each update.
        own["zero_optimization"] = zero | {"overlap_comm": False}
    # In bf16 each addition loses bits; under ZeRO-1 `passes` adds in fp32. Under ZeRO-2 with
    # offload DeepSpeed 0.19.8 would add to the NaN that a bad step has left.
    kept = zero_stage(values) == 2 and offload_device(values) != "none"
    if accumulation > 1 and precision(values) == "bf16" and zero_stage(values) > 1 and not kept:
        own["data_types"] = {"grad_accum_dtype": "fp32"} | values.get("data_types", {})
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,  # never: our own log has each step
    } | values | own | {
        "train_batch_size": rows, "train_micro_batch_size_per_gpu": micro_rows,
        "gradient_accumulation_steps": accumulation, "gradient_clipping": clip_norm}
