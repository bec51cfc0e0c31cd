"""The fused linear cross-entropy in Triton's interpreter: the chunked one's numbers and draws."""

import pytest

pytest.importorskip("triton", reason="the fused kernels need the triton package")

import torch  # noqa: E402
from test_attention_fused import run_worker  # noqa: E402

from deberta_ds.errors import UserError  # noqa: E402
from deberta_ds.model.embeddings import WordEmbedding  # noqa: E402

TOLERANCES = {"float32": 1e-6, "float16": 2e-3}


def test_interpreter_equals_the_chunked_function():
    lines = run_worker("fused_cross_entropy.py", timeout=120)
    assert max(lines.pop(0)) < 1e-6  # a masked LM's head with vocabulary_loss = "fused"
    assert len(lines) == 4
    for line in lines:
        print(line)
        assert max(line["errors"]) < TOLERANCES[line["dtype"]]
        assert line["dtypes_kept"] and line["same_correct"] and line["repeats"]
        assert line["same_draws"]


def test_fused_loss_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="vocabulary_loss = 'fused' needs a GPU"):
        WordEmbedding(8, 4)(torch.zeros(1, 4), labels_T=torch.zeros(1, dtype=torch.int64),
                            bias_V=torch.zeros(8), fused=True)
