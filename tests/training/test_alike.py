"""Ranks that do not run the same stop at the start, and both say in what they differ."""

import shutil

import pytest
import rank_helpers
from data_helpers import tokenizer_path
from launching import deepspeed_json, make_run, options_of


def start(tmp_path, arguments: list[list[str]], script=rank_helpers.PRETRAIN
          ) -> tuple[list[int], str]:
    """Run pretrain.py, each rank with arguments of its own; return (exit codes, what was said)."""
    codes = rank_helpers.wait(rank_helpers.start_each(arguments, tmp_path / "log", script), 120)
    return codes, (tmp_path / "log").read_text()


@pytest.mark.multi
def test_a_rank_with_another_value_is_named_before_the_first_step(tmp_path):
    """Half of a ZeRO-1 model was trained at a learning rate of its own, with exit code 0."""
    run, ds = make_run(tmp_path), deepspeed_json(tmp_path / "ds.json", 1)
    common = options_of(run, ds)
    codes, text = start(tmp_path, [common, [*common, "--optim.learning_rate=2e-3"]])
    assert codes == [2, 2] and "loss" not in text, text
    assert "optim.learning_rate = 0.002, on rank 0 0.001" in text and "rank 1 on " in text


@pytest.mark.multi
def test_a_node_with_a_stale_copy_of_the_corpus_is_named(tmp_path):
    """Both ranks read the path `train`, each from its own directory."""
    arguments = []
    for name in "ab":
        run = make_run(tmp_path / name)
        run.write_text(run.read_text().replace(f"{run.parent}/out", f"{tmp_path}/out")
                       .replace(str(run.parent), "."))
        arguments.append([str(run.parent), *options_of(
            "run.toml", deepspeed_json(tmp_path / "ds.json", 0))])
    shutil.rmtree(tmp_path / "b/train")
    shutil.copytree(tmp_path / "b/heldout", tmp_path / "b/train")
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text("import os, runpy, sys\nos.chdir(sys.argv.pop(1))\n"
                         f"runpy.run_path({str(rank_helpers.PRETRAIN)!r}, run_name='__main__')\n")
    codes, text = start(tmp_path, arguments, elsewhere)
    assert codes == [2, 2] and "content hash of ./train = " in text, text
    assert "rank 1 on " in text and "optim." not in text


@pytest.mark.multi
def test_fine_tuning_ranks_with_other_settings_are_named(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "a b", "label": 0}\n{"text": "c d", "label": 1}\n')
    (tmp_path / "t.toml").write_text(
        'name = "t"\nkind = "classification"\ntexts = ["text"]\n'
        'train = "t.jsonl"\nval = "t.jsonl"\n')
    common = ["--task", str(tmp_path / "t.toml"), "--model", "random:tiny", "--tokenizer",
              tokenizer_path(), "--out", str(tmp_path / "out")]
    codes, text = start(tmp_path, [common, [*common, "--t.epochs=7"]],
                        rank_helpers.PRETRAIN.with_name("finetune.py"))
    assert codes == [2, 2] and "--t.epochs = '7', on rank 0 " in text, text


@pytest.mark.multi
def test_a_kernel_that_fails_on_one_node_ends_the_run_on_all(tmp_path):
    """One node went on with slower operators, all others waited for it, and --check passed."""
    pytest.importorskip("triton")
    run, ds = make_run(tmp_path), deepspeed_json(tmp_path / "ds.json", 1)
    common = [*options_of(run, ds), "--check"]
    script = rank_helpers.PRETRAIN.parents[1] / "tests/workers/pretrain_checked.py"
    codes, text = start(tmp_path, [[how, str(tmp_path), *common] for how in ("passes", "dies")],
                        script)
    assert codes == [2, 2] and "check passed" not in text, text
    assert text.count("error: rank 1 on node1: attention: the fused kernel fails its check on "
                      "node1, cpu: its process ends with SIGABRT\nCUDA error: an illegal memory "
                      "access") == 1, text
    assert "--model.attention=dense in pretraining" in text
    kept, = tmp_path.rglob("kernels/*.txt")
    assert kept.parts[-4] == "node0" and "largest error 1.0e-06" in kept.read_text()
