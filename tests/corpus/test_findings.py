"""Documents found to be left out: exact and near duplicates, text of evaluation files."""

import gzip
import json
import random
import unicodedata
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.ipc
import pyarrow.parquet
import pytest
from data_helpers import (
    READ,
    planned,
    random_documents,
    stored_texts,
    tokenize,
    tree,
    write_json_lines,
)

from deberta_ds.base.errors import UserError
from deberta_ds.corpus import contamination, dedup, findings
from deberta_ds.corpus.contamination import find_contamination, words_of
from deberta_ds.corpus.dedup import Group, find_duplicates, similarity
from deberta_ds.corpus.documents import plan_units
from deberta_ds.tokenizer.text import normalize


def test_duplicates_are_the_ones_a_set_finds(tmp_path):
    texts = random_documents(400, longest=2)
    units = planned(tmp_path / "text.jsonl", texts, 5_000)
    found = tmp_path / "found"
    counts = find_duplicates(units, found, read=READ, workers=2)
    unique = list(dict.fromkeys(normalize(text) for text in texts))
    assert counts == {"documents": 400, "exact": 400 - len(unique), "near": 0}
    tokenize(units, tmp_path / "out", leave_out=[str(found)])
    assert stored_texts(tmp_path / "out") == unique
    tokenize(tmp_path / "text.jsonl", tmp_path / "out2", unit_bytes=9_000,  # the same documents
             leave_out=[str(found)])
    assert stored_texts(tmp_path / "out2") == unique


def test_empty_documents_alone_have_no_duplicates(tmp_path):
    units = planned(tmp_path / "text.jsonl", ["", " ", ""], 5_000)
    for near in (0.0, 0.8):
        counts = find_duplicates(units, tmp_path / f"{near}", read=READ, near_threshold=near)
        assert counts["exact"] == counts["near"] == 0


def test_a_search_that_can_read_no_document_ends(tmp_path):
    """With a wrong --text_key, 0 were found."""
    units = planned(tmp_path / "text.jsonl", ["same text"] * 3)
    (tmp_path / "val.txt").write_text("one two three four five six seven eight\n")
    read = replace(READ, text_key="content")
    searches = {"duplicates": find_duplicates, "contaminated": partial(
        find_contamination, against=[str(tmp_path / "val.txt")])}
    for name, search in searches.items():
        with pytest.raises(UserError, match="none of 3 documents can be read; .*text.jsonl, byte 0:"
                                            " no string under 'content'"):
            search(units, out=tmp_path / name, read=read)


@pytest.mark.parametrize(("damage", "message"), [
    ({"counts": {"documents": 3}}, r"damaged manifest \(counts.exact is missing\); run that"),
    ({"reason": "none"}, r"damaged manifest \(reason"),
    ({"counts": {"documents": "3", "exact": 0, "near": 0}}, r"damaged manifest \(counts.documents"),
    ({"version": 3}, "format version 3, .* make it again in a new directory")])
def test_findings_without_what_a_reader_needs_are_named(tmp_path, damage, message):
    units = planned(tmp_path / "text.jsonl", ["same text"] * 3)
    find_duplicates(units, tmp_path / "found", read=READ)
    path = tmp_path / "found/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(UserError, match=rf"found/manifest\.json: {message}"):
        find_duplicates(units, tmp_path / "found", read=READ)


def test_findings_of_other_options_inputs_or_states_are_refused(tmp_path):
    """They would drop unique documents in silence."""
    write_json_lines(tmp_path / "text.jsonl", ["same text"] * 3 + ["another one"])
    write_json_lines(tmp_path / "other.jsonl", ["not searched"])

    def tokenized(found, name="text.jsonl", out="out"):
        return tokenize(tmp_path / name, tmp_path / out, leave_out=[str(tmp_path / found)])

    units = plan_units([str(tmp_path / "text.jsonl")], READ)
    find_duplicates(units, tmp_path / "found", read=READ)
    with pytest.raises(UserError, match="not among the inputs"):
        tokenized("found", "other.jsonl")
    tokenized("found")
    both = plan_units([str(tmp_path / "text.jsonl"), str(tmp_path / "other.jsonl")], READ)
    find_duplicates(both, tmp_path / "found2", read=READ)
    with pytest.raises(UserError, match="other inputs or options"):
        tokenized("found2")  # into a finished directory: not the old result in silence
    write_json_lines(tmp_path / "text.jsonl", ["same text"] * 3 + ["another 1ne"])
    with pytest.raises(UserError, match="changed since"):  # at the same size
        tokenized("found", out="out3")
    with pytest.raises(UserError, match="other inputs or options"):
        tokenize(tmp_path / "text.jsonl", tmp_path / "out")
    (tmp_path / "found" / "places.npy").write_bytes(b"")
    with pytest.raises(UserError, match="places.npy: 0 bytes"):
        tokenized("found")


