"""benchmarks/orderings.py: differences seed by seed, their intervals, what they allow to say."""

import json

import pytest

from benchmarks import orderings


def write_run(directory, arm, seed, loss, paradigms, finished=True):
    path = directory / f"{arm}-s{seed}"
    (path / "scores").mkdir(parents=True)
    records = [{"kind": "eval", "step": 9, "tokens_seen": 2_000_000, "masked_loss": loss}]
    if finished:
        records.append({"kind": "event", "step": 9, "event": "end", "detail": "all steps done"})
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    scores = {"accuracy": sum(paradigms) / len(paradigms),
              "paradigms": {str(k): {"accuracy": value} for k, value in enumerate(paradigms)}}
    (path / "scores/minimal_pairs.json").write_text(json.dumps({"scorers": {"pll_word": scores}}))


@pytest.fixture
def arms(tmp_path):
    for seed, ahead in enumerate((0.3, 0.4, 0.5)):
        write_run(tmp_path, "mlm", seed, 4.0 - ahead, [0.6, 0.7, 0.65])
        write_run(tmp_path, "mlm-bert", seed, 4.0, [0.5, 0.75, 0.6 + seed / 100])
    write_run(tmp_path, "gdes", 0, 3.0, [0.5], finished=False)
    (tmp_path / "empty-s0").mkdir()
    (tmp_path / "empty-s0/metrics.jsonl").write_text("")
    found = {}
    for run in orderings.find_runs(tmp_path):
        found.setdefault(run.arm, {})[run.seed] = run
    return found


def test_only_finished_runs_count(arms):
    assert {arm: sorted(of_arm) for arm, of_arm in arms.items()} == {
        "mlm": [0, 1, 2], "mlm-bert": [0, 1, 2]}


def test_a_lower_loss_is_ahead_with_student_s_interval(arms):
    found = orderings.difference(arms["mlm"], arms["mlm-bert"], "masked loss")
    assert found["ahead"] == pytest.approx(0.4)
    half = 4.302653 * 0.1 / 3**0.5  # Student's quantile of two degrees of freedom
    assert found["interval over seeds"] == pytest.approx([0.4 - half, 0.4 + half], rel=1e-5)
    assert found["verdict"] == "holds"
    turned = orderings.difference(arms["mlm-bert"], arms["mlm"], "masked loss")
    assert turned["verdict"] == "does not hold"


def test_minimal_pairs_need_both_intervals(arms):
    found = orderings.difference(arms["mlm"], arms["mlm-bert"], "BLiMP pll_word")
    low, high = found["interval over seeds"]
    assert 0 < low < high  # 2.67, 3.00, 3.33 points less 0.33 a seed
    low, high = found["interval over paradigms"]
    assert low < 0 < high and found["verdict"] == "not significant"


def test_one_seed_is_no_claim(arms):
    found = orderings.difference(arms["mlm"], {0: arms["mlm-bert"][0]}, "masked loss")
    assert found["seeds"] == 1 and found["verdict"] == "one seed: no claim"
    assert orderings.difference(arms["mlm"], arms["mlm-bert"], "probe") is None


def test_a_generator_is_not_compared_with_a_whole_masked_lm():
    of_mlm = orderings.pair_measures({"scorers": {"pll_word": {}, "pll_piece": {}}})
    of_rtd = orderings.pair_measures({"scorers": {"pll_word": {}, "discriminator_sum": {}}})
    assert of_mlm.keys() & of_rtd.keys() == {"BLiMP"}
    assert of_mlm["BLiMP"] == "pll_word" and of_rtd["BLiMP"] == "discriminator_sum"
    assert of_rtd["BLiMP generator pll_word"] == "pll_word"
