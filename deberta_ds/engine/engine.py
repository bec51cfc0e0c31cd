"""Process group, model and DeepSpeed engine, and whether the installed DeepSpeed fits.

The JSON and DeepSpeed are checked before the process group exists, on every rank with the same
result: DeepSpeed itself would answer with a traceback from each rank, after minutes of start-up.

Patterns that hold under every ZeRO stage: one engine, one forward that returns both losses, one
backward; initial values are set after construction, parameter by parameter, because under
`zero.Init` an assignment in a constructor is a silent no-op.
"""

import logging
import math
import os
import sys
import warnings
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from enum import Enum
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.runtime.torch_autocast import get_default_autocast_lower_precision_modules
from torch import Tensor, nn

from deberta_ds.base.errors import ConfigError, UserError, first_line
from deberta_ds.base.numbers import counted
from deberta_ds.cluster import dist
from deberta_ds.cluster.launcher import check_environment, count_gpus, meet_mpi, rank_variables
from deberta_ds.config.run_config import OptimConfig, RunConfig
from deberta_ds.engine.clipping import (
    check_all_at_once,
    clip_networks_apart,
    measure_in_pieces,
    reduce_nothing,
)
from deberta_ds.engine.ds_config import CompleteConfig, DeepSpeedConfig
from deberta_ds.engine.optim import Muon, build_optimizer
from deberta_ds.engine.passes import HookedPasses, build_passes
from deberta_ds.engine.state import CheckpointError
from deberta_ds.model import cpu
from deberta_ds.model.backbone import init_parameters
from deberta_ds.model.dropout import LinearGelu
from deberta_ds.objectives.build import build_model, held_parameters, objective_of

# DeepSpeed calls names that torch 2.13 is about to rename; one warning a collective helps nobody.
warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)
# DeepSpeed asks every optimizer whether it is DeepSpeed's Muon (ours is another, see `muon`).
# Importing that loads torch's compiler, over a second of processor time in each rank's start.
with patch.object(deepspeed.runtime.compiler, "compile",
                  lambda *_, **__: lambda function: function):
    import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def prepare_rank() -> torch.device:
    """Find out which rank this is, and return its device; the group is not joined yet."""
    check_parts("deepspeed", deepspeed, MODULE_PARTS)
    if dist.is_distributed():
        return local_device()
    os.environ.update(rank_variables(os.environ))
    if "RANK" not in os.environ:
        meet_mpi()
    check_environment(os.environ)
    count_gpus()
    if device_type() == "cpu":
        check_parts("deepspeed", deepspeed, CPU_PARTS)
        # Only inference all-reduce uses this operator, and building it takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ.get("RANK", "0") == "0":
        show_choices()
    device = local_device()
    if device.type == "cpu":
        cpu.keep_heap()
    else:
        if device.index >= torch.cuda.device_count():
            seen = counted(torch.cuda.device_count(), "GPU")
            raise UserError(f"LOCAL_RANK = {device.index}, but this process sees only {seen}; "
                            "start fewer ranks on this node, or let each see all of its GPUs "
                            "(Slurm: --gpus-per-node, not --gpus-per-task or --gpu-bind)")
        torch.cuda.set_device(device)
    return device


def show_choices() -> None:
    """Print what the library chose for this machine (logger "deberta_ds") as it is chosen."""
    logger = logging.getLogger("deberta_ds")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def init_distributed() -> torch.device:
    """Join the launcher's process group (or be a group of one); return this rank's device."""
    device = prepare_rank()
    if dist.is_distributed():
        return device
    try:
        with dist.saying_who_waits():
            deepspeed.init_distributed(verbose=False)
    except (RuntimeError, ValueError) as error:  # torch's: a port in use, ranks that did not come
        remedy = ("choose a free port (--master_port of deepspeed and torchrun, else MASTER_PORT), "
                  "and start every rank")
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            remedy = ("start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which "
                      "torch 2.13 gives restarted ranks the addresses of those before")
        raise UserError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} cannot join the "
            f"others at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"({first_line(error)}); {remedy}") from error
    dist.begin_alarm()
    return device


def device_type() -> str:
    """Return what this machine computes on: "cpu", "cuda", ..."""
    return deepspeed.get_accelerator().device_name()


def local_device() -> torch.device:
    """Return this rank's device."""
    name = device_type()
    return torch.device("cpu") if name == "cpu" else torch.device(name, dist.local_rank())


def build_pretraining_engine(run: RunConfig, ds: CompleteConfig, valid_vocab: int | None,
                             initial: dict[str, Tensor] | None = None):
    """Return the DeepSpeed engine of a run, its parameters initialized from train.seed.

    `initial` replaces the random values of the parameters it names; only rank 0's is read.
    """
    stage3 = ds.stage == 3
    with deepspeed.zero.Init(config_dict_or_path=ds.as_dict()) if stage3 else nullcontext():
        model = build_model(run, valid_vocab)
    gather = partial(deepspeed.zero.GatheredParameters, modifier_rank=0) if stage3 else nullcontext
    frozen, waiting = held_parameters(run, dict(model.named_parameters()))
    apart = objective_of(run).clip_groups(run)
    init_parameters(model, run.model.init_std, run.train.seed, gather)
    set_parameters(model, initial or {}, gather)
    engine = build_engine(model, run.optim, ds, frozen, waiting, apart)
    engine.passes = build_passes(engine, run, ds)
    return engine


