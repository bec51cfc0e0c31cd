"""Imports run one way: a room imports itself and the rooms above it in the table."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "deberta_ds"
# In order. A name is a folder of the package or a file at its root; a line is a room.
ROOMS = [line.split() for line in """
    errors files json_files numbers shipped splitmix command_line
    options validation toml_files model_config objective_config config presets batch_schedule
        deepspeed_config
    records trackers log
    cpu dist
    cluster
    tokenizer
    data
    model
    objectives
    planner
    formats
    train
    analysis
    finetune
    report
    __main__
""".replace("\n        ", " ").strip().splitlines()]
ORDER = {name: number for number, names in enumerate(ROOMS) for name in names}
NEVER = {("model", "data")}  # (who, what): the order allows it, the design does not
NO_TORCH = {*ROOMS[0], *ROOMS[1], *ROOMS[2]}  # configs load on a login node
DEEPSPEED = {"train/engine.py", "train/deepspeed_check.py"}  # who may import it
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))
         if path != PACKAGE / "__init__.py"}


def imports(file: str, top_level_only: bool = False) -> set[str]:
    """Return the dotted names that a file imports."""
    tree = ast.parse(FILES[file].read_text())
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def test_every_room_is_in_the_table_and_every_name_in_it_is_there():
    assert {room(file) for file in FILES} == ORDER.keys()


def test_imports_run_one_way():
    wrong = []
    for file in FILES:
        mine = room(file)
        for name in sorted(imports(file)):
            top, _, rest = name.partition(".")
            theirs = rest.split(".")[0]
            if top == "deberta_ds" and theirs in ORDER and (
                    ORDER[theirs] > ORDER[mine] or (mine, theirs) in NEVER):
                wrong.append(f"{file} imports {name}")
            elif top in ("launch", "data_prep", "benchmarks", "tests", "tools"):
                wrong.append(f"{file} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_who_imports_torch_and_deepspeed():
    tops = {file: {name.split(".")[0] for name in imports(file, top_level_only=True)}
            for file in FILES}
    heavy = [file for file in FILES if room(file) in NO_TORCH
             and tops[file] & {"torch", "deepspeed", "transformers"}]
    assert not heavy
    users = {file for file in FILES
             if any(name.split(".")[0] == "deepspeed" for name in imports(file))}
    assert users <= DEEPSPEED, users - DEEPSPEED
