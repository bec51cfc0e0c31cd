"""The table of kernels: what runs where, why, and that the documentation says the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model import choose
from deberta_ds.model.choose import Request, load, pick
from deberta_ds.model.embeddings import loss_function
from deberta_ds.model.encoder import Trunk
from deberta_ds.model.kernels import kernel_check

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HALF, SINGLE = torch.bfloat16, torch.float32
IDEAS = ("attention", "cross-entropy", "LayerNorm", "GELU", "dropout", "projections")
SMALL = ModelConfig(vocab_size=200, hidden_size=32, num_layers=2, num_heads=2,
                    intermediate_size=64, max_position=64, position_buckets=8)


@pytest.fixture
def card(monkeypatch):
    """Function that pretends to have a card of some capability, whose checks end as told."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(choose.OFF, raising=False)

    def pretend(capability=(9, 0), passed=True):
        def check(*_arguments) -> str:
            if passed:
                return "checked"
            raise UserError("off by 1.0")

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(kernel_check, "check", check)
        choose.pick.cache_clear()

    pretend()
    yield pretend
    choose.pick.cache_clear()


def request(idea: str, device=GPU, dtype=HALF, **more) -> Request:
    size = 64 if idea == "attention" else 768
    state = dtype if idea in ("LayerNorm", "GELU") else None
    return Request(device, dtype, size, state)._replace(**more)


@pytest.mark.parametrize("idea", IDEAS)
def test_on_a_cpu_torchs_operators_run(card, idea):
    kernel, why = pick(idea, request(idea, CPU))
    assert kernel.name == {
        "attention": "tiled", "cross-entropy": "chunked", "dropout": "hash",
        "projections": "separate"}.get(idea, "torch")
    assert why == "not fused: no GPU"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"size": 160}, "heads of 160 are larger than 128"), ({"obstacle": "too large"}, "too large"),
    ({"dtype": SINGLE}, "it takes bf16 and fp16, not fp32")])
def test_a_gpu_that_goes_without_the_kernels_is_a_warning(card, caplog, changes, reason):
    with caplog.at_level("INFO", "deberta_ds"):
        for device in (CPU, GPU):
            pick("attention", request("attention", device, **changes))
    loud, = caplog.records
    assert loud.levelname == "WARNING"
    assert reason in loud.message and "runs as dense, several times slower" in loud.message


def test_on_a_card_triton_runs_or_nothing_does(card):
    """A run whose kernel failed went on, 6 times slower, and another rank's word was lost."""
    for idea in IDEAS:
        kernel, why = pick(idea, request(idea))
        assert (kernel.name, why) == ("fused", "" if idea == "projections" else "checked")
    card(passed=False)
    for idea, remedy in zip(IDEAS[:4], ("--model.attention=dense", "--model.cross_entropy=chunked",
                                        "set DEBERTA_DS_KERNELS=0", "DEBERTA_DS_KERNELS=0"),
                            strict=True):
        with pytest.raises(UserError, match="(?s)the fused kernel fails its check on [^ ]+, "
                                            f"cuda:0: off by 1.0\n.*{remedy}"):
            pick(idea, request(idea))
    assert pick("attention", request("attention"), "dense")[0].name == "dense"


@pytest.mark.parametrize("idea, more, reason", [
    ("attention", {"size": 160}, "heads of 160 are larger than 128"),
    ("attention", {"dtype": SINGLE}, "it takes bf16 and fp16, not fp32"),
    ("attention", {"obstacle": "more than a launch has"}, "more than a launch has"),
    ("cross-entropy", {"dtype": SINGLE}, "it takes bf16 and fp16, not fp32"),
    ("cross-entropy", {"size": 100}, "hidden size 100 is no multiple of 16"),
    ("LayerNorm", {"size": 9000}, "hidden size 9000 is larger than 8192"),
    ("GELU", {"dtype": torch.float64}, "it takes fp32, bf16 and fp16, not fp64"),
    ("projections", {"obstacle": "ZeRO-3"}, "ZeRO-3")])
