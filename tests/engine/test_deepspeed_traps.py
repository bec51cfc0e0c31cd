"""What DeepSpeed 0.19.8 does wrong without an error, re-checked against the installed version.

If one of these fails, the trap is fixed upstream or has changed: see the table of traps in
docs/explanation/deepspeed-traps.md for the guard that may be relaxed.
"""

import json

import pytest
from launching import ROOT, python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("traps")
    python(ROOT / "tests/workers/traps.py", root / "out.json", root)
    return json.loads((root / "out.json").read_text())


def test_zero3_applies_the_last_gradient_again(found):
    used, unused = found["stale gradient"]["2"]
    assert used > 0 and unused == 0
    used, unused = found["stale gradient"]["3"]
    assert used > 0 and unused == pytest.approx(used, rel=1e-5)


def test_gradients_are_clipped_unless_the_config_says_otherwise(found):
    assert found["clipping"] == 1.0


def test_small_parameters_are_never_partitioned_by_default(found):
    assert found["never partitioned"] == {"default": 2, "threshold 0": 0}


def test_universal_loading_of_zero3_is_wrong_three_times(found):
    assert found["universal"]["step counters"] == 1  # of two groups: each step counts twice
    assert found["universal"]["weight decays"] == [0.0, 0.0]  # not [0.0, 0.5]
    assert found["universal"]["buffer"] == 0.0  # not 7.0


def test_a_flipped_bit_is_loaded(found):
    assert abs(found["flipped bit"]) > 1e-3


def test_a_missing_latest_is_no_error_and_latest_is_not_atomic(found):
    assert found["missing latest"] == [None, None]
    assert found["latest in place"]


def test_zero0_in_bf16_starts_adam_at_step_one(found):
    assert found["adam step"] == 1


def test_zero0_in_fp16_divides_by_a_scale_that_the_loss_never_had(found):
    assert found["over loss scale"] == {"0": pytest.approx(1 / 256, rel=1e-2),
                                        "1": pytest.approx(1, rel=1e-2)}


def test_a_misspelled_key_is_ignored(found):
    assert found["misspelled key"] == 1
