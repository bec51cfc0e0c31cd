"""The fused linear cross-entropy in Triton's interpreter: the chunked one's numbers and draws."""

import pytest

pytest.importorskip("triton", reason="the fused kernels need the triton package")

import torch  # noqa: E402
from test_attention_fused import run_worker  # noqa: E402

from deberta_ds.base.errors import UserError  # noqa: E402
from deberta_ds.model.choose import Request  # noqa: E402
from deberta_ds.model.embeddings import TokenEmbedding  # noqa: E402
from deberta_ds.model.kernels import checks  # noqa: E402
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy  # noqa: E402

TOLERANCES = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}


def test_interpreter_equals_the_chunked_function():
    lines = run_worker("fused_cross_entropy.py", timeout=120)
    # A masked LM's head with cross_entropy = "fused"; not by max(), which passes over NaN.
    assert all(error < 1e-6 for error in lines.pop(0))
    first = lines.pop(0)
    assert first["check"] < 1e-2 and first["poison"] == [True, True]
    assert len(lines) == 5
    for line in lines:
        print(line)
        assert all(error < TOLERANCES[line["dtype"]] for error in line["errors"])
        assert line["dtypes_kept"] and line["same_correct"] and line["repeats"]
        assert line["same_draws"]


def test_fused_loss_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="cross_entropy = 'fused' cannot run here: no GPU"):
        TokenEmbedding(8, 4)(torch.zeros(1, 4), labels_T=torch.zeros(1, dtype=torch.int64),
                            bias_V=torch.zeros(8), loss="fused")


def test_check_on_the_card_finds_wrong_losses_counts_and_draws(monkeypatch):
    def error_of(wrong):
        monkeypatch.setattr(checks, "load", lambda _place: lambda *values, **options: wrong(
            *linear_cross_entropy(*values, **options)))
        request = Request(torch.device("cpu"), (torch.float32,), 16)
        return checks.worst(checks.cross_entropy(request))[0]

    assert error_of(lambda *right: right) < 1e-6
    assert error_of(lambda loss, count, ids: (loss * 1.1, count, ids)) > 0.05
    assert error_of(lambda loss, count, ids: (loss, count + 1, ids)) == 1
    assert error_of(lambda loss, count, ids: (loss, count, ids.flip(0))) == 1
