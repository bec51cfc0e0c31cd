"""Rows as functions of (seed, g), and refusal of damaged corpora."""

import gc
import hashlib
import json
import os
import pickle
import re
import resource

import numpy as np
import pytest
from data_helpers import (
    check_batch,
    dataset_of,
    flip_a_bit,
    make_corpus,
    random_documents,
    run_with_batches,
    tiny_tokenizer,
)

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import xxh3
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.data import corpus as corpus_files
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.rows import RowDataset, collate, eval_sequences

SEQ_LEN = 64


@pytest.fixture
def corpus(tmp_path):
    documents = [tiny_tokenizer().encode(text) for text in random_documents(40)]
    return make_corpus(tmp_path / "corpus", documents, tiny_tokenizer(), (SEQ_LEN, 128))


def read_all(dataset: RowDataset) -> list:
    """Return the rows of the first epoch of a dataset of one source."""
    rows, = dataset.num_rows.values()
    return [dataset[g] for g in range(rows)]


def test_each_epoch_visits_every_row_once_in_another_order(corpus):
    dataset = dataset_of(corpus)
    rows = dataset.num_rows[str(corpus)]
    first = [dataset.locate(g)[1] for g in range(rows)]
    second = [dataset.locate(g)[1] for g in range(rows, 2 * rows)]
    assert sorted(first) == sorted(second) == list(range(rows))
    assert first != second
    assert any(not np.array_equal(dataset[first.index(row)].labels,  # other masks
                                  dataset[rows + second.index(row)].labels) for row in first)


def test_row_is_a_pure_function_of_seed_and_number(corpus):
    dataset, again = dataset_of(corpus), pickle.loads(pickle.dumps(dataset_of(corpus)))
    for g in (0, 5, 10**12 + 3):
        for name in ("input_ids", "labels", "segments", "positions"):
            assert np.array_equal(getattr(dataset[g], name), getattr(again[g], name))
    other = dataset_of(corpus, seed=8)
    assert any(not np.array_equal(dataset[g].input_ids, other[g].input_ids) for g in range(4))


@pytest.mark.parametrize("selection", ["uniform", "deberta_window"])
def test_a_falling_rate_is_that_of_the_row_s_place_in_the_run(corpus, selection):
    falling = MaskConfig(rate=0.5, final_rate=0.1, max_ngram=3, selection=selection)
    dataset = dataset_of(corpus, mask=falling, rows_of_run=101)
    for g, rate in ((0, 0.5), (25, 0.4), (75, 0.2), (100, 0.1), (250, 0.1)):
        steady = dataset_of(corpus, mask=MaskConfig(rate=rate, max_ngram=3, selection=selection))
        assert np.array_equal(dataset[g].labels, steady[g].labels), g
        assert np.array_equal(dataset[g].input_ids, steady[g].input_ids), g
    last = MaskConfig(rate=0.1, max_ngram=3, selection=selection)
    held_out, expected = (eval_sequences(str(corpus), tiny_tokenizer(), seq_len=SEQ_LEN, mask=mask,
                                    eval_seed=1, num_rows=4) for mask in (falling, last))
    for row, other in zip(held_out, expected, strict=True):
        assert np.array_equal(row.labels, other.labels)


@pytest.mark.parametrize("ngram", [1, 3])
def test_batches_keep_their_invariants(corpus, ngram):
    dataset = dataset_of(corpus, mask=MaskConfig(max_ngram=ngram, mask_share=0.8,
                                                   random_share=0.1))
    batch = collate([dataset[g] for g in range(16)])
    check_batch(batch, tiny_tokenizer())
    assert batch.input_ids.shape == (16, SEQ_LEN)


def test_every_token_appears_exactly_once_in_an_epoch(corpus):
    dataset = dataset_of(corpus)
    special = tiny_tokenizer().is_special()
    seen = 0
    for row in read_all(dataset):
        original = np.where(row.labels != -100, row.labels, row.input_ids)
        seen += int((~special[original]).sum())
    documents = [tiny_tokenizer().encode(text) for text in random_documents(40)]
    expected = sum(int((~special[np.array(ids)]).sum()) for ids in documents)
    assert seen == expected


