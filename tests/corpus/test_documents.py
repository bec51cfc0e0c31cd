"""Readers: every format, every split, and bad input named by file and line."""

import codecs
import gzip
import json
import lzma
import os
import sys
from types import SimpleNamespace

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data_helpers import TEXTS, documents_of, problems_of, texts_of
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.documents import Extent, ReadOptions, plan_units
from deberta_ds.corpus.quality import Text
from deberta_ds.corpus.readers import read_unit
from deberta_ds.corpus.recipe import READING, read_options_of
from deberta_ds.files.inputs import open_bytes


def json_lines(texts=TEXTS):
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def test_every_format_gives_the_same_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(json_lines()))
    (tmp_path / "d.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    table = pyarrow.table({"text": TEXTS, "lang": ["en", "de", "zh", "en"]})
    pyarrow.parquet.write_table(table, tmp_path / "e.parquet", row_group_size=2)
    with pyarrow.ipc.new_stream(str(tmp_path / "f.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_file(str(tmp_path / "g.arrow"), table.schema) as writer:
        writer.write_table(table)
    for path in sorted(tmp_path.iterdir()):
        assert texts_of([path], documents="line") == TEXTS, path.name
        assert texts_of([path], unit_bytes=20, documents="line") == TEXTS, path.name
    assert texts_of([tmp_path / "a.jsonl", tmp_path / "e.parquet"]) == TEXTS * 2


def test_remote_paths_go_through_fsspec_and_their_problems_are_one_error(tmp_path, monkeypatch):
    for name in ("a.jsonl", "b.jsonl", "c.pdf"):
        with fsspec.open(f"memory://pattern/{name}", "wb") as file:
            file.write(json_lines())
    assert texts_of(["memory://pattern"]) == texts_of(["memory://pattern/*.jsonl"]) == TEXTS * 2
    assert texts_of(["memory://pattern/a.jsonl"], unit_bytes=30) == TEXTS
    (tmp_path / "b.txt").write_text("local by URL", encoding="utf-8")
    assert texts_of([f"file://{tmp_path}/b.txt"]) == ["local by URL"]
    with pytest.raises(UserError, match="no such file"):
        texts_of(["memory://pattern/*.txt"])
    for missing in ("s3fs", "aiohttp", "gcsfs"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for name in ("s3://bucket/a.jsonl", "gs://bucket/a.jsonl", "nosuch://host/a.jsonl"):
        with pytest.raises(UserError, match=name):
            texts_of([name])


def test_a_remote_directory_is_read_by_the_rules_of_a_local_one(tmp_path):
    """Hidden files, and the JSON in which save_to_disk describes a dataset, were read as text."""
    files = ("a.jsonl", ".hidden.jsonl", ".cache/b.jsonl", "set/dataset_dict.json",
             "set/train/state.json", "set/train/dataset_info.json", "c/d.jsonl", "c/state.json")
    for name in files:
        for root in (f"file://{tmp_path}", "memory://"):
            with fsspec.open(f"{root}/rules/{name}", "wb", auto_mkdir=True) as file:
                file.write(json_lines())
    for pattern in ("", "/**", "/*/*.json", "/.cache", "/.*/*", "/set/train/state.json"):
        found = [[extent.path.partition("/rules/")[2] for unit in plan_units(
            [root + pattern], ReadOptions()) for extent in unit]
            for root in (f"{tmp_path}/rules", "memory://rules")]
        assert sorted(found[0]) == sorted(found[1]), pattern
    assert texts_of(["memory://rules"]) == TEXTS * 3


def test_hub_datasets_are_streamed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(json_lines())
    assert texts_of([f"hub:{tmp_path}/set"]) == TEXTS


def test_documents_of_text_files(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("title\nCHAPTER 1\none\n\n\ntwo\nCHAPTER 2\nthree\n", encoding="utf-8")
    assert len(texts_of([path])) == 1
    assert texts_of([path], documents="blank_line") == ["title\nCHAPTER 1\none",
                                                        "two\nCHAPTER 2\nthree"]
    assert texts_of([path], documents="match:CHAPTER ") == ["title", "CHAPTER 1\none\n\n\ntwo",
                                                            "CHAPTER 2\nthree"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["", "a", "bb\r", "CHAPTER x", "long line of words", " "]),
             max_size=30),
    st.integers(1, 60), st.sampled_from(["line", "blank_line", "match:CHAPTER"]), st.booleans())
def test_any_split_into_byte_ranges_gives_the_same_documents(tmp_path_factory, lines, cut,
                                                             documents, newline):
    path = tmp_path_factory.mktemp("split") / "t.txt"
    data = ("\n".join(lines) + ("\n" if newline else "")).encode()
    path.write_bytes(data)
    read = ReadOptions(documents=documents)
    whole = [d.text for d in read_unit([Extent(str(path), "text", 0, len(data))], read)]
    edges = [*range(0, len(data), cut), len(data)]
    spans = [Extent(str(path), "text", a, b) for a, b in zip(edges, edges[1:], strict=False)]
    assert [d.text for span in spans for d in read_unit([span], read)] == whole


def test_labels(tmp_path):
    for name in ("de", "fr"):
        (tmp_path / name).mkdir()
    (tmp_path / "de" / "a.txt").write_text("x")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "fr" / "a.parquet")
    assert [d.label for d in documents_of(tmp_path, label_from_directory=True)] == ["de", "fr"]
    (tmp_path / "b.jsonl").write_text('{"text": "x", "lang": "fr"}\n')
    assert [d.label for d in documents_of(tmp_path / "b.jsonl", label_key="lang")] == ["fr"]


def test_bad_json_lines_are_named_by_file_and_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{"text": broken}\n{"body": "x"}\n[1]\n{"text": 5}\n'
        b'{"text": null}\n{"text": "\xff\xfe"}\n{"text": "last"}\n')
    problems, documents = problems_of(path)
    assert [d.text for d in documents if not d.problem] == ["good", "last"]
    for number, (problem, reason) in enumerate(
        zip(problems, ("not JSON", "no string under 'text' (found: body)", "a JSON list",
                       "no string under 'text' but int", "no string under 'text' but null",
                       "invalid UTF-8"), strict=True), start=2):
        assert problem.startswith(f"{path}:{number}: {reason}"), problem


def test_bad_text_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good\nbad \xe4 byte\nlast\n")
    for documents, count in (("line", 3), ("file", 1)):
        problems, found = problems_of(path, documents=documents)
        assert len(found) == count and problems[0].startswith(f"{path}:2: invalid UTF-8")
        assert "at byte 9" in problems[0]


def test_overlong_lines_are_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "' + b"x" * 5000 + b'"}\n{"text": "b"}\n')
    problems, documents = problems_of(path, max_document_bytes=1000)
    assert [d.text for d in documents if not d.problem] == ["a", "b"]
    assert problems == [f"{path}:2: longer than 1000 bytes; raise --max_document_bytes"]


