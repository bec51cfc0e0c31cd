"""What version 0.1.0 wrote stays usable: its checkpoint resumes and exports with the same numbers.

The fixture was made by the old code (its README says how); nothing in it is ever made anew.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import rank_helpers
import torch
from data_helpers import tokenizer_path
from launching import ROOT
from safetensors.torch import load_file

from deberta_ds.errors import UserError
from deberta_ds.files import xxh3
from deberta_ds.formats.checkpoint import load_whole_state, newest
from deberta_ds.formats.convert import convert
from deberta_ds.formats.layout import CheckpointError
from deberta_ds.formats.relative_rows import TABLE, UNREAD_ROWS
from deberta_ds.formats.release_reader import SIDE_FILE, read_release
from deberta_ds.formats.run_record import read_run_record
from deberta_ds.records import read_metrics

OLD = ROOT / "tests/fixtures/version_0_1_0"
STEP = "step-00000004"
ENGINES = {"rtd": "ZeRO-1", "mlm": "ZeRO-3"}


def numbers(metrics: Path, after_step: int) -> list[dict]:
    """Return the losses and scores that a run logged after a step, without what time decides."""
    timed = ("seconds", "tokens_per_second", "flops_per_second", "mfu", "eta_seconds")
    return [{key: value for key, value in record.items() if key not in timed}
            for record in read_metrics(metrics)
            if record.pop("kind") in ("train", "eval") and record["step"] > after_step]


def assert_same_numbers(found: list[dict], expected: list[dict]) -> None:
    """1e-5 relative: another processor's matrix products round otherwise; on one they are equal.

    Scores of an order move by whole pairs, of which the held-out rows have some 20,000: one or two.
    """
    assert len(found) == len(expected) > 0
    for ours, old in zip(found, expected, strict=True):
        if "masked_loss" in ours:  # a masked LM's own numbers were called the generator's
            old = {key.replace("generator_", "masked_"): value for key, value in old.items()}
        lost = {key: value for key, value in old.items() if key not in ours}
        assert not lost, f"no longer logged: {lost}"
        for key in {"roc_auc", "average_precision"} & old.keys():
            assert ours[key] == pytest.approx(old.pop(key), abs=1e-4)
        assert {key: ours[key] for key in old} == pytest.approx(old, rel=1e-5, abs=1e-7)


@pytest.mark.multi
@pytest.mark.parametrize("kind", ENGINES)
def test_old_checkpoint_resumes_with_the_losses_of_the_old_code(tmp_path, kind):
    checkpoints = tmp_path / "out/checkpoints"
    shutil.copytree(OLD / kind / STEP, checkpoints / STEP)
    # The run named its files relative to the repository; they have moved to where they are now.
    text = rank_helpers.run(2, [
        "--config", str(OLD / kind / "run.toml"), "--deepspeed_config",
        str(OLD / kind / "deepspeed.json"), f"--out_dir={tmp_path / 'out'}", "--data.verify=full",
        f'--data.sources=[{{path = "{OLD}/train"}}]', f"--data.eval={OLD}/heldout",
        f"--data.tokenizer={OLD}/spm.model"], tmp_path / "log")
    assert f"resume at step 4 (from {checkpoints / STEP})" in text
    assert "passed over" not in text and "another layout" not in text
    assert_same_numbers(numbers(tmp_path / "out/metrics.jsonl", 0),
                        numbers(OLD / kind / "metrics.jsonl", 4))
    # It keeps its rules for good: the common norm of both networks among them.
    record = read_run_record(newest(tmp_path / "out"))
    assert [getattr(record, name) for name in ("row_rules", "cpu_rules", "clip_rules")] == [1, 1, 1]


@pytest.mark.parametrize("kind", ENGINES)
def test_old_checkpoint_exports_the_tensors_of_the_old_code(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(ROOT)  # the run names its tokenizer relative to the repository
    convert(OLD / kind / STEP, tmp_path / "export", "hf")
    old_files = sorted((OLD / kind / "export").rglob("*.safetensors"))
    assert len(old_files) == (4 if kind == "rtd" else 2)
    for old_file in old_files:
        old = load_file(old_file)
        new_file = tmp_path / "export" / old_file.relative_to(OLD / kind / "export")
        new, side = load_file(new_file), load_file(new_file.with_name(SIDE_FILE))
        unread = side.pop("deberta." + UNREAD_ROWS)  # new since 0.1.0: only transformers reads it
        new.pop("deberta." + UNREAD_ROWS, None)
        for name in new:
            if name.endswith(TABLE):
                assert torch.equal(new[name][0], new[name][1]) and len(unread) == 1
                new[name][0] = unread[0]
        assert new.keys() == old.keys()
        assert all(torch.equal(new[name], old[name]) for name in old)
    for old_file in sorted((OLD / kind / "export").rglob("*.json")):
        new_file = tmp_path / "export" / old_file.relative_to(OLD / kind / "export")
        old, new = (json.loads(file.read_text()) for file in (old_file, new_file))
        if old.get("legacy") is False:  # new since 0.1.0: transformers 4.48 to 5.19 load it so
            assert old.pop("tie_word_embeddings") and not new.pop("tie_word_embeddings")
        assert new == old, old_file


@pytest.mark.parametrize("kind", ENGINES)
def test_old_export_reads_as_the_checkpoint_it_was_made_of(kind, monkeypatch):
    monkeypatch.chdir(ROOT)
    exported, saved = read_release(OLD / kind / "export"), read_release(OLD / kind / STEP)
    for name, network in saved.networks().items():
        found = exported.networks()[name]
        assert found.config == network.config
        assert found.tensors.keys() == network.tensors.keys()
        assert all(torch.equal(found.tensors[key], network.tensors[key]) for key in found.tensors)


class Payload:
    """A pickle that would create a directory when it is loaded."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def plant(path: Path, name: str, mark: Path) -> None:
    """Put code into one file of an old checkpoint and make its manifest fit."""
    values = torch.load(path / name, weights_only=False)
    torch.save(values | {"planted": Payload(mark)}, path / name)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": (path / name).stat().st_size, "xxh3": xxh3(path / name)}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", ENGINES)
