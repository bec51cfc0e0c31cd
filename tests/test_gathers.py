"""A gather made of broadcasts gives what torch's own gives, of whole groups and of parts."""

from pathlib import Path

import pytest
import rank_helpers


@pytest.mark.multi
def test_broadcasts_gather_as_torch_does(tmp_path):
    worker = Path(__file__).parent / "workers/gathers.py"
    assert "equal" in rank_helpers.run(3, [], tmp_path / "log", worker)