def build_engine(model: nn.Module, optim: OptimConfig, ds: CompleteConfig,
                 frozen: Collection[str] = (), waiting: Collection[str] = (),
                 apart: tuple[str, ...] = ()):
    """Return the DeepSpeed engine over an initialized model.

    `frozen` parameters have no gradient and no optimizer state; `waiting` ones do not move before
    `set_learning_rate` lets them; those whose names begin with a prefix in `apart` are clipped by a
    norm of their own.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    matmuls = torch.bfloat16 if ds.matmul_precision == "bf16" else None
    optimizer = build_optimizer(model, optim, waiting, apart, matmuls)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, dist_init_required=False,
                                      config=dict_for_deepspeed(ds))
    check_engine(engine)
    if local_device().type == "cpu" and hasattr(engine.optimizer, "get_grad_norm_direct"):
        measure_in_pieces(engine.optimizer)
    if type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer":  # ZeRO-1 and 2
        check_all_at_once(engine.optimizer)
        if dist.world_size() == 1:
            reduce_nothing(engine.optimizer)
    if apart:
        clip_networks_apart(engine, [group["network"] for group in optimizer.param_groups])
    if isinstance(optimizer, Muon):
        optimizer.bind(engine)
    engine.passes = HookedPasses(engine)
    # As zeros, their gradients count in no norm, and leave moments at zero.
    engine.holds = [parameter.register_hook(torch.zeros_like)
                    for name, parameter in model.named_parameters() if name in waiting]
    return engine


def dict_for_deepspeed(ds: CompleteConfig) -> dict[str, Any]:
    """Return what `deepspeed.initialize` is given on this machine."""
    values = ds.as_dict()
    if ds.torch_autocast.enabled:  # exactly the classes that are listed travel in 16 bits
        values["torch_autocast"]["lower_precision_safe_modules"] = [
            *get_default_autocast_lower_precision_modules(),
            f"{LinearGelu.__module__}.{LinearGelu.__name__}"]
    if ds.stage == 3 and local_device().type == "cpu":
        # DeepSpeed gathers what it keeps whole one by one after every update. On a GPU that is a
        # launch each; a collective of gloo takes a millisecond however little it moves.
        values["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
    return values


@torch.no_grad()
def set_parameters(model: nn.Module, values: dict[str, Tensor], gather) -> None:
    """Copy `values` into the parameters of the same names; DeepSpeed takes rank 0's."""
    parameters = dict(model.named_parameters())
    assert values.keys() <= parameters.keys(), values.keys() - parameters.keys()
    for name, parameter in parameters.items():
        with gather(parameter):  # on every rank, also where there is no value
            if name in values:
                parameter.copy_(values[name])


def set_learning_rate(engine, rate: float, *, is_thawed: bool = True) -> None:
    """Set the rate of a step's update; `is_thawed`: waiting parameters move from now on."""
    while is_thawed and engine.holds:
        engine.holds.pop().remove()
    for group in engine.optimizer.param_groups:
        waits = group.get("waits") and not is_thawed
        group["lr"] = 0.0 if waits else rate * group.get("rate_share", 1.0)


class BadStepError(UserError):
    """A loss or a gradient is not finite, or the loss spiked; the update was not made."""

    on_every_rank = True


Update = Enum("Update", "MADE OVERFLOW BAD")  # OVERFLOW: the fp16 loss scale was lowered instead


def update(engine) -> Update:
    """Make the update from the gradients of the passes, unless one of them is not finite."""
    if hasattr(engine.optimizer, "overflow"):
        try:
            engine.step()
        except Exception as error:  # DeepSpeed has no class of its own for it
            if "loss scale already at minimum" not in str(error):
                raise
            raise BadStepError("the fp16 gradient overflows at the lowest loss scale; train in "
                               "bf16 or fp32, or lower optim.learning_rate") from None
        if not engine.optimizer.overflow:
            return Update.MADE
        is_scaled = engine.fp16_enabled() and engine.dynamic_loss_scale()
        return Update.OVERFLOW if is_scaled else Update.BAD
    # ZeRO-0 in fp32: a plain optimizer, which would apply NaN. All ranks hold the same gradients.
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    if torch.stack(torch._foreach_norm(gradients)).isfinite().all():
        engine.step()
        return Update.MADE
    engine.zero_grad()  # what the wrappers do; `step` cannot clip when there is nothing to clip
    engine.micro_steps += 1
    engine.skipped_steps += 1
    return Update.BAD


def gradient_norm(engine) -> float | None:
    """Return the norm of the last update's gradient, if there is one and it is finite."""
    norm = engine.get_global_grad_norm()
    return None if norm is None or not math.isfinite(norm) else float(norm)


