"""`[init] from` through launch/pretrain.py: two ranks under ZeRO-3 start from an exported model."""

import pytest
import rank_helpers
import torch
from launching import deepspeed_json, make_run, options_of

from deberta_ds.checkpoint.find import load_whole_state
from deberta_ds.publish.convert import convert

pytestmark = [pytest.mark.multi, pytest.mark.slow]
TINY_STEP = 1e-9  # learning rate of the one step that makes a checkpoint of the first weights


def start(root, name, init, **changes):
    """Train one negligible step from `init` on two ranks; return (weights, output)."""
    run = make_run(root / name, steps="1", warmup_steps="0", learning_rate=str(TINY_STEP),
                   save_every="1", eval_every="1", two_layers=True, **changes)
    text = run.read_text().replace('preset = "tiny"\nnum_layers = 2\nvocab_size = 640\n', "")
    run.write_text(text.replace("[objective]", f"[init]\n{init}\n[objective]"))
    ds = deepspeed_json(root / "zero3.json", 3)
    text = rank_helpers.run(2, options_of(run, ds), root / f"{name}.log")
    return load_whole_state(root / name / "out")[0], text


def close(first, second):
    return all((first[name] - second[name]).abs().max() < 1e-7 for name in first)


def test_runs_start_from_checkpoint_and_from_its_export(tmp_path):
    run = make_run(tmp_path / "first", steps="2", warmup_steps="0", save_every="2", eval_every="2",
                   two_layers=True)
    ds = deepspeed_json(tmp_path / "zero1.json", 1)
    rank_helpers.run(1, options_of(run, ds), tmp_path / "log")
    before, _ = load_whole_state(tmp_path / "first/out")
    summary = convert(tmp_path / "first/out", tmp_path / "hf", "hf")
    assert any("AutoModel -> DebertaV2Model: no missing" in line for line in summary.checks)

    after, output = start(tmp_path, "whole", f'from = "{tmp_path}/hf"')
    assert before.keys() == after.keys() and close(before, after)
    assert "GDES delta taken from the file" in output

    after, output = start(
        tmp_path, "words", f'from = "{tmp_path}/first/out"\nembeddings_only = true', kind='"mlm"')
    merged = before["words.weight"] + before["discriminator.words.weight"]
    assert torch.equal(after["words.weight"], merged)  # fixed, not merely slow
    assert "first of two stages" in output
