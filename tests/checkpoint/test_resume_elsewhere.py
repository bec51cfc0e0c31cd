"""A run goes on with another number of ranks and another ZeRO stage: same rows, same losses."""

import pytest
import rank_helpers
from launching import deepspeed_json, make_run, options_of

from deberta_ds.tracking.records import read_metrics

# Functions of a step's place in the run.
FALLING = ("--objective.mask.rate=0.3", "--objective.mask.final_rate=0.15",
           "--objective.temperature=2.0", "--objective.final_temperature=0.5",
           "--train.initial_batch_size=2", "--train.batch_warmup_steps=9")
pytestmark = [pytest.mark.multi, pytest.mark.slow]


def train_lines(out) -> list[dict]:
    return [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "train"]


@pytest.mark.parametrize("kind", ["mlm", "rtd"])
def test_other_ranks_and_stages_go_on_with_the_same_rows(tmp_path, kind):
    """One rank, then two under ZeRO-3, then one under ZeRO-2; dropout depends on ranks: none."""
    run_file = make_run(tmp_path, steps="12", save_every="4", log_every="1", workers="1",
                        two_layers=True)
    configs = {stage: deepspeed_json(tmp_path / f"zero{stage}.json", stage) for stage in (1, 2, 3)}

    def run(name: str, ranks: int, stage: int, *options: str) -> str:
        command = [*options_of(run_file, configs[stage]), f"--objective.kind={kind}",
                   f"--out_dir={tmp_path / name}", *FALLING, *options]
        return rank_helpers.run(ranks, command, tmp_path / f"{name}-{stage}.log")

    run("whole", 1, 1)
    run("moved", 1, 1, "--train.stop_after=4")
    assert "1 rank" in run("moved", 2, 3, "--train.stop_after=8")
    assert "2 ranks" in run("moved", 1, 2)
    whole, moved = train_lines(tmp_path / "whole"), train_lines(tmp_path / "moved")
    assert [line["step"] for line in moved] == list(range(1, 13))
    for line, other in zip(whole, moved, strict=True):
        for key in ("step", "sequences_seen", "tokens_seen"):
            assert line[key] == other[key], key
        for key in line:
            if key.endswith("loss"):
                assert other[key] == pytest.approx(line[key], rel=1e-5), (line["step"], key)
