"""What a resumed run must have in common with its checkpoint: contents, not paths or kernels."""

import dataclasses

import pytest
from data_helpers import RUN_RECORD
from launching import make_run

from deberta_ds.checkpoint.find import CheckpointError, RunRecord
from deberta_ds.config import run_config
from deberta_ds.config.run_config import RunConfig
from deberta_ds.data.corpus import Corpus
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training.inputs import check_identity


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("identity")
    make_run(root)
    return root


@pytest.fixture
def run(place) -> RunConfig:
    return run_config.load(place / "run.toml")[0]


def content_hashes(run: RunConfig) -> dict[str, str]:
    return {
        source.path: Corpus(source.path, seq_len=run.data.seq_len, part=source.part).content_hash
        for source in run.data.sources}


def record_of(run: RunConfig) -> RunRecord:
    return RunRecord(**RUN_RECORD | {"config": run_config.to_dict(run),
                                     "content_hashes": content_hashes(run),
                                     "tokenizer_sha256": Tokenizer(run.data.tokenizer).sha256})


def check(run: RunConfig, record: RunRecord) -> list[str]:
    identity = content_hashes(run) | {"tokenizer": Tokenizer(run.data.tokenizer).sha256}
    return check_identity(run, identity, record, "step-1")


def changed(run: RunConfig, section: str, **values) -> RunConfig:
    return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section),
                                                                    **values)})


def with_sources(run: RunConfig, *sources: dict) -> RunConfig:
    return changed(run, "data", sources=tuple(dataclasses.replace(run.data.sources[0], **values)
                                              for values in sources))


def test_moved_corpus_moved_tokenizer_and_another_attention_resume(run, tmp_path, place):
    (tmp_path / "moved").symlink_to(place / "train")
    (tmp_path / "other.model").write_bytes((place / "spm.model").read_bytes())
    moved = with_sources(run, {"path": str(tmp_path / "moved")})
    moved = changed(moved, "data", tokenizer=str(tmp_path / "other.model"))
    moved = changed(moved, "model", attention="reference")
    assert [line.split(": ")[:2] for line in check(moved, record_of(run))] == [
        ["changed since the checkpoint", key]
        for key in ("data.sources", "data.tokenizer", "model.attention")]


def test_another_held_out_set_is_a_warning_of_its_own(run):
    """The log said that a checkpoint was skipped."""
    record = record_of(run)
    then = dataclasses.replace(record, content_hashes=record.content_hashes | {"held-out x": "0"})
    identity = record.content_hashes | {"tokenizer": record.tokenizer_sha256, "held-out x": "1"}
    assert check_identity(run, identity, then, "step-1") == [
        "WARNING: held-out x: other content, 0 -> 1: its scores are not those of before"]


def test_another_tokenizer_or_corpus_at_the_same_path_is_refused_by_name(run):
    record = record_of(run)
    for then, message in (
            ({"tokenizer_sha256": "0" * 64}, r"data\.tokenizer = .*spm\.model, sha256 0000"),
            ({"content_hashes": dict.fromkeys(record.content_hashes, "0" * 64)},
             r"data\.sources\[0\] = .*train: .*0000")):
        with pytest.raises(CheckpointError, match=message):
            check(run, dataclasses.replace(record, **then))


def test_weights_order_and_number_of_the_sources_are_of_the_run(run, place):
    """A source's number in the list is part of its shuffle, so two that change places are new."""
    train, other = {"path": str(place / "train")}, {"path": str(place / "heldout")}
    both = with_sources(run, train, other)
    record = record_of(both)
    check(both, record)
    for sources in ([other, train], [train, other | {"weight": 2.0}], [train],
                    [train, other | {"first_sequence": 5}]):
        with pytest.raises(CheckpointError, match=r"data\.sources\[[01]\] = "):
            check(with_sources(run, *sources), record)


@pytest.mark.parametrize("section, values", [
    ("model", {"hidden_dropout": 0.2}), ("model", {"num_heads": 2}),
    ("objective", {"rtd_weight": 10.0}), ("data", {"seed": 1}), ("train", {"seed": 1}),
    ("train", {"global_batch_size": 16}), ("optim", {"name": "adam_uncorrected"})])
def test_what_decides_the_losses_is_of_the_run(run, section, values):
    (key,) = values
    with pytest.raises(CheckpointError, match=rf"\+ {section}\.{key} = "):
        check(changed(run, section, **values), record_of(run))


def test_a_rate_that_jumps_as_steps_are_raised_is_said(run):
    record = dataclasses.replace(record_of(run), step=run.train.steps)
    longer = changed(run, "train", steps=10 * run.train.steps)
    assert any("the learning rate of step" in line for line in check(longer, record))
    assert check(run, record) == []
