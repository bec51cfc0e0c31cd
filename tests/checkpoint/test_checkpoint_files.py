"""What a checkpoint survives: every damage is found and named; what is whole is read exactly."""

import errno
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_helpers
import torch
from launching import NVME_REASON, ROOT, make_run, options_of, python
from small_disk import small_disk

from deberta_ds.checkpoint import find, save, saved_state
from deberta_ds.checkpoint.find import CheckpointError, path_of
from deberta_ds.checkpoint.saved_state import SavedState
from deberta_ds.engine import state as engine_state
from deberta_ds.engine.engine import check_engine
from deberta_ds.engine.state import MASTER

pytestmark = pytest.mark.multi
WORKER = Path(__file__).parents[1] / "workers/restore.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of every stage, by two ranks: DIRECTORY/w2_zero3_fp32/checkpoints/step-..."""
    root = tmp_path_factory.mktemp("saved")
    run_file = make_run(root, activation_checkpointing='"none"', two_layers=True)
    rank_helpers.run(2, ["save", str(run_file), str(root / "ck")], root / "log2", WORKER)
    return root


KINDS = {"zero0_fp32", "zero1_fp32", "zero1_bf16", "zero1_fp16",
         "zero1_bf16_fp32accumulation", "zero1_fp32_roundrobin", "zero2_fp32", "zero2_bf16_cpu",
         "zero3_fp32", "zero3_bf16", "zero3_fp16", "zero3_bf16_cpu"}


def loads_of(kinds: set[str], few: int) -> int:
    """Return how many loads a world size makes: of every kind by every kind, saved by one rank and
    by two; without FULL_TABLE `few` of them.
    """
    return 2 * len(kinds) ** 2 if "FULL_TABLE" in os.environ else few


@pytest.mark.slow
def test_every_kind_of_engine_loads_what_every_other_saved_bit_for_bit(saved):
    arguments = [str(saved / "run.toml"), str(saved / "ck")]
    rank_helpers.run(1, ["save", *arguments], saved / "log1", WORKER)
    for world_size, few in ((1, 40), (2, 50)):
        text = rank_helpers.run(world_size, ["load", *arguments], saved / "log", WORKER)
        assert f"{loads_of(KINDS, few)} loads equal" in text


@pytest.mark.slow
def test_every_kind_of_engine_keeps_what_muon_has(tmp_path):
    """Momenta alone for matrices; and after two steps every stage and precision is at one place."""
    run_file = make_run(
        tmp_path, activation_checkpointing='"none"', warmup_steps='5\nname = "muon"',
        two_layers=True)
    arguments = [str(run_file), str(tmp_path / "ck")]
    rank_helpers.run(2, ["save", *arguments], tmp_path / "log2", WORKER)
    rank_helpers.run(1, ["save", *arguments], tmp_path / "log1", WORKER)
    kinds = {path.name[3:] for path in (tmp_path / "ck").glob("w2_*")}
    assert len(kinds) == (10 if "FULL_TABLE" in os.environ else 7)
    for world_size, few in ((1, 25), (2, 30)):
        text = rank_helpers.run(world_size, ["load", *arguments], tmp_path / "log", WORKER)
        assert f"{loads_of(kinds, few)} loads equal" in text
    whole = SavedState(path_of(tmp_path / "ck/w2_zero0_fp32", 2))
    for kind in sorted(kinds):
        other = SavedState(path_of(tmp_path / f"ck/w2_{kind}", 2))
        for name in whole.shapes:
            a, b = whole.read_whole(name), other.read_whole(name)
            if kind.endswith(("fp32", "roundrobin")):
                assert (a - b).abs().max() <= 1e-6, (kind, name)
            elif "exp_avg_sq" not in whole.state_keys(name):  # 16 bits; two steps of lr 1e-3
                way = 2e-3 * 0.2 * (max(a.shape) * min(a.shape)) ** 0.5
                assert (a - b).norm() <= 0.3 * way, (kind, name)