def test_what_cannot_run_says_why(card, idea, more, reason):
    kernel, why = pick(idea, request(idea, **more))
    assert kernel.name != "fused" and f": {reason}" in why
    if idea in choose.OPTIONS:
        with pytest.raises(UserError, match=f"= 'fused' cannot run here: {reason}; use 'auto' or "):
            pick(idea, request(idea, **more), "fused")


def test_an_old_card_or_a_variable_rules_out_triton(card, monkeypatch):
    card(capability=(7, 5))
    assert "compute capability 8.0" in pick("LayerNorm", request("LayerNorm"))[1]
    card()
    monkeypatch.setenv("DEBERTA_DS_KERNELS", "0")
    assert pick("GELU", request("GELU"))[1] == "not fused: DEBERTA_DS_KERNELS=0"


def test_kernels_by_name(card):
    for mode in ("dense", "reference", "tiled"):
        kernel, why = pick("attention", request("attention", CPU), mode)
        assert (kernel.name, why) == (mode, f"attention = '{mode}'")
    with pytest.raises(UserError, match="choose one of auto, fused, tiled, reference, dense"):
        pick("attention", request("attention", CPU), "flash")
    with pytest.raises(UserError, match="cross_entropy = 'fused' cannot run here: no GPU"):
        loss_function("fused", torch.zeros(1, 16), torch.zeros(8, 16))


def test_everything_that_runs_here_can_be_loaded(card):
    for kernel in choose.KERNELS:
        if not kernel.check:
            assert load(kernel.place) is None or callable(load(kernel.place))


def test_choices_of_a_model_in_a_line(card):
    found = choose.choices(SMALL, CPU, SINGLE, HALF)
    assert tuple(found) == IDEAS
    assert found["attention"] == {"kernel": "tiled", "why": "not fused: no GPU"}
    assert choose.in_a_line(found) == (
        "attention tiled, cross-entropy chunked, LayerNorm torch, GELU torch, dropout hash, "
        "projections separate (not fused: no GPU)")
    named = choose.choices(replace(SMALL, attention="reference"), CPU, SINGLE, SINGLE)
    assert named["attention"] == {"kernel": "reference", "why": "attention = 'reference'"}


def test_the_documentation_has_this_table():
    """But for the last column, which says in words what a kernel needs."""
    text = (Path(__file__).parents[2] / "docs/explanation/attention.md").read_text()
    where = {"cuda": "GPU", "cpu": "CPU", "": "everywhere else"}
    rows = [f"| {one.idea} | `{one.name}` | "
            f"{'only by name' if one.by_name_only else where[one.device]} | "
            f"{choose.names_of(one.dtypes) if one.dtypes else 'any'}" for one in choose.KERNELS]
    assert [line.rsplit(" | ", 1)[0] for line in text.splitlines()
            if line.startswith(tuple(f"| {idea} | `" for idea in IDEAS))] == rows


def test_a_kernel_without_a_position_term_gives_way(card, monkeypatch):
    fused, *others = choose.KERNELS
    monkeypatch.setattr(choose, "KERNELS", (fused._replace(terms=1), *others))
    _, why = pick("attention", request("attention"))
    assert why == "not fused: it lacks a position term; not tiled: it is for cpu"


@pytest.mark.slow
def test_torch_compile_takes_a_trunk_through_the_kernels_as_one_graph(monkeypatch):
    """It broke where a kernel was looked up, a seed was read, and a table was made by NumPy."""
    pytest.importorskip("triton", reason="the fused kernels need the triton package")
    from benchmarks.host_time import Nothing, triton_kernels

    for module, name in triton_kernels():
        monkeypatch.setattr(module, name, Nothing())
    first = {one.idea: one for one in reversed(choose.KERNELS)}
    monkeypatch.setattr(choose, "pick", lambda idea, *_: (first[idea], ""))
    trunk = Trunk(replace(SMALL, num_layers=1)).bfloat16().train()
    for parameter in trunk.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    inputs = torch.randn(2, 40, 32, dtype=torch.bfloat16), torch.ones(2, 40, dtype=torch.int32)
    trunk(*inputs)  # kernels are loaded in the first pass
    compiled = torch.compile(trunk, fullgraph=True, backend="aot_eager")
    compiled(*inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in trunk.parameters())
