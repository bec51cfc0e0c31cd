"""Imports run one way: a room of the core imports itself and the rooms before it; the wings know
the core, and each other only where WINGS says so.
"""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "deberta_ds"
# In order, the ground floor first; `tests/` has a folder for each.
CORE = """base config tokenizer model cluster tracking files data objectives engine checkpoint
          release training""".split()
WINGS: dict[str, set[str]] = {
    "corpus": set(), "evaluate": set(), "planner": set(), "publish": set(), "tasks": set(),
    "finetuning": {"tasks", "publish"},
    "report": {"corpus", "evaluate", "planner", "publish", "tasks", "finetuning"}}
DOORS = {"api", "__main__"}  # may import all
NEVER = {("data", "model")}  # (who, what): the order allows it, the design does not
NO_TORCH = {"base", "config", "tracking"}  # a run file is checked on a login node
KNOWS_DEEPSPEED = {"engine"}
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
    assert {room(file) for file in FILES} == {*CORE, *WINGS, *DOORS}


def may_import(mine: str, theirs: str) -> bool:
    if mine in CORE:
        before = CORE[:CORE.index(mine) + 1]
        return theirs in before and (mine, theirs) not in NEVER
    return mine in DOORS or theirs in {mine, *CORE, *WINGS[mine]}


def test_imports_run_one_way():
    wrong = []
    for file in FILES:
        mine = room(file)
        for name in sorted(imports(file)):
            top, _, rest = name.partition(".")
            theirs = rest.split(".")[0]
            if top == "deberta_ds" and theirs and not may_import(mine, theirs):
                wrong.append(f"{file} imports {name}")
            elif top in ("launch", "data_prep", "benchmarks", "tests", "tools"):
                wrong.append(f"{file} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_by_way_of_others():
    modules = {f"deberta_ds.{file[:-3].replace('/', '.')}".removesuffix(".__init__"): file
               for file in FILES}
    graph = {name: {wanted if wanted in modules else wanted.rpartition(".")[0]
                    for wanted in imports(file)} & modules.keys()
             for name, file in modules.items()}
    TopologicalSorter(graph).prepare()  # CycleError names the files


def test_who_imports_torch_and_deepspeed():
    tops = {file: {name.split(".")[0] for name in imports(file, top_level_only=True)}
            for file in FILES}
    heavy = [file for file in FILES if room(file) in NO_TORCH
             and tops[file] & {"torch", "deepspeed", "transformers"}]
    assert not heavy
    users = {room(file) for file in FILES
             if any(name.split(".")[0] == "deepspeed" for name in imports(file))}
    assert users == KNOWS_DEEPSPEED


# What `engine/` gives to others: torch's module inside, and what is ours.
OURS = {"module", "device", "train", "eval", "destroy", "passes"}


def test_no_attribute_of_deepspeeds_engine_is_asked_for_outside_its_room():
    """step.py counted `engine.micro_steps` and read an error's text."""
    public = set(re.findall(r"^(?:def|class) (\w+)", FILES["engine/engine.py"].read_text(), re.M))
    wrong = []
    for file in FILES:
        if room(file) in {"engine", "tokenizer"}:  # whose engines are others
            continue
        text = FILES[file].read_text()
        assert "loss scale already" not in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in (
                    "engine", "_engine", "model_engine") and node.attr not in OURS | public:
                wrong.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_what_scripts_import_of_the_package_is_there_also_inside_functions():
    for path in [path for top in ("benchmarks", "tools", "examples", "launch", "data_prep")
                 for path in (PACKAGE.parent / top).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deberta_ds."):
                place = PACKAGE.parent / node.module.replace(".", "/")
                file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                there = {*re.findall(r"\w+", file.read_text()), *(x.stem for x in place.glob("*"))}
                assert {alias.name for alias in node.names} <= there, f"{path}: {node.module}"
