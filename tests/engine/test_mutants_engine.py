"""What changed a step of the optimizer without a test noticing (docs/evidence/reliability.md)."""

import signal
from types import SimpleNamespace

import pytest
import torch
from launching import make_run
from test_clipping import LARGEST, DeepSpeedZeroOptimizer_Stage3

from deberta_ds.config import run_config
from deberta_ds.config.run_config import OptimConfig
from deberta_ds.engine import clipping, ds_config, engine, muon
from deberta_ds.engine.clipping import _clip, clip_networks_apart
from deberta_ds.engine.engine import keep_nothing_gathered, set_learning_rate


@pytest.mark.parametrize("values", [[2e-6, 1e-6], [0.3, 0.4], [3.0, 4.0]])
def test_small_norms_are_clipped_as_by_torch(values):
    """torch and DeepSpeed divide by the norm plus 1e-6."""
    ours, theirs = torch.tensor(values), torch.nn.Parameter(torch.zeros(2))
    theirs.grad = ours.clone()
    torch.nn.utils.clip_grad_norm_([theirs], 1e-6)
    _clip([[ours]], [""], 1e-6)
    torch.testing.assert_close(ours, theirs.grad, rtol=1e-6, atol=0)


def test_a_norm_that_only_fp64_holds_is_finite():
    gradients = [torch.tensor([3e38]), torch.tensor([3e38])]
    _clip([gradients], [""], 1.0)
    assert torch.cat(gradients).tolist() == pytest.approx([0.5**0.5] * 2)


def test_one_group_that_is_not_finite_spoils_its_network():
    """A group whose norm is not finite measures -1: the common norm stands for its network's."""
    optimizer = DeepSpeedZeroOptimizer_Stage3()
    clip_networks_apart(SimpleNamespace(optimizer=optimizer, gradient_clipping=lambda: LARGEST))
    for value, group in zip((-1.0, 7.0, 4.0), optimizer.fp16_groups, strict=True):
        optimizer.get_grad_norm_direct(value, group)
    assert optimizer.scale(0, 1, 2) == {0: 99.0, 1: 7.0, 2: 99.0}


class BF16_Optimizer:  # noqa: N801  DeepSpeed's name
    def __init__(self):
        self.fp32_groups_gradients = [[torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 12.0])]]
        self.optimizer = SimpleNamespace(param_groups=[{}, {"network": "d"}])
        self.clip_grad, self.overflow, self._global_grad_norm = LARGEST, False, None

    def step(self, closure):
        self.clip_seen, self._global_grad_norm = self.clip_grad, 2 * LARGEST


def test_bf16_is_clipped_once_and_reports_the_norm_of_all():
    optimizer = BF16_Optimizer()
    clip_networks_apart(SimpleNamespace(optimizer=optimizer, gradient_clipping=lambda: LARGEST))
    optimizer.step()
    clipped = [gradients[0].norm().item() for gradients in optimizer.fp32_groups_gradients]
    assert clipped == pytest.approx([LARGEST, LARGEST], rel=1e-5)
    assert (optimizer.clip_seen, optimizer.clip_grad) == (0.0, LARGEST)
    assert optimizer._global_grad_norm.item() == pytest.approx(13.0)


def test_pieces_of_a_gradient_keep_their_parameter_and_padding_is_left_out(monkeypatch):
    monkeypatch.setattr(clipping, "_PIECE", 4)
    padding, first, second = torch.ones(3), torch.arange(10.0), torch.arange(4.0)
    padding._zero_padding = True
    optimizer = SimpleNamespace(get_grad_norm_direct=lambda gradients, parameters: [
        (gradient.tolist(), owner) for gradient, owner in zip(gradients, parameters, strict=True)])
    clipping.measure_in_pieces(optimizer)
    assert optimizer.get_grad_norm_direct([padding, first, second], ["a", "b"]) == [
        ([0, 1, 2, 3], "a"), ([4, 5, 6, 7], "a"), ([8, 9], "a"), ([0, 1, 2, 3], "b")]


def test_what_deepspeed_is_given_is_the_run_s(tmp_path):
    run, _ = run_config.load(make_run(tmp_path, global_batch_size="24", micro_batch_size="3"))
    found = ds_config.resolve(run, {"gradient_clipping": "auto"}, 2)
    assert {key: found[key] for key in ds_config.RUN_KEYS} == {
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4, "gradient_clipping": run.optim.clip_norm}
    assert ds_config.matmul_precision({"torch_autocast": {"enabled": True}}) == "bf16"
    assert ds_config.matmul_precision({"fp16": {"enabled": True}}) == "fp16"
    zero = keep_nothing_gathered({"zero_optimization": {"stage": 3}})["zero_optimization"]
    assert zero == {"stage": 3, "stage3_param_persistence_threshold": 0}


def test_rates_follow_shares_and_wait_until_the_thaw():
    removed, groups = [], [{"rate_share": 0.5}, {"waits": True}, {"waits": False}]
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups), holds=[
        SimpleNamespace(remove=lambda: removed.append(1)) for _ in range(2)])
    set_learning_rate(engine, 2.0, is_thawed=False)
    assert [group["lr"] for group in groups] == [1.0, 0.0, 2.0] and not removed
    set_learning_rate(engine, 2.0)
    assert [group["lr"] for group in groups] == [1.0, 2.0, 2.0]
    assert len(removed) == 2 and not engine.holds


def test_ctrl_c_is_the_run_s_again_once_all_ranks_are_there():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with engine._saying_who_waits():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_muon_multiplies_in_the_type_of_the_matmuls(process_group, monkeypatch):
    class Seen(Exception):  # noqa: N818
        pass

    def build(model, optim, waiting, apart, matmuls):
        raise Seen(matmuls)

    monkeypatch.setattr(engine, "build_optimizer", build)
    for ds, wanted in (({"torch_autocast": {"enabled": True}}, torch.bfloat16), ({}, None)):
        with pytest.raises(Seen) as found:
            engine.build_engine(torch.nn.Linear(1, 1), OptimConfig(learning_rate=1e-3), ds)
        assert found.value.args == (wanted,)


def test_matrices_that_are_cut_are_not_worked_on_with_whole_ones():
    flat = torch.zeros(6)
    parts = [muon._Part(muon._Matrix((3, 2), None, is_cut), flat, flat)
             for is_cut in (True, False, True)]
    assert [[part.matrix.is_cut for part in batch] for batch in muon._batches(parts)] == [
        [False], [True, True]]
