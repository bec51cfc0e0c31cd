"""Whether the JSON, and the installed DeepSpeed, are what this program relies on.

Both are checked before the process group exists, on every rank with the same result: DeepSpeed
itself would answer with a traceback from each rank, after minutes of start-up on a large job. Its
own models know the keys and ranges inside a section, but read "no" as true and true as 1, so the
types are held against the same models strictly.
"""

import math
import typing
from enum import Enum
from pathlib import Path

import deepspeed
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ValidationError

from deberta_ds.deepspeed_config import precision, problems_between
from deberta_ds.errors import UserError
from deberta_ds.validation import nearest, raise_problems

_MODELS = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config,
           "fp16": DeepSpeedFP16Config}
_ON_GPUS = ("zero_quantized_weights", "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights")
_LARGEST = (1 << 63) - 1
# Parts of DeepSpeed 0.19 that the code uses and that are documented nowhere, by who has them.
MODULE_PARTS = ("zero.Init", "zero.GatheredParameters", "initialize", "init_distributed",
                "get_accelerator", "constants.default_pg_timeout")
CPU_PARTS = ("ops.__compatible_ops__",)  # made when it is asked for, by running compilers
COMM_PARTS = ("cdb.all_reduce", "cdb.reduce", "cdb.reduce_scatter_function",
              "cdb.all_gather_function", "cdb._reduce_op")  # there is a cdb after init_distributed
ENGINE_PARTS = ("module", "optimizer", "device", "backward", "step", "zero_grad", "micro_steps",
                "skipped_steps", "global_steps", "global_samples", "fp16_enabled",
                "dynamic_loss_scale", "set_train_batch_size", "train_micro_batch_size_per_gpu",
                "set_gradient_accumulation_boundary", "get_global_grad_norm",
                "zero_optimization_stage",
                "zero_nvme_offload_optimizer", "dp_world_size", "gradient_clipping",
                "clip_fp32_gradients")
_WRAPPER = ("param_groups", "overflow", "optimizer.state")
_ZERO = (*_WRAPPER, "loss_scaler", "unscale_and_clip_grads", "get_grad_norm_direct",
         "complete_grad_norm_calculation_for_cpu_offload")
OPTIMIZER_PARTS = {  # by DeepSpeed's wrapper; formats/engine_state.py reads and writes their state
    "FP16_UnfusedOptimizer": (*_WRAPPER, "loss_scale_config", "fp16_groups", "fp32_groups",
                              "unscale_and_clip_grads"),
    "BF16_Optimizer": (*_WRAPPER, "bf16_groups", "fp32_groups_flat_partition",
                       "fp32_groups_gradients", "clip_grad", "step", "update_lp_params"),
    "DeepSpeedZeroOptimizer": (
        *_ZERO, "round_robin_bit16_groups", "round_robin_bit16_offsets",
        "single_partition_of_fp32_groups", "params_in_partition", "update_lp_params"),
    "DeepSpeedZeroOptimizer_Stage3": (
        *_ZERO, "fp16_groups", "fp32_partitioned_groups_flat", "swap_optimizer",
        "sub_group_to_group_id",
        "checkpoint_event_prologue", "checkpoint_event_epilogue", "_swappable_optimizer_subgroup",
        "_get_param_partition_rank", "_reassign_or_swap_out_partitioned_parameters",
        "_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out"),
}
ZERO3_PARAMETER_PARTS = ("ds_id", "ds_shape", "ds_numel", "partition_numel")


def check_json(values: dict, place: str) -> None:
    """Raise ConfigError with every problem inside the sections of a loaded DeepSpeed JSON."""
    check_parts("deepspeed", deepspeed, MODULE_PARTS)
    problems = []
    for name, model in _MODELS.items():
        section = values.get(name, {})
        wrong_types = _type_problems(model, section, name)
        problems += wrong_types or _model_problems(model, section, name)
    if not problems:
        problems = problems_between(values)
    raise_problems(place, problems)


