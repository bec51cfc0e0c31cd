"""Gradients summed outside of DeepSpeed, by passes and by a recorded graph, are those of its hooks.
"""

import pytest
import rank_helpers
import torch
from launching import ROOT, make_run

pytestmark = [pytest.mark.multi, pytest.mark.slow]
SETTINGS = [(stage, precision, count) for stage in (0, 1, 2) for precision in ("fp32", "bf16")
            for count in (1, 2, 5) if stage or precision == "fp32"]


@pytest.fixture(scope="module", params=[1, 2], ids="{} ranks".format)
def results(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("passes")
    run_file = make_run(root, dropout=0.1, two_layers=True, steps="3", warmup_steps="1")
    text = run_file.read_text().replace('kind = "rtd"', 'kind = "rtd"\nfinal_temperature = 0.5')
    run_file.write_text(text + 'freeze = ["generator.embeddings"]\nfreeze_steps = 2\n')
    rank_helpers.run(request.param, [str(run_file), str(root / "out.pt")], root / "log",
                     ROOT / "tests/workers/passes.py")
    return request.param, torch.load(root / "out.pt", weights_only=False)


def same(left: tuple, right: tuple) -> bool:
    return left[:2] == right[:2] and all(
        torch.equal(tensor, right[2][name]) for name, tensor in left[2].items())


@pytest.mark.parametrize("stage, precision, count", SETTINGS)
def test_a_graph_trains_bit_for_bit_as_passes_do(results, stage, precision, count):
    ranks, found = results
    sums, graph = (found[stage, precision, count, way] for way in ("sums", "graph"))
    assert same(sums, graph)
    assert sums[3] == graph[3] == found[stage, precision, count, "hooks"][3]  # DeepSpeed's counts
    assert graph[4] == 2  # before and after the thaw
