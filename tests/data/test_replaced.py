"""Stored replacements: the same bytes however they are made, and a run that trains on them."""

import json
import os
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import rank_helpers
import torch
from data_helpers import flip_a_bit, run_main
from launching import ROOT

from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig, ObjectiveConfig
from deberta_ds.config.run_config import ConfigError, SourceConfig, load
from deberta_ds.corpus import replacements
from deberta_ds.corpus.replacements import Recipe, replace_corpus
from deberta_ds.data import corpus as corpus_files
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.replaced import read_replaced_manifest, shard_path
from deberta_ds.data.rows import RowDataset, collate, eval_sequences
from deberta_ds.objectives import rtd
from deberta_ds.objectives.build import build_model
from deberta_ds.release.reader import load_backbone
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tracking.log import read_metrics

TINY = ROOT / "tests/fixtures/tiny_run"
GENERATOR = str(TINY / "rtd/export")
LENGTH = 32


def recipe(part: str = "heldout", temperatures=(2.0, 1.0), **changes) -> Recipe:
    return Recipe(str(TINY / part), GENERATOR, LENGTH, temperatures, **changes)


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes()
            for file in sorted(directory.rglob("*")) if file.is_file()}


def dataset_of(replaced: Path, part: str = "heldout", **options) -> RowDataset:
    return RowDataset([SourceConfig(path=str(TINY / part), replaced=str(replaced))],
                      Tokenizer(TINY / "spm.model"), seq_len=LENGTH, seed=3, mask=MaskConfig(),
                      **options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return {part of the corpus: its replacements}."""
    made = {}
    for part in ("train", "heldout"):
        made[part] = tmp_path_factory.mktemp(part) / "replaced"
        replace_corpus(recipe(part), made[part])
    return made


def test_workers_and_a_crash_change_no_byte(stored, tmp_path, monkeypatch):
    expected = files_of(stored["heldout"])
    replace_corpus(recipe(), tmp_path / "two", workers=2)
    assert files_of(tmp_path / "two") == expected
    original, done = replacements.replace_shard, []

    def fails_at_the_third(*unit):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(unit)
        return original(*unit)

    monkeypatch.setattr(replacements, "replace_shard", fails_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        replace_corpus(recipe(), tmp_path / "again")
    monkeypatch.setattr(replacements, "replace_shard", original)
    replace_corpus(recipe(), tmp_path / "again")
    assert files_of(tmp_path / "again") == expected


@torch.no_grad()
def test_rows_hold_what_the_generator_puts_there(stored):
    tokenizer, dataset = Tokenizer(TINY / "spm.model"), dataset_of(stored["heldout"])
    words, masked_lm = load_backbone(GENERATOR).masked_lm
    for draw, temperature in enumerate((2.0, 1.0)):
        plain = RowDataset([SourceConfig(path=str(TINY / "heldout"))], tokenizer, seq_len=LENGTH,
                           seed=draw, mask=MaskConfig())
        changed = 0
        rows = plain.num_rows[str(TINY / "heldout")]
        epoch = draw * rows  # rows of the second epoch take the second draw
        for g in range(epoch, epoch + rows):
            found = dataset[g]
            assert dataset.draw(g) == draw
            batch = collate([plain.natural_row(dataset.locate(g)[1])])
            _, _, ids_BL = rtd.replace_targets(words, masked_lm, batch, seed=draw,
                                               temperature=temperature, valid_vocab=tokenizer.size)
            original_BL = torch.where(batch.labels >= 0, batch.labels, batch.input_ids)
            assert found.input_ids.tolist() == ids_BL[0].tolist()
            expected = torch.where(ids_BL != original_BL, original_BL, -100)
            assert found.labels.tolist() == expected[0].tolist()
            changed += int((ids_BL != original_BL).sum())
        assert changed > 2 * rows


def test_shards_keep_no_maps_and_few_descriptors(stored, monkeypatch):
    monkeypatch.setattr(corpus_files, "most_open_files", lambda: 4)
    monkeypatch.setattr(corpus_files, "kept_open", cache(corpus_files.kept_open.__wrapped__))
    dataset, place = dataset_of(stored["train"], "train"), str(stored["train"])
    rows = dataset.num_rows[str(TINY / "train")]
    found = [dataset[g] for g in range(2 * rows)]  # both draws
    assert place not in Path("/proc/self/maps").read_text()
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert 0 < sum(link.startswith(place) for link in links) <= 4
    mapped = {kind: np.load(shard_path(stored["train"], 1, "00000-000", kind))
              for kind in ("mask", "ids", "ends")}
    for row in found[rows:]:
        name, number = dataset._corpora[0].shard_row(dataset.locate(row.row)[1])
        if name == "00000-000":
            is_target = np.unpackbits(mapped["mask"][number], count=LENGTH).astype(bool)
            end = mapped["ends"][number]
            assert (row.input_ids[is_target] == mapped["ids"][end - is_target.sum():end]).all()
            assert ((row.labels >= 0) == is_target).all()


def test_what_0_2_0_wrote_is_read_by_its_names(stored, tmp_path):
    shutil.copytree(stored["heldout"], tmp_path / "old")
    for number in (0, 1):
        (tmp_path / f"old/sample-{number}").rename(tmp_path / f"old/draw-{number}")
    new, old = dataset_of(stored["heldout"]), dataset_of(tmp_path / "old")
    assert all((new[g].input_ids == old[g].input_ids).all() for g in range(4))
    values = {"kind": "rtd_cached", "sample_by": "course"}
    assert ObjectiveConfig(**values).sample_by == "run"


def test_draws_follow_the_epoch_or_the_course_of_the_run(stored):
    by_epoch = dataset_of(stored["heldout"])
    rows = by_epoch.num_rows[str(TINY / "heldout")]
    assert [by_epoch.draw(epoch * rows) for epoch in range(5)] == [0, 1, 0, 1, 0]
    by_course = dataset_of(stored["heldout"], sample_by="run", rows_of_run=10)
    assert [by_course.draw(g) for g in range(10)] == [0] * 5 + [1] * 5


@torch.no_grad()
def test_loss_is_that_of_the_joint_run_on_the_same_replacements(stored):
    """With the generator's samples the same, a discriminator cannot tell the two objectives."""
    run, _ = load(TINY / "rtd/run.toml", ["--objective.embedding_sharing=nes"])
    cached, _ = load(TINY / "rtd/run.toml", ["--objective.kind=rtd_cached"])
    tokenizer = Tokenizer(TINY / "spm.model")
    joint, alone = (build_model(one, tokenizer.size).eval() for one in (run, cached))
    generator = torch.Generator().manual_seed(5)
    for parameter in joint.parameters():
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    alone.load_state_dict({name: value for name, value in joint.state_dict().items()
                           if name.startswith("discriminator.")})
    words, masked_lm = load_backbone(GENERATOR).masked_lm
    joint.words, joint.generator, joint.sampling_seed = words, masked_lm, 0
    options = {"seq_len": LENGTH, "mask": MaskConfig(), "eval_seed": 0}
    masked = collate(eval_sequences(str(TINY / "heldout"), tokenizer, **options))
    one_draw = Path(str(stored["heldout"]) + "-cold")
    replace_corpus(recipe(temperatures=(1.0,)), one_draw)
    replaced = collate(eval_sequences(str(TINY / "heldout"), tokenizer, **options,
                                 replaced=str(one_draw)))
    normalizers = {"targets": torch.ones(()), "tokens": torch.ones(())}
    _, sums, per_token = joint(masked, normalizers)
    _, alone_sums, alone_per_token = alone(replaced, normalizers)
    assert alone_per_token["replaced"].tolist() == per_token["replaced"].tolist()
    assert torch.equal(alone_per_token["logits"], per_token["logits"])
    for name, value in alone_sums.items():
        assert value == sums[name], name


def cached_run(stored, out: Path, *more: str) -> list[str]:
    source = f'[{{path = "{TINY}/train", replaced = "{stored["train"]}"}}]'
    return ["--config", str(TINY / "rtd/run.toml"), "--deepspeed_config",
            str(ROOT / "ds_configs/zero1_fp32.json"), f"--out_dir={out}",
            "--objective.kind=rtd_cached", f"--data.sources={source}",
            f"--data.heldout={TINY}/heldout", f"--data.heldout_replaced={stored['heldout']}",
            f"--data.tokenizer={TINY}/spm.model", f"--init.generator={GENERATOR}",
            "--train.steps=6", "--train.log_every=1", "--train.save_every=2",
            "--train.eval_every=3", "--optim.warmup_steps=0", *more]


def numbers(out: Path) -> list[dict]:
    timed = ("seconds", "tokens_per_second", "flops_per_second", "mfu", "eta_seconds",
             "peak_memory_bytes", "node_memory_bytes", "cpu_share", "goodput", "slowest_share",
             "saves_seconds", "evaluations_seconds", "restarts_seconds")
    return [{key: value for key, value in record.items() if key not in timed}
            for record in read_metrics(out / "metrics.jsonl") if record["kind"] != "event"]


@pytest.mark.multi
def test_a_killed_run_goes_on_bit_for_bit_and_its_model_is_read(stored, tmp_path, monkeypatch):
    rank_helpers.run(2, cached_run(stored, tmp_path / "whole"), tmp_path / "log")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(max((tmp_path / "killed/checkpoints").glob("step-*")))
    text = rank_helpers.run(2, cached_run(stored, tmp_path / "killed"), tmp_path / "log-again")
    assert "resume at step" in text
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    found = numbers(tmp_path / "whole")
    assert "generator_loss" not in found[0] and "roc_auc" in found[-1]
    model = load_backbone(tmp_path / "whole")
    assert model.replaced_token_head is not None and model.masked_lm is None
    start = load_backbone(GENERATOR).masked_lm[0].weight
    moved = (model.backbone.words.weight - start).abs().max()
    assert 0 < moved < 0.1  # the table began as the generator's
    monkeypatch.chdir(ROOT)
    # Of its stored replacements, not of masked rows.
    scores = json.loads(run_main("launch/evaluate.py", "--run", tmp_path / "whole"))
    assert "roc_auc" in scores
    for name, value in scores.items():
        assert value == pytest.approx(found[-1][name], rel=1e-5), name
    with pytest.raises(UserError, match="no stored replacements"):
        run_main("launch/evaluate.py", "--run", tmp_path / "whole", "--data", TINY / "train")


def test_what_does_not_fit_is_refused(stored, tmp_path):
    with pytest.raises(UserError, match="made for other sequences"):
        dataset_of(stored["train"])
    with pytest.raises(UserError, match="no finished replacements"):
        dataset_of(tmp_path)
    with pytest.raises(UserError, match="attend_across_documents"):
        dataset_of(stored["heldout"], attend_across_documents=True)
    damaged = tmp_path / "damaged"
    shutil.copytree(stored["heldout"], damaged)
    shard = next(iter(read_replaced_manifest(damaged)[0].shards[1]))
    path = shard_path(damaged, 1, shard, "ids")
    flip_a_bit(path)
    dataset_of(damaged)  # sizes alone do not show it
    with pytest.raises(UserError, match="ids.npy: xxh3 checksum differs"):
        dataset_of(damaged, verify="full")
    path.unlink()
    with pytest.raises(UserError, match="ids.npy"):
        dataset_of(damaged)
    with pytest.raises(UserError, match="holds the output of other inputs or options"):
        replace_corpus(recipe(seed=1), stored["heldout"])
    (damaged / "manifest.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(UserError, match="damaged manifest"):
        dataset_of(damaged)
    with pytest.raises(ConfigError, match="init.generator needs init.from"):
        load(TINY / "rtd/run.toml", [f"--init.generator={GENERATOR}"])


@pytest.mark.parametrize("place", [str(TINY / "heldout"), GENERATOR])
def test_a_corpus_or_generator_that_changes_meanwhile_is_named(tmp_path, place):
    """Workers open both again, and would have mixed two states."""
    read = {str(TINY / "heldout"): Corpus(TINY / "heldout", seq_len=LENGTH).rows_content_hash,
            GENERATOR: replacements._generator(GENERATOR)[1]} | {place: "another"}
    with pytest.raises(UserError, match=f"{place}: changed while this command read it"):
        replacements.replace_shard(recipe(), str(tmp_path), 0, "00000-000", read)


def test_a_seed_without_room_for_draws_is_refused(tmp_path, capsys):
    """2e13 ended in a traceback of torch: masks and samples take the seed times a million."""
    with pytest.raises(SystemExit):
        run_main("data_prep/replace.py", TINY / "heldout", "--generator", GENERATOR, "--out",
                 tmp_path, "--seq_len", LENGTH, "--seed", 1 << 43)
    assert "--seed: 8796093022208 is not below 8,796," in capsys.readouterr().err
    replace_corpus(recipe(temperatures=(1.0,), seed=(1 << 43) - 1), tmp_path / "largest")


def test_files_are_compact(stored):
    """A bit a token for the mask, two bytes for each replaced token, eight a row."""
    manifest, _ = read_replaced_manifest(stored["train"])
    for draw, shards in enumerate(manifest.shards):
        for name in shards:
            mask, ids, ends = (np.load(shard_path(stored["train"], draw, name, kind))
                               for kind in ("mask", "ids", "ends"))
            assert mask.dtype == np.uint8 and mask.shape == (len(ends), LENGTH // 8)
            assert ids.dtype.itemsize == 2 and len(ids) == ends[-1] < 0.16 * mask.size * 8