def test_code_in_an_old_checkpoint_is_refused_and_not_run(tmp_path, kind):
    files = sorted(path.name for path in (OLD / kind / STEP / "zero").iterdir())
    assert len(files) >= 3
    for number, name in enumerate(files):
        path, mark = tmp_path / str(number) / STEP, tmp_path / "ran"
        shutil.copytree(OLD / kind / STEP, path)
        plant(path, f"zero/{name}", mark)
        if kind == "mlm" and name == "zero_pp_rank_1_mp_rank_00_model_states.pt":
            continue  # nothing in it is ever asked for
        with pytest.raises(CheckpointError, match="code in it was not run"):
            load_whole_state(path)
        assert not mark.exists()


@pytest.mark.multi
def test_code_in_an_old_checkpoint_is_not_run_by_a_resumed_run(tmp_path):
    path, mark = tmp_path / "out/checkpoints" / STEP, tmp_path / "ran"
    shutil.copytree(OLD / "rtd" / STEP, path)
    plant(path, "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt", mark)
    processes = rank_helpers.start(2, [
        "--config", str(OLD / "rtd/run.toml"), "--deepspeed_config",
        str(OLD / "rtd/deepspeed.json"), f"--out_dir={tmp_path / 'out'}",
        f'--data.sources=[{{path = "{OLD}/train"}}]', f"--data.eval={OLD}/heldout",
        f"--data.tokenizer={OLD}/spm.model"], tmp_path / "log")
    codes, text = rank_helpers.wait(processes), (tmp_path / "log").read_text()
    assert 2 in codes and "code in it was not run" in text and "Traceback" not in text
    assert not mark.exists()


def test_another_tokenizer_where_the_old_run_had_its_own_is_not_exported(tmp_path, monkeypatch):
    other = tmp_path / "tests/fixtures/version_0_1_0/spm.model"
    other.parent.mkdir(parents=True)
    other.write_bytes(Path(tokenizer_path()).read_bytes())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="spm.model: is not the tokenizer that .* was trained with"):
        read_release(OLD / "mlm" / STEP)