def test_the_table_of_layouts_in_the_docs_is_what_is_tested(saved):
    tested = {path.name[3:] for path in (saved / "ck").glob("w2_*")}
    text = (ROOT / "docs/explanation/reliability.md").read_text()
    named = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `zero")}
    assert tested == KINDS == named


@pytest.mark.slow
@pytest.mark.skipif("NVME_TESTS" not in os.environ, reason=NVME_REASON)
def test_moments_on_nvme_are_restored(tmp_path):
    run_file = make_run(tmp_path)
    arguments = [str(run_file), str(tmp_path / "ck")]
    rank_helpers.run(1, ["save_nvme", *arguments], tmp_path / "log", WORKER)
    text = rank_helpers.run(1, ["load_nvme", *arguments], tmp_path / "log", WORKER)
    assert "4 loads equal" in text


@pytest.mark.parametrize("kind", ["zero1_bf16", "zero3_bf16"])
def test_same_tensors_as_deepspeeds_universal_converter(saved, tmp_path, kind):
    python("-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder",
           saved / f"ck/deepspeed/w2_{kind}/zero", "--output_folder", tmp_path,
           "--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state")
    state = SavedState(path_of(saved / f"ck/w2_{kind}", 2))
    for name in state.shapes:
        for key in (MASTER, "exp_avg", "exp_avg_sq"):
            atom = torch.load(tmp_path / "zero" / name / f"{key}.pt", weights_only=True)
            atom = atom["param"] if isinstance(atom, dict) else atom
            assert torch.equal(state.read(name, key), atom.flatten()), (name, key)


def test_consolidation_equals_zero_to_fp32(saved):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # The script does not read a round-robin order, nor the files of DeepSpeed's BF16_Optimizer.
    for kind in sorted(KINDS - {"zero1_fp32_roundrobin", "zero1_bf16_fp32accumulation"}):
        if kind.startswith("zero0"):  # it has no such files
            continue
        expected = get_fp32_state_dict_from_zero_checkpoint(
            str(saved / f"ck/deepspeed/w2_{kind}"), tag="zero")
        found, run = saved_state.load_whole_state(path_of(saved / f"ck/w2_{kind}", 2))
        assert run.name == "tiny" and found.keys() == expected.keys()
        assert run.model.attention == "auto"  # its reader's machine may not have the run's
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def run_dir(saved, tmp_path):
    """A run with three checkpoints: steps 2, 4 and 6."""
    source = path_of(saved / "ck/w2_zero3_fp32", 2)
    for step in (2, 4, 6):
        path = path_of(tmp_path, step)
        shutil.copytree(source, path)
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | {"step": step}))
    return tmp_path


FILES = ["rank-00000.safetensors", "rank-00001.safetensors", "layout.json", "run.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "flipped"])
def test_damage_is_found_named_and_skipped(run_dir, name, damage):
    file = path_of(run_dir, 6) / name
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "flipped":
        chance = random.Random(name)
        position = chance.randrange(len(data))
        flipped = bytes([data[position] ^ 1 << chance.randrange(8)])
        file.write_bytes(data[:position] + flipped + data[position + 1:])
    else:
        file.write_bytes(data[:len(data) // 2] if damage == "truncated" else b"")
    found = find.find(run_dir, "auto")
    assert found.path == path_of(run_dir, 4)
    assert len(found.warnings) == 1
    assert "step-00000006" in found.warnings[0] and file.name in found.warnings[0]
    assert ("truncated" in found.warnings[0]) == (damage in ("truncated", "empty"))
    with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
        find.find(run_dir, str(path_of(run_dir, 6)))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_read_is_skipped(run_dir, monkeypatch, number):
    """It ended the start, though an older checkpoint was whole."""
    path, real = path_of(run_dir, 6), find.xxh3

    def fail(file):
        if file == path / "run.json":
            raise OSError(number, os.strerror(number), str(file))
        return real(file)

    monkeypatch.setattr(find, "xxh3", fail)
    found = find.find(run_dir, "auto")
    assert found.path == path_of(run_dir, 4)
    assert f"run.json cannot be read ({os.strerror(number)})" in found.warnings[0]
    monkeypatch.setattr(Path, "read_bytes", lambda file: fail(path / "run.json"))
    assert f"manifest.json: {os.strerror(number)}; " in find.problems_of(path)[0]  # not "damaged"


def test_every_flipped_bit_of_a_manifest_is_found_or_harmless(run_dir):
    path = path_of(run_dir, 6) / "manifest.json"
    data = path.read_bytes()
    whole = json.loads(data)
    for position in range(0, len(data), 7):
        changed = data[:position] + bytes([data[position] ^ 2]) + data[position + 1:]
        path.write_bytes(changed)
        try:
            if json.loads(changed) == whole:
                continue
        except ValueError:
            pass
        assert find.problems_of(path.parent), (position, changed[position - 20:position + 20])


def test_half_written_and_damaged_manifests_are_skipped(run_dir):
    (path_of(run_dir, 6) / "manifest.json").unlink()
    (path_of(run_dir, 4) / "manifest.json").write_text('{"version": 1, "files": ')
    found = find.find(run_dir, "auto")
    assert found.path == path_of(run_dir, 2)
    assert "did not finish" in found.warnings[0] and "damaged" in found.warnings[1]
    (path_of(run_dir, 2) / "run.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint") as error:
        find.find(run_dir, "auto")
    assert str(error.value).count("step-0000000") == 3


def test_a_run_is_no_checkpoint_to_resume_from(run_dir, tmp_path):
    """Its save "did not finish"."""
    with pytest.raises(CheckpointError, match="is a run; name a checkpoint, such as .*-00000006$"):
        find.find(tmp_path, str(run_dir))


def test_a_run_killed_in_its_first_save_starts_anew(run_dir):
    for step in (2, 4, 6):
        (path_of(run_dir, step) / "manifest.json").unlink()
    found = find.find(run_dir, "auto")
    assert found.path is None and len(found.warnings) == 3


def test_a_manifest_that_does_not_name_every_file_is_not_whole(run_dir):
    """Without the file of one rank, or without any; with a file on disk that it does not name."""
    path = path_of(run_dir, 6)
    manifest = json.loads((path / "manifest.json").read_text())

    def found_with(**changes) -> find.Found:
        (path / "manifest.json").write_text(json.dumps(manifest | changes))
        return find.find(run_dir, "auto")

    for left_out in (["rank-00001.safetensors"], ["run.json"], list(manifest["files"])):
        found = found_with(files={name: entry for name, entry in manifest["files"].items()
                                  if name not in left_out})
        assert found.path == path_of(run_dir, 4)
        assert all(f"does not name {name}" in found.warnings[0] for name in left_out)
    (path / "rank-00001.safetensors").unlink()
    few = {name: entry for name, entry in manifest["files"].items() if "rank-00001" not in name}
    assert "does not name rank-00001" in found_with(files=few).warnings[0]
    extra = path_of(run_dir, 4) / "rank-00002.safetensors"
    extra.write_bytes(b"")
    assert "does not name rank-00002" in find.find(run_dir, "auto").warnings[1]
    for ranks in (1, 0, 10**9):  # with the files of so many, one rank's may be lost unseen
        assert f"is of {ranks} ranks, run.json of 2" in found_with(
            world_size=ranks, files=few).warnings[0]
    outside = manifest["files"] | {"../step-00000002/run.json": {"bytes": 1, "xxh3": ""}}
    assert "outside the directory" in found_with(files=outside).warnings[0]


def test_keep_deletes_old_ones_and_remains_of_killed_saves(run_dir):
    (path_of(run_dir, 2) / "manifest.json").unlink()  # a save that was killed
    path_of(run_dir, 8).mkdir()  # one that is not finished yet
    save.prune(run_dir, keep=1)
    assert [path.name[-1] for path in find.list_steps(run_dir)] == ["6", "8"]


def test_a_damaged_newest_one_does_not_outlive_the_whole_ones(run_dir):
    """A run passes over step 6 and saves step 5: with keep = 1 only the damaged one stayed."""
    (path_of(run_dir, 6) / "rank-00000.safetensors").write_bytes(b"")
    found = find.find(run_dir, "auto")
    (run_dir / "best").symlink_to("checkpoints/step-00000006")
    [line] = save.set_aside(run_dir, 4)
    assert found.path == path_of(run_dir, 4) and "is named left-00000006 now" in line
    assert not (run_dir / "best").is_symlink() and save.set_aside(run_dir, 4) == []
    shutil.copytree(path_of(run_dir, 4), path_of(run_dir, 5))
    save.prune(run_dir, keep=1)
    assert [path.name[-1] for path in find.list_steps(run_dir)] == ["5"]


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_dynamic_loss_scale_goes_on_and_a_static_one_is_the_jsons(dynamic):
    """fp16 does not run on CPUs, so only the copying is tested."""
    saved = {"dynamic": dynamic, "cur_scale": 64.0, "cur_iter": 7, "last_overflow_iter": 5,
             "cur_hysteresis": 2, "scale_window": 1}
    scaler = SimpleNamespace(dynamic=dynamic, cur_scale=4096.0, cur_iter=0, last_overflow_iter=-1,
                             cur_hysteresis=1, scale_window=1000)
    engine_state.write_loss_scale(
        SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler)), saved)
    assert (scaler.cur_scale, scaler.cur_iter) == ((64.0, 7) if dynamic else (4096.0, 0))
    assert scaler.scale_window == 1000


def test_an_engine_that_could_not_be_resumed_is_refused_before_the_first_step():
    class ZenFlowZeroOptimizer:
        """Stands for any wrapper of DeepSpeed's that is not known here."""

    engine = SimpleNamespace(optimizer=ZenFlowZeroOptimizer(), dp_world_size=1)
    with pytest.raises(CheckpointError, match="leads to ZenFlowZeroOptimizer.*plain ZeRO-0, 1"):
        check_engine(engine)


@pytest.mark.slow
def test_full_disk_is_one_error_and_leaves_the_old_checkpoints(tmp_path):
    run_file, disk = make_run(tmp_path), tmp_path / "disk"
    config = tmp_path / "zero3.json"
    config.write_text('{"zero_optimization": {"stage": 3}}')
    with small_disk(disk, "9m") as resize:
        arguments = [*options_of(run_file, config), f"--out_dir={disk}/out",
                     "--train.save_every=2", "--train.steps=8"]
        processes = rank_helpers.start(2, arguments, tmp_path / "log")
        assert rank_helpers.wait(processes) == [2, 2]
        text = (tmp_path / "log").read_text()
        assert text.count("error: ") == 1 and "; make room" in text and "Traceback" not in text
        whole = [p.name for p in find.list_steps(disk / "out")]
        assert whole == ["step-00000002", "step-00000004"]
        assert find.find(disk / "out", "auto").path.name == "step-00000004"
        resize("60m")
        text = rank_helpers.run(2, arguments, tmp_path / "log2")
        assert "resume at step 4" in text
