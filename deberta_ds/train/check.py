"""Problems between the sections of a run, its DeepSpeed config and its tokenizer: all at once."""

import json

from deberta_ds import config, deepspeed_config
from deberta_ds.config import IDENTITY_FIELDS, RunConfig
from deberta_ds.formats.checkpoint import CheckpointError
from deberta_ds.validation import ConfigError, raise_problems


def check_run(run: RunConfig, ds: dict, world_size: int, tokenizer_size: int | None,
              place: str) -> None:
    """Raise ConfigError with every cross problem of a run; `tokenizer_size` None is not checked."""
    problems = []
    try:
        deepspeed_config.accumulation_steps(run, world_size)
    except ConfigError as error:
        problems.append(str(error))
    model, train, optim = run.model, run.train, run.optim
    if tokenizer_size is not None and model.vocab_size < tokenizer_size:
        problems.append(f"model.vocab_size = {model.vocab_size}: smaller than the {tokenizer_size} "
                        f"ids of {run.data.tokenizer}; raise it (a multiple of 64 is fast)")
    if run.data.seq_len > model.max_position:
        problems.append(f"data.seq_len = {run.data.seq_len}: above model.max_position = "
                        f"{model.max_position}, the rows of the absolute position table")
    masked_layers = model.num_layers
    if run.objective.kind == "rtd":
        masked_layers = run.generator_model.num_layers
    if masked_layers < 2 and not model.absolute_input:
        problems.append("the enhanced mask decoder needs at least 2 layers "
                        "(objective.generator_layers for rtd, model.num_layers for mlm)")
    if optim.warmup_steps > train.steps:
        problems.append(f"optim.warmup_steps = {optim.warmup_steps}: more than train.steps = "
                        f"{train.steps}")
    if optim.name != "adamw" and "offload_optimizer" in ds.get("zero_optimization", {}):
        if ds.get("zero_force_ds_cpu_optimizer"):
            problems.append(f"optim.name = {optim.name!r}: zero_force_ds_cpu_optimizer would "
                            "replace it by DeepSpeedCPUAdam; set that key to false")
    raise_problems(place, problems)


def check_identity(run: RunConfig, fingerprints: dict[str, str], record: dict, place: str) -> None:
    """Raise CheckpointError with a diff if a checkpoint's run.json is of another run."""
    now, then = _now_and_then(run, record)
    differing = [key for key in sorted(now.keys() | then.keys())
                 if now.get(key) != then.get(key) and _is_identity(key)]
    lines = [f"- {key} = {json.dumps(then.get(key))}\n  + {key} = {json.dumps(now.get(key))}"
             for key in differing]
    saved = record["fingerprints"]
    for path in sorted(saved.keys() | fingerprints.keys()):
        if saved.get(path) != fingerprints.get(path):
            lines.append(f"- corpus {path}: {saved.get(path)}\n  + corpus {path}: "
                         f"{fingerprints.get(path)}")
    if lines:
        raise CheckpointError(
            f"{place} is of another run (- saved, + now):\n  " + "\n  ".join(lines)
            + "\n  change these back, or start anew in another out_dir")


def changed_values(run: RunConfig, record: dict) -> list[str]:
    """Return "key: then -> now" for values that may change on resume and did."""
    now, then = _now_and_then(run, record)
    return [f"{key}: {then.get(key)} -> {now.get(key)}" for key in sorted(now.keys() | then.keys())
            if now.get(key) != then.get(key) and not _is_identity(key)]


def _now_and_then(run: RunConfig, record: dict) -> tuple[dict, dict]:
    """Return both configs flat; one saved before a key existed gets that key's default."""
    then = config.from_dict(record["config"], "run.json")
    return config.flatten(config.to_dict(run)), config.flatten(config.to_dict(then))


def _is_identity(key: str) -> bool:
    return any(key == field or key.startswith(f"{field}.") for field in IDENTITY_FIELDS)
