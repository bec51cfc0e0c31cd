"""[init] moments: another run goes on with the optimizer's state of a checkpoint."""

import shutil
from dataclasses import replace

import pytest
import rank_helpers
import torch
from data_helpers import make_corpus
from launching import deepspeed_json, losses, make_run, options_of
from tokenizer_cases import directory_of

import deberta_ds
from deberta_ds.base.errors import UserError
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.saved_state import SavedState, tensors_of_rank
from deberta_ds.cluster.watchdog import Watchdog
from deberta_ds.config import run_config
from deberta_ds.engine import ds_config, engine
from deberta_ds.engine.state import layout_of
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.start import start
from deberta_ds.training.step import train_step


@pytest.fixture(scope="module", params=["adamw", "muon"])
def trunk(tmp_path_factory, process_group, request):
    root = tmp_path_factory.mktemp("trunk")
    run_file = make_run(root, two_layers=True, steps="3", save_every="3", eval_every="3",
                        warmup_steps=f'0\nname = "{request.param}"\nschedule = "constant"')
    deberta_ds.train(run_file)
    return run_file


def after_one_more_step(run, resume: str) -> tuple[list, int]:
    """Return the state after the step that follows the trunk's last one, and the steps counted."""
    ds = ds_config.load("ds_configs/zero1_fp32.json")
    with start(run, ds, resume=resume, place="test", origins={},
               watchdog=Watchdog(run.out_dir, 0)) as started:
        longer = replace(run, train=replace(run.train, steps=4))
        micro = next(batches_of(longer, started.inputs, start=3, end=4))
        engine.set_learning_rate(started.engine, run.optim.learning_rate)
        counted = started.engine.global_steps
        train_step(started.engine, micro, step=3, seed=run.train.seed)
        return [(name, tensor.clone()) for name, tensor in tensors_of_rank(
            started.engine, layout_of(started.engine))], counted


def test_the_next_step_is_that_of_the_uninterrupted_run_bit_for_bit(trunk, tmp_path):
    """Of the same sequences; without the moments it is another one."""
    run, _ = run_config.load(trunk)
    (wanted, before), (found, counted), (without, _) = (after_one_more_step(*one) for one in (
        (run, "auto"),
        (replace(run, out_dir=str(tmp_path / "a"), init=run_config.InitConfig(
            source=run.out_dir, moments=True)), "auto"),
        (replace(run, out_dir=str(tmp_path / "b"), init=run_config.InitConfig(
            source=run.out_dir)), "auto")))
    assert before == 3 and counted == 0
    assert [name for name, _ in wanted] == [name for name, _ in found]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(wanted, found, strict=True))
    assert not all(torch.equal(a, b) for (_, a), (_, b) in zip(wanted, without, strict=True))
    steps = SavedState(find.newest(run.out_dir)).scalars("words.weight")
    assert {key: float(value) for key, value in steps.items()} == {"step": 3.0}


@pytest.mark.parametrize("trunk", ["adamw"], indirect=True)
@pytest.mark.parametrize("key, value, message", [
    ("optim.name", "adam_uncorrected", "has the state of optim.name = 'adamw', the run has "
     "'adam_uncorrected'; set it as there"),
    ("init.from", "{root}/exported", "needs a checkpoint of this project, with its optimizer's "
     "state: .*exported: no checkpoint.*or leave init.moments out"),
    ("init.from", "{root}/damaged", "not a whole checkpoint|damaged"),
    ("model.position_buckets", "64", "of another model: position_buckets = 64 .source: 16.; leave "
     "init.moments out"),
    ("objective.kind", "mlm", "its parameters are not the model's: .*; leave init.moments out"),
    ("data.tokenizer", "{root}/roberta", "another model: data.tokenizer = .* .source: other tok")])
def test_a_source_without_the_state_is_refused(trunk, tmp_path, key, value, message):
    """A tokenizer of as many rows once got the rows of the source's tokens."""
    root = trunk.parent
    if not (root / "damaged").exists():
        deberta_ds.export(root / "out", root / "exported")
        shutil.copytree(find.newest(root / "out"), root / "damaged")
        (root / "damaged/layout.json").write_text("{}")
        shutil.copytree(directory_of("roberta"), root / "roberta")
        own = Tokenizer(root / "roberta")
        make_corpus(root / "roberta_corpus", [own.encode("A quick brown fox.")] * 99, own)
    values = {"out_dir": str(tmp_path / "new"), "init.from": str(root / "out"),
              "init.moments": True, key: int(value) if value.isdigit() else value.format(root=root)}
    if key == "data.tokenizer":
        values |= {"data.sources": [{"path": str(root / "roberta_corpus")}], "data.heldout": ""}
    with pytest.raises(UserError, match=message):
        deberta_ds.train(trunk, values)


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_go_on_from_the_moments_that_two_ranks_uploaded(tmp_path, process_group):
    """Under ZeRO-3, next to one rank with the same moments and to one without."""
    run_file, url = make_run(tmp_path, two_layers=True, steps="4", save_every="2", eval_every="4",
                             warmup_steps="0"), f"file://{tmp_path}/store"
    ds = deepspeed_json(tmp_path / "zero3.json", 3)

    def on_two_ranks(name: str, *options: str) -> list[float]:
        rank_helpers.run(2, [*options_of(run_file, ds), f"--out_dir={tmp_path / name}", *options],
                         tmp_path / f"{name}.log")
        return list(losses(tmp_path / name).values())

    on_two_ranks("trunk", f"--train.upload={url}", "--train.keep=1")
    (uploaded,) = find.list_steps(tmp_path / "store")
    assert find.step_of(uploaded) == 4 and not find.problems_of(uploaded)
    assert (uploaded / "rank-00001.safetensors").exists()
    two = on_two_ranks("two", f"--init.from={url}", "--init.moments=true")
    for moments in (True, False):
        deberta_ds.train(run_file, {"out_dir": str(tmp_path / str(moments)), "init.from": url,
                                    "init.moments": moments})
        one = list(losses(tmp_path / str(moments)).values())
        assert one[0] == pytest.approx(two[0], rel=1e-5)  # sums run in another order
        assert (one == pytest.approx(two, rel=1e-5)) == moments
