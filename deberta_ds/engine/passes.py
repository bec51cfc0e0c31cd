"""Passes of micro-batches: by the hooks of DeepSpeed, or with gradients that are summed here.

On a GPU a micro-batch of v3-base is some 5,000 operators and launches, for which Python needs
longer than the card. A CUDA graph replays all of them in one call. No hook of DeepSpeed runs in a
replay; so gradients are added to static tensors, which `coalesce_grad_reduction` takes as if the
hooks had left them (bit for bit the same update; tests/engine/test_passes.py). The sum is in fp32
and rounded to the dtype of the weights once an update, without a graph too: in bf16 each addition
would lose bits (1.2 % of the sum over 128 micro-batches).
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from deberta_ds.base.errors import UserError, first_line
from deberta_ds.base.user_code import is_own
from deberta_ds.cluster import dist
from deberta_ds.config.run_config import RunConfig
from deberta_ds.data.rows import Batch
from deberta_ds.engine.ds_config import CompleteConfig, DeepSpeedConfig
from deberta_ds.model.dropout import seeded

_LOG = logging.getLogger("deberta_ds")
_NO_GRAPH = "no CUDA graph, the GPU may wait for Python"
_WARM_UPS = 3  # passes before a capture: libraries choose their algorithms and workspaces
_GRAPHS = 2  # of different shapes, kept at once
Sums = dict[str, Tensor]
Forward = Callable[[Any], tuple[Tensor, Sums]]  # a micro-batch -> its loss, detached sums


class Engine(Protocol):
    """DeepSpeed's, which has no types; a call is its module's forward pass (`objectives.base`)."""

    module: nn.Module
    device: torch.device
    passes: "HookedPasses"

    def __call__(self, batch: Batch, normalizers: Sums) -> tuple[Tensor, Sums, Sums]: ...


def graph_obstacle(run: RunConfig, ds: DeepSpeedConfig, device_type: str) -> str:
    """Return why micro-batches of a run do not become CUDA graphs, or an empty string."""
    if run.train.cuda_graph == "off":
        return "train.cuda_graph = 'off'"
    if device_type != "cuda":
        return "there is no GPU"
    if is_own(run.objective.kind) and run.train.cuda_graph != "on":
        return (f"objective.kind = {run.objective.kind} may read the device; if it does not, write "
                'train.cuda_graph = "on"')
    return sums_obstacle(ds)


def sums_obstacle(ds: DeepSpeedConfig) -> str:
    """Return why gradients cannot be summed outside of DeepSpeed, or an empty string."""
    if ds.stage == 3:
        return "ZeRO-3 gathers weights by hooks; use ZeRO-1 or 2"
    if ds.precision == "fp16":
        return "the loss scale of fp16 is a number of the host; use bf16"
    if ds.torch_autocast.enabled:
        return "torch_autocast casts weights in every pass; use bf16"
    if ds.offload().device != "none":
        return "offload_optimizer copies gradients by hooks; leave it out"
    if ds.data_types.grad_accum_dtype == "fp32" and ds.stage == 1:
        return "data_types.grad_accum_dtype is in the way; leave it out, sums are in fp32 here"
    return ""


def are_summed(ds: DeepSpeedConfig, accumulates: bool) -> bool:
    """Return whether gradients are summed here without a graph: in bf16 below ZeRO-2, which, as
    ZeRO-3, adds in fp32 itself.
    """
    return accumulates and ds.precision == "bf16" and ds.stage < 2 and not sums_obstacle(ds)


def build_passes(engine, run: RunConfig, ds: CompleteConfig) -> "HookedPasses":
    """Return what makes the passes of a run's micro-batches."""
    reason = graph_obstacle(run, ds, engine.device.type)
    if reason and engine.device.type == "cuda" and run.train.cuda_graph != "off":
        _LOG.info("%s: %s", _NO_GRAPH, reason)
    if reason and not are_summed(ds, ds.gradient_accumulation_steps > 1):
        return HookedPasses(engine)
    return Passes(engine, "off" if reason else run.train.cuda_graph)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name the block in traces of torch.profiler (train.profile_steps) and of Nsight (NVTX)."""
    with record_function(name), (
            torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext()):
        yield


@contextmanager
def seed_pass(device: torch.device, seed: int) -> Iterator[None]:
    """Make dropout inside a function of `seed`; torch's generators, too, which heads and code of
    one's own may ask.
    """
    torch.manual_seed(seed)
    with seeded(torch.full((1,), seed, dtype=torch.int64, device=device)):
        yield


def first_bad_gradient(engine, batch, seed: int, forward: Forward) -> str:
    """Return the first parameter, in backward order, with a gradient that is not finite, or ""."""
    bad: list[str] = []

    def note(gradient: Tensor, name: str) -> None:
        if not torch.isfinite(gradient).all():
            bad.append(name)

    hooks = [parameter.register_hook(partial(note, name=name))
             for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    with seed_pass(engine.device, seed):
        loss, _ = forward(batch.to(engine.device))
    engine.backward(loss)
    for hook in hooks:
        hook.remove()
    return bad[0] if bad else ""


class HookedPasses:
    """The passes of an update by DeepSpeed: `begin_step`, `run_pass` each, `hand_over`."""

    def __init__(self, engine):
        self._engine, self._left = engine, 0

    def begin_step(self, normalizers: Sums, micro_batches: int) -> None:
        """Start an update; `normalizers` as in `objectives.base`."""
        # Of a batch that grows. A smaller micro-batch is a whole one to DeepSpeed, which only adds
        # up its samples wrongly.
        self._engine.set_train_batch_size(
            dist.world_size() * micro_batches * self._engine.train_micro_batch_size_per_gpu())
        self._left = micro_batches

    def run_pass(self, batch: Any, seed: int, forward: Forward, computing: Callable = nullcontext
            ) -> tuple[Tensor, Sums]:
        """As `Passes.run_pass`; the last backward pass is made by `hand_over`."""
        engine = self._engine
        self._left -= 1
        engine.set_gradient_accumulation_boundary(not self._left)
        with seed_pass(engine.device, seed), span("forward"), computing():
            self._loss, sums = forward(batch.to(engine.device))
        loss = self._loss.detach()
        if self._left:
            with span("backward"):
                engine.backward(self._loss)
                engine.step()
        return loss, sums

    def hand_over(self, good: Tensor) -> None:
        """Make the last backward pass; unless `good`, with NaN in place of its gradients."""
        with span("backward"):
            factor = torch.where(good, 1.0, torch.nan).to(self._loss.dtype)
            self._engine.backward(self._loss * factor)
        del self._loss


class Passes(HookedPasses):
    """As `HookedPasses`, without DeepSpeed's hooks."""

    def __init__(self, engine, mode: str):
        """mode: train.cuda_graph."""
        super().__init__(engine)
        self._mode, device = mode, engine.device
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters), device=device)
        self._sums = self._views(self._flat)
        self._normalizers = {name: torch.ones((), device=device) for name in ("targets", "tokens")}
        self._count = torch.ones((), device=device)
        self._seed = torch.zeros(1, dtype=torch.int64, device=device)
        self._weights: list[int] = []
        self._graphs: dict[tuple, Callable[[Batch], tuple[Tensor, Sums]]] = {}

    def begin_step(self, normalizers: Sums, micro_batches: int) -> None:
        super().begin_step(normalizers, micro_batches)
        self._flat.zero_()
        for name, value in normalizers.items():
            self._normalizers[name].copy_(value)
        self._count.fill_(micro_batches)
        weights = [p.data_ptr() for p in self._parameters] if self._mode != "off" else []
        if weights != self._weights:  # a graph has their addresses
            self._graphs.clear()
        self._weights = weights

    def run_pass(self, batch: Batch, seed: int, forward: Forward | None = None,
            computing: Callable = nullcontext) -> tuple[Tensor, Sums]:
        """Pass a micro-batch forward and backward; return its detached loss and sums.

        With a graph they are overwritten by the next pass. `computing` is a context of what needs
        no other rank.
        """
        with span("forward and backward"), computing():
            self._seed.fill_(seed)
            replay = None if self._mode == "off" else self._graph_of(batch)
            torch.manual_seed(seed)  # behind the warm-up of a capture, which may have asked them
            return replay(batch) if replay else self._pass(batch.to(self._engine.device))

    @span("reduction")
    def hand_over(self, good: Tensor) -> None:
        """Give the summed gradients to DeepSpeed; unless `good`, NaN in their place.

        Gradients are reduced over ranks here; the update may follow.
        """
        engine, stage = self._engine, self._engine.zero_optimization_stage()
        factor = torch.where(good, 1.0, torch.nan).float()
        torch._foreach_mul_([gradient.view(-1)[:1] for gradient in self._sums], factor)
        engine.micro_steps += self._left - 1  # `step` counts one
        engine.set_gradient_accumulation_boundary(True)
        with engine.coalesce_grad_reduction() if stage else nullcontext():
            # New tensors every time: DeepSpeed replaces the memory of those that it finds.
            gradients = self._views(self._flat.to(self._parameters[0].dtype))
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        if not stage:
            engine.allreduce_gradients()

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def _pass(self, batch: Batch) -> tuple[Tensor, Sums]:
        with seeded(self._seed):
            loss, sums, _ = self._engine.module(batch, self._normalizers)
        found = torch.autograd.grad(loss / self._count, self._parameters, allow_unused=True)
        pairs = [(total, gradient) for total, gradient in zip(self._sums, found, strict=True)
                 if gradient is not None]
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
        return loss.detach(), sums

    def _graph_of(self, batch: Batch) -> Callable[[Batch], tuple[Tensor, Sums]] | None:
        """Return what replays the graph for batches of this shape; None for good if rejected."""
        # Waiting weights have a hook each (engine.holds), which a graph takes in.
        key = (*(tensor.shape for tensor in _tensors(batch)), bool(self._engine.holds))
        if key not in self._graphs:
            if len(self._graphs) == _GRAPHS:
                self._graphs.clear()
            kept = self._flat.clone()  # what the micro-batches before this one left
            try:
                self._graphs[key] = self._captured(batch.to(self._engine.device, copy=True))
            except RuntimeError as error:  # of torch, a library or the driver
                if self._mode == "on":
                    raise UserError(f"train.cuda_graph = 'on': {first_line(error)}; write "
                                    "train.cuda_graph = \"off\"") from error
                self._mode = "off"
                _LOG.warning("WARNING: %s: %s", _NO_GRAPH, first_line(error))
            finally:
                self._flat.copy_(kept)
        return self._graphs.get(key)

    def _captured(self, fixed: Batch) -> Callable[[Batch], tuple[Tensor, Sums]]:
        # Numbers of the host would stay those of this batch.
        fraction: Any = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        nothing: Any = None
        fixed = dataclasses.replace(fixed, num_targets=nothing, num_tokens=nothing,
                                    run_fraction=fraction)
        results, launch = capture(lambda: self._pass(fixed))

        def replay(batch: Batch) -> tuple[Tensor, Sums]:
            for own, tensor in zip(_tensors(fixed), _tensors(batch), strict=True):
                own.copy_(tensor, non_blocking=True)
            fraction.fill_(min(1.0, batch.run_fraction))
            launch()
            return results

        return replay


def _tensors(batch: Batch) -> list[Tensor]:
    values = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


def capture(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Return the results of a function as a CUDA graph, and what fills them again."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Only what this thread does is checked: others copy checkpoints, and watch.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = function()
    return results, graph.replay
