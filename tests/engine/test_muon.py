"""Muon: near the polar factor, and the same steps however ZeRO cuts the matrices."""

from contextlib import nullcontext

import pytest
import rank_helpers
import torch
from launching import deepspeed_json, make_run, options_of
from torch import nn

from deberta_ds.base.errors import ConfigError
from deberta_ds.checkpoint.find import newest
from deberta_ds.checkpoint.saved_state import SavedState
from deberta_ds.config.run_config import OptimConfig, load
from deberta_ds.engine import engine, optim
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.engine.gpus import GPUS
from deberta_ds.engine.optim import Matrix, Muon, orthogonal
from deberta_ds.engine.state import MASTER, Piece
from deberta_ds.planner.plan import make_plan
from deberta_ds.training.start import check_run


def test_orthogonal_matrices_are_near_the_polar_factor():
    torch.manual_seed(0)
    for shape in ((40, 16), (16, 40), (16, 16)):
        matrices = torch.randn(3, *shape, dtype=torch.float64)
        got = orthogonal(matrices)
        left, sizes, right = torch.linalg.svd(matrices, full_matrices=False)
        # The same singular vectors, and every value between 0.6 and 1.3.
        values = left.mT @ got @ right.mT
        on = values.diagonal(dim1=-2, dim2=-1)
        assert (values - torch.diag_embed(on)).abs().max() < 1e-9
        assert ((on > 0.6) & (on < 1.3))[sizes > 0.05 * sizes.max()].all()


def test_many_matrices_are_worked_on_in_parts(monkeypatch):
    """One flat buffer of five matrices, two at a time, as five of one's own."""
    torch.manual_seed(0)
    weights, gradients = torch.randn(5, 8, 24), torch.randn(5, 8, 24)
    alone = [nn.Parameter(w.clone()) for w in weights]
    flat = nn.Parameter(weights.reshape(-1).clone())
    held = [Matrix((8, 24), Piece(0, 0, n * 192, 0, 192), False) for n in range(5)]
    monkeypatch.setattr(optim, "_AT_ONCE", 400)
    for params in (alone, [flat]):
        for p, g in zip(params, gradients if len(params) == 5 else [gradients.reshape(-1)],
                        strict=True):
            p.grad = g.clone()
        optimizer = Muon([{"params": params, "matrices": True}], 0.95, lr=0.1)
        optimizer._held = {flat: held}
        optimizer.step()
    assert torch.allclose(torch.stack(alone).flatten(), flat, atol=1e-6)


def test_16_bits_will_do():
    """As on a GPU: singular values away from zero come near 1 all the same."""
    torch.manual_seed(0)
    matrices = torch.randn(2, 48, 16)
    got = orthogonal(matrices.bfloat16())
    assert got.dtype == torch.bfloat16
    sizes = torch.linalg.svdvals(got.float())
    assert ((sizes > 0.6) & (sizes < 1.3)).all()
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert (got.float() - left @ right).norm() < 0.35 * (left @ right).norm()


@pytest.mark.parametrize("section, refused", [
    ({"device": "cpu"}, True), ({"device": "none"}, False), (None, False)])
def test_offload_is_refused(tmp_path, section, refused):
    """Its matrices would lie in the host's memory; null and "none" are no offload."""
    ds = DeepSpeedConfig(zero_optimization={"stage": 2, "offload_optimizer": section})
    run, _ = load(make_run(tmp_path, warmup_steps='5\nname = "muon"'))
    both = (lambda: check_run(run, ds, 1, ""),
            lambda: make_plan(run, ds, gpu=GPUS["h100"], gpus=1, nodes=1, mfu=0.4))
    for check in both[:1 + refused]:
        with pytest.raises(ConfigError, match="muon': .*use adamw") if refused else nullcontext():
            check()


SMALL_GROUPS = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0,
                                      "sub_group_size": 20_000}}
LAYOUTS = [("zero0", 1, 0, {}), ("zero3 by two", 2, 3, SMALL_GROUPS), ("zero1 by three", 3, 1, {})]


@pytest.mark.multi
@pytest.mark.slow
def test_every_cut_of_the_matrices_trains_alike(tmp_path):
    """Four steps of two networks, clipped. What it saves is loaded bit for bit by every kind of
    engine, which are at one place after two steps: checkpoint/test_checkpoint_files.py.
    """
    run_file = make_run(tmp_path, steps="4", warmup_steps="2", save_every="4", eval_every="4",
                        two_layers=True, global_batch_size="12")
    saved = {}
    for name, ranks, stage, more in LAYOUTS:
        ds = deepspeed_json(tmp_path / f"{name}.json", stage, **more)
        rank_helpers.run(ranks, [*options_of(run_file, ds), "--optim.name=muon",
                                 "--optim.clip_norm=0.1", f"--out_dir={tmp_path / name}"],
                         tmp_path / f"{name}.log")
        saved[name] = SavedState(newest(tmp_path / name))
    first = saved.pop("zero0")
    matrices = {name for name in first.shapes if "exp_avg_sq" not in first.state_keys(name)}
    assert any(name.endswith("ffn_in.weight") for name in matrices)
    assert not any("words" in name or "bias" in name for name in matrices)
    for layout, state in saved.items():
        for name in first.shapes:
            assert state.state_keys(name) == first.state_keys(name), (layout, name)
            for key in (MASTER, *first.state_keys(name)):
                a, b = first.read(name, key), state.read(name, key)
                assert (a - b).norm() <= 1e-4 * a.norm() + 1e-12, (layout, name, key)


def test_muon_multiplies_in_the_type_of_the_matmuls(process_group, monkeypatch):
    class Seen(Exception):  # noqa: N818
        pass

    def build(model, optim, waiting, apart, matmuls):
        raise Seen(matmuls)

    monkeypatch.setattr(engine, "build_optimizer", build)
    for enabled, wanted in ((True, torch.bfloat16), (False, None)):
        ds = DeepSpeedConfig(torch_autocast={"enabled": enabled})
        with pytest.raises(Seen) as found:
            engine.build_engine(torch.nn.Linear(1, 1), OptimConfig(learning_rate=1e-3), ds)
        assert found.value.args == (wanted,)


def test_matrices_that_are_cut_are_not_worked_on_with_whole_ones():
    flat = torch.zeros(6)
    parts = [optim._Part(Matrix((3, 2), None, is_cut), flat, flat)
             for is_cut in (True, False, True)]
    assert [[part.matrix.is_cut for part in batch] for batch in optim._batches(parts)] == [
        [False], [True, True]]
