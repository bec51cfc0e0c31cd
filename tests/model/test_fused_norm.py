"""What lies between a layer's products, in Triton's interpreter: torch's numbers, bit for bit its
dropout; and a whole model through all kernels."""

import pytest

pytest.importorskip("triton", reason="the fused kernels need the triton package")

import torch  # noqa: E402
from test_attention_fused import run_worker  # noqa: E402

from deberta_ds.model.dropout import (  # noqa: E402
    LinearGelu,
    ResidualNorm,
    fused_kernel,
)

TOLERANCES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def test_interpreter_equals_torch():
    *lines, last = run_worker("fused_norm.py", timeout=300)
    for line in lines:
        print(line)
        assert line["error"] < TOLERANCES[line["dtype"]] and line["repeats"] and line["same_mask"]
    assert len(lines) == 8
    assert last["poisoned"] == [True, True] and last["empty"]


def test_a_model_through_all_kernels_is_the_cpus():
    """Dropout on: the elements that are dropped are the same, and so are losses and gradients."""
    for line in run_worker("fused_model.py", timeout=300):
        print(line)
        assert line["error"] < (5e-2 if "autocast" in line["name"] else 2e-5), line["name"]


def test_nothing_changes_on_a_cpu(monkeypatch):
    """Without the interpreter, CPU tensors never meet the kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden = torch.randn(5, 24)
    assert fused_kernel("LayerNorm", hidden.dtype, hidden) is None
    layer = LinearGelu(24, 40)
    right = torch.nn.functional.gelu(torch.nn.functional.linear(hidden, layer.weight, layer.bias))
    assert torch.equal(layer(hidden), right)
    norm = ResidualNorm(24, 1e-7, 0.0).eval()
    assert torch.equal(norm(hidden, hidden)[0], torch.nn.LayerNorm.forward(norm, hidden + hidden))
