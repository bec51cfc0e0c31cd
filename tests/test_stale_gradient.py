"""The defect that makes a missing gradient an error, re-checked against the pinned DeepSpeed.

If this fails because stage 3 leaves the unused layer still, the defect is mended upstream, and the
rule that every parameter gets a gradient in every micro-batch may be relaxed.
"""

import pytest
from launching import ROOT, python


def moved(stage: int) -> tuple[float, float]:
    """Return how far layer 0 moved in the step that used it and in the next, which did not."""
    done = python(ROOT / "tests/workers/stale.py", stage)
    line = next(line for line in done.stdout.splitlines() if line.startswith("moved"))
    used, unused = map(float, line.split()[1:])
    return used, unused


@pytest.mark.slow
def test_zero3_applies_the_last_gradient_again():
    used, unused = moved(2)
    assert used > 0 and unused == 0
    used, unused = moved(3)
    assert used > 0 and unused == pytest.approx(used, rel=1e-5)
