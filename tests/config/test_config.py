"""Run configs, presets, options and DeepSpeed JSONs: strict, complete, and round trips."""

import ast
import dataclasses
import re
import runpy
import tomllib
from pathlib import Path

import numpy as np
import pytest

from deberta_ds.base.errors import ConfigError
from deberta_ds.base.files import flatten
from deberta_ds.config import objective, run_config
from deberta_ds.config.model import MODELS
from deberta_ds.config.options import OneOfOrOwn, Option, describe, options_of
from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig
from deberta_ds.config.toml_files import as_override, parse_override
from deberta_ds.corpus import recipe
from deberta_ds.model.backbone import Backbone, count_parameters, on_meta
from deberta_ds.objectives.mlm import MlmModel
from deberta_ds.objectives.rtd import Discriminator, RtdModel
from deberta_ds.tasks.settings import Settings

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
    run, origins = run_config.load(run_file, ["--train.steps=20", "--model.num_layers=3",
                                              "--model.position_buckets=-1"])
    assert run.train.steps == 20 and origins["train.steps"] == "command line"
    assert run.model.num_layers == 3  # over the preset's 4
    assert run.model.position_buckets == 0  # Hugging Face writes -1
    assert origins["model.hidden_size"] == "preset tiny"
    assert origins["optim.learning_rate"] == str(run_file)
    assert origins["optim.eps"] == "default"
    assert run.objective.mask.max_ngram == 3 and origins["objective.mask.max_ngram"] == "mlm recipe"


@pytest.mark.parametrize("override, expected", [
    ("--model.hidden_sise=3", "did you mean model.hidden_size?"),
    ('--data.sources=[{path = "a", first_row = 2}]', "data.sources.0.first_row: unknown key"),
    ('--data.sources=[{path = "a", weight = -1}]', "1 problem in "),  # of a number its own
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
    with pytest.raises(ConfigError, match=re.escape(expected)):
        run_config.load(run_file, [override])


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


@pytest.mark.parametrize("value", [
    1, 2.5, True, "a \"b\" ü", "1", ["x", 2], {"a.b": "c", "d e": [1], "f-g": {"h": 0.1}},
    np.int64(3), np.float32(0.5)],  # of a notebook
    ids=repr)
def test_an_override_is_read_as_what_was_written(value):
    """Names of held-out corpora may hold a dot, which makes a table within a table."""
    assert parse_override(as_override("data.heldout", value)) == ("data.heldout", value)


# preset: (Hugging Face backbone, official MaskedLanguageModel)
COUNTS = {
    "deberta-base": (138_601_728, 139_655_769),
    "deberta-large": (405_163_008, 406_838_361),
    "deberta-xlarge": (757_804_032, 759_528_537),
    "deberta-v2-xlarge": (884_593_152, 887_871_588),
    "deberta-v2-xxlarge": (1_564_549_632, 1_567_828_068),
    "deberta-v3-xsmall": (70_682_112, 71_155_428),
    "deberta-v3-small": (141_304_320, 142_417_764),
    "deberta-v3-base": (183_831_552, 184_944_996),
    "deberta-v3-large": (434_012_160, 435_716_196),
    "mdeberta-v3-base": (278_218_752, 279_455_096),
}
GENERATORS = {  # preset of the discriminator: (backbone, official MaskedLanguageModel)
    "deberta-v3-xsmall": (60_035_328, 60_508_644),
    "deberta-v3-small": (120_040_704, 121_154_148),
    "deberta-v3-base": (141_304_320, 142_417_764),
    "deberta-v3-large": (282_857_472, 284_561_508),
}
RTD_HEADED = {  # official ReplacedTokenDetection, which also owns an unused position table
    "deberta-v3-xsmall": 71_027_713,
    "deberta-v3-base": 184_817_665,
    "deberta-v3-large": 435_589_121,
}


@pytest.mark.parametrize("preset", COUNTS)
def test_each_preset_has_the_official_number_of_parameters(preset):
    config = ModelConfig(**MODELS[preset])
    generator = dataclasses.replace(config, num_layers=config.num_layers // 2)
    for network, counts in ((config, COUNTS), (generator, GENERATORS)):
        if preset in counts:
            backbone, masked_lm = counts[preset]
            if not config.key_bias:  # official v1 models carry two more, inert, biases per layer
                masked_lm -= 2 * config.hidden_size * config.num_layers
            assert count_parameters(on_meta(Backbone, network)) == backbone
            assert count_parameters(on_meta(MlmModel, network)) == masked_lm
    if preset in RTD_HEADED:
        unused = config.max_position * config.hidden_size
        count = count_parameters(on_meta(Discriminator, config, "gdes"))
        assert count == RTD_HEADED[preset] - unused


def test_sharing_decides_which_word_tables_exist():
    config = ModelConfig(**MODELS["tiny"])
    table = config.vocab_size * config.hidden_size

    def count(sharing):
        objective = ObjectiveConfig(kind="rtd", embedding_sharing=sharing)
        with_sharing = on_meta(lambda: RtdModel(config, config, objective, sampling_seed=0))
        return count_parameters(with_sharing)

    assert count("gdes") == count("nes") == count("es") + table


ROOT = Path(__file__).resolve().parents[2]
CLASSES = [value for value in {**vars(objective), **vars(run_config), **vars(recipe)}.values()
           if isinstance(value, type) and dataclasses.is_dataclass(value)
           and value not in (OneOfOrOwn, Option, recipe.ReadOptions)] + [Settings]


def test_the_page_is_current():
    made = runpy.run_path(str(ROOT / "docs/make_configuration.py"))
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    assert page == made["page"](), "run python docs/make_configuration.py"


@pytest.mark.parametrize("cls", [run_config.RunConfig, Settings, recipe.Recipe])
def test_every_option_has_a_meaning_and_every_number_limits(cls):
    for option in options_of(cls):
        assert option.meaning or option.kind == "section", option.key
        if option.kind in ("number", "whole number"):
            assert option.limits, f"{option.key} has no limits"


def test_explain_knows_every_key_of_the_shipped_run_files():
    """--explain preset and --explain from said that there is no such key."""
    known = {option.key for option in run_config.run_options()}
    files = [path for path in (ROOT / "launch/runs").rglob("*.toml")
             if path.parent.name not in ("superglue", "glue", "tasks")]
    assert len(files) > 10
    for path in files:
        for key, value in flatten(tomllib.loads(path.read_text())).items():
            assert key in known or key.rpartition(".")[0] in known, f"{path}: {key}"
            for inner in value if isinstance(value, list) else ():
                assert not isinstance(inner, dict) or {f"{key}[].{k}" for k in inner} <= known


def test_explain_finds_keys_by_a_part_of_their_name():
    shape = describe(run_config.run_options(), "vocab_size")
    assert shape[2] == ("    whole number; default the tokenizer's ids padded to 64, at least 1, "
                        "at most 2^24")
    lines = describe(options_of(run_config.RunConfig), "optim.learning_rate")
    assert lines == ["optim.learning_rate", "    peak learning rate",
                     "    number; required, above 0, at most 10"]


def attributes_read() -> set[str]:
    """Return every attribute that some module of the package reads from anything."""
    found = set()
    for path in (ROOT / "deberta_ds").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


def test_every_field_of_a_config_has_a_reader():
    """A knob needs a reader: an expression, not a comment or a string, reads it by name."""
    read = attributes_read()
    assert len(CLASSES) == 15, [cls.__name__ for cls in CLASSES]
    for cls in CLASSES:
        for field in dataclasses.fields(cls):
            assert field.name in read, f"{cls.__name__}.{field.name} has no reader"
