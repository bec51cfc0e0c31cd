"""The host waits for the device once a training step, after the last backward pass was launched,
and never in the passes that a CUDA graph captures, whose shapes are those of every batch.

Tensors of the "meta" device stand for a GPU's: whoever reads a number of theirs is seen.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="the fused kernels need the triton package")

import torch  # noqa: E402
from test_determinism import batch_of_packed_rows  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402

from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig  # noqa: E402
from deberta_ds.engine import passes  # noqa: E402
from deberta_ds.engine.engine import Update, update  # noqa: E402
from deberta_ds.engine.passes import HookedPasses  # noqa: E402
from deberta_ds.model import (
    choose,  # noqa: E402
    encoder,  # noqa: E402
)
from deberta_ds.model.embeddings import InputBlock, TokenEmbedding  # noqa: E402
from deberta_ds.model.heads import MaskedLmHead, ReplacedTokenHead  # noqa: E402
from deberta_ds.model.kernels.attention import fused_path  # noqa: E402
from deberta_ds.objectives import rtd  # noqa: E402
from deberta_ds.objectives.mlm import MlmModel  # noqa: E402
from deberta_ds.objectives.rtd import RtdModel  # noqa: E402
from deberta_ds.objectives.rtd_cached import CachedRtdModel  # noqa: E402
from deberta_ds.training.step import train_step  # noqa: E402

CONFIG = ModelConfig(vocab_size=200, hidden_size=32, num_layers=2, num_heads=2,
                     intermediate_size=64, max_position=64, position_buckets=8)
DEVICE = torch.device("meta")
READERS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero"}


class Waits(TorchDispatchMode):
    """Note when the host waits for the device, and give it zeros, or another number."""

    number = 0.0

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if name in READERS and any(x.is_meta for x in tensors):
            self.events.append(name)
            return self.number
        if name == "_to_copy" and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            self.events.append("read")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        to_device = name == "_to_copy" and kwargs.get("device") == DEVICE and tensors[0].is_cpu
        into_device = name == "copy_" and args[0].is_meta and args[1].is_cpu
        if (to_device and not kwargs.get("non_blocking")) or (
                into_device and not (len(args) > 2 and args[2])):
            self.events.append("copy")
        return function(*args, **kwargs)


class Makes(TorchFunctionMode):
    """Note numbers of the host that become a tensor of the device, which is a copy, too."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) and made.is_meta:
            self.events.append("copy")
        return made


class Engine:
    """What `train_step` asks of DeepSpeed's, which waits in its `step`, after all of this."""

    device = DEVICE
    optimizer = SimpleNamespace(overflow=False)

    def __init__(self, model, events):
        self.model, self.events = model, events
        self.passes = HookedPasses(self)

    def __call__(self, *inputs):
        return self.model(*inputs)

    def backward(self, loss):
        loss.backward()
        self.events.append("backward")

    def step(self):
        self.events.append("step")

    def fp16_enabled(self):
        return False

    def train_micro_batch_size_per_gpu(self):
        return 1

    def set_train_batch_size(self, rows):
        pass

    def set_gradient_accumulation_boundary(self, is_boundary):
        pass


@pytest.fixture
def fused(monkeypatch):
    def attend(*tensors, segments, mode, **options):
        return fused_path(*tensors, segments_BL=segments, **options)

    # "meta" knows no autocast
    monkeypatch.setattr(torch, "autocast", lambda *_arguments, **_options: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _kind: False)
    monkeypatch.setattr(encoder, "attend", attend)
    first = {one.idea: one for one in reversed(choose.KERNELS)}
    monkeypatch.setattr(choose, "pick", lambda idea, *_: (first[idea], ""))


@pytest.mark.parametrize("kind", ["mlm", "rtd"])
def test_the_host_waits_once_a_step_at_its_end(kind, fused):
    if kind == "mlm":
        model = MlmModel(replace(CONFIG, conv_kernel=3), 190)
    else:
        model = RtdModel(CONFIG, CONFIG, ObjectiveConfig(kind="rtd"), sampling_seed=0)
    model.to(DEVICE)
    batches = [batch_of_packed_rows() for _ in range(2)]
    with Waits() as waits, Makes(waits.events):
        engine = Engine(model, waits.events)
        train_step(engine, batches, step=0, seed=1)  # makes the tables that steps share
        waits.events.clear()
        result = train_step(engine, batches, step=1, seed=1)
    assert waits.events == ["backward", "step", "backward", "read", "step"]
    assert result.updated and {"targets", "tokens"} <= result.sums.keys()


