"""`[init] from` through launch/pretrain.py: two ranks under ZeRO-3 start from an exported model."""

import pytest
import rank_helpers
import torch
from export_cases import make_release
from launching import deepspeed_json, make_run, options_of

import deberta_ds
from deberta_ds.checkpoint.saved_state import load_whole_state
from deberta_ds.publish.convert import convert
from deberta_ds.release.model_files import write_ours

TINY_STEP = "1e-9"  # learning rate of the one step that makes a checkpoint of the first weights


def write_run(root, **changes):
    """Write a run of any shape that trains one negligible step; return its file."""
    return make_run(root, steps="1", warmup_steps="0", learning_rate=TINY_STEP, save_every="1",
                    eval_every="1", preset=None, vocab_size=None, **changes)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An export of a discriminator with its generator, and what is in it."""
    root, release = tmp_path_factory.mktemp("source"), make_release("v3")
    write_ours(release, root / "ours")
    summary = convert(root / "ours", root / "hf", "hf")
    assert any("AutoModel -> DebertaV2Model: no missing" in line for line in summary.checks)
    return root / "hf", release


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_start_from_an_export(tmp_path, source):
    path, release = source
    options = options_of(write_run(tmp_path), deepspeed_json(tmp_path / "zero3.json", 3))
    output = rank_helpers.run(2, [*options, f"--init.from={path}"], tmp_path / "log")
    assert "GDES delta taken from the file" in output
    state, _ = load_whole_state(tmp_path / "out")
    expected = {"discriminator.words.weight": release.main.tensors["words.delta"]} | {
        name: tensor for name, tensor in release.generator.tensors.items() if name == "words.weight"
    } | {f"discriminator.{name}": tensor for name, tensor in release.main.tensors.items()
         if name.startswith("trunk.")}
    assert expected.keys() <= state.keys() and len(expected) > 50
    for name, tensor in expected.items():
        assert (state[name] - tensor).abs().max() < 1e-7, name


def test_the_embedding_of_the_first_of_two_stages_is_fixed(tmp_path, source, process_group):
    path, release = source
    run = write_run(tmp_path, kind='"mlm"')
    deberta_ds.train(run, {"init.from": str(path), "init.embeddings_only": True},
                     deepspeed_config=deepspeed_json(tmp_path / "zero1.json", 1))
    words = load_whole_state(tmp_path / "out")[0]["words.weight"]
    assert torch.equal(words, release.main.tensors["words.weight"])  # fixed, not merely slow
