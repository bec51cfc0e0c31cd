"""torch.compile takes the trunk through the fused kernels whole, forward and backward."""

import pytest

pytest.importorskip("triton", reason="the fused kernels need the triton package")

import torch  # noqa: E402

from benchmarks.host_time import Nothing, triton_kernels  # noqa: E402
from deberta_ds.config.run_config import ModelConfig  # noqa: E402
from deberta_ds.model import choose  # noqa: E402
from deberta_ds.model.choose import KERNELS  # noqa: E402
from deberta_ds.model.encoder import Trunk  # noqa: E402

SHAPE = dict(vocab_size=200, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64,
             max_position=64, position_buckets=8)


@pytest.mark.slow
def test_the_trunk_is_one_graph(monkeypatch):
    """It broke where a kernel was looked up, a seed was read, and a table was made by NumPy."""
    for module, name in triton_kernels():
        monkeypatch.setattr(module, name, Nothing())
    first = {one.idea: one for one in reversed(KERNELS)}
    monkeypatch.setattr(choose, "pick", lambda idea, *_: (first[idea], ""))
    trunk = Trunk(ModelConfig(**SHAPE)).bfloat16().train()
    for parameter in trunk.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    inputs = torch.randn(2, 40, 32, dtype=torch.bfloat16), torch.ones(2, 40, dtype=torch.int32)
    trunk(*inputs)  # kernels are loaded in the first pass
    compiled = torch.compile(trunk, fullgraph=True, backend="aot_eager")
    compiled(*inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in trunk.parameters())
