"""Training and evaluation on fake CUDA tensors: every branch of a GPU runs, without one.

A tensor that is made on the CPU, a number that the host reads, a gradient of another shape or dtype
is an error. Fake tensors have no data, so the fused kernels' results are those of their fake
operators. Needs a CUDA build of torch, not a card: other builds have no graph of CUDA tensors.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch

if not torch.version.cuda:
    pytest.skip("needs a CUDA build of torch", allow_module_level=True)
pytest.importorskip("triton", reason="the fused kernels need the triton package")

from test_determinism import batch_of_packed_rows  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.autograd.function import FunctionCtx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402

from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig  # noqa: E402
from deberta_ds.finetuning.features import FeatureBatch  # noqa: E402
from deberta_ds.finetuning.heads import TaskModel  # noqa: E402
from deberta_ds.model import (
    choose,  # noqa: E402
    linear_cross_entropy,  # noqa: E402  # noqa: E402
)
from deberta_ds.model.backbone import Backbone  # noqa: E402
from deberta_ds.model.encoder import Encoder  # noqa: E402
from deberta_ds.model.kernels import checks  # noqa: E402
from deberta_ds.objectives.mlm import MlmModel  # noqa: E402
from deberta_ds.objectives.rtd import RtdModel  # noqa: E402
from deberta_ds.objectives.rtd_cached import CachedRtdModel  # noqa: E402
from deberta_ds.planner.activations import first_ids  # noqa: E402
from deberta_ds.tasks.settings import Settings  # noqa: E402  # noqa: E402
from deberta_ds.tasks.task import HeadKind, task_named  # noqa: E402  # noqa: E402

SHAPE = dict(vocab_size=208, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128,
             max_position=64, position_buckets=8)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
              "autocast": torch.float32}


# ------------------------------------------------------------------------------ a graph's walk


def gradients(root: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradient of a scalar for each leaf: what the C++ engine does on a GPU alone."""
    waiting, stack = {root.grad_fn: 0}, [root.grad_fn]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None:
                stack += [node] if node not in waiting else []
                waiting[node] = waiting.get(node, 0) + 1
    found, sums, ready = {}, {root.grad_fn: {0: torch.ones_like(root)}}, [root.grad_fn]
    while ready:
        node = ready.pop()
        given = sums.pop(node, {})
        if hasattr(node, "variable"):
            found[node.variable] = given[0]
            continue
        for (other, number), grad in zip(*_backward(node, given), strict=True):
            if grad is not None:
                _add(sums.setdefault(other, {}), other, number, grad, node)
            waiting[other] -= 1
            ready += [other] if not waiting[other] else []
    return found


def _backward(node, given: dict[int, torch.Tensor]) -> tuple[list, list]:
    """Return the edges of a node to others, and the gradients that go along them."""
    grads = [given.get(number) for number in range(len(node._input_metadata))]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    with torch.no_grad():
        if not hasattr(node, "needs_input_grad"):  # one of torch's own
            made = node(*grads)
            made = made if isinstance(made, tuple) else (made,)
            pairs = zip(node.next_functions, made, strict=True)
            return edges, [grad for (other, _), grad in pairs if other is not None]
        if not getattr(node, "none_stays", False):
            grads = [torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)
                     if grad is None else grad
                     for grad, like in zip(grads, node._input_metadata, strict=True)]
        made = node.apply(*grads)
    made = made if isinstance(made, tuple) else (made,)
    return edges, [grad for grad, wanted in zip(made, node.needs_input_grad, strict=True) if wanted]


def _add(sums, node, number: int, grad: torch.Tensor, maker) -> None:
    """Add a gradient to that of an output of `node`, which it must fit."""
    like = node.variable if hasattr(node, "variable") else node._input_metadata[number]
    if not hasattr(maker, "needs_input_grad"):  # the engine does so, for torch's own alone
        grad = grad.sum_to_size(tuple(like.shape)).to(like.dtype)
    assert (grad.device, tuple(grad.shape), grad.dtype) == (
        like.device, tuple(like.shape), like.dtype), (maker.name(), node.name())
    sums[number] = sums[number] + grad if number in sums else grad


# ------------------------------------------------------------------------------ a card


