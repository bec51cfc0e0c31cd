"""Identity: where each stored document came from, from a row to it and back, and taking it out."""

import json
import os
import shutil
from pathlib import Path

import pytest
from data_helpers import random_documents, run_main, stored_texts, tiny_tokenizer, tokenize, tree

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.documents import ReadOptions
from deberta_ds.corpus.origins import Origins, take_down
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.shards import read_manifest, read_rows_manifest
from deberta_ds.tokenizer.text import normalize

READ = ReadOptions(id_key="name", label_key="lang")
TEXTS = random_documents(150, longest=5)


def make(source, out, texts):
    lines = [json.dumps({"text": text, "name": f"doc-{number}", "lang": "de" if number % 3 else ""})
             for number, text in texts]
    source.write_text("\n".join(lines) + "\n")
    tokenize(source, out, unit_bytes=6000, read=READ)
    pack_corpus(out, tiny_tokenizer(), 64)
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("origins")
    return make(root / "text.jsonl", root / "corpus", enumerate(TEXTS))


def test_a_row_leads_to_its_documents_and_a_document_to_its_rows(corpus):
    opened, origins = Corpus(corpus, seq_len=64), Origins(corpus)
    tokenizer, seen = tiny_tokenizer(), {}
    for row in range(opened.num_rows):
        shard, documents = opened.documents_of(row)
        for document, piece in zip(documents, opened.row(row), strict=True):
            origin = origins.of(shard, document)
            number = int(origin.id.removeprefix("doc-"))
            assert tokenizer.decode(piece) in normalize(TEXTS[number])
            line = Path(origin.source).read_bytes()[origin.place:].splitlines()[0]
            assert json.loads(line)["name"] == origin.name == f"doc-{number}"
            assert origin.label == ("de" if number % 3 else "")
            seen.setdefault(origin.name, set()).add(row)
    assert len(seen) == len(TEXTS)
    for name, rows in seen.items():
        (shard, documents), = origins.find([name]).items()
        assert opened.rows_of(shard, *documents) == sorted(rows)


@pytest.mark.parametrize("name", ["~", "s3:", "\udcff"], ids=ascii)
def test_origins_lie_in_a_directory_of_any_name(tmp_path, name, monkeypatch):
    """pyarrow takes "~" in a path for the home directory, "s3:" for a store."""
    monkeypatch.chdir(tmp_path)
    corpus = make(Path("text.jsonl"), Path(name), enumerate(TEXTS[:5]))
    origins, (shard,) = Origins(corpus), read_manifest(corpus)[0].shards
    assert [origins.of(shard.name, number).id for number in range(5)] == [
        f"doc-{number}" for number in range(5)]


def test_documents_are_taken_out_and_other_shards_are_links(corpus, tmp_path):
    gone = [3, 4, 90]
    names = [f"doc-{number}" for number in gone]
    done = take_down(corpus, names, tmp_path / "new", tiny_tokenizer(), workers=1)
    assert done["documents"] == 3 and 1 <= done["shards"] <= 3
    left = [(number, text) for number, text in enumerate(TEXTS) if number not in gone]
    assert stored_texts(tmp_path / "new") == [normalize(text) for _, text in left]
    old, new = read_manifest(corpus)[0], read_manifest(tmp_path / "new")[0]
    characters = sum(len(normalize(TEXTS[number])) for number in gone)
    assert old.counts["characters"] - new.counts["characters"] == characters
    assert new.counts["documents"] == 147 and new.counts["taken_down"] == 3
    assert new.counts["tokens"] == sum(shard.tokens for shard in new.shards)
    assert [sum(row) for row in zip(*new.labels.values(), strict=True)] == [
        new.counts[name] for name in ("documents", "characters", "tokens")]
    linked = [shard.name for shard in new.shards if os.path.samefile(
        corpus / "tokens" / f"{shard.name}.npy", tmp_path / "new/tokens" / f"{shard.name}.npy")]
    assert len(linked) == len(old.shards) - done["shards"] > 0
    assert Corpus(tmp_path / "new", seq_len=64).verify("full")
    rows = read_rows_manifest(tmp_path / "new/rows-64")[0]
    assert pack_corpus(tmp_path / "new", tiny_tokenizer(), 64) == rows  # nothing is left to do
    assert not Origins(tmp_path / "new").find(["doc-3"])
    assert take_down(corpus, names, tmp_path / "new", tiny_tokenizer()) == done  # again
    with pytest.raises(UserError, match="no document no-such"):
        take_down(corpus, ["doc-3", "no-such"], tmp_path / "other", tiny_tokenizer())
    assert not (tmp_path / "other").exists()


