"""What lies between a layer's products, in Triton's interpreter: torch's numbers, bit for bit its
dropout; and a whole model through all kernels."""

import pytest

pytest.importorskip("triton", reason="the fused kernels need the triton package")

import torch  # noqa: E402
from test_attention_fused import run_worker  # noqa: E402

from deberta_ds.model import elementwise, kernel_check  # noqa: E402
from deberta_ds.model.dropout import LinearGelu, ResidualNorm  # noqa: E402

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


@pytest.fixture
def card(monkeypatch):
    """Function that asks for the kernels on a card that is not there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    elementwise._kernels.cache_clear()

    def ask(update=torch.bfloat16, hidden=torch.bfloat16, size=768, capability=(9, 0), passed=True):
        verdict = kernel_check.Verdict(passed, "checked" if passed else "GELU off by 1.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(kernel_check, "check", lambda *arguments: verdict)
        elementwise._kernels.cache_clear()
        return elementwise._kernels(torch.device("cuda", 0), update, hidden, size) is not None

    yield ask
    elementwise._kernels.cache_clear()


def test_choice_of_kernels(card, caplog, monkeypatch):
    caplog.set_level("INFO", logger="deberta_ds")
    assert card() and card(hidden=torch.float32) and card(torch.float32, torch.float32)
    for case in ({"size": 9000}, {"capability": (7, 5)}, {"passed": False},
                 {"update": torch.float64}):
        assert not card(**case)
    monkeypatch.setenv("DEBERTA_DS_NATIVE", "0")
    assert not card()
    for reason in ("more than 8192", "compute capability 8.0", "GELU off by 1.0", "float64",
                   "DEBERTA_DS_NATIVE=0"):
        assert reason in caplog.text


def test_nothing_changes_on_a_cpu(monkeypatch):
    """Without the interpreter, CPU tensors never meet the kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden = torch.randn(5, 24)
    assert elementwise.kernels(hidden.dtype, hidden) is None
    layer = LinearGelu(24, 40)
    right = torch.nn.functional.gelu(torch.nn.functional.linear(hidden, layer.weight, layer.bias))
    assert torch.equal(layer(hidden), right)
    norm = ResidualNorm(24, 1e-7, 0.0).eval()
    assert torch.equal(norm(hidden, hidden)[0], torch.nn.LayerNorm.forward(norm, hidden + hidden))
