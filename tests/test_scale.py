"""A job of 64 ranks costs each of them no more file operations than one of 8."""

import pytest
from launching import ROOT, python


@pytest.mark.slow
def test_no_rank_does_more_in_a_larger_job():
    done = python(ROOT / "benchmarks/scale.py", "--ranks", "8", "64", "--layers", "2")
    assert "save, delete the old one, resumed from this W | 64 |" in done.stdout
