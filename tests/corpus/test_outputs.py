"""Outputs at a URL: what local commands write, made in a local directory and copied there."""

from pathlib import Path

import pytest
from data_helpers import READ, run_main, tiny_tokenizer, tokenize, tokenizer_path, tree

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.corpus.dedup import find_duplicates
from deberta_ds.corpus.documents import plan_units
from deberta_ds.corpus.findings import Findings
from deberta_ds.corpus.outputs import JOB, fetch, output
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.units import extents_of, identified
from deberta_ds.data.corpus import Corpus
from deberta_ds.files.remote import Cache


def test_a_corpus_is_made_at_a_url_by_several_hosts_in_turn(text_file, tmp_path):
    url, hosts = f"file://{tmp_path}/store/web", [str(tmp_path / host) for host in "ab"]
    for path in (str(tmp_path / "local"), url):
        with output(path, cache=hosts[0], first=JOB) as out:
            tokenize(text_file, out)
        with output(path, cache=hosts[0]) as out:
            pack_corpus(out, tiny_tokenizer(), 64)
    local = Corpus(tmp_path / "local", seq_len=64)
    assert tree(fetch(url, cache=str(tmp_path / "third"))) == tree(tmp_path / "local")
    with output(url, cache=hosts[1], first=JOB) as out:  # another host knows that it is done
        tokenize(text_file, out)
        with pytest.raises(UserError, match="other inputs or options"):
            tokenize(text_file, out, unit_bytes=30_000)
    with output(url, cache=hosts[1]) as out:
        pack_corpus(out, tiny_tokenizer(), 32)
    with output(url, cache=hosts[0], first=JOB) as out:  # and the first has no plan for 32
        tokenize(text_file, out)
    for seq_len in (32, 64):
        found = Corpus(url, seq_len=seq_len, cache=Cache(str(tmp_path / "rows")))
        assert found.corpus_content_hash == local.corpus_content_hash
        assert sum(len(found.row(row)) for row in range(found.num_rows)) > 100


def test_what_fails_leaves_nothing_at_the_url(text_file, tmp_path):
    url, cache = f"file://{tmp_path}/store/web", str(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), output(url, cache=cache) as out:
        tokenize(text_file, out)
        raise ZeroDivisionError
    assert not (tmp_path / "store").exists()


def test_every_command_takes_a_tokenizer_at_a_url(text_file, tmp_path, monkeypatch):
    """--add_mask wrote to ./file:/..., verify.py found no such file, --cache was not asked."""
    monkeypatch.chdir(tmp_path)
    url, cache = f"file://{tokenizer_path()}", ("--cache", tmp_path / "cache")
    run_main("data_prep/train_tokenizer.py", "--add_mask", url, "--out",
             f"file://{tmp_path}/made", *cache)
    tokenize(text_file, tmp_path / "corpus")
    pack_corpus(tmp_path / "corpus", tiny_tokenizer(), 64)
    run_main("data_prep/verify.py", tmp_path / "corpus", "--tokenizer", url, *cache)
    assert (tmp_path / "made/spm.model").is_file()
    assert sorted(path.name for path in tmp_path.iterdir() if path != text_file) == [
        "cache", "corpus", "made"]


def test_a_model_file_and_findings_at_a_url(text_file, tmp_path):
    store, cache = f"file://{tmp_path}/store", str(tmp_path / "cache")
    with output(f"{store}/spm.model", cache=cache, first=()) as out:
        write_atomic(out, b"model")
    units = plan_units([str(text_file)], READ)
    with output(f"{store}/found", cache=cache) as out:
        counts = find_duplicates(units, out, read=READ)
    assert Path(fetch(f"{store}/spm.model", cache=cache + "2")).read_bytes() == b"model"
    found = Findings(fetch(f"{store}/found", cache=cache + "2"))
    assert found.counts == counts and not (tmp_path / "store/found/hashes").exists()
    found.check(extents_of(identified(units, tmp_path).values()), READ)
