"""Imports run one way (architecture): each layer may import itself and the layers below it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deberta_ds"
LAYERS = [
    {"errors", "files", "shipped", "splitmix", "options", "model_config", "objective_config",
     "json_files", "toml_files", "validation", "config", "presets",
     "batch_schedule", "deepspeed_config", "command_line"},
    {"cpu", "dist", "log", "numbers", "records", "trackers", "tokenizer", "cluster"},
    {"data", "model"},
    {"objectives"},
    {"formats", "planner"},
    {"train"},
    {"analysis", "finetune", "report", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
NO_TORCH = LAYERS[0] | {"log", "numbers", "records", "trackers"}
DEEPSPEED_ONLY_IN = {"train/engine.py", "train/deepspeed_check.py"}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imports(path: Path, top_level_only: bool = False) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module)
            if node.module == "deberta_ds":
                found += [f"deberta_ds.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_one_way(path):
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ("launch", "data_prep", "benchmarks", "tests"):
            raise AssertionError(f"{path} imports {name}")
        if parts[0] != "deberta_ds" or len(parts) == 1 or parts[1] not in LEVEL:
            continue
        below = LEVEL[parts[1]] < LEVEL[mine] or parts[1] == mine
        beside = LEVEL[parts[1]] == LEVEL[mine] and {parts[1], mine} != {"data", "model"}
        assert below or beside, f"{path.relative_to(ROOT)} ({mine}) imports {name}"


def test_every_module_has_a_layer():
    for path in modules():
        assert path.relative_to(PACKAGE).parts[0].removesuffix(".py") in LEVEL, path


def test_configs_load_on_a_login_node():
    for path in modules():
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in NO_TORCH:
            heavy = {name.split(".")[0] for name in imports(path, top_level_only=True)}
            assert not heavy & {"torch", "deepspeed", "transformers"}, path


def test_deepspeed_is_imported_in_few_places():
    users = {path.relative_to(PACKAGE).as_posix() for path in modules()
             if any(name.split(".")[0] == "deepspeed" for name in imports(path))}
    assert users <= DEEPSPEED_ONLY_IN
