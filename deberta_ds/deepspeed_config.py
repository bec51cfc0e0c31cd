"""The DeepSpeed JSON: checked by us, completed from the run config.

DeepSpeed 0.19.8 accepts misspelt top-level keys in silence, keeps the string "auto", reads "no" as
true in some places, and clips gradients at 1.0 unless told otherwise. So every key is either known
here with its type, or refused with the reason; each number has one owner, and the dict that
DeepSpeed gets is complete. What lies inside zero_optimization, bf16 and fp16 is held against
DeepSpeed's own models later (train/deepspeed_check.py). No torch and no deepspeed in this module.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from deberta_ds import shipped
from deberta_ds.config import RunConfig
from deberta_ds.errors import refuse_pipe
from deberta_ds.json_files import parse_json
from deberta_ds.options import STRICT
from deberta_ds.validation import ConfigError, nearest, problems_of, raise_problems

# Computed by the run config; in the JSON they may only be absent or "auto".
RUN_KEYS = {
    "train_batch_size": "train.global_batch_rows",
    "train_micro_batch_size_per_gpu": "train.micro_batch_rows",
    "gradient_accumulation_steps": "train.global_batch_rows / (micro_batch_rows x world size)",
    "gradient_clipping": "optim.clip_norm",
}
# Built by code: an entry in the JSON would be a second owner.
CODE_KEYS = {
    "optimizer": "optim.name, optim.lr, ...",
    "scheduler": "optim.schedule, optim.warmup_steps, ...",
    "checkpoint": "the resume code",
}
_LARGEST_POWER = 32  # of 2, of a loss scale: far above all that trains; torch takes 62
_OWN_LOG = "the run writes metrics.jsonl and TensorBoard files itself"
_ONE_COPY = "there is no model, sequence or expert parallelism here; use ZeRO"
_OWN_ROWS = "the rows and their order are the run file's"
_REMOVED = "DeepSpeed 0.19 has removed it"
# Keys that DeepSpeed knows, or knew, and that would do nothing or harm here: why.
REFUSED = {
    "activation_checkpointing": "it has no effect here; use train.checkpoint_layers and "
                                "train.recompute of the run file",
    "compile": "it has no effect here: the engine is not compiled",
    "tensorboard": _OWN_LOG, "wandb": _OWN_LOG, "csv_monitor": _OWN_LOG, "comet": _OWN_LOG,
    "swanlab": _OWN_LOG, "timers": _OWN_LOG, "log_level": _OWN_LOG,
    "tensor_parallel": _ONE_COPY, "pipeline": _ONE_COPY, "expert_parallel": _ONE_COPY,
    "sequence_parallel_size": _ONE_COPY, "seq_parallel_communication_data_type": _ONE_COPY,
    "use_data_before_expert_parallelism": _ONE_COPY, "data_parallel_group": _ONE_COPY,
    "hybrid_engine": "it is for reinforcement learning",
    "weight_quantization": "it is for inference",
    "zero_allow_comm_data_type_fp32": _REMOVED,
    "data_efficiency": _OWN_ROWS, "curriculum_learning": _OWN_ROWS,
    "dataloader_drop_last": _OWN_ROWS,
    "autotuning": "it starts jobs of its own; use launch/plan.py",
    "vocabulary_size": "it only warns; model.vocab_size is the run file's",
    "gradient_allreduce_op": "losses are sums over exact counts, which need the mean",
    "managed_gradient_accumulation": "the loop needs it as it is",
    "disable_python_gc": "it is not supported here", "disable_allgather": "it has no effect",
    "datastates": "checkpoints are written by the resume code",
    "datastates_ckpt": "checkpoints are written by the resume code",
    "bfloat16": 'it is the old name of "bf16"', "allgather_size": _REMOVED,
    "nebula": _REMOVED, "compression_training": _REMOVED, "amp": _REMOVED,
    "quantize_training": _REMOVED, "sparse_gradients": _REMOVED, "eigenvalue": _REMOVED,
    "sparse_attention": _REMOVED, "elasticity": _REMOVED, "graph_harvesting": _REMOVED,
    "progressive_layer_drop": _REMOVED,
}
# The same inside the sections that DeepSpeed's own models check.
REFUSED_INSIDE = {
    "zero_optimization.compute_grad_norm": "every step needs the norm",
    "zero_optimization.load_from_fp32_weights": "it has no effect: resuming always reads masters",
    "zero_optimization.elastic_checkpoint": "any world size resumes from any checkpoint",
    "zero_optimization.pipeline_loading_checkpoint": "it has no effect here",
    "zero_optimization.gather_16bit_weights_on_model_save": "use launch/export.py",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "use launch/export.py",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "use launch/export.py",
    "zero_optimization.zenflow": "it changes what is computed",
    "zero_optimization.legacy_stage1": _REMOVED,
    "zero_optimization.leaf_module": "there are no experts here",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "it is for DeepSpeed's own",
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "write pin_memory inside offload_optimizer",
    "zero_optimization.mics_shard_size": _REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.zeropp_loco_param": _REMOVED,
    "zero_optimization.offload_optimizer.super_offload": "it needs DeepSpeed's CPU optimizer",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "it needs DeepSpeed's CPU optimizer",
    "zero_optimization.offload_optimizer.ratio": "it needs DeepSpeed's CPU optimizer",
    "bf16.check_grad_overflow": "the step relies on it",
    "fp16.auto_cast": "it has no effect: the model takes token ids",
    "fp16.fp16_master_weights_and_grads": "it needs DeepSpeed's CPU optimizer",
}

_Count = Annotated[int, Field(ge=1, lt=1 << 63)]


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
    intra_op_parallelism: _Count = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


@dataclass(config=STRICT, frozen=True)
class _CommsLogger:
    enabled: bool = False
    prof_all: bool = True
    prof_ops: tuple[str, ...] = ()
    verbose: bool = False
    debug: bool = False


@dataclass(config=STRICT, frozen=True)
class _FlopsProfiler:
    enabled: bool = False
    recompute_fwd_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    profile_step: _Count = 1
    module_depth: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_modules: _Count = 1
    detailed: bool = True
    output_file: str | None = None


@dataclass(config=STRICT, frozen=True)
class _Schema:
    """The keys that a JSON may hold: how a run is run."""

    zero_optimization: dict = field(default_factory=dict)
    bf16: dict = field(default_factory=dict)
    fp16: dict = field(default_factory=dict)
    torch_autocast: _Autocast = _Autocast()
    data_types: _DataTypes = _DataTypes()
    aio: _DiskAccess = _DiskAccess()
    comms_logger: _CommsLogger = _CommsLogger()
    flops_profiler: _FlopsProfiler = _FlopsProfiler()
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[float, Field(gt=0)] = 1.0
    zero_allow_untested_optimizer: bool = True
    zero_force_ds_cpu_optimizer: bool = False
    steps_per_print: _Count = 1
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False


JSON_KEYS = frozenset(_Schema.__dataclass_fields__)


def load(path: str | Path) -> dict:
    """Return the JSON of `path`, checked as far as it can be without DeepSpeed. Raises ConfigError.
    """
    refuse_pipe(path)
    try:
        text = shipped.find(path).read_text(encoding="utf-8-sig")
        values = parse_json(text, strict=False)  # NaN: said below, with its key
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such DeepSpeed config; see ds_configs/README.md") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a DeepSpeed config is one JSON object")
    problems = []
    for key, value in values.items():
        problems += _refusal(key, value)
    known = {key: value for key, value in values.items() if key in JSON_KEYS}
    problems += problems_of(_Schema, known)
    problems += _inside({key: value for key, value in known.items() if isinstance(value, dict)})
    raise_problems(str(path), problems)
    return values


def _refusal(key: str, value) -> list[str]:
    if key in RUN_KEYS and value != "auto":
        return [f'"{key}": {json.dumps(value)} belongs to the run config ({RUN_KEYS[key]}); '
                'delete it or write "auto"']
    if key in CODE_KEYS:
        return [f'"{key}": belongs to {CODE_KEYS[key]}; delete it here']
    if key in REFUSED:
        return [f'"{key}": a DeepSpeed key that is not supported here: {REFUSED[key]}; delete it']
    if key not in JSON_KEYS and key not in RUN_KEYS:
        return [f'"{key}": not a DeepSpeed key{nearest(key, JSON_KEYS | RUN_KEYS.keys())}']
    return []


def _inside(sections: dict[str, dict]) -> list[str]:
    """Return what is wrong inside the sections that DeepSpeed's own models check later."""
    problems = []
    for name in ("zero_optimization", "bf16", "fp16"):
        for key, value in _leaves(sections.get(name, {}), f"{name}."):
            if key in REFUSED_INSIDE:
                problems.append(f'"{key}": a DeepSpeed key that is not supported here: '
                                f"{REFUSED_INSIDE[key]}; delete it")
            elif value == "auto":
                problems.append(f'"{key}": "auto" is for other trainers; write a value, or delete '
                                "the key")
    stage = sections.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        problems.append(f'"zero_optimization.stage" = {json.dumps(stage)}: must be 0, 1, 2 or 3')
    switches = {name: sections.get(name, {}).get("enabled", False)
                for name in ("bf16", "fp16", "torch_autocast")}
    problems += [f'"{name}.enabled" = {json.dumps(value)}: must be true or false'
                 for name, value in switches.items() if type(value) is not bool]
    on = [f'"{name}"' for name, value in switches.items() if value is True]
    if len(on) > 1:
        problems.append(f"{' and '.join(on)}: only one of them can be enabled")
    return problems