def test_documents_with_evaluation_text_are_found_and_left_out(tmp_path):
    examples = [{"passage": {"text": "The tower was built by seven brothers, who never spoke to "
                             "each other again after it fell.", "n": [1]}, "label": True},
                {"sentence": "Nobody at the old harbour knew what the sailor said."},
                {"sentence": "Too short to count."},
                {"question": "What did nobody know?", "passage":
                 "Nobody at the old harbour knew what the sailor said."}]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(e) + "\n" for e in examples))
    (tmp_path / "dev.tsv").write_text("id\tsentence\n1\tA quiet table of words that nobody in "
                                      "this corpus has ever written down before.\n")
    texts = random_documents(40)
    texts[3] += (" Was BUILT by seven brothers who -- never spoke to each other again, after it "
                 "fell down.")
    texts[9] = "x " + examples[1]["sentence"].upper() + " y"
    texts[11] += " The tower was built by seven brothers. Too short to count."
    texts[20] += " The tower was built by seven brothers, who never"  # no document has 13 words
    texts[21] = "spoke to each other again after it fell. " + texts[21]
    units = planned(tmp_path / "text.jsonl", texts, 4000)
    against = [str(tmp_path / "val.jsonl"), str(tmp_path / "dev.tsv")]
    report = find_contamination(units, against, tmp_path / "found", read=READ, workers=1)
    assert report.documents == [40, 2]
    assert list(report.examples.values()) == [[3, 3, 1, 0], [1, 0, 1, 0]]
    assert "brothers who never spoke" in report.samples[0]["words"]
    byte = sum(len(json.dumps({"text": text})) + 1 for text in texts[:3])
    assert report.samples[0]["document"] == f"{tmp_path}/text.jsonl, byte {byte}"
    assert report.samples[1]["example"] == f"{against[0]}, example 1"
    for part in ((1, 2), (2, 2)):
        assert find_contamination(units, against, tmp_path / "parts", read=READ, part=part) is None
    assert find_contamination(units, against, tmp_path / "parts", read=READ) == report
    assert tree(tmp_path / "parts") == tree(tmp_path / "found")
    find_duplicates(units, tmp_path / "twice", read=READ)
    found = [str(tmp_path / "found"), str(tmp_path / "twice")]
    done = tokenize(units, tmp_path / "out", leave_out=found)
    kept = [normalize(text) for number, text in enumerate(texts) if number not in (3, 9)]
    assert stored_texts(tmp_path / "out") == list(dict.fromkeys(kept))
    assert done[str(tmp_path / "out")].counts["contaminated"] == 2
    old = '"ok"\n"ما هي عاصمة"'.encode("cp1256")
    for name, data, message in (("old.txt", old, "old.txt:2: invalid UTF-8 .*; convert"),
                                ("old.jsonl", old, "old.jsonl:2: invalid UTF-8 .*; convert"),
                                ("none.jsonl", b'{"a": "b"}\n', "no text of 8 words")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=message):
            find_contamination(units, [str(tmp_path / name)], tmp_path / "old", read=READ)


def test_a_text_of_many_examples_is_found_once_in_a_document(tmp_path, monkeypatch):
    """A passage that 1,000 questions share gave 1,000 hits for each of its words; and for each
    sample the lines before it were counted, from the first byte of a file of any size.
    """
    passage = " ".join(f"word{n}" for n in range(300))
    (tmp_path / "val.jsonl").write_text("".join(
        json.dumps({"passage": passage, "question": f"Question {n}?"}) + "\n" for n in range(1000)))
    units = planned(tmp_path / "text.jsonl", ["nothing", passage, passage + " and on"])
    usual, hits = contamination.hits, []

    def counted(*arguments):
        for hit in usual(*arguments):
            hits.append(hit)
            yield hit

    monkeypatch.setattr(contamination, "hits", counted)
    lines = []
    monkeypatch.setattr("deberta_ds.corpus.documents.line_number", lambda *one: lines.append(one))
    against = str(tmp_path / "val.jsonl")
    report = find_contamination(units, [against], tmp_path / "found", read=READ)
    assert report.examples == {against: [1000, 1000, 0, 1000]} and report.documents == [3, 2]
    assert report.samples[0]["example"] == f"{against}, example 0"
    assert len(hits) == 2 * 288 and not lines  # runs of 13 words in 300


