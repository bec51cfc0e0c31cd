"""Whether the JSON, and the installed DeepSpeed, are what this program relies on.

Both are checked before the process group exists, on every rank with the same result: DeepSpeed
itself would answer with a traceback from each rank, after minutes of start-up on a large job.
"""

from operator import attrgetter

import deepspeed

from deberta_ds.config.options import ConfigError
from deberta_ds.engine import ds_config

# Parts of DeepSpeed 0.19 that the code uses and that are documented nowhere, by who has them.
MODULE_PARTS = ("zero.Init", "zero.GatheredParameters", "initialize", "init_distributed",
                "get_accelerator")
CPU_PARTS = ("ops.__compatible_ops__",)  # made when it is asked for, by running compilers
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
OPTIMIZER_PARTS = {  # by DeepSpeed's wrapper; engine/state.py reads and writes their state
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
ZERO3_PARAMETER_PARTS = ("ds_id", "ds_shape", "ds_numel", "ds_tensor", "partition_numel")


def check_deepspeed(values: dict, place: str) -> list[str]:
    """Check a JSON; return warnings about what this machine does badly. Raises ConfigError."""
    ds_config.check(values, place)
    return check_machine(values, deepspeed.get_accelerator().device_name(), place)


def check_machine(values: dict, device_type: str, place: str) -> list[str]:
    """Return warnings about what this machine does badly; ConfigError for what it cannot do."""
    if device_type != "cpu":
        return []
    kind = ds_config.precision(values)
    if kind == "fp16" and not deepspeed.get_accelerator().is_fp16_supported():
        raise ConfigError(f"{place}: fp16.enabled: this processor has no fp16; use "
                          "ds_configs/zero1_autocast_cpu.json")
    if kind == "fp32":
        return []
    return [f"WARNING: {kind} weights without a GPU: torch's CPU kernels sum the gradients of "
            f"norms and embeddings in {kind}, which makes them wrong by up to half at 8,192 tokens "
            "per micro-batch; use ds_configs/zero1_autocast_cpu.json (fp32 weights, bf16 "
            "matmuls)"]


def check_engine(engine) -> None:
    """Raise ConfigError if the engine lacks a part that the code relies on."""
    check_parts("engine", engine, ENGINE_PARTS)
    parts = OPTIMIZER_PARTS.get(type(engine.optimizer).__name__, ("param_groups", "state"))
    check_parts("optimizer", engine.optimizer, parts)
    if engine.zero_optimization_stage() == 3:
        parameter = next(p for p in engine.module.parameters() if p.requires_grad)
        check_parts("parameter", parameter, ZERO3_PARAMETER_PARTS)


def check_parts(owner: str, thing, names: tuple[str, ...]) -> None:
    """Raise ConfigError, the same on every rank, if `thing` lacks one of the dotted `names`."""
    missing = []
    for name in names:
        try:
            attrgetter(name)(thing)
        except AttributeError:
            missing.append(name)
    if missing:
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__}: {owner} ({type(thing).__name__}) has no "
            f"{', '.join(missing)}, which this program relies on; install deepspeed>=0.19.8,<0.20")
