"""Regional compilation: the same numbers as eager, and a clear error without a compiler."""

import shutil

import pytest
import torch

from deberta_ds.config import ModelConfig
from deberta_ds.errors import UserError
from deberta_ds.model.encoder import Trunk, compile_layers
from deberta_ds.model.init import init_parameters

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2,
                     intermediate_size=64, max_position=32, position_buckets=8,
                     hidden_dropout=0.0, attention_dropout=0.0)


def _results(trunk: Trunk) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    words_BLC = torch.randn(2, 24, 32, generator=generator, requires_grad=True)
    hidden_BLC = trunk(words_BLC, torch.ones(2, 24, dtype=torch.int32))
    used = [p for p in trunk.parameters() if p.requires_grad]
    weight_BLC = torch.randn(hidden_BLC.shape, generator=generator)
    return [hidden_BLC, *torch.autograd.grad((hidden_BLC * weight_BLC).sum(), [words_BLC, *used])]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_equals_eager():
    trunk = Trunk(CONFIG)
    init_parameters(trunk, 0.2, 0)
    eager = _results(trunk)
    compile_layers(trunk)
    compiled = _results(trunk)
    assert len(eager) == len(compiled)
    for one, other in zip(eager, compiled, strict=True):
        assert (one - other).norm() <= 2e-6 * one.norm() + 1e-7


def test_no_compiler_is_one_clear_message(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="no-such-compiler is not there"):
        compile_layers(Trunk(CONFIG))
