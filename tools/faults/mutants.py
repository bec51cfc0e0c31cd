"""Change one thing in the core and see whether a test notices: mutants.py --seed 0 --count 100

Each mutant is one changed line of a copy of the package: a comparison or sign flipped, a number
moved by one, a guard or a negation dropped, an `and` for an `or`. The tests named for its file run
in a process of their own. A mutant that no test notices is printed: add the test, or see that the
change means nothing.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = {  # file of the package: tests that should notice
    "data/masking.py": ["test_masking.py"],
    "data/rows.py": ["test_rows.py", "test_masking.py", "test_replaced.py"],
    "data/shards.py": ["test_packing.py"],
    "data/mixture.py": ["test_mixture.py", "test_permutation.py"],
    "data/batch.py": ["test_rows.py", "test_objectives.py"],
    "data/loader.py": ["test_loader.py"],
    "objectives/base.py": ["test_objectives.py", "test_export.py"],
    "objectives/mlm.py": ["test_objectives.py", "test_export.py", "test_gradients.py"],
    "objectives/rtd.py": ["test_objectives.py", "test_gradients.py", "test_export.py"],
    "engine/optim.py": ["test_schedule.py"],
    "training/step.py": ["test_ladder.py", "test_trajectory.py"],
    "model/heads.py": ["test_objectives.py", "test_export.py"],
    "model/encoder.py": ["test_encoder_parity.py"],
    "model/linear_cross_entropy.py": ["test_linear_cross_entropy.py"],
    "model/attention/geometry.py": ["test_attention_reference.py"],
    "model/attention/reference.py": ["test_attention_reference.py"],
    "model/attention/segments.py": ["test_attention_tiled.py"],
    "model/attention/tiled.py": ["test_attention_tiled.py"],
    "model/attention/dense.py": ["test_attention_tiled.py"],
}
_FLIPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
          ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
          ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn,
          ast.NotIn: ast.In}


def places(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    """Return (node, what to change) of every mutant of a module; docstrings are left alone."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIPS:
            found.append((node, "comparison"))
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _FLIPS:
            found.append((node, "operator"))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            found.append((node, "negation"))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            found.append((node, "number"))
        elif isinstance(node, ast.If) and not node.orelse:
            found.append((node, "guard"))
    return found


def mutate(node: ast.AST, what: str) -> None:
    """Change a node in place."""
    if what == "comparison":
        node.ops[0] = _FLIPS[type(node.ops[0])]()
    elif what == "operator":
        node.op = _FLIPS[type(node.op)]()
    elif what == "negation":
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else node.op
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif what == "number":
        node.value += 1
    else:
        node.test = ast.Constant(False)


def run(copy: Path, tests: list[str], seconds: float) -> bool:
    """Return whether the tests pass in a copy of the repository; a hang counts as noticed."""
    env = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
               *(str(path) for name in tests for path in (copy / "tests").rglob(name))]
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--files", nargs="+", default=list(TESTS), help="only these")
    parser.add_argument("--seconds", type=float, default=600, help="for the tests of one mutant")
    parser.add_argument("--out", type=Path, help="write the survivors as JSON")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    survivors, noticed = [], 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(
            ".git", ".venv", "runs", "__pycache__", "images", "results"))
        for number in range(options.count):
            name = options.files[number % len(options.files)]
            path, text = copy / "deberta_ds" / name, (ROOT / "deberta_ds" / name).read_text()
            tree = ast.parse(text)
            node, what = drawn.choice(places(tree))
            line = text.splitlines()[node.lineno - 1].strip()
            mutate(node, what)
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            survived = run(copy, TESTS[name], options.seconds)
            path.write_text(text)
            noticed += not survived
            if survived:
                survivors.append({"file": name, "line": node.lineno, "what": what, "text": line})
                print(f"SURVIVED {name}:{node.lineno} {what}: {line}", flush=True)
    print(f"{noticed} of {options.count} mutants were noticed")
    if options.out:
        options.out.write_text(json.dumps(survivors, indent=1) + "\n")


if __name__ == "__main__":
    main()