@pytest.mark.parametrize(("text", "words"), [
    ("हिन्दी में लिखा हुआ।", ["हिन्दी", "में", "लिखा", "हुआ"]), ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
    ("שָׁלוֹם עוֹלָם", ["שָׁלוֹם", "עוֹלָם"]),
    ("مُحَمَّد، می\u200cخواهم", ["مُحَمَّد", "می\u200cخواهم"]),
    ("Cafe\u0301, don't", ["cafe\u0301", "don", "t"]), ("สวัสดี", ["ส", "วั", "ส", "ดี"]),
    ("བོད་སྐད", ["བོ", "ད", "སྐ", "ད"]), ("中文。a", ["中", "文", "a"])])
def test_words_keep_their_marks(text, words):
    """Vowel signs are no letters to Python: 13 consonants counted as 13 words."""
    assert words_of(text) == words


def test_evaluation_text_is_found_under_the_text_rules(tmp_path):
    """A soft hyphen or a decomposed letter in an evaluation file hid its example."""
    text = "Während der Fahrt übte der Schüler auf der Geige ein Stück für seine Prüfung ein"
    raw = unicodedata.normalize("NFD", text).replace("Fahrt", "Fah\xadrt")
    (tmp_path / "val.jsonl").write_text(json.dumps({"a": raw}))
    units = planned(tmp_path / "text.jsonl", ["x " + text + " y", "nothing"])
    report = find_contamination(units, [str(tmp_path / "val.jsonl")], tmp_path / "out", read=READ)
    assert report.documents == [2, 1]


def test_evaluation_files_of_any_size_and_kind_are_read_once(tmp_path):
    """Files over 4 MiB, such as BoolQ's training set, were read once for each of their parts."""
    examples = [{"n": n, "passages": [{"text": f"This long file has an example of number {n} and "
                                       "no document holds it ever."}]} for n in range(40)]
    units = planned(tmp_path / "text.jsonl", [examples[17]["passages"][0]["text"], "nothing"])
    (tmp_path / "a.jsonl").write_text("".join(
        json.dumps(e | {"padding": "x" * (1 << 17)}) + "\n" for e in examples))
    pyarrow.parquet.write_table(table := pyarrow.Table.from_pylist(examples),
                                tmp_path / "b.parquet", row_group_size=9)
    with pyarrow.ipc.new_stream(str(tmp_path / "c.arrow"), table.schema) as writer:
        writer.write_table(table)
    against = [str(tmp_path / name) for name in ("a.jsonl", "b.parquet", "c.arrow")]
    assert len(plan_units(against[:1], READ)) > 1
    report = find_contamination(units, against, tmp_path / "found", read=READ)
    assert report.examples == dict.fromkeys(against, [40, 1, 0, 0])
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"a": "b"}' * 999)[:-9])
    with pytest.raises(UserError, match=r"d.jsonl.gz.*cut short"):
        find_contamination(units, [str(tmp_path / "d.jsonl.gz")], tmp_path / "none", read=READ)


def test_duplicates_across_corpora_leave_once(tmp_path):
    """Mixtures need one corpus a source: search all at once, each leaves out its own."""
    first, second = random_documents(60, seed=1), random_documents(60, seed=2)
    write_json_lines(tmp_path / "web.jsonl", first + second[:20])
    write_json_lines(tmp_path / "wiki.jsonl", second + first[:10])
    inputs = [str(tmp_path / name) for name in ("web.jsonl", "wiki.jsonl")]
    find_duplicates(plan_units(inputs, READ, 4000), tmp_path / "found", read=READ)
    for name in ("web", "wiki"):
        tokenize(tmp_path / f"{name}.jsonl", tmp_path / name, leave_out=[str(tmp_path / "found")])
    both = stored_texts(tmp_path / "web") + stored_texts(tmp_path / "wiki")
    assert len(set(both)) == len(both) and set(both) == {*map(normalize, first + second)}


