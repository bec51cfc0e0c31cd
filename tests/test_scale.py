"""A job of 64 ranks costs each of them no more file operations than one of 8."""

import os

import pytest
from launching import ROOT, python

SIZES = ("8", "64", "1024", "4096") if "FULL_TABLE" in os.environ else ("8", "64")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3] if "FULL_TABLE" in os.environ else [1])
def test_no_rank_does_more_in_a_larger_job(tmp_path, stage):
    """FULL_TABLE=1: up to 4,096 ranks, under ZeRO-3 too; some minutes."""
    done = python(ROOT / "benchmarks/scale.py", "--ranks", *SIZES, "--layers", "2",
                  "--stage", stage, "--out", tmp_path / "scale.json", timeout=580)
    print(done.stdout)
    assert f"save, delete the old one, resumed from this W | {int(SIZES[-1]):,} |" in done.stdout
