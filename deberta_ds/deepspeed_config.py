"""The DeepSpeed JSON: checked by us, completed from the run config.

DeepSpeed 0.19.8 accepts misspelt top-level keys in silence, keeps the string "auto", and clips
gradients at 1.0 unless told otherwise. So every top-level key is checked here, each number has one
owner, and the dict that DeepSpeed gets is complete. No torch and no deepspeed in this module.
"""

import json
from pathlib import Path

from deberta_ds.config import RunConfig
from deberta_ds.validation import ConfigError, nearest, raise_problems

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
# How it is run: passed through as DeepSpeed documents them.
JSON_KEYS = frozenset("""
    zero_optimization bf16 fp16 data_types torch_autocast activation_checkpointing aio compile
    comms_logger flops_profiler wall_clock_breakdown communication_data_type prescale_gradients
    gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    steps_per_print memory_breakdown dump_state seq_parallel_communication_data_type
    sparse_gradients use_data_before_expert_parallelism tensor_parallel
    disable_allgather graph_harvesting
""".split())


def load(path: str | Path) -> dict:
    """Return the JSON of `path`, its top-level keys checked. Raises ConfigError."""
    repeated: list[str] = []

    def unique(pairs):
        seen = {}
        for key, value in pairs:
            if key in seen:
                repeated.append(key)
            seen[key] = value
        return seen

    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such DeepSpeed config; see ds_configs/README.md") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a DeepSpeed config is one JSON object")
    problems = [f'"{key}": written twice' for key in repeated]
    for key, value in values.items():
        problems += _problems_of(key, value)
    raise_problems(str(path), problems)
    return values


def _problems_of(key: str, value) -> list[str]:
    if key in RUN_KEYS and value != "auto":
        return [f'"{key}": {json.dumps(value)} belongs to the run config ({RUN_KEYS[key]}); '
                'delete it or write "auto"']
    if key in CODE_KEYS:
        return [f'"{key}": belongs to {CODE_KEYS[key]}; delete it here']
    if key not in JSON_KEYS and key not in RUN_KEYS:
        known = JSON_KEYS | RUN_KEYS.keys()
        return [f'"{key}": not a DeepSpeed key{nearest(key, known)}']
    return []


def zero_stage(values: dict) -> int:
    """Return the ZeRO stage of a DeepSpeed dict."""
    return int(values.get("zero_optimization", {}).get("stage", 0))


def precision(values: dict) -> str:
    """Return "bf16", "fp16" or "fp32": the type of the weights that run forward."""
    for name in ("bf16", "fp16"):
        if values.get(name, {}).get("enabled", False):
            return name
    return "fp32"


def accumulation_steps(run: RunConfig, world_size: int) -> int:
    """Return micro-batches per step; raises ConfigError where the batch does not divide."""
    train = run.train
    at_once = train.micro_batch_rows * world_size
    if train.global_batch_rows % at_once:
        raise ConfigError(
            f"train.global_batch_rows = {train.global_batch_rows}: not divisible by "
            f"micro_batch_rows x world size = {train.micro_batch_rows} x {world_size} = {at_once}")
    return train.global_batch_rows // at_once


def resolve(run: RunConfig, values: dict, world_size: int) -> dict:
    """Return the complete dict for `deepspeed.initialize` from a checked JSON and the run."""
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 62,  # our own log speaks
    } | values | {
        "train_batch_size": run.train.global_batch_rows,
        "train_micro_batch_size_per_gpu": run.train.micro_batch_rows,
        "gradient_accumulation_steps": accumulation_steps(run, world_size),
        "gradient_clipping": run.optim.clip_norm,
    }