def test_unknown_and_empty_inputs_and_useless_sizes(tmp_path):
    """--max_document_bytes 0 left out all documents and reported success."""
    (tmp_path / "x.docx").write_bytes(b"")
    with pytest.raises(UserError, match=r"unknown kind of file; known are .txt .*.ndjson .*.feather"
                                        r", each also with .gz "):
        texts_of([tmp_path / "x.docx"])
    with pytest.raises(UserError, match="no input files"):
        texts_of([tmp_path])
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert texts_of([tmp_path / "empty.jsonl"]) == []
    for document, unit in ((0, 0), (-5, 0), (1, -1)):
        with pytest.raises(UserError, match="must be positive"):
            texts_of([tmp_path / "empty.jsonl"], unit, max_document_bytes=document)


def test_a_compressed_file_is_read_by_its_name_in_any_case_or_says_its_name(tmp_path):
    """Without the suffix it was to be converted by iconv; .GZ was an unknown kind."""
    for suffix, data in ((".GZ", gzip.compress(json_lines(TEXTS))),
                         (".Zst", zstandard.compress(json_lines(TEXTS))),
                         (".xz", lzma.compress(json_lines(TEXTS)))):
        for path in (tmp_path / f"a.jsonl{suffix}", tmp_path / "a.jsonl"):
            path.write_bytes(data)
        assert texts_of([tmp_path / f"a.jsonl{suffix}"]) == TEXTS
        with pytest.raises(UserError, match="a.jsonl: is compressed; rename it to "
                                            f"a.jsonl{suffix.lower()}"):
            texts_of([tmp_path / "a.jsonl"])


def test_a_part_of_a_remote_file_costs_a_few_bytes_of_its_front(tmp_path, monkeypatch):
    """Each part read a buffer of 4 MiB there, to see whether the file is compressed."""
    asked, read = [], LocalFileSystem.cat_file

    def cat_file(self, path, start=None, end=None, **options):
        asked.append(end - start)
        return read(self, path, start, end, **options)

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    with open_bytes(f"file://{tmp_path}/a.txt") as file:
        file.seek(90)
        assert file.read() == bytes(range(90, 100)) and asked == [6, 10]
        file.seek(0)
        assert file.read() == bytes(range(100))


