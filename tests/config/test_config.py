"""Run configs and DeepSpeed JSONs: strict, complete, and round trips."""

import numpy as np
import pytest

from deberta_ds.config import run_config
from deberta_ds.config.options import ConfigError
from deberta_ds.config.toml_files import as_override, parse_override
from deberta_ds.engine import ds_config

MINIMAL = """
name = "x"
out_dir = "runs/x"
[model]
preset = "tiny"
[objective]
kind = "mlm"
[data]
sources = [{path = "corpus"}]
tokenizer = "spm.model"
[optim]
learning_rate = 1e-3
[train]
steps = 10
global_batch_size = 8
micro_batch_size = 2
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_later_wins_and_origins_are_remembered(run_file):
    run, origins = run_config.load(run_file, ["--train.steps=20", "--model.num_layers=3"])
    assert run.train.steps == 20 and origins["train.steps"] == "command line"
    assert run.model.num_layers == 3  # over the preset's 4
    assert origins["model.hidden_size"] == "preset tiny"
    assert origins["optim.learning_rate"] == str(run_file)
    assert origins["optim.eps"] == "default"
    assert run.objective.mask.max_ngram == 3 and origins["objective.mask.max_ngram"] == "mlm recipe"


def test_every_problem_of_a_number_is_its_own(run_file):
    with pytest.raises(ConfigError, match="^1 problem"):
        run_config.load(run_file, ['--data.sources=[{path = "a", weight = -1}]'])


def test_hugging_face_spelling_of_no_buckets(run_file):
    assert run_config.load(run_file, ["--model.position_buckets=-1"])[0].model.position_buckets == 0


@pytest.mark.parametrize("override, expected", [
    ("--model.hidden_sise=3", "did you mean model.hidden_size?"),
    ("--optim.lr=1e-3", "optim.lr: renamed to optim.learning_rate"),
    ('--data.sources=[{path = "a", first_row = 2}]', "renamed to data.sources.0.first_sequence"),
    ("--train.steps=1.5", "valid integer"),
    ("--train.steps=true", "valid integer"),
    ("--train.steps=0", "at least 1"),
    ("--model.num_heads=3", "not divisible by num_heads = 3"),
    ("--objective.kind=gan", "'gan'"),
    ("--objective.mask.rate=1.5", "must be below 1"),
    ("--objective.mask.rate=0", "must be above 0"),
    ("--train.watchdog_seconds=1e-300", "watchdog_seconds = 1e-300 must be 0 or at least 1"),
    ("--optim.learning_rate=nan", "finite number"),
    ("--optim.min_learning_rate_share=-1", "at least 0"),
    ("--objective.rtd_weight=-1", "at least 0"),
    ("--train.stop_after=-5", "at least 0"),
    ("--data.workers=99999999999999999999", "at most 256"),
    ("--objective.generator_layers=1000000", "at most 1000"),
    ("--model.max_relative=1", "at least 2"),
    ("--model.conv_kernel=-3", "at least 0"),
    ("--optim.betas=[0.9, 1.0]", "below 1"),
    ('--data.sources=[{path = "a", part = [0, 2]}]', "part.1 = 2: must be at most 1"),
    ("--data.sources=[]", "must not be empty"),
    ("--model.preset=deberta-v3-bass", "did you mean deberta-v3-base?"),
    ("steps=3", "--section.key=value"),
    ("--.steps=3", "--section.key=value"), ("--train.=3", "--section.key=value"),
    ("--name=caf\udce9", "is not UTF-8"),
    ("--objective.mask=0.3", "objective.mask"), ('--objective.kind=["mlm"]', "objective.kind"),
    ("--init.from.x=5", "init.from: input should be"), ("--data.corpus.x=5", "a local directory"),
    ("--init.from=5", "init.from = 5"), ("--init={from=5}", "init.from = 5"),
    ('--out_dir="a\\u0000"', "out_dir holds a NUL"),
    ("--data.sources.0.path=x", "sources is a list; give it whole"),
    ("--name.first=x", "name is a value, not a section"),
    ('--data.sources=[{path = "a", replaced = "b"}]',
     'data.sources[0].replaced: for objective.kind = "rtd_cached" alone'),
    ("--data.heldout_replaced=b", "heldout_replaced must have the names of heldout"),
])
def test_each_problem_is_named(run_file, override, expected):
    with pytest.raises(ConfigError, match="(?s).*") as error:
        run_config.load(run_file, [override])
    assert expected in str(error.value)


def test_of_many_problems_the_first_hundred_are_told(run_file):
    """The nearest known key was looked for 200,000 times."""
    run_file.write_text(MINIMAL + "\n".join(f"k{i} = 1" for i in range(3000)))
    with pytest.raises(ConfigError, match="^more than 100 problems in .*run.toml") as error:
        run_config.load(run_file, [])
    assert str(error.value).endswith("\n  2,900 more")


def test_missing_and_invalid_files(tmp_path):
    with pytest.raises(ConfigError, match="no such run config"):
        run_config.load(tmp_path / "none.toml")
    (tmp_path / "short.toml").write_text('name = "short"')
    with pytest.raises(ConfigError) as error:
        run_config.load(tmp_path / "short.toml")
    assert "\n  optim: missing; a table [optim] with at least: learning_rate" in str(error.value)
    assert "\n  out_dir: missing; this key has no default" in str(error.value)
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        run_config.load(tmp_path / "bad.toml")


@pytest.mark.parametrize("text, expected", [
    ('{"zero_optimisation": {}}', "did you mean zero_optimization?"),
    ('{"optimizer": {"type": "Adam"}}', "belongs to the run config (optim.name"),
    ('{"train_batch_size": 8}', "train.global_batch_size"),
    ('{"bf16": {}, "bf16": {}}', "written twice"), ('[1]', "one JSON object"),
    ('{', "not valid JSON")])
def test_deepspeed_json_is_strict(tmp_path, text, expected):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        ds_config.load(tmp_path / "ds.json")
    assert expected in str(error.value)


def test_clipping_is_always_written(run_file, tmp_path):
    (tmp_path / "ds.json").write_text('{"gradient_clipping": "auto", "bf16": {"enabled": true}, '
                                     '"zero_optimization": {"stage": 1}}')
    run, _ = run_config.load(run_file, ["--optim.clip_norm=0"])
    values = ds_config.load(tmp_path / "ds.json")
    ds = ds_config.resolve(run, values, world_size=2)
    assert ds["gradient_clipping"] == 0  # DeepSpeed's own default would clip at 1.0
    assert ds["gradient_accumulation_steps"] == 2 and ds["train_batch_size"] == 8
    assert ds_config.precision(ds) == "bf16"


@pytest.mark.parametrize("value", [
    1, 2.5, True, "a \"b\" ü", "1", ["x", 2], {"a.b": "c", "d e": [1], "f-g": {"h": 0.1}},
    np.int64(3), np.float32(0.5)],  # of a notebook
    ids=repr)
def test_an_override_is_read_as_what_was_written(value):
    """Names of held-out corpora may hold a dot, which makes a table within a table."""
    assert parse_override(as_override("data.heldout", value)) == ("data.heldout", value)