def test_across_documents_is_one_segment(corpus):
    apart, together = dataset_of(corpus), dataset_of(corpus, attend_across_documents=True)
    for row in read_all(together):
        real = int((row.segments > 0).sum())
        assert set(row.segments[:real]) == {1} and not row.segments[real:].any()
        assert np.array_equal(row.positions[:real], np.arange(real))
    assert max(int(apart[g].segments.max()) for g in range(10)) > 1  # of one alone nothing is seen


def test_a_longer_stage_on_another_part_shares_no_token(tmp_path):
    tokens = list(range(10, 370))  # every token id appears once in the corpus
    path = make_corpus(tmp_path / "c", [tokens[i : i + 30] for i in range(0, 360, 30)],
                       tiny_tokenizer(), (SEQ_LEN, 128), shards=6)

    def ids_of(dataset):
        shown = [np.where(row.labels >= 0, row.labels, row.input_ids) for row in read_all(dataset)]
        return set(np.concatenate(shown).tolist()) - {0, 1, 2}

    first = ids_of(dataset_of(SourceConfig(path=str(path), part=(0.0, 0.5))))
    second = ids_of(dataset_of(SourceConfig(path=str(path), part=(0.5, 1.0)), seq_len=128))
    assert not first & second and first | second == set(tokens)
    with pytest.raises(UserError, match="part"):
        dataset_of(SourceConfig(path=str(path), part=(0.5, 0.51)))