def test_names_of_files(tmp_path, capsys):
    """A pattern gives each file once, unknown kinds are named, and names must be text."""
    (tmp_path / "d/e").mkdir(parents=True)
    for name in ("d/a.txt", "d/e/b.txt", "d/b.pdf", "d/c"):
        (tmp_path / name).write_text(name)
    assert sorted(texts_of([f"{tmp_path}/d/**"])) == ["d/a.txt", "d/e/b.txt"]
    assert "2 files of unknown kind skipped" in (note := capsys.readouterr().err)
    assert "d/b.pdf" in note and f"{tmp_path}/d/c" in note
    with open(os.fsencode(tmp_path) + b"/\x93\xfa.txt", "w") as file:  # Shift-JIS
        file.write("text")
    with pytest.raises(UserError, match="its name is not UTF-8; rename the file"):
        texts_of([tmp_path])


def test_half_a_surrogate_pair_in_an_id_or_label_is_a_bad_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "id": "\\ud800"}\n{"text": "b", "id": "1"}\n')
    for key in ("id_key", "label_key"):
        problems, documents = problems_of(path, **{key: "id"})
        assert problems == [f"{path}:1: half of a surrogate pair in its id or label"]
        assert [document.text for document in documents] == ["", "b"]


def test_many_small_files_share_units(tmp_path):
    texts = [f"document {number}" for number in range(300)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:03d}.txt").write_text(text)
    assert list(map(len, plan_units([str(tmp_path)], ReadOptions()))) == [300]
    assert texts_of([tmp_path]) == texts


def test_long_windows_and_byte_order_marks(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=29)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    stream = compressor.compressobj()  # without the size in its header, as `zstd --long=29` < pipe
    data = stream.compress(json_lines(TEXTS * 3)) + stream.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    assert texts_of([tmp_path / "a.jsonl.zst"]) == TEXTS * 3
    (tmp_path / "b.jsonl").write_bytes(codecs.BOM_UTF8 + json_lines())
    assert texts_of([tmp_path / "b.jsonl"]) == TEXTS


def test_lists_of_json_nested_keys_paragraphs_and_old_line_ends(tmp_path):
    """Each was a bad document, or a file a single one."""
    rows = [{"meta": {"text": "a"}, "id": 1}, {"meta": {"text": ["b", "c"]}}, {"meta": {}}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.table({"meta": [rows[0]["meta"]]}), tmp_path / "c.parquet")
    for name in ("a.json", "b.jsonl"):
        problems, documents = problems_of(tmp_path / name, text_key="meta.text")
        assert [document.text for document in documents] == ["a", "b\n\nc", ""]
        assert len(problems) == 1 and "no string under 'meta.text'" in problems[0]
    assert texts_of([tmp_path / "c.parquet"], text_key="meta.text") == ["a"]
    assert problems_of(tmp_path / "b.jsonl", text_key="meta")[0][0].endswith(
        "no string under 'meta' (found: meta.text); see --text_key")
    rows = pyarrow.array([b"bytes", b"\xff"], pyarrow.binary())  # as Spark may write strings
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "E.PARQUET")
    assert texts_of([tmp_path / "E.PARQUET"]) == ["bytes", "\udcff"]  # which is a bad document
    for end in ("\r", "\r\n", "\n"):
        (tmp_path / "d.txt").write_bytes(f"one{end}two{end}{end}three".encode())
        assert texts_of([tmp_path / "d.txt"], documents="line") == ["one", "two", "", "three"]
        assert len(texts_of([tmp_path / "d.txt"], documents="blank_line", unit_bytes=3)) == 2
    assert Text("a\x85b\u2028c\rd\r\ne").lines == list("abcde")


def test_a_reader_of_ones_own_divides_text_files(tmp_path):
    """FILE.py:NAME; its digest is part of what a corpus is of, so that an edited one is another."""
    reader, page = tmp_path / "pages.py", tmp_path / "a.txt"
    reader.write_text("def pages(data):\n    return data.decode().split('\\f')\n"
                      "def fails(data):\n    raise KeyError('x')\n")
    page.write_text("one\ftwo\fthree" + "x" * 99)

    def options(name: str) -> ReadOptions:
        return read_options_of(SimpleNamespace(**dict.fromkeys(READING, "") | {
            "documents": f"{reader}:{name}", "max_document_bytes": 50}))

    def read(name: str) -> list:
        units = plan_units([str(page)], options(name), unit_bytes=4)
        assert len(units) == 1  # never cut
        return list(read_unit(units[0], options(name)))

    found = read("pages")
    assert [(one.text, one.where) for one in found[:2]] == [("one", 0), ("two", 1)]
    assert "longer than 50 bytes" in found[2].problem
    assert options("pages").documents.startswith(f"{reader}:pages#")
    for name, said in (("fails", "fails failed on this document: KeyError"),
                       ("none", "has no none; define it there")):
        with pytest.raises(UserError, match=said):
            read(name)
