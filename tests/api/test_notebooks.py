"""The notebooks of examples/ run from top to bottom, the second on what the first has made."""

import json
import os
from pathlib import Path

import pytest
from launching import ROOT


@pytest.mark.slow
def test_notebooks(process_group, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for name in ("train_and_look_inside", "adapt_and_finetune"):
        notebook = json.loads((ROOT / f"examples/{name}.ipynb").read_text())
        names: dict = {}
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert not cell["outputs"], f"{name}: clear the outputs before a commit"
                code = "".join(cell["source"]).replace("STEPS = 300", "STEPS = 4").replace(
                    "STEPS = 50", "STEPS = 4")
                exec(compile(code, name, "exec"), names)
    printed = capsys.readouterr().out
    assert "question_or_order" in printed and Path("runs/notebook/hf/model.safetensors").is_file()
