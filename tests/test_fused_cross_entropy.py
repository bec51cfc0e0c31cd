"""The fused linear cross-entropy in Triton's interpreter: the chunked one's numbers and draws."""

import pytest

pytest.importorskip("triton", reason="the fused kernels need the triton package")

from test_attention_fused import run_worker  # noqa: E402

TOLERANCES = {"float32": 1e-6, "float16": 2e-3}


def test_interpreter_equals_the_chunked_function():
    lines = run_worker("fused_cross_entropy.py", timeout=120)
    assert len(lines) == 4
    for line in lines:
        print(line)
        assert max(line["errors"]) < TOLERANCES[line["dtype"]]
        assert line["dtypes_kept"] and line["same_correct"] and line["repeats"]
        assert line["same_draws"]