def test_a_document_that_was_cut_is_one_text_and_many_documents(tmp_path):
    """Its parts stayed in the new corpus's count of documents: all but one."""
    texts = ["x" * 600_000, *TEXTS[:5]]
    corpus = make(tmp_path / "text.jsonl", tmp_path / "corpus", enumerate(texts))
    old = read_manifest(corpus)[0].counts
    assert old["documents"] == 6 + old["cut"] > 7
    done = take_down(corpus, ["doc-0", "doc-2"], tmp_path / "new", tiny_tokenizer())
    new = read_manifest(tmp_path / "new")[0]
    assert done["documents"] == new.counts["taken_down"] == 2
    assert new.counts["documents"] == new.documents == 4
    assert sum(row[0] for row in new.labels.values()) == 4
    assert new.counts["tokens"] == new.tokens


def test_origins_do_not_depend_on_the_workers(corpus, tmp_path):
    source = corpus.parent / "text.jsonl"
    tokenize(source, tmp_path / "two", workers=2, unit_bytes=6000, read=READ)
    assert tree(tmp_path / "two/documents") == tree(corpus / "documents")


MADE_WITH = ("--tokenizer", tiny_tokenizer().path)
PACK = ("data_prep/pack.py", "--seq_len", 64, *MADE_WITH, "--workers", 1)
TAKE = ("data_prep/take_down.py", "--out", "new", *MADE_WITH, "--document", "doc-1")


@pytest.mark.parametrize("name, command", [
    ("manifest.json", PACK), ("tokens/*.npy", ("data_prep/verify.py",)), ("ends/*.npy", TAKE),
    ("rows-64/manifest.json", PACK), ("rows-64/.job.json", PACK), ("rows-64/.lock", PACK),
    ("rows-64/*.starts.npy", ("data_prep/find.py", "--seq_len", 64, "--row", 0)),
    ("rows-64/*[0-9].npy", ("data_prep/find.py", "--seq_len", 64, "--document", "doc-1")),
    ("rows-64/*.starts.npy", ("data_prep/show.py", "--seq_len", 64, *MADE_WITH)),
    ("documents/manifest.json", TAKE), ("documents/*.parquet", TAKE),
    ("tokenizer", ("data_prep/stats.py", "--tokenizer", "corpus/tokenizer"))])
def test_a_pipe_among_the_files_of_a_corpus_is_named(corpus, tmp_path, monkeypatch, name, command):
    """find.py waited for ever for who would write to it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, "corpus")
    if name.startswith("rows-64/."):
        Path("corpus/rows-64/manifest.json").unlink()  # work is done there
    for path in list(Path("corpus").glob(name)) or [Path("corpus", name)]:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with pytest.raises(UserError, match="corpus/[^:]*: .*pipe|corpus/rows-64: holds the output"):
        run_main(command[0], "corpus", *command[1:])


def test_the_scripts(corpus, tmp_path):
    find = ("data_prep/find.py", corpus, "--seq_len", 64)
    name = run_main(*find, "--row", 0).split()[2]
    assert name.startswith("doc-")
    assert "sequences 0" in run_main(*find, "--document", name)
    (tmp_path / "ids").write_text(name + "\n")
    for out, *named in (("new", "--documents_from", tmp_path / "ids"), ("b", "--document", name)):
        printed = run_main("data_prep/take_down.py", corpus, "--out", tmp_path / out, *MADE_WITH,
                           *named, "--workers", 1)
        assert "1 documents taken out, 1 shards" in printed
    damaged = next((tmp_path / "new/documents").glob("*.parquet"))
    damaged.unlink()  # it may be a hard link
    damaged.write_bytes(b"x")
    with pytest.raises(UserError, match=str(damaged)):
        run_main("data_prep/verify.py", tmp_path / "new")
    for text in ("[]", "3", '{"a": [1]}', "{", '{"a": ["x", 1]}'):
        (tmp_path / "new/documents/manifest.json").write_text(f'{{"version": 1, "files": {text}}}')
        with pytest.raises(UserError, match="manifest.json: damaged"):
            Origins(tmp_path / "new")