class OneDevice(TorchDispatchMode):
    """Rejects operators with tensors of two devices: for an index on the CPU a GPU waits, and fake
    operators of ours do not look.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        kinds = {x.device.type for x in tree_iter((args, kwargs, out))
                 if isinstance(x, torch.Tensor) and x.ndim}
        assert len(kinds) < 2 or function.overloadpacket.__name__ == "_to_copy", function
        return out


@pytest.fixture(autouse=True)
def fake_card(monkeypatch):
    """An H100 on which all kernels pass their checks; the host's own samples are numbers."""
    sample = torch.randint

    def randint(*arguments, **named):
        with unset_fake_temporarily() if "device" not in named else contextlib.nullcontext():
            found = sample(*arguments, **named)
            return found if "device" in named or found.ndim else found.item()

    stand_ins = ((torch, "randint", randint),
                 (torch.autograd, "grad", lambda root, leaf: (gradients(root)[leaf],)),
                 (torch.cuda, "device", lambda _device: contextlib.nullcontext()),
                 (torch.cuda, "get_device_capability", lambda _device=None: (9, 0)),
                 (torch.cuda, "is_bf16_supported", lambda: True),
                 (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
                 (torch._C, "_current_graph_task_id", lambda: 1),  # for checkpoints
                 (FunctionCtx, "set_materialize_grads",
                  lambda node, value: setattr(node, "none_stays", not value)),
                 # The one wait, documented there.
                 (linear_cross_entropy, "_sample", first_ids),
                 # Of numbers below minlength, so its shape is known.
                 (torch, "bincount", lambda group, minlength: group.new_zeros(minlength)),
                 (checks, "check", lambda *_arguments: "fake"))
    for stand_in in stand_ins:
        monkeypatch.setattr(*stand_in)
    monkeypatch.delenv(choose.OFF, raising=False)
    choose.pick.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), OneDevice():
        yield
    choose.pick.cache_clear()


def built(make: Callable[[], torch.nn.Module], precision: str) -> torch.nn.Module:
    """Return a model on the card, in the dtype of a precision."""
    torch.set_default_dtype(PRECISIONS[precision])
    try:
        with torch.device("cuda"):
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def check(model: torch.nn.Module, loss: torch.Tensor) -> None:
    """Assert that every parameter has a gradient; `gradients` has looked at each."""
    assert (loss.device.type, loss.dtype) == ("cuda", torch.float32)
    found = gradients(loss)
    assert [name for name, one in model.named_parameters() if one not in found] == []


# ------------------------------------------------------------------------------ models


def pretraining_model(kind: str, config: ModelConfig) -> torch.nn.Module:
    if kind == "mlm":
        return MlmModel(replace(config, conv_kernel=3), 190)
    if kind == "rtd_cached":
        return CachedRtdModel(config, 50.0)
    objective = ObjectiveConfig(kind="rtd", embedding_sharing=kind)
    return RtdModel(config, config, objective, sampling_seed=0, valid_vocab=190)


@pytest.mark.parametrize(("kind", "checkpointing"), [
    *product(("mlm", "gdes", "es", "nes", "rtd_cached"), ("none",)),
    *product(("mlm", "gdes"), ("full", "selective"))])
@pytest.mark.parametrize(("precision", "attention"), [
    ("fp32", "dense"), *product(("bf16", "fp16", "autocast"), ("fused", "dense"))])
def test_gradients_of_pretraining(kind, precision, checkpointing, attention):
    config = ModelConfig(**SHAPE, attention=attention)
    model = built(lambda: pretraining_model(kind, config), precision)
    for module in model.modules():
        if isinstance(module, Encoder):
            module.checkpointing = checkpointing
    with unset_fake_temporarily():
        batch = batch_of_packed_rows()
    batch = batch._map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
    norm = dict.fromkeys(("targets", "tokens"), torch.ones((), device="cuda"))
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
        loss, sums, _ = model(batch, norm)
    assert all(value.device.type == "cuda" for value in sums.values())
    check(model, loss)


EXAMPLES, LENGTH, SPANS, LABELS = 2, 24, 4, 3


def features(head: HeadKind) -> FeatureBatch:
    """Return a batch of two examples with two spans each, without data."""
    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="cuda")

    rows = EXAMPLES if head == "words" else SPANS
    slots = 2 * rows if head == "answer" else SPANS
    labels = torch.int64 if head != "regress" else torch.float32
    return FeatureBatch(
        input_ids_RL=integers(rows, LENGTH), segments_RL=integers(rows, LENGTH).int(),
        example_R=integers(rows), span_row_S=integers(SPANS), span_slot_S=integers(SPANS),
        span_start_S=integers(SPANS), span_end_S=integers(SPANS), slot_example_K=integers(slots),
        labels_E=integers(EXAMPLES, *[LABELS] * (head == "multilabel")).to(labels),
        slot_labels_K=integers(slots).float(), weights_E=integers(EXAMPLES).float(),
        characters_RL2=integers(rows, LENGTH, 2).int(), longest_span=5, rows=(0, 1))


@pytest.mark.parametrize(("head", "precision", "sift", "truncation"), [
    *product(get_args(HeadKind), PRECISIONS, (0.0,), ("first",)),
    *product(get_args(HeadKind), ("bf16",), (1.0,), ("first",)),
    ("classify", "bf16", 0.0, "windows_max")])
def test_gradients_of_fine_tuning(head, precision, sift, truncation):
    labels = ("score",) if head == "regress" else ("a", "b", "c")
    task = replace(task_named("RTE"), head=head, labels=labels, values=())
    config, settings = ModelConfig(**SHAPE), Settings(sift_weight=sift, truncation=truncation)
    model = built(lambda: TaskModel(task, Backbone(config), settings), precision)
    batch = features(head)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
        out = model(batch)
        check(model, out.loss_sum)
        with torch.no_grad():
            assert model.eval()(batch).scores.device.type == "cuda"
