"""Kernels: what runs where, and why, as the documentation says it; and how one is checked."""

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import temporary_directory
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model import choose
from deberta_ds.model.choose import Request, load, pick
from deberta_ds.model.encoder import Trunk
from deberta_ds.model.kernels import checks

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
        monkeypatch.setattr(checks, "check", check)
        choose.pick.cache_clear()

    pretend()
    yield pretend
    choose.pick.cache_clear()


def request(idea: str, device=GPU, **more) -> Request:
    return Request(device, (HALF,), 64 if idea == "attention" else 768)._replace(**more)


@pytest.mark.parametrize("idea", IDEAS)
def test_on_a_cpu_torchs_operators_run(card, idea):
    kernel, why = pick(idea, request(idea, CPU))
    assert kernel.name == {
        "attention": "tiled", "cross-entropy": "chunked", "dropout": "hash",
        "projections": "separate"}.get(idea, "torch")
    assert why == "not fused: no GPU"


def test_on_a_card_triton_runs_or_nothing_does(card):
    """A run whose kernel failed went on, 6 times slower, and another rank's word was lost; one that
    was asked for by name was not checked.
    """
    for idea in IDEAS:
        kernel, why = pick(idea, request(idea))
        assert (kernel.name, why) == ("fused", "" if idea == "projections" else "checked")
    assert pick("attention", request("attention"), "fused")[1] == "attention = 'fused'; checked"
    card(passed=False)
    for idea, remedy in zip(IDEAS[:4], ("--model.attention=dense", "--model.cross_entropy=chunked",
                                        "set DEBERTA_DS_KERNELS=0", "DEBERTA_DS_KERNELS=0"),
                            strict=True):
        for mode in ("auto", "fused"):
            with pytest.raises(UserError, match="(?s)the fused kernel fails its check on [^ ]+, "
                                                f"cuda:0: off by 1.0\n.*{remedy}"):
                pick(idea, request(idea), mode)
    assert pick("attention", request("attention"), "dense")[0].name == "dense"


@pytest.mark.parametrize("idea, more, reason", [
    ("attention", {"size": 160}, "heads of 160 are larger than 128"),
    ("attention", {"dtypes": (SINGLE,)}, "it takes bf16 and fp16, not fp32"),
    ("attention", {"obstacle": "more than a launch has"}, "more than a launch has"),
    ("cross-entropy", {"dtypes": (SINGLE,)}, "it takes bf16 and fp16, not fp32"),
    ("cross-entropy", {"size": 100}, "hidden size 100 is no multiple of 16"),
    ("LayerNorm", {"size": 9000}, "hidden size 9000 is larger than 8192"),
    ("LayerNorm", {"dtypes": (HALF, torch.float64)}, "it takes fp32, bf16 and fp16, not fp64"),
    ("projections", {"obstacle": "ZeRO-3"}, "ZeRO-3")])
def test_what_cannot_run_says_why(card, caplog, idea, more, reason):
    """And a GPU that goes without a Triton kernel is a warning."""
    with caplog.at_level("INFO", "deberta_ds"):
        for device in (CPU, GPU):
            kernel, why = pick(idea, request(idea, device, **more))
    assert kernel.name != "fused" and f": {reason}" in why
    loud = [f"{one.levelname} {one.message}" for one in caplog.records]
    assert len(loud) == (idea != "projections")
    assert all(line.startswith(f"WARNING WARNING: {idea} runs as {kernel.name}, several times "
                               "slower than fused: ") and reason in line for line in loud)
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
    with pytest.raises(UserError, match="none of fused, tiled, dense, reference; use 'auto'"):
        pick("attention", request("attention", CPU), "flash")


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
            f"{'only by name' if one.name == 'reference' else where[one.device]} | "
            f"{choose.names_of(one.dtypes) if one.dtypes else 'any'}" for one in choose.KERNELS]
    assert [line.rsplit(" | ", 1)[0] for line in text.splitlines()
            if line.startswith(tuple(f"| {idea} | `" for idea in IDEAS))] == rows


def test_a_kernel_without_a_position_term_gives_way(card, monkeypatch):
    fused, *others = choose.KERNELS
    monkeypatch.setattr(choose, "KERNELS", (fused._replace(terms=1), *others))
    _, why = pick("attention", request("attention", terms=(True, True)))
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


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Function that checks under a stand-in for Python, a shell script."""
    pytest.importorskip("triton")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(checks, "c_compiler", lambda: "")
    monkeypatch.setattr(checks, "_MOST_SECONDS", 1)
    script = tmp_path / "python"

    def check(commands: str, *sources: Path) -> str:
        script.write_text(f"#!/bin/sh\ncat > /dev/null\necho run >> {tmp_path}/runs\n{commands}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setattr(checks, "SOURCES", sources)
        return checks.check(Request(CPU, (HALF,), 16), "its place")

    checks.check.cache_clear()
    yield check
    checks.check.cache_clear()


@pytest.mark.parametrize(("commands", "words"), [
    ("echo misaligned >&2; kill -SEGV $$", "its process ends with SIGSEGV\nmisaligned"),
    ("seq 300 >&2; echo fatal error: Python.h >&2; exit 1", "299\n300\nfatal error: Python.h"),
    ("exec sleep 30", "it does not end in 1 s"),
    ("echo '[0.1, \"keys\"]'", "keys off by 1.0e-01 where 1.5e-02 is allowed"),
    ("echo '[NaN, \"keys\"]'", "keys off by nan where")])
def test_a_check_that_does_not_pass_says_why_in_full(check, tmp_path, commands, words):
    """Of a compiler's error 200 characters were shown, and a fault of the GPU ended the run."""
    with pytest.raises(UserError) as refused:
        check(commands)
    assert words in str(refused.value)
    assert not list(tmp_path.rglob("kernels"))


def test_a_pass_is_kept_on_this_node(check, tmp_path):
    passing = "echo a line of a library; echo '[0.001, \"keys\"]'"
    assert check(passing).endswith("largest error 1.0e-03") and check("exit 1") == check(passing)
    checks.check.cache_clear()  # another process
    assert "kept in " in check("exit 1")
    for text, commands in (("old", passing), ("new", "exit 1")):
        (tmp_path / "kernel.py").write_text(text)  # a change of it asks again
        checks.check.cache_clear()
        with nullcontext() if text == "old" else pytest.raises(UserError, match="exit code 1"):
            check(commands, tmp_path / "kernel.py")


@pytest.mark.parametrize(("tools", "header", "words"), [
    ((), True, "no C compiler (apt install gcc"), (("gcc",), False, "(apt install python3-dev)"),
    (("clang",), True, "")])
def test_what_triton_needs_is_looked_for(monkeypatch, tmp_path, tools, header, words):
    """`apt install python3-venv make gcc` brings no Python.h, and every kernel fell back."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name if name in tools else None)
    monkeypatch.setattr("sysconfig.get_path", lambda *names: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    with pytest.raises(UserError, match=re.escape(words)) if words else nullcontext():
        assert checks.c_compiler() == "clang"


def test_what_triton_compiles_stays_on_this_node(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for given, wanted in ((None, str(temporary_directory() / "triton")), ("own", "own")):
        if given:
            monkeypatch.setenv("TRITON_CACHE_DIR", given)
        assert checks.keep_on_this_node() == checks.os.environ["TRITON_CACHE_DIR"] == wanted
    assert temporary_directory().stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: 12345)
    (tmp_path / "deberta_ds-12345").mkdir()
    with pytest.raises(UserError, match="deberta_ds-12345 belongs to another user"):
        checks.keep_on_this_node()