def _leaves(section: dict, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in section.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")


def problems_between(values: dict) -> list[str]:
    """Return the rules that DeepSpeed would only find while it builds the engine.

    Many are about the stage, so the planner asks too.
    """
    zero = values.get("zero_optimization", {})
    stage, problems = zero.get("stage", 0), []
    for name, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        section = zero.get(name) or {}
        device = section.get("device", "none")
        where = f"zero_optimization.{name}"
        if device != "none" and stage not in stages:
            problems.append(f"{where}: needs ZeRO stage {' or '.join(map(str, stages))}, not "
                            f"{stage}")
        if device == "nvme" and stage != 3:
            problems.append(f'{where}.device = "nvme": needs ZeRO stage 3, not {stage}')
        if device == "nvme" and not section.get("nvme_path"):
            problems.append(f'{where}.nvme_path: missing; "nvme" needs a fast local directory')
    power = values.get("fp16", {}).get("initial_scale_power", 0)
    if not 0 <= power <= _LARGEST_POWER:
        problems.append(f"fp16.initial_scale_power = {power}: must be 0 to {_LARGEST_POWER}; the "
                        "first loss scale is 2 to that power")
    problems += [f"zero_optimization.{name} = {zero[name]}: must be above 0"
                 for name in ("reduce_bucket_size", "allgather_bucket_size")
                 if zero.get(name, 1) < 1]
    if zero.get("allgather_bucket_size", 0) % 2:
        problems.append("zero_optimization.allgather_bucket_size: must be even")
    if zero.get("zero_hpz_partition_size", 1) != 1 and stage != 3:
        problems.append("zero_optimization.zero_hpz_partition_size: needs ZeRO stage 3")
    if stage == 3 and values.get("gradient_predivide_factor", 1.0) != 1.0:
        problems.append("gradient_predivide_factor: must be 1.0 under ZeRO stage 3; delete it")
    return problems


def zero_stage(values: dict) -> int:
    """Return the ZeRO stage of a DeepSpeed dict."""
    return int(values.get("zero_optimization", {}).get("stage", 0))


def precision(values: dict) -> str:
    """Return "bf16", "fp16" or "fp32": the type of the weights that run forward."""
    for name in ("bf16", "fp16"):
        if values.get(name, {}).get("enabled", False):
            return name
    return "fp32"


def problems_with_optimizer(name: str, values: dict) -> list[str]:
    """Return why optim.name cannot go with a checked JSON."""
    zero = values.get("zero_optimization", {})
    section = zero.get("offload_optimizer") or {}
    if name != "adamw" and zero_stage(values) and not values.get("zero_allow_untested_optimizer",
                                                                 True):
        return [f"optim.name = {name!r}: zero_allow_untested_optimizer must be true; delete it"]
    if section.get("device", "none") == "none":
        return []
    if name == "muon":
        return ["optim.name = 'muon': its matrices are on the GPU; leave "
                "zero_optimization.offload_optimizer out, or use adamw"]
    if name != "adamw" and values.get("zero_force_ds_cpu_optimizer"):
        return [f"optim.name = {name!r}: zero_force_ds_cpu_optimizer would replace it by "
                "DeepSpeedCPUAdam; set that key to false"]
    return []


def product_precision(values: dict) -> str:
    """Return "bf16", "fp16" or "fp32": the type in which products are computed."""
    autocast = values.get("torch_autocast", {}).get("enabled", False)  # which has bf16 alone
    return "bf16" if autocast else precision(values)


def _what_divides(micro_batch_rows: int, rows: int, world_size: int) -> str:
    """Return the nearest batches, smaller micro-batches and fewer ranks that would do."""
    at_once = micro_batch_rows * world_size
    totals = [str(total) for total in (rows // at_once * at_once, rows // at_once * at_once
                                       + at_once) if total]
    micro = next((size for size in range(micro_batch_rows - 1, 0, -1)
                  if rows % (size * world_size) == 0), None)
    ranks = next((count for count in range(min(world_size - 1, rows // micro_batch_rows), 0, -1)
                  if rows % (count * micro_batch_rows) == 0), None)
    smaller = f", or micro_batch_rows = {micro}" if micro else ""
    fewer = f", or {ranks} ranks" if ranks else ""
    return f"{' or '.join(totals)} rows would be{smaller}{fewer}"


def accumulation_steps(run: RunConfig, world_size: int) -> int:
    """Return micro-batches per step; raises ConfigError where the batch does not divide."""
    train = run.train
    at_once, rows = train.micro_batch_rows * world_size, train.global_batch_rows
    if rows % at_once:
        raise ConfigError(
            f"train.global_batch_rows = {rows}: not divisible by micro_batch_rows x world size = "
            f"{train.micro_batch_rows} x {world_size} = {at_once}; "
            f"{_what_divides(train.micro_batch_rows, rows, world_size)}")
    return rows // at_once


def resolve(run: RunConfig, values: dict, world_size: int) -> dict:
    """Return the complete dict for `deepspeed.initialize` from a checked JSON and the run."""
    return complete(values, rows=run.train.global_batch_rows,
                    micro_rows=run.train.micro_batch_rows,
                    accumulation=accumulation_steps(run, world_size),
                    clip_norm=run.optim.clip_norm)


def complete(values: Mapping, *, rows: int, micro_rows: int, accumulation: int, clip_norm: float
             ) -> dict:
    """Return the complete dict of a step of `rows`, of `accumulation` micro-batches on each rank.
    """
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,  # never: our own log speaks
    } | dict(values) | {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": micro_rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm,
    }
