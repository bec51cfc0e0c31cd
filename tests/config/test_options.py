"""Options are what they are said to be: the page, --explain and the errors come from one place."""

import ast
import dataclasses
import runpy
import tomllib
from pathlib import Path

import pytest

from deberta_ds.config import objective, run_config
from deberta_ds.config.options import OneOfOrOwn, Option, describe, options_of
from deberta_ds.config.toml_files import flatten
from deberta_ds.corpus import recipe
from deberta_ds.tasks.settings import Settings

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