def check_machine(values: dict, device_type: str, place: str) -> list[str]:
    """Return warnings about what this machine does badly; ConfigError for what it cannot do."""
    if device_type != "cpu":
        return []
    zero, kind = values.get("zero_optimization", {}), precision(values)
    problems = [f"zero_optimization.{name}: needs a GPU" for name in _ON_GPUS if zero.get(name)]
    if kind == "fp16" and not deepspeed.get_accelerator().is_fp16_supported():
        problems.append("fp16.enabled: this processor has no fp16; use "
                        "ds_configs/zero1_autocast_cpu.json")
    raise_problems(place, problems)
    if kind == "fp32":
        return []
    return [f"WARNING: {kind} weights without a GPU: torch's CPU kernels add up the gradients of "
            f"norms and embeddings in {kind}, which makes them wrong by up to half at 8,192 tokens "
            "a micro-batch; use ds_configs/zero1_autocast_cpu.json (fp32 weights, bf16 products)"]


def check_engine(engine) -> None:
    """Raise UserError if the engine lacks a part that the code relies on."""
    check_parts("engine", engine, ENGINE_PARTS)
    parts = OPTIMIZER_PARTS.get(type(engine.optimizer).__name__, ("param_groups", "state"))
    check_parts("optimizer", engine.optimizer, parts)
    if engine.zero_optimization_stage() == 3:
        parameter = next(p for p in engine.module.parameters() if p.requires_grad)
        check_parts("parameter", parameter, ZERO3_PARAMETER_PARTS)


def check_parts(owner: str, thing, names: tuple[str, ...]) -> None:
    """Raise UserError, the same on every rank, if `thing` lacks one of the dotted `names`."""
    missing = [name for name in names if not _has(thing, name)]
    if missing:
        error = UserError(
            f"DeepSpeed {deepspeed.__version__}: {owner} ({type(thing).__name__}) has no "
            f"{', '.join(missing)}, which this program relies on; install deepspeed>=0.19.8,<0.20")
        error.on_every_rank = True
        raise error


def _has(thing, dotted_name: str) -> bool:
    for name in dotted_name.split("."):
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def _type_problems(model: type[BaseModel], section: dict, place: str) -> list[str]:
    """Return keys that the model does not know, and values of another type than its field's."""
    fields = {alias: field for name, field in model.model_fields.items()
              for alias in {name, field.alias or name}}
    problems = []
    for key, value in section.items():
        where = f"{place}.{key}"
        if key not in fields:
            problems.append(f"{where}: unknown key{nearest(key, fields)}")
            continue
        kinds = _kinds(fields[key].annotation)
        inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        if inner and isinstance(value, dict):
            problems += _type_problems(inner, value, where)
        elif problem := _type_problem(kinds, value):
            problems.append(f"{where} = {value!r}: {problem}")
    return problems


def _kinds(annotation) -> tuple[type, ...]:
    """Return the classes of an annotation such as Optional[int]."""
    found = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Union \
        else (annotation,)
    return tuple(kind if isinstance(kind, type) else object for kind in found)


def _type_problem(kinds: tuple[type, ...], value) -> str:
    if value is None and type(None) in kinds or object in kinds:
        return ""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and math.isfinite(value) and value == int(value) and abs(value) <= _LARGEST
    for kind in kinds:
        if kind is bool:
            return "" if isinstance(value, bool) else "must be true or false"
        if issubclass(kind, Enum) and issubclass(kind, str) or kind in (str, Path):
            return "" if isinstance(value, str) else "must be a text"
        if issubclass(kind, int):
            return "" if whole else f"must be a whole number up to {_LARGEST}"
        if issubclass(kind, float):
            return "" if number and math.isfinite(value) else "must be a finite number"
    return "must be a section"


def _model_problems(model: type[BaseModel], section: dict, place: str) -> list[str]:
    try:
        model(**section)
        return []
    except ValidationError as error:
        return [f"{'.'.join([place, *map(str, item['loc'])])}: {item['msg']}"
                for item in error.errors()]
    except (AssertionError, ValueError, TypeError) as error:  # validators of DeepSpeed's own
        return [f"{place}: {error}"]
