"""The planner's communication against the bytes that real runs hand to their collectives."""

import json
import os
from pathlib import Path

import pytest
import rank_helpers
import torch
from launching import make_run

from deberta_ds import config
from deberta_ds.planner.activations import trace
from deberta_ds.planner.communication import traffic
from deberta_ds.planner.gathering import CallRecorder, Calls, gathered

WORKER = Path(__file__).parent / "workers/traffic.py"
NOTHING_STAYS = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0,
                 "stage3_param_persistence_threshold": 0}
WHOLE_TABLE = "FULL_TABLE" in os.environ
RECOMPUTED = ["--train.checkpoint_layers=1"]
QUICK = {2: [{"stage": 3, "zero": NOTHING_STAYS, "overrides": RECOMPUTED, "micro_batches": 2}]}
CASES = {
    2: [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3},
        {"stage": 1, "ds": {"communication_data_type": "fp32"}},
        {"stage": 3, "ds": {"communication_data_type": "fp32"}},
        {"stage": 3, "zero": {"stage3_param_persistence_threshold": 0}},
        {"stage": 3, "zero": NOTHING_STAYS},
        {"stage": 3, "zero": NOTHING_STAYS | {"stage3_max_reuse_distance": 400_000}},
        {"stage": 3, "zero": {"stage3_param_persistence_threshold": 10_000}},
        {"stage": 3, "zero": {"stage3_param_persistence_threshold": 10_000,
                              "stage3_max_reuse_distance": 400_000}},
        {"stage": 3, "zero": {"stage3_param_persistence_threshold": 0,
                              "stage3_max_live_parameters": 500_000,
                              "stage3_max_reuse_distance": 200_000,
                              "stage3_prefetch_bucket_size": 100_000}},
        {"stage": 3, "zero": NOTHING_STAYS, "overrides": ["--objective.kind=mlm"]},
        {"stage": 3, "zero": NOTHING_STAYS, "micro_batches": 1,
         "overrides": ["--train.recompute=cheap", *RECOMPUTED]}, *QUICK[2]],
    4: [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3},
        {"stage": 3, "zero": NOTHING_STAYS, "micro_batches": 1}],
} if WHOLE_TABLE else QUICK


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("ranks", CASES)
def test_bytes_are_within_one_percent_of_those_counted(tmp_path, ranks):
    """One case; with FULL_TABLE=1 every stage on 2 and 4 ranks, three minutes."""
    shape = '"tiny"\nhidden_size = 128\nintermediate_size = 512\nnum_layers = 4'
    run = make_run(tmp_path, preset=shape)
    cases = [json.dumps({"micro_batches": 2} | case) for case in CASES[ranks]]
    rank_helpers.run(ranks, [str(run), str(tmp_path / "out.json"), *cases], tmp_path / "log",
                     WORKER)
    for name, measured in json.loads((tmp_path / "out.json").read_text()).items():
        case, ds = json.loads(name), measured["ds"]
        calls = trace(config.load(run, case.get("overrides", []))[0], torch.bfloat16,
                      fused=False).calls
        weights = gathered(calls, ds["zero_optimization"], ranks)
        sent = traffic(measured["parameters"], ds, ranks, case["micro_batches"], weights)
        counted = measured["sent"]
        gradients = counted.get("all-reduce", 0.0) + counted.get("reduce-scatter", 0.0)
        weights = sum(counted.values()) - gradients
        print(f"{ranks} ranks, {name}: gradients {gradients:,.0f}, planned {sent.gradients:,.0f}; "
              f"weights {weights:,.0f}, planned {sent.weights:,.0f}")
        assert gradients == pytest.approx(sent.gradients, rel=0.01), name
        assert weights == pytest.approx(sent.weights, rel=0.01, abs=1000), name


# Module 0 holds 100 elements, module 1 holds 50; both are called, and come back in reverse order.
THERE_AND_BACK = Calls([100, 50], [[0], [1]], [(True, 0), (False, 0), (True, 1), (False, 1),
                                               (True, 1), (False, 1), (True, 0), (False, 0)])


@pytest.mark.parametrize("zero, elements, a_step, messages", [
    ({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}, 300, 0, 4),
    ({"stage3_max_reuse_distance": 50, "stage3_prefetch_bucket_size": 0}, 250, 0, 3),  # 1 stays
    ({"stage3_prefetch_bucket_size": 0}, 150, 0, 2),  # both stay, and are given up at the end
    ({"stage3_prefetch_bucket_size": 50}, 150, 0, 2),  # 1 comes while 0 is at work
    ({"stage3_param_persistence_threshold": 50, "stage3_max_reuse_distance": 0,
      "stage3_prefetch_bucket_size": 0}, 200, 50, 2),
])
def test_what_is_used_again_soon_stays(zero, elements, a_step, messages):
    zero = {"stage3_param_persistence_threshold": 0} | zero
    found = gathered(THERE_AND_BACK, zero, 2)
    assert (found.a_micro_batch, found.a_step, found.messages) == (elements, a_step, messages)
    assert gathered(THERE_AND_BACK, zero, 8).a_micro_batch >= elements  # parts are padded


def test_a_module_whose_result_gets_no_gradient_has_no_backward_pass():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(first, second)
    recorder = CallRecorder(model)
    second(first(torch.ones(1, 2)).detach()).sum().backward()
    assert recorder.calls.events == [(True, 1), (False, 1), (True, 2), (False, 2), (True, 2)]
