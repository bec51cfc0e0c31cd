"""FILE.py:NAME in a run file: the examples by themselves, and what they return."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from launching import ROOT, make_run

from deberta_ds.base import user_code
from deberta_ds.base.errors import ConfigError, UserError
from deberta_ds.config import run_config
from deberta_ds.config.optim import OptimConfig, learning_rate
from deberta_ds.engine.optim import build_optimizer
from deberta_ds.objectives.build import objective_named, objective_of

EXAMPLES = ROOT / "examples"
CODE = """
def bad(step, total_steps, optim): return "1"
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("override, expected", [
    ("--optim.schedule=linaer", "optim.schedule: 'linaer' is unknown; did you mean linear?"),
    ("--optim.schedule=mine.py", "or FILE.py:NAME"), ("--optim.name=adam", "did you mean adamw?"),
    ("--objective.mask.selection=uniforn", "did you mean uniform?"),
    ("--objective.kind=mlmm", "did you mean mlm?"),
    ('--evaluate.metrics=["recall"]', "evaluate.metrics.0: 'recall' is unknown; write FILE.py")])
def test_an_unknown_name_is_told_the_nearest_one(run_file, override, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        run_config.load(run_file, [override])


def test_what_a_function_returns_is_looked_at(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    optim = OptimConfig(learning_rate=1.0, schedule=f"{tmp_path}/own.py:bad")
    with pytest.raises(UserError, match="returned '1' for step 0; it must return a finite"):
        learning_rate(optim, 0, 10)
    (tmp_path / "objective.py").write_text("METRICS = ()")
    with pytest.raises(UserError, match="lacks HEADS, encoders, problems, build"):
        objective_named(f"{tmp_path}/objective.py")


def test_inverse_sqrt():
    optim = OptimConfig(learning_rate=2.0, warmup_steps=4,
                        schedule=f"{EXAMPLES}/inverse_sqrt.py:inverse_sqrt")
    found = [learning_rate(optim, step, 100) for step in range(16)]
    assert found[:4] == [0.5, 1.0, 1.5, 2.0] and found[15] == 1.0


def test_lion_against_its_formula():
    model = torch.nn.Linear(3, 2)
    optim = OptimConfig(learning_rate=0.1, betas=(0.9, 0.98), weight_decay=0.5,
                        name=f"{EXAMPLES}/lion.py:lion")
    optimizer = build_optimizer(model, optim)
    weights, average = model.weight.detach().clone(), torch.zeros(2, 3)
    for _ in range(3):
        gradient = torch.randn(2, 3)
        model.weight.grad, model.bias.grad = gradient.clone(), torch.ones(2)
        optimizer.step()
        weights -= 0.1 * (torch.sign(0.9 * average + 0.1 * gradient) + 0.5 * weights)
        average = 0.98 * average + 0.02 * gradient
    torch.testing.assert_close(model.weight.detach(), weights)


def test_rare_words_are_chosen_more_often():
    choose = user_code.load("", f"{EXAMPLES}/rare_words.py:rare_words")
    ids, starts = np.repeat([10, 10_000], 50), np.arange(100)
    rng = np.random.default_rng(0)
    chosen = np.concatenate([choose(ids, starts, np.ones(100, int), 15, rng) for _ in range(99)])
    assert len(chosen) == 99 * 15 and 2 < (chosen >= 50).sum() / (chosen < 50).sum() < 6


def test_scores_and_objective():
    view = {"logits": torch.tensor([1.0, -1.0, 1.0]), "replaced": torch.tensor([True, True, False])}
    assert user_code.load("", f"{EXAMPLES}/more_scores.py:recall")({}, view) == 0.5
    view = {"logits": torch.zeros(20), "replaced": torch.arange(20) % 4 == 0}
    error = user_code.load("", f"{EXAMPLES}/more_scores.py:roc_auc_error")({}, view)
    assert error == pytest.approx((21 / (12 * 5 * 15)) ** 0.5)  # at an area of 0.5: the rank test's
    objective = objective_named(f"{EXAMPLES}/small_states.py")
    assert objective.METRICS[-1].key == "state_size" and objective.HEADS == {"main": "mlm_head."}


def test_an_objective_keeps_the_masks_of_the_one_that_it_extends(run_file):
    """It trained with 1-grams and 100 % [MASK] in silence, masked LM with 3-grams and 80/10/10."""
    own = f"--objective.kind={EXAMPLES}/small_states.py"
    masks = [run_config.load(run_file, [kind])[0].objective.mask
             for kind in (own, "--objective.kind=mlm", "--objective.kind=rtd")]
    assert masks[0] == masks[1] != masks[2]
    run, origins = run_config.load(run_file, [own, "--objective.mask.max_ngram=2"])
    assert run.objective.mask == replace(masks[1], max_ngram=2)
    assert origins["objective.mask.mask_share"] == f"{EXAMPLES}/small_states.py recipe"


def test_an_objective_that_cannot_be_loaded_is_said_when_the_run_is_checked(run_file):
    """By all ranks together: while its file was parsed, one rank alone would end."""
    run, _ = run_config.load(run_file, ["--objective.kind=none.py"])
    with pytest.raises(UserError, match="objective.kind: none.py: no such file"):
        objective_of(run)


def test_a_file_under_two_keys_runs_once(tmp_path):
    """Its classes and its state were there twice."""
    (tmp_path / "own.py").write_text("def one(text): pass\ntwo = one\n")
    assert user_code.load("a", f"{tmp_path}/own.py:one") is user_code.load(
        "b", f"{tmp_path}/../{tmp_path.name}/own.py:two")


def test_examples_are_short_and_their_digests_known(run_file):
    for path in EXAMPLES.glob("*.py"):
        is_short = len(path.read_text().splitlines()) < 60
        assert is_short or path.name == "convert_annotations.py", path  # no code of a run
    run, _ = run_config.load(run_file)
    optim = replace(run.optim, name=f"{EXAMPLES}/lion.py:lion")
    assert user_code.digests(run) == {}
    assert list(user_code.digests(replace(run, optim=optim))) == [f"{EXAMPLES}/lion.py:lion"]