def test_a_group_of_alike_documents_is_read_in_parts(tmp_path, monkeypatch):
    """A page that is there a million times took gigabytes: all of a bucket was read at once."""
    pytest.importorskip("datasketch")
    generator = random.Random(3)
    pages = [" ".join(generator.choices([f"w{n}" for n in range(300)], k=60)) for _ in range(20)]
    texts = [f"{generator.choice(pages)} {number % 7}" for number in range(300)]
    units = planned(tmp_path / "text.jsonl", texts, 20_000)
    for name, documents, merged in (("whole", 1 << 14, 1 << 20), ("parts", 61, 5)):
        monkeypatch.setattr(dedup, "NEAR_DOCUMENTS", documents)
        monkeypatch.setattr(findings, "_MERGED_AT_ONCE", merged)
        counts = find_duplicates(units, tmp_path / name, read=READ, near_threshold=0.8)
        assert sum(counts.values()) - counts["documents"] == 280
    assert tree(tmp_path / "whole") == tree(tmp_path / "parts")


def test_near_duplicates_are_found_behind_a_stranger_in_their_band():
    generator = np.random.default_rng(0)
    stranger, second = generator.integers(1 << 32, size=(2, 128), dtype=np.uint32)
    third = second.copy()
    third[:20] += 1  # 108 of 128 entries agree
    signatures = np.stack([stranger, second, third, third, stranger])
    sets = [np.sort(part) for part in (stranger, second, third, third, stranger)]
    exact = len(set(second) & set(third)) / len(set(second) | set(third))
    assert similarity(sets[1], sets[2]) == exact == 108 / 148
    for threshold, later in ((0.72, [2, 3, 4]), (0.74, [3, 4])):
        group = Group(threshold)
        found = [group.has(*document) for document in zip(signatures, sets, strict=True)]
        assert [number for number, is_near in enumerate(found) if is_near] == later


@pytest.mark.parametrize("size", [10, 1000, 1023, 1024, 1025, 5000])
def test_similarity_of_sketches(size):
    generator = np.random.default_rng(size)
    hashes = np.unique(generator.integers(1 << 32, size=2 * size, dtype=np.uint32))
    generator.shuffle(hashes)
    first, second = set(hashes[:size].tolist()), set(hashes[size // 5 : size + size // 5].tolist())
    sketches = [np.array(sorted(part), dtype="<u4")[:1024] for part in (first, second)]
    exact = len(first & second) / len(first | second)
    assert abs(similarity(*sketches) - exact) <= (0 if size < 1024 else 0.05)
    assert similarity(sketches[0], sketches[0]) == 1.0


def test_near_duplicates_in_scripts_without_spaces(tmp_path):
    """A text without spaces was one word, hence one 5-gram, hence never similar to another."""
    pytest.importorskip("datasketch")
    generator = random.Random(0)
    scripts = {"zh": (0x4E00, 0x5FFF), "ja": (0x3041, 0x30FA), "th": (0x0E01, 0x0E2E),
               "lo": (0x0E81, 0x0E82), "bo": (0x0F40, 0x0F68), "my": (0x1000, 0x1020)}
    originals, changed = [], []
    for low, high in scripts.values():
        for _ in range(10):
            text = "".join(chr(generator.randint(low, high)) for _ in range(300))
            originals.append(text)
            changed.append(text[:150] + "。" + text[151:])
    units = planned(tmp_path / "text.jsonl", originals + changed)
    counts = find_duplicates(units, tmp_path / "found", read=READ, near_threshold=0.8)
    assert counts["exact"] == 0 and counts["near"] >= 59


@pytest.mark.parametrize("threshold", [0.7, 0.8])
def test_near_duplicates_are_decided_by_their_sets(tmp_path, threshold):
    """Pairs just above and below the threshold; estimates by signatures missed a quarter."""
    pytest.importorskip("datasketch")
    generator = random.Random(1)
    words = [f"w{number}" for number in range(5000)]
    originals, changed, similar = [], [], 0
    for number in range(150):
        text = generator.choices(words, k=200)
        other = list(text)
        for place in generator.sample(range(200), 1 + number % 8):
            other[place] = "changed"
        sets = [{tuple(part[i : i + 5]) for i in range(196)} for part in (text, other)]
        similar += len(sets[0] & sets[1]) / len(sets[0] | sets[1]) >= threshold
        originals.append(" ".join(text))
        changed.append(" ".join(other))
    units = planned(tmp_path / "text.jsonl", originals + changed, 40_000)
    counts = find_duplicates(units, tmp_path / "found", read=READ, near_threshold=threshold)
    assert 40 < similar < 140 and similar - 1 <= counts["near"] <= similar
    assert counts["exact"] == 0
