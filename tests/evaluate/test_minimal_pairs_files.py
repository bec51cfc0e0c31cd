"""Files of minimal pairs: formats, names, samples, and what is refused."""

import collections
import dataclasses
import io
import tarfile

import numpy as np
import pytest
from launching import ROOT
from test_minimal_pairs import PAIRS, as_jsonl

from deberta_ds.base.errors import UserError
from deberta_ds.training.pairs import MinimalPair, read_pairs, sample_pairs, undecided


def test_a_damaged_archive_is_one_clear_error(tmp_path):
    noise = np.random.default_rng(0).bytes(1 << 17).hex()
    (tmp_path / "own.jsonl").write_text(as_jsonl(PAIRS).replace("fox", noise))
    with tarfile.open(tmp_path / "pairs.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "own.jsonl", "own.jsonl")
    data = bytearray((tmp_path / "pairs.tar.xz").read_bytes())
    data[-1000:-900] = bytes(100)
    (tmp_path / "pairs.tar.xz").write_bytes(data)
    with pytest.raises(UserError, match=r"pairs.tar.xz: damaged"):
        read_pairs(tmp_path / "pairs.tar.xz")


def test_formats_are_read(tmp_path):
    (tmp_path / "own.jsonl").write_text("\ufeff" + as_jsonl(PAIRS).replace("\n", "\r\n") + "\n")
    assert read_pairs(tmp_path / "own.jsonl") == PAIRS
    blimp = tmp_path / "blimp"
    blimp.mkdir()
    for pair in PAIRS:
        with open(blimp / f"{pair.paradigm}.jsonl", "a") as file:
            file.write(as_jsonl([pair], paradigm="UID", phenomenon="linguistics_term"))
    assert read_pairs(blimp) == PAIRS
    with tarfile.open(tmp_path / "blimp.tar.xz", "w:xz") as archive:
        for name in ("c", "a", "b"):
            archive.add(blimp / f"{name}.jsonl", f"data/{name}.jsonl")
        archive.addfile(tarfile.TarInfo("data/README"), io.BytesIO())
    assert read_pairs(tmp_path / "blimp.tar.xz") == PAIRS
    (tmp_path / "filler-gap-wh_object.txt").write_text("bad one\ngood one\nbad two\ngood two\n\n")
    assert read_pairs(tmp_path / "filler-gap-wh_object.txt") == [
        MinimalPair(f"good {n}", f"bad {n}", "filler-gap-wh_object", "filler-gap")
        for n in ("one", "two")]
    bare = '{"sentence_good": "a  b", "sentence_bad": "b a"}\n'
    (tmp_path / "bare.jsonl").write_text(bare)
    assert read_pairs(tmp_path / "bare.jsonl") == [MinimalPair("a b", "b a", "bare", "bare")]
    for name, text in (("de/agreement.jsonl", bare), ("fr/agreement.jsonl", bare),
                       ("README.txt", "What this is\nand who made it\n"), ("z.txt", "bad\ngood\n")):
        (tmp_path / "two" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "two" / name).write_text(text)  # two files of one name are two paradigms
    assert [pair.paradigm for pair in read_pairs(tmp_path / "two")] == [
        "de/agreement", "fr/agreement", "z"]


@pytest.mark.parametrize("name, text, message", [
    ("x.jsonl", "{", "x.jsonl:1: not a JSON object"),
    ("x.jsonl", "3", "must be a JSON object with sentence_good and sentence_bad, it is 3"),
    ("x.jsonl", '{"sentence_good": "a"}', "sentence_bad: must be a sentence, it is null"),
    ("x.jsonl", '\n{"sentence_good": "a", "sentence_bad": " "}', "l:2, sentence_bad: is empty"),
    ("x.jsonl", '{"sentence_good": "a", "sentence_bad": "b", "UID": 3}', "UID: must be a name"),
    ("x.jsonl", '{"sentence_good": "\\ud800", "sentence_bad": "b"}', "1: not a JSON object (half"),
    ("x.jsonl", "", "no pairs"),
    ("x.txt", "one\ntwo\nthree\n", "3 lines"),
    ("x.tar", "no archive", "neither .jsonl nor .txt nor a whole tar archive"),
    ("x.jsonl", as_jsonl([PAIRS[0], dataclasses.replace(PAIRS[0], phenomenon="two")]),
     "is of phenomenon 'one' and of 'two'"),
])
def test_bad_pairs_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as raised:
        read_pairs(tmp_path / name)
    assert message in str(raised.value)


def test_sample_takes_as_many_of_each_paradigm():
    sample = sample_pairs(PAIRS, 1, seed=3)
    assert [pair.paradigm for pair in sample] == ["a", "b", "c"]
    assert sample == sample_pairs(PAIRS, 1, seed=3)
    assert sample_pairs(PAIRS, 9) == PAIRS


def test_the_committed_pairs_are_200_in_8_phenomena():
    pairs = read_pairs(ROOT / "launch/runs/minimal_pairs.jsonl")
    assert collections.Counter(pair.phenomenon for pair in pairs) == dict.fromkeys(
        {pair.phenomenon for pair in pairs}, 25)
    assert len({pair.phenomenon for pair in pairs}) == 8
    assert len({(pair.good, pair.bad) for pair in pairs}) == 200
    assert all(pair.good != pair.bad for pair in pairs)


def test_pairs_with_unlike_numbers_of_unknown_tokens_count_half_and_are_few():
    """A sum of fewer log-probabilities is larger: such a pair was decided by the unknown word."""
    known, unknown = [2, 9, 9, 3], [2, 1, 9, 3]
    pairs = [(known, unknown), (unknown, known), (known, known),
             *[(known, [2, 9, 8, 3]), (unknown, [2, 1, 8, 3])] * 30]
    assert undecided(pairs, 1).tolist() == [True, True, True] + 60 * [False]
    assert undecided(pairs, None).sum() == 1  # two equal sentences
    with pytest.raises(UserError, match="3 of 4 minimal pairs have two equal sentences, or one wi"):
        undecided(pairs[:4], 1)
