"""The prep stages: the same bytes for any number of workers, restarts, refusals."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from data_helpers import (
    READ,
    flip_a_bit,
    make_corpus,
    random_documents,
    stored_texts,
    tiny_tokenizer,
    tokenize,
    tokenizer_path,
    tree,
    write_json_lines,
)

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.dedup import find_duplicates
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.pack import pack_corpus, pack_shard
from deberta_ds.corpus.stats import corpus_stats
from deberta_ds.corpus.tokenize import CleanOptions
from deberta_ds.corpus.units import job
from deberta_ds.data.shards import read_manifest
from deberta_ds.tokenizer.text import normalize

SCRIPTS = Path(__file__).parents[2] / "data_prep"


def test_same_bytes_for_any_number_of_workers(text_file, tmp_path):
    for workers in (1, 3):
        tokenize(text_file, tmp_path / str(workers), workers, heldout_share=0.2,
                 heldout_out=tmp_path / f"{workers}h")
        pack_corpus(tmp_path / str(workers), tiny_tokenizer(), 64, workers=workers)
    for suffix in ("", "h"):
        assert tree(tmp_path / f"1{suffix}") == tree(tmp_path / f"3{suffix}")
    train, heldout = stored_texts(tmp_path / "1"), stored_texts(tmp_path / "1h")
    assert 0.1 < len(set(heldout)) / 300 < 0.3 and not set(train) & set(heldout)
    whole = [normalize(text) for text in random_documents(300)]
    assert train == [text for text in whole if text not in set(heldout)]
    assert len(read_manifest(tmp_path / "1")[0].shards) > 3


def test_a_restart_does_what_is_missing_and_another_job_is_refused(text_file, tmp_path):
    out = tmp_path / "out"
    tokenize(text_file, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    tokenize(text_file, out)  # a finished job is left alone
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(UserError, match="other inputs or options"):
        tokenize(text_file, out, unit_bytes=30_000)
    whole = tree(out)
    (out / "manifest.json").unlink()
    names = [shard["name"] for shard in json.loads(whole["manifest.json"])["shards"]]
    min((out / ".units").glob("*.json")).unlink()
    (out / "tokens" / f".{names[0]}.npy.99.tmp").write_bytes(b"half")
    tokenize(text_file, out)
    paths = [out / "tokens" / f"{name}.npy" for name in names]
    assert tree(out) == whole
    assert sum(path.stat().st_mtime_ns != before[path] for path in paths) == 1


@pytest.mark.multi
def test_mpi_gives_the_same_bytes_and_one_error(text_file, tmp_path):
    pytest.importorskip("mpi4py")
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on this machine")
    command = [sys.executable, "-m", "mpi4py.futures", str(SCRIPTS / "tokenize_corpus.py")]
    options = ["--tokenizer", tokenizer_path(), "--unit_bytes", "20000", "--out"]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    subprocess.run([*mpirun, *command, str(text_file), *options, str(tmp_path / "mpi")],
                   check=True, capture_output=True)
    tokenize(text_file, tmp_path / "one")
    assert tree(tmp_path / "mpi") == tree(tmp_path / "one")
    with open(text_file, "a") as file:
        file.write("broken\n")
    failed = subprocess.run([*mpirun, *command, str(text_file), *options, str(tmp_path / "bad")],
                            capture_output=True, text=True)
    assert failed.returncode != 0 and failed.stderr.count("error: ") == 1
    assert "Traceback" not in failed.stderr and not (tmp_path / "bad" / "manifest.json").exists()


def test_parts_of_an_array_give_the_same_bytes(text_file, tmp_path):
    """Jobs of an array share a directory, and none of them finishes it."""
    units = plan_units([str(text_file)], READ, 20_000)
    find_duplicates(units, tmp_path / "whole", read=READ)
    tokenize(text_file, tmp_path / "one")
    pack_corpus(tmp_path / "one", tiny_tokenizer(), 64)
    out, found = tmp_path / "out", tmp_path / "found"
    for part in ((1, 3), (2, 3), (3, 3)):
        assert tokenize(text_file, out, part=part) == {}
        assert find_duplicates(units, found, read=READ, part=part) == {}
        assert not (out / "manifest.json").exists() and not (found / "manifest.json").exists()
    with job(out, json.loads((out / ".job.json").read_text()), finished="manifest.json",
             part=(1, 3)):
        tokenize(text_file, out, part=(2, 3))  # two parts at once
        for busy in ((1, 3), None):
            with pytest.raises(UserError, match="another command is at work"):
                tokenize(text_file, out, part=busy)
    work = out / ".units" / "0" / "tokens"
    times = {path: path.stat().st_mtime_ns for path in work.iterdir()}
    tokenize(text_file, out)
    assert times == {path: path.stat().st_mtime_ns for path in work.iterdir()}
    for part in ((1, 2), (2, 2)):
        assert pack_corpus(out, tiny_tokenizer(), 64, part=part) is None
    pack_corpus(out, tiny_tokenizer(), 64)
    find_duplicates(units, found, read=READ)
    assert tree(out) == tree(tmp_path / "one") and tree(found) == tree(tmp_path / "whole")


def test_held_out_documents_leave_the_other_corpora_too(tmp_path):
    texts = [f"document number {number} of this test" for number in range(300)]
    write_json_lines(tmp_path / "web.jsonl", texts)
    write_json_lines(tmp_path / "wiki.jsonl", texts[100:] + ["only here"])
    tokenize(tmp_path / "web.jsonl", tmp_path / "web", heldout_out=tmp_path / "heldout",
             heldout_share=0.2)
    done = tokenize(tmp_path / "wiki.jsonl", tmp_path / "wiki", heldout_share=0.2,
                    drop_heldout=True)
    held_out, wiki = stored_texts(tmp_path / "heldout"), stored_texts(tmp_path / "wiki")
    assert len(held_out) > 30 and not set(held_out) & set(wiki)
    dropped = done[str(tmp_path / "wiki")].counts["held_out"]
    assert dropped == len(set(held_out) & set(texts[100:])) > 20
    with pytest.raises(UserError, match="held-out share 2.0: must be between 0 and 1"):
        tokenize(tmp_path / "web.jsonl", tmp_path / "y", heldout_share=2.0, drop_heldout=True)


def test_bad_documents_stop_or_are_counted(tmp_path, capsys):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "good one", "score": NaN}\n{"text": "\\ud800"}\n{"text": ""}\n'
                    '{"text": "a\\u0000"}\n{"text": "12345678"}\nnot json\n')
    with pytest.raises(UserError, match=r"text.jsonl:2: a lone surrogate.*--max_bad allows 0"):
        tokenize(path, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    clean = CleanOptions(min_characters=2, min_letter_share=0.5, max_bad=2)
    counts = tokenize(path, tmp_path / "out2", clean=clean)[str(tmp_path / "out2")].counts
    assert (counts["documents"], counts["bad"], counts["empty"]) == (1, 2, 1)
    assert (counts["too_short"], counts["few_letters"], counts["removed_characters"]) == (1, 1, 1)
    path.write_text(('{"text": "fine"}\n' * 50 + "bad\n") * 3)  # those of all units are limited
    with pytest.raises(UserError, match="3 bad documents, --max_bad allows 2"):
        tokenize(path, tmp_path / "all", unit_bytes=900, clean=CleanOptions(max_bad=2))
    capsys.readouterr()
    tokenize(path, tmp_path / "all", unit_bytes=900, clean=CleanOptions(max_bad=3))  # goes on
    assert capsys.readouterr().err.count("left out: ") == 3


@pytest.mark.parametrize("options", [{}, {"heldout_share": 0.3, "drop_heldout": True}])
def test_shards_do_not_depend_on_how_much_is_looked_at_at_once(tmp_path, monkeypatch, options):
    odd = ["", " ", "\0", "a\0b", "na\u00efve \u3000 e\u0301", "\u200b", "x", "\U0001f600\n\n?"]
    lines = [json.dumps({"text": text, "lang": "de" if number % 3 else "fr"})
             for number, text in enumerate(odd * 20 + random_documents(60))]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(random.Random(0).sample([*lines, "broken", '{"text": "\\ud800"}'],
                                                     len(lines) + 2)) + "\n")
    clean = CleanOptions(min_characters=2, max_bad=2)
    units = plan_units([str(path)], read := ReadOptions(label_key="lang"))
    trees = []
    for characters, documents in ((1, 1), (60, 1 << 12), (1 << 20, 7), (1 << 20, 1 << 12)):
        monkeypatch.setattr("deberta_ds.corpus.encode._BATCH_CHARACTERS", characters)
        monkeypatch.setattr("deberta_ds.corpus.encode._BATCH_DOCUMENTS", documents)
        out = tmp_path / f"{characters}-{documents}"
        tokenize(units, out, clean=clean, read=read, **options)
        trees.append(tree(out))
    assert all(found == trees[0] for found in trees[1:])
    counts = json.loads(trees[0]["manifest.json"])["counts"]
    assert counts["bad"] == 2 and counts["empty"] == 80 and counts["too_short"] == 20


def test_a_truncated_shard_and_a_flipped_bit_are_named(tmp_path):
    documents = [tiny_tokenizer().encode(text) for text in random_documents(30)]
    corpus = make_corpus(tmp_path / "corpus", documents, tiny_tokenizer(), (64,))
    info = read_manifest(corpus)[0].shards[0]
    for part in ("tokens", "ends"):  # by what reads whole shards
        shard = corpus / part / f"{info.name}.npy"
        flip_a_bit(shard)
        for read in (lambda: corpus_stats(corpus, tiny_tokenizer()), lambda: pack_shard(
                str(corpus), info, tiny_tokenizer().word_starts(), 32)):
            with pytest.raises(UserError, match=f"{part}/{shard.name}: xxh3 checksum differs"):
                read()
        flip_a_bit(shard)
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(UserError, match="bytes, the manifest says"):
        pack_corpus(corpus, tiny_tokenizer(), 32)
