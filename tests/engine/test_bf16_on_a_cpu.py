"""16-bit weights on a CPU: how wrong torch's sums make the gradients, and what to do instead."""

from contextlib import nullcontext

import numpy as np
import pytest
import rank_helpers
import torch
from deepspeed import get_accelerator
from launching import ROOT, make_run, options_of

from deberta_ds.base.errors import ConfigError
from deberta_ds.config import run_config
from deberta_ds.data.rows import Row, collate
from deberta_ds.engine import ds_config, engine
from deberta_ds.model import cpu
from deberta_ds.model.backbone import init_parameters
from deberta_ds.objectives.build import build_model

ROWS, LENGTH, VOCABULARY = 64, 128, 640


@pytest.fixture(scope="module")
def gradients():
    """{kind: {parameter: gradient}} of one micro-batch of 8,192 tokens."""
    run, _ = run_config.load(ROOT / "launch/runs/demo.toml", [
        f"--model.vocab_size={VOCABULARY}", "--model.hidden_size=32", "--model.num_heads=2",
        "--model.intermediate_size=64", "--model.num_layers=4", "--objective.kind=rtd"])
    random = np.random.default_rng(0)
    rows = []
    for number in range(ROWS):
        ids = np.minimum(random.zipf(1.3, LENGTH) + 3, VOCABULARY - 2).astype(np.int64)
        labels = np.where(random.random(LENGTH) < 0.15, ids, -100)
        rows.append(Row(number, np.where(labels >= 0, VOCABULARY - 1, ids), labels,
                        np.ones(LENGTH, np.int32), np.arange(LENGTH, dtype=np.int32)))
    batch = collate(rows)
    norm = {"targets": torch.tensor(float(batch.num_targets)),
            "tokens": torch.tensor(float(batch.num_tokens))}

    def backward(weights: torch.dtype, autocast: bool) -> dict[str, torch.Tensor]:
        model = build_model(run, VOCABULARY - 1).eval()
        init_parameters(model, 0.05, 0, lambda parameter: nullcontext())
        model.to(weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, *_ = model(batch, norm)
        loss.backward()
        return {name: p.grad.double() for name, p in model.named_parameters()}

    return {"fp32": backward(torch.float32, False), "bf16": backward(torch.bfloat16, False),
            "autocast": backward(torch.float32, True)}


def error(gradients: dict, kind: str, names=None) -> float:
    """Return the relative error of the gradient over some parameters, all by default."""
    names = names or gradients["fp32"].keys()
    difference = [gradients[kind][name] - gradients["fp32"][name] for name in names]
    return (sum(d.square().sum() for d in difference)
            / sum(gradients["fp32"][name].square().sum() for name in names)).sqrt().item()


def test_autocast_keeps_the_gradients_that_bf16_weights_lose(gradients):
    biases = [name for name in gradients["fp32"] if name.endswith("norm.bias")]
    assert error(gradients, "bf16", biases) > 0.1  # if not, torch has fixed it: drop the warning
    assert error(gradients, "autocast", biases) < 0.02
    assert error(gradients, "autocast") < 0.01 < 0.04 < error(gradients, "bf16")


@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize(("name", "weights", "matmuls"), [
    ("zero1_bf16", True, True), ("zero2_fp16", True, False), ("zero1_fp32", False, False),
    ("zero1_autocast_cpu", False, True)])
def test_16_bits_without_a_gpu_and_bf16_matmuls_without_units_for_them_are_warned_of(
        name, weights, matmuls, has_bf16, monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    monkeypatch.setattr(cpu, "has_bf16", lambda: has_bf16)
    values = ds_config.load(ROOT / f"ds_configs/{name}.json")
    lines = engine.check_machine(values, name)
    assert any("weights without a GPU" in line for line in lines) == weights
    assert any("without bf16 units" in line for line in lines) == (matmuls and not has_bf16)
    better = "zero1_autocast_cpu" if has_bf16 else "zero1_fp32"
    assert all(f"use ds_configs/{better}.json" in line for line in lines)
    monkeypatch.setattr(engine, "device_type", lambda: "cuda")
    assert engine.check_machine(values, name) == []


@pytest.mark.multi
def test_a_warning_about_the_machine_is_in_the_log_of_a_run(tmp_path):
    ds = ROOT / "ds_configs/zero1_bf16.json"
    text = rank_helpers.run(1, [*options_of(make_run(tmp_path), ds), "--train.stop_after=1"],
                            tmp_path / "log")
    lines = engine.check_machine(ds_config.load(ds), "ds.json")
    assert lines and all(text.count(line) == 1 for line in lines)


def test_fp16_where_the_processor_has_none_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: None)  # as DeepSpeed says
    monkeypatch.setattr(cpu, "has_bf16", lambda: True)
    values = ds_config.load(ROOT / "ds_configs/zero2_fp16.json")
    with pytest.raises(ConfigError, match="fp16.enabled: .* no fp16; use .*zero1_autocast_cpu"):
        engine.check_machine(values, "ds.json")


def test_gradients_of_every_linear_layer_travel_in_16_bits():
    """DeepSpeed compares classes, so a subclass of Linear must be named to it."""
    run, _ = run_config.load(ROOT / "launch/runs/demo.toml")
    used = {type(module) for module in build_model(run, None).modules()
            if isinstance(module, torch.nn.Linear)}
    values = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    on = engine.dict_for_deepspeed(ds_config.DeepSpeedConfig(**values))
    named = set(on["torch_autocast"].pop("lower_precision_safe_modules"))
    assert on == values
    named |= {"torch.nn.modules.linear.Linear"} if "torch.nn.Linear" in named else set()
    assert {f"{kind.__module__}.{kind.__name__}" for kind in used} <= named
    values = {"bf16": {"enabled": True}}
    assert engine.dict_for_deepspeed(ds_config.DeepSpeedConfig(**values)) == values