def gathered(parameters: list[nn.Parameter]):
    """Context in which the given parameters are whole on every rank, for reading."""
    if any(hasattr(p, "ds_id") for p in parameters):
        return deepspeed.zero.GatheredParameters(parameters)
    return nullcontext()


# Parts of DeepSpeed 0.19 that the code uses and that are documented nowhere, by who has them.
MODULE_PARTS = """
    zero.Init zero.GatheredParameters initialize init_distributed get_accelerator""".split()
CPU_PARTS = ("ops.__compatible_ops__",)  # made when it is asked for, by running compilers
ENGINE_PARTS = """
    module optimizer device backward step zero_grad micro_steps skipped_steps global_steps
    global_samples fp16_enabled dynamic_loss_scale set_train_batch_size
    train_micro_batch_size_per_gpu set_gradient_accumulation_boundary get_global_grad_norm
    allreduce_gradients coalesce_grad_reduction zero_optimization_stage
    zero_nvme_offload_optimizer dp_world_size gradient_clipping clip_fp32_gradients""".split()
_WRAPPER = "param_groups overflow optimizer.state"
_ZERO = f"""{_WRAPPER} loss_scaler unscale_and_clip_grads get_grad_norm_direct
    complete_grad_norm_calculation_for_cpu_offload"""
OPTIMIZER_PARTS = {  # by DeepSpeed's wrapper; engine/state.py reads and writes their state
    "BF16_Optimizer": f"""{_WRAPPER} bf16_groups fp32_groups_flat_partition fp32_groups_gradients
        clip_grad step update_lp_params""".split(),
    "DeepSpeedZeroOptimizer": f"""{_ZERO} round_robin_bit16_groups round_robin_bit16_offsets
        single_partition_of_fp32_groups params_in_partition update_lp_params averaged_gradients
        has_overflow_partitioned_grads_serial cpu_offload dtype gradient_accumulation_dtype
        reduce_bucket_size reduce_ipg_grads
        reduce_independent_p_g_buckets_and_remove_grads""".split(),
    "DeepSpeedZeroOptimizer_Stage3": f"""{_ZERO} fp16_groups fp32_partitioned_groups_flat
        swap_optimizer sub_group_to_group_id checkpoint_event_prologue checkpoint_event_epilogue
        _swappable_optimizer_subgroup _get_param_partition_rank
        _reassign_or_swap_out_partitioned_parameters _optimizer_states_and_gradient_swap_in
        _optimizer_states_and_gradient_swap_out""".split()}
ZERO3_PARAMETER_PARTS = "ds_id ds_shape ds_numel ds_tensor partition_numel".split()


def check_machine(ds: DeepSpeedConfig, place: str) -> list[str]:
    """Return warnings about what this machine does badly; ConfigError, naming `place`, for what it
    cannot do.
    """
    if device_type() != "cpu":
        return []
    kind, matmuls = ds.precision, ds.matmul_precision
    if kind == matmuls == "fp32":
        return []
    better = f"ds_configs/{cpu.deepspeed_json()}.json"
    if kind == "fp16" and not deepspeed.get_accelerator().is_fp16_supported():
        raise ConfigError(f"{place}: fp16.enabled: this processor has no fp16; use {better}")
    warned = []
    if matmuls == "bf16" and not cpu.has_bf16():
        warned.append("WARNING: bf16 matmuls on a processor without bf16 units (AVX512-BF16 or "
                      f"AMX): they can take 60 times as long as in fp32; use {better}")
    if kind != "fp32":
        warned.append(f"WARNING: {kind} weights without a GPU: torch's CPU kernels sum the "
                      f"gradients of norms and embeddings in {kind}, which makes them wrong by up "
                      f"to half at 8,192 tokens per micro-batch; use {better} (fp32 weights)")
    return warned


def check_engine(engine) -> None:
    """Raise UserError if the engine lacks what is used, or its state could not be saved."""
    kind = type(engine.optimizer).__name__
    is_plain = isinstance(engine.optimizer, torch.optim.Optimizer)
    if not is_plain and kind not in OPTIMIZER_PARTS:
        raise CheckpointError(f"the DeepSpeed config leads to {kind}, whose state could not be "
                              "saved and loaded; use plain ZeRO-0, 1, 2 or 3 "
                              "(docs/explanation/reliability.md)")
    check_parts("engine", engine, ENGINE_PARTS)
    check_parts("optimizer", engine.optimizer,
                ["param_groups", "state"] if is_plain else OPTIMIZER_PARTS[kind])
    if engine.dp_world_size != dist.world_size():
        raise CheckpointError(
            f"the DeepSpeed config splits {dist.world_size()} ranks into groups (tensor or "
            "sequence parallelism), whose checkpoints could not be loaded; leave those keys out")
    if engine.zero_optimization_stage() == 3:
        parameter = next(p for p in engine.module.parameters() if p.requires_grad)
        check_parts("parameter", parameter, ZERO3_PARAMETER_PARTS)


def check_parts(owner: str, thing, names: Sequence[str]) -> None:
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
