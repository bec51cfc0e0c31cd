"""An installation outside the clone: every command is there, with recipes and presets."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from launching import ROOT

SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "deberta_ds", "launch",
           "data_prep", "ds_configs")


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    """The files of a wheel that was built from a copy of the sources."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
                    "--no-build-isolation", "--disable-pip-version-check", "-w", root, source],
                   check=True, capture_output=True, text=True)
    wheel, = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    return root / "site"


def call(installation, directory, *words):
    environment = os.environ | {"PYTHONPATH": str(installation), "DS_ACCELERATOR": "cpu"}
    return subprocess.run([sys.executable, "-P", *words], cwd=directory, env=environment, text=True,
                          capture_output=True, timeout=600)


@pytest.mark.slow
def test_every_command_is_listed_and_has_an_entry_point(installation, tmp_path):
    done = call(installation, tmp_path, "-m", "deberta_ds")
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^  ([a-z-]+) {2,}\S", done.stdout, re.M)
    scripts = {path.stem.replace("_", "-") for folder in ("launch", "data_prep")
               for path in (ROOT / folder).glob("*.py")} - {"demo", "options"}
    assert set(listed) == scripts and len(listed) == len(scripts)
    entry_points, = installation.glob("*.dist-info/entry_points.txt")
    entries = re.findall(r"^deberta-(\S+) = deberta_ds.__main__:main$", entry_points.read_text(),
                         re.M)
    assert sorted(entries) == sorted(scripts)


def test_an_installation_has_the_recipes(installation):
    for folder in ("launch/runs", "ds_configs", "launch/cluster"):
        there = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        inside = installation / "deberta_ds"
        assert there == {path.relative_to(inside) for path in (inside / folder).rglob("*")
                         if path.is_file()}


@pytest.mark.slow
def test_a_recipe_is_found_from_anywhere(installation, tmp_path):
    """A command under its installed name plans the recipe of the installation."""
    program = tmp_path / "deberta-plan"
    program.write_text("from deberta_ds.__main__ import main\nmain()\n")
    done = call(installation, tmp_path, program, "--config", "launch/runs/demo.toml",
                "--devices", "2 x h100")
    assert "recommended: ZeRO-" in done.stdout, done.stderr
    assert str(installation) in call(
        installation, tmp_path, "-c", "import deberta_ds; print(deberta_ds.__file__)").stdout
    done = call(installation, tmp_path, program, "--no_such_option")
    assert done.returncode == 2 and "usage: deberta-plan [-h]" in done.stderr
    done = call(installation, tmp_path, program, "--help")
    assert "    deberta-plan --config RUN.toml" in done.stdout
    assert "python launch" not in done.stdout and "as in deberta-pretrain" in done.stdout
    (tmp_path / "corpus").mkdir()  # errors name commands that are there, too
    done = call(installation, tmp_path, "-m", "deberta_ds", "verify", "corpus")
    assert "run deberta-tokenize-corpus to the end" in done.stderr
    done = call(installation, tmp_path, "-m", "deberta_ds", "no-such-command")
    assert done.returncode == 2 and "no such command" in done.stderr
