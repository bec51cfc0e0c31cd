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


def test_universal_loading_of_zero3_is_wrong_three_times(found):
    assert found["universal"]["step counters"] == 1  # of two groups: each step counts twice
    assert found["universal"]["weight decays"] == [0.0, 0.0]  # not [0.0, 0.5]
    assert found["universal"]["buffer"] == 0.0  # not 7.0


def test_a_flipped_bit_is_loaded(found):
    assert abs(found["flipped bit"]) > 1e-3


@pytest.mark.parametrize("trap, seen", [
    ("clipping", 1.0),  # gradients are clipped unless the config says otherwise
    ("never partitioned", {"default": 2, "threshold 0": 0}),  # small parameters
    ("missing latest", [None, None]),  # is no error
    ("latest in place", True),  # is not replaced atomically
    ("adam step", 1),  # ZeRO-0 in bf16 begins there
    # ZeRO-0 in fp16 divides by a scale that the loss never had.
    ("over loss scale", {"0": pytest.approx(1 / 256, rel=1e-2), "1": pytest.approx(1, rel=1e-2)}),
    ("misspelled key", 1)])  # is ignored
def test_a_trap_is_there(found, trap, seen):
    assert found[trap] == seen
