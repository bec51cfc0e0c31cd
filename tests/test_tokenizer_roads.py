"""The whole road of a tokenizer that is not SentencePiece: DeBERTa v1's, from the public files on.

tests/tokenizer_roads.py takes it for every kind and writes the table of docs/data.md.
"""

import pytest
import tokenizer_roads as roads


@pytest.mark.multi
def test_v1_goes_from_public_files_to_a_fine_tuned_model(tmp_path):
    kind = next(kind for kind in roads.KINDS if kind.is_public_v1)
    steps = [step for step in roads.ROADS if step not in (roads.predict, roads.convert)]
    found = roads.take(kind, tmp_path / "v1", steps)
    problems = {name: result["problem"] for name, result in found.items() if "problem" in result}
    assert not problems and len(found) == len(steps)