def test_eval_rows_are_fixed_and_spread_over_the_corpus(corpus):
    arguments = {"seq_len": SEQ_LEN, "mask": MaskConfig(), "eval_seed": 3}
    rows = eval_sequences(str(corpus), tiny_tokenizer(), **arguments, num_rows=5)
    again = eval_sequences(str(corpus), tiny_tokenizer(), **arguments)
    numbers = [row.row for row in rows]
    assert numbers == [(2 * i + 1) * len(again) // 10 for i in range(5)]
    for row in rows:
        assert np.array_equal(row.labels, again[row.row].labels)
    assert [row.row for row in again] == list(range(len(again)))
    assert len({row // -(-len(again) // 3) for row in numbers}) == 3  # of its three shards
    with pytest.raises(UserError, match="rows"):
        eval_sequences(str(corpus), tiny_tokenizer(), **arguments, num_rows=10**6)


def test_refuses_another_tokenizer(corpus, tmp_path):
    manifest = corpus / "manifest.json"
    manifest.write_text(manifest.read_text().replace(tiny_tokenizer().sha256, "0" * 64))
    rows = corpus / "rows-64" / "manifest.json"
    with pytest.raises(UserError, match="another version"):
        dataset_of(corpus)
    data = json.loads(rows.read_text())
    data["corpus"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    rows.write_text(json.dumps(data))
    with pytest.raises(UserError, match="tokenizer"):
        dataset_of(corpus)


def test_refuses_truncated_and_flipped_shards(corpus):
    shard = corpus / "tokens" / "00001-000.npy"
    flip_a_bit(shard)
    dataset_of(corpus, verify="sizes")
    with pytest.raises(UserError, match=r"00001-000.npy: xxh3 checksum.*copy"):
        dataset_of(corpus, verify="full")
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"00001-000.npy: \d+ bytes"):
        dataset_of(corpus)
    shard.unlink()
    with pytest.raises(UserError, match="00001-000.npy: No such file"):
        dataset_of(corpus)


def test_refuses_a_token_outside_the_vocabulary(corpus):
    shard = corpus / "tokens" / "00000-000.npy"
    tokens = np.lib.format.open_memmap(shard, mode="r+")
    tokens[:] = 60000
    tokens.flush()
    dataset = dataset_of(corpus)
    with pytest.raises(UserError, match=r"00000-000.npy.*token id 60000"):
        read_all(dataset)


def test_names_the_missing_corpus_and_length(corpus, tmp_path):
    with pytest.raises(UserError, match="nowhere.*not a finished corpus"):
        dataset_of(tmp_path / "nowhere")
    words = "no sequence plan for seq_len 32.*rows-128.*--seq_len 32 --tokenizer"
    with pytest.raises(UserError, match=words):
        dataset_of(corpus, seq_len=32)
    for same in (corpus, corpus / ".." / corpus.name):
        with pytest.raises(UserError, match="twice"):
            dataset_of(corpus, same)


@pytest.mark.parametrize(("name", "place", "value"), [
    ("00001-000.npy", 128, 4_000_000_000), ("00001-000.npy", 132, 4_000_000_000),
    ("00001-000.npy", 132, 0), ("00001-000.npy", 132, 63), ("00001-000.starts.npy", 136, 7_000_000),
    ("00001-000.starts.npy", 132, 0), ("00001-000.starts.npy", 128, 4_000_000_000)])
def test_a_row_plan_of_the_right_size_with_wrong_content_is_refused(corpus, name, place, value):
    path = corpus / "rows-64" / name
    data = bytearray(path.read_bytes())
    data[place : place + 4] = int(value).to_bytes(4, "little")
    path.write_bytes(data)
    dataset = dataset_of(corpus)
    with pytest.raises(UserError, match=r"00001-000.npy: sequence \d+ of this plan.*pack.py"):
        read_all(dataset)
    # With a manifest that agrees, as after a copy of the wrong plan, full verification finds it.
    manifest = corpus / "rows-64" / "manifest.json"
    values = json.loads(manifest.read_text())
    for shard in values["shards"]:
        if shard["name"] == "00001-000":
            key = "starts_xxh3" if "starts" in name else "xxh3"
            shard[key] = xxh3(path)
    manifest.write_text(json.dumps(values))
    opened = Corpus(corpus, seq_len=64)
    with pytest.raises(UserError, match=r"00001-000.npy: sequence \d+ of this plan") as first:
        for row in range(opened.num_rows):
            opened.row(row)
    with pytest.raises(UserError, match=re.escape(str(first.value))):
        dataset_of(corpus, verify="full")


def test_a_shard_that_is_cut_while_a_run_reads_it_is_one_error(corpus):
    """A memory map would have killed the process (SIGBUS)."""
    dataset = dataset_of(corpus)
    shard = corpus / "tokens" / "00001-000.npy"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(UserError, match=r"00001-000.npy: ends at byte \d+, cut short"):
        read_all(dataset)


def test_small_plans_are_read_once_and_others_a_part_at_a_time(corpus, monkeypatch):
    gc.collect()  # corpora of other tests give their room back
    before, reads = corpus_files.SmallFiles.room_bytes, []
    monkeypatch.setattr(corpus_files.os, "pread",
                        lambda *args, pread=os.pread: reads.append(args) or pread(*args))
    kept = dataset_of(corpus)
    expected = read_all(kept)
    rows = range(len(expected))
    plans = [path for path in (corpus / "rows-64").glob("*.npy")]
    room = corpus_files.SmallFiles.room_bytes
    assert before - room == sum(path.stat().st_size for path in plans)
    token_reads = len(reads) - len(plans)
    assert len(rows) <= token_reads < 1.2 * len(rows)  # a few rows have pieces that lie far apart
    for limit in ("room_bytes", "most_bytes"):
        with monkeypatch.context() as context:
            context.setattr(corpus_files.SmallFiles, limit, 0)
            parts = dataset_of(corpus)
            reads.clear()
            for g, row in zip(rows, expected, strict=True):
                np.testing.assert_array_equal(parts[g].input_ids, row.input_ids)
            assert len(reads) == token_reads + 2 * len(rows)
    del kept  # its room is for the next corpus
    assert corpus_files.SmallFiles.room_bytes == before


MANY_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for workers in (0, 2):
    print(sum(int(batch.input_ids.sum()) for batch in batches_of(Phase(0, 8, 20), workers)))
"""


def test_more_files_than_descriptors(tmp_path):
    """Several sources under a low `ulimit -n`: an error, or with workers a wait for ever."""
    tokens = [[10 + n % 50] * 40 for n in range(60)]
    paths = [make_corpus(tmp_path / name, tokens, tiny_tokenizer(), (64,), shards=30)
             for name in ("a", "b", "c")]
    done = run_with_batches(MANY_FILES, *paths)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second


@pytest.mark.parametrize("soft, hard, kept", [
    (256, 256, 128), (1024, 4096, 4096 - 512), (1024, 1024, 1024 - 256),
    (4096, resource.RLIM_INFINITY, 65536 - 8192)])
def test_files_that_are_kept_open_leave_descriptors_to_the_process(monkeypatch, soft, hard, kept):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert corpus_files.most_open_files.__wrapped__() == kept