def test_without_zero_the_host_waits_for_all_gradients_at_once():
    """In fp32 it waited for each: 198 times a step of deberta-v3-base."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, device=DEVICE) for _ in range(20)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine = SimpleNamespace(optimizer=object(), module=model, micro_steps=0, skipped_steps=0,
                             step=lambda: None, zero_grad=lambda: None)
    with Waits() as waits:
        waits.number = 1.0  # each is finite
        assert update(engine) is Update.MADE
    assert len(waits.events) == 1


def test_what_waits_is_seen():
    there = torch.zeros(3, device=DEVICE)
    with Waits() as waits, Makes(waits.events):
        for wait in (lambda: there.sum().item(), lambda: bool(there[0] > 0), lambda: there.cpu(),
                     lambda: there.tolist(), lambda: torch.ones(3).to(DEVICE),
                     lambda: there.copy_(torch.ones(3)), lambda: there.new_tensor([1.0])):
            wait()
        assert len(waits.events) == 7, waits.events
        torch.ones(3).to(DEVICE, non_blocking=True)
        torch.full((), 3.0, device=DEVICE)
        assert len(waits.events) == 7


# ------------------------------------------------------------------------------ captures


class Captures(Waits):
    """An operator that a CUDA graph cannot hold is an error; `shapes` are those of all others."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(function, types, args, kwargs)
        assert not self.events, f"{function} cannot be captured: {self.events}"
        self.shapes.append((str(function), [tuple(x.shape) for x in tree_iter(out)
                                            if isinstance(x, torch.Tensor)]))
        return out


def captured(kind: str, checkpointing: str = "none", frozen: str = "-") -> list:
    """Return the shapes of every operator in the passes of batches with 12, 4 and 0 targets."""
    if kind == "v1":
        model = MlmModel(replace(CONFIG, position_buckets=0, share_position_projections=False,
                                 relative_norm=False), 190)
    elif kind == "v2":
        model = MlmModel(replace(CONFIG, conv_kernel=3), 190)
    elif kind == "rtd_cached":
        model = CachedRtdModel(CONFIG, 50.0)
    else:
        settings = ObjectiveConfig(kind="rtd", embedding_sharing=kind, final_temperature=0.5)
        model = RtdModel(CONFIG, CONFIG, settings, sampling_seed=0)
    for name, parameter in model.to(DEVICE).named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    for module in model.modules():
        if isinstance(module, encoder.Encoder):
            module.checkpointing = checkpointing
    made = passes.Passes(SimpleNamespace(module=model, device=DEVICE, holds=[]), "auto")
    found = []

    def capture(function):
        with Waits():  # warm-up: makes the tables that passes share
            function()
        with Captures() as capture, Makes(capture.events):
            results = function()
        found.append(capture.shapes)
        return results, lambda: None

    with patch.object(passes, "capture", capture):
        for targets in (12, 4, 0):
            made._graphs.clear()
            columns = [max(0, targets - number) for number in range(3)]
            made.run_pass(batch_of_packed_rows(targets, columns, slots=12), seed=7)
    return found


@pytest.mark.parametrize("kind, more", [
    ("v1", {}), ("v2", {}), ("gdes", {}), ("es", {}), ("nes", {}), ("rtd_cached", {}),
    ("gdes", {"checkpointing": "full"}), ("v2", {"checkpointing": "selective"}),
    ("gdes", {"frozen": "generator."})])
def test_passes_can_be_captured_and_have_one_shape(kind, more, fused):
    first, *others = captured(kind, **more)
    assert len(first) > 300 and all(other == first for other in others)


@pytest.mark.parametrize("kind", ["v2", "gdes"])
def test_no_pass_asks_for_a_kernel_that_the_start_has_not_checked(kind, fused, monkeypatch):
    """Dropout's request was another one, so that the first step checked its kernel again."""
    asked, pick = [], choose.pick
    monkeypatch.setattr(choose, "pick", lambda idea, request, *_: (
        asked.append((idea, request)) or pick(idea)))
    captured(kind)
    of_passes = {one for one in asked if one[0] != "projections"}  # which has no check
    asked.clear()
    choose.choices(CONFIG, DEVICE, torch.float32, torch.float32)
    assert len(of_passes) == 5 and of_passes <= {*asked}


PLACES = [(encoder, "gather_columns"), (encoder, "attend"), (encoder, "pass_keys"),
          (encoder.Attention, "project"), (encoder.Layer, "_block"),
          (encoder.Encoder, "relative_table"), (TokenEmbedding, "forward"),
          (InputBlock, "add_positions"), (MaskedLmHead, "transformed"),
          (ReplacedTokenHead, "forward"), (rtd, "token_uniforms"), (rtd, "replace_targets")]


@pytest.mark.parametrize("owner, name", PLACES, ids=lambda place: getattr(place, "__name__", place))
def test_a_number_that_is_read_anywhere_is_caught(owner, name, fused, monkeypatch):
    function = getattr(owner, name)

    def reads(*arguments, **named):
        out = function(*arguments, **named)
        next(x for x in tree_iter(out) if isinstance(x, torch.Tensor)).sum().item()
        return out

    monkeypatch.setattr(owner, name, reads)
    with pytest.raises(AssertionError, match="_local_scalar_dense.* cannot be captured"):
        captured("gdes")
