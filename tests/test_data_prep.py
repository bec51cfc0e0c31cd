"""The prep stages: the same bytes for any number of workers, restarts, duplicates, refusals."""

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from data_helpers import (
    SENTENCES,
    make_corpus,
    random_documents,
    tiny_tokenizer,
    tokenizer_path,
)
from tqdm import tqdm

from deberta_ds.data import shards
from deberta_ds.data.corpus import Corpus, map_array
from deberta_ds.data.prep.contamination import find_contamination
from deberta_ds.data.prep.dedup import find_duplicates
from deberta_ds.data.prep.docstrings import (
    installed_python_files,
    pinned_python_files,
    write_docstrings,
)
from deberta_ds.data.prep.documents import ReadOptions, plan_units
from deberta_ds.data.prep.near import similar_to_earlier, similarity
from deberta_ds.data.prep.pack import pack_corpus, pack_shard
from deberta_ds.data.prep.stats import corpus_stats, stats_text
from deberta_ds.data.prep.text import normalise
from deberta_ds.data.prep.tokenize import CleanOptions, tokenize_corpus
from deberta_ds.data.prep.train_spm import train_tokenizer
from deberta_ds.data.prep.units import _drive, job, no_space_as_user_error
from deberta_ds.data.shards import read_manifest
from deberta_ds.errors import UserError

SCRIPTS = Path(__file__).parent.parent / "data_prep"
READ = ReadOptions()


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.jsonl"
    write_json_lines(path, random_documents(300))
    return path


def write_json_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def tokenize(source, out, workers=1, clean=None, unit_bytes=20_000, **options):
    units = plan_units([str(source)], READ, unit_bytes)
    return tokenize_corpus(units, out, tiny_tokenizer(), read=READ, clean=clean or CleanOptions(),
                           workers=workers, **options)


def tree(directory):
    return {str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(Path(directory).rglob("*")) if path.is_file()}


def stored_texts(corpus):
    texts = []
    for shard in read_manifest(corpus)[0].shards:
        tokens = map_array(Path(corpus) / "tokens" / f"{shard.name}.npy")
        begin = 0
        for end in map_array(Path(corpus) / "ends" / f"{shard.name}.npy").tolist():
            texts.append(tiny_tokenizer().decode(tokens[begin:end]))
            begin = end
    return texts


def test_stored_text_is_the_normalised_text_in_order(text_file, tmp_path):
    tokenize(text_file, tmp_path / "out")
    assert stored_texts(tmp_path / "out") == [normalise(text) for text in random_documents(300)]
    assert len(read_manifest(tmp_path / "out")[0].shards) > 3


def test_same_bytes_for_any_number_of_workers(text_file, tmp_path):
    for workers in (1, 2, 3):
        tokenize(text_file, tmp_path / str(workers), workers, heldout_share=0.2,
                 heldout_out=tmp_path / f"{workers}h")
        pack_corpus(tmp_path / str(workers), tiny_tokenizer(), 64, workers=workers)
    for suffix in ("", "h"):
        assert tree(tmp_path / f"1{suffix}") == tree(tmp_path / f"2{suffix}")
        assert tree(tmp_path / f"1{suffix}") == tree(tmp_path / f"3{suffix}")
    train, heldout = stored_texts(tmp_path / "1"), stored_texts(tmp_path / "1h")
    assert 0.1 < len(set(heldout)) / 300 < 0.3 and not set(train) & set(heldout)


def test_restart_does_only_what_is_missing(text_file, tmp_path):
    out = tmp_path / "out"
    tokenize(text_file, out)
    whole = tree(out)
    (out / "manifest.json").unlink()
    names = [shard.name for shard in json_shards(whole)]
    (out / ".units").mkdir()
    for name in names[1:]:
        write_marker(out, name, whole)
    times = {name: (out / "tokens" / f"{name}.npy").stat().st_mtime_ns for name in names}
    (out / "tokens" / f".{names[0]}.npy.99.tmp").write_bytes(b"half")
    tokenize(text_file, out)
    assert tree(out) == whole
    redone = [name for name in names
              if (out / "tokens" / f"{name}.npy").stat().st_mtime_ns != times[name]]
    assert redone == names[:1]


def json_shards(files):
    from deberta_ds.data.shards import ShardInfo

    return [ShardInfo(**shard) for shard in json.loads(files["manifest.json"])["shards"]]


def write_marker(out, name, whole):
    from dataclasses import asdict

    from deberta_ds.data.prep.tokenize import COUNTS

    shard = next(shard for shard in json_shards(whole) if shard.name == name)
    ends = np.load(out / "ends" / f"{name}.npy")
    texts = stored_texts_of(out, name, ends)
    counts = dict.fromkeys(COUNTS, 0)
    labels = {"": [len(ends), sum(map(len, texts)), shard.tokens]}
    origins = json.loads(whole["documents/manifest.json"])["files"][name]
    result = {"shards": [[asdict(shard)]], "labels": [labels], "counts": counts, "problems": [],
              "origins": [{name: origins}]}
    (out / ".units" / f"{name[:5]}.json").write_text(json.dumps(result))


def stored_texts_of(out, name, ends):
    tokens = np.load(out / "tokens" / f"{name}.npy")
    return [tiny_tokenizer().decode(part) for part in np.split(tokens, ends[:-1])]


def test_a_finished_job_is_left_alone_and_another_one_refused(text_file, tmp_path):
    out = tmp_path / "out"
    tokenize(text_file, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    tokenize(text_file, out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(UserError, match="other inputs or options"):
        tokenize(text_file, out, unit_bytes=30_000)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and not made by this command"):
        tokenize(text_file, tmp_path / "precious")


@pytest.mark.multi
def test_kills_at_random_moments_leave_no_corpus_and_restart_gives_the_same_bytes(
    text_file, tmp_path
):
    arguments = [sys.executable, str(SCRIPTS / "tokenize_corpus.py"), str(text_file),
                 "--tokenizer", tokenizer_path(), "--unit_bytes", "20000", "--workers", "2"]
    subprocess.run([*arguments, "--out", str(tmp_path / "whole")], check=True, capture_output=True)
    generator = random.Random(0)
    out = tmp_path / "killed"
    for _ in range(3):
        process = subprocess.Popen([*arguments, "--out", str(out)], start_new_session=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(generator.uniform(0.3, 1.2))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([*arguments, "--out", str(out)], check=True, capture_output=True)
    assert tree(out) == tree(tmp_path / "whole")


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


def test_rank_0_works_too_and_takes_waiting_units_back(tmp_path):
    done = []

    def note(number):
        time.sleep(0.01)
        done.append((number, threading.get_ident()))
        return {}

    missing = deque((tmp_path, str(number), note, (number,)) for number in range(24))
    with ThreadPoolExecutor(1) as pool, tqdm(disable=True) as bar:
        _drive(pool, missing, 12, bar, work_here=True)
    assert sorted(number for number, _ in done) == list(range(24))
    here = sum(thread == threading.get_ident() for _, thread in done)
    assert here >= 8  # about 12; without taking back the pool alone does the last 12, here 6


def test_duplicates_are_the_ones_a_set_finds(tmp_path):
    texts = random_documents(400, longest=2)
    write_json_lines(tmp_path / "text.jsonl", texts)
    units = plan_units([str(tmp_path / "text.jsonl")], READ, 5_000)
    found = tmp_path / "found"
    counts = find_duplicates(units, found, read=READ, workers=2)
    unique = list(dict.fromkeys(normalise(text) for text in texts))
    assert counts == {"documents": 400, "exact": 400 - len(unique), "near": 0}
    tokenize_corpus(units, tmp_path / "out", tiny_tokenizer(), read=READ, clean=CleanOptions(),
                    leave_out=[str(found)])
    assert stored_texts(tmp_path / "out") == unique
    other = plan_units([str(tmp_path / "text.jsonl")], READ, 9_000)  # other units, same documents
    tokenize_corpus(other, tmp_path / "out2", tiny_tokenizer(), read=READ, clean=CleanOptions(),
                    leave_out=[str(found)])
    assert stored_texts(tmp_path / "out2") == unique


def test_findings_of_other_options_inputs_or_states_are_refused(tmp_path):
    """They would drop unique documents in silence."""
    write_json_lines(tmp_path / "text.jsonl", ["same text"] * 3 + ["another one"])
    write_json_lines(tmp_path / "other.jsonl", ["not searched"])

    def tokenized(found, name="text.jsonl", read=READ, out="out"):
        units = plan_units([str(tmp_path / name)], read)
        return tokenize_corpus(units, tmp_path / out, tiny_tokenizer(), read=read,
                               clean=CleanOptions(), leave_out=[str(tmp_path / found)])

    units = plan_units([str(tmp_path / "text.jsonl")], READ)
    find_duplicates(units, tmp_path / "found", read=READ)
    with pytest.raises(UserError, match="other reading options"):
        tokenized("found", read=ReadOptions(documents="line"))
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
    with pytest.raises(UserError, match="inputs that have changed"):
        tokenize(tmp_path / "text.jsonl", tmp_path / "out")
    (tmp_path / "found" / "places.npy").write_bytes(b"")
    with pytest.raises(UserError, match="places.npy: 0 bytes"):
        tokenized("found")
    with pytest.raises(UserError, match="named twice"):
        find_duplicates(both + both, tmp_path / "found3", read=READ)


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
    write_json_lines(tmp_path / "text.jsonl", texts)
    units = plan_units([str(tmp_path / "text.jsonl")], READ, 4000)
    against = [str(tmp_path / "val.jsonl"), str(tmp_path / "dev.tsv")]
    report = find_contamination(units, against, tmp_path / "found", read=READ, workers=1)
    assert report.documents == [40, 2]
    assert list(report.examples.values()) == [[3, 3], [1, 0]]
    assert "brothers who never spoke" in report.samples[0]["words"]
    assert report.samples[0]["document"] == f"{tmp_path}/text.jsonl:4"
    assert report.samples[1]["example"] == f"{against[0]}, example 1"
    find_duplicates(units, tmp_path / "twice", read=READ)
    found = [str(tmp_path / "found"), str(tmp_path / "twice")]
    done = tokenize_corpus(units, tmp_path / "out", tiny_tokenizer(), read=READ,
                           clean=CleanOptions(), leave_out=found)
    kept = [normalise(text) for number, text in enumerate(texts) if number not in (3, 9)]
    assert stored_texts(tmp_path / "out") == list(dict.fromkeys(kept))
    assert done[str(tmp_path / "out")].counts["contaminated"] == 2
    with pytest.raises(UserError, match="no text of 8 words"):
        (tmp_path / "val.jsonl").write_text('{"a": "b"}\n')
        find_contamination(units, against[:1], tmp_path / "none", read=READ)


def test_duplicates_across_corpora_leave_once(tmp_path):
    """Mixtures need one corpus a source: search all at once, each leaves out its own."""
    first, second = random_documents(60, seed=1), random_documents(60, seed=2)
    write_json_lines(tmp_path / "web.jsonl", first + second[:20])
    write_json_lines(tmp_path / "wiki.jsonl", second + first[:10])
    inputs = [str(tmp_path / name) for name in ("web.jsonl", "wiki.jsonl")]
    find_duplicates(plan_units(inputs, READ, 4000), tmp_path / "found", read=READ)
    for name in ("web", "wiki"):
        units = plan_units([str(tmp_path / f"{name}.jsonl")], READ)
        tokenize_corpus(units, tmp_path / name, tiny_tokenizer(), read=READ,
                        clean=CleanOptions(), leave_out=[str(tmp_path / "found")])
    web, wiki = stored_texts(tmp_path / "web"), stored_texts(tmp_path / "wiki")
    assert not set(web) & set(wiki) and len(set(web)) == len(web) and len(set(wiki)) == len(wiki)
    assert set(web) | set(wiki) == {normalise(text) for text in first + second}


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
    for problem in ({"heldout_share": 2.0, "heldout_out": tmp_path / "x"},
                    {"heldout_share": 0.1, "heldout_out": tmp_path / "y"}):
        with pytest.raises(UserError, match="held-out"):
            tokenize(tmp_path / "web.jsonl", tmp_path / "y", **problem)


def test_near_duplicates(tmp_path):
    pytest.importorskip("datasketch")
    generator = random.Random(0)
    words = [f"word{number}" for number in range(500)]
    originals = [" ".join(generator.choices(words, k=120)) for _ in range(30)]
    changed = [text.replace(text.split()[60], "changed", 1) for text in originals]
    write_json_lines(tmp_path / "text.jsonl", originals + changed)
    units = plan_units([str(tmp_path / "text.jsonl")], READ, 8_000)
    counts = find_duplicates(units, tmp_path / "found", read=READ, near_threshold=0.7)
    assert counts["exact"] == 0 and 28 <= counts["near"] <= 30


def test_near_duplicates_are_found_behind_a_stranger_in_their_band():
    generator = np.random.default_rng(0)
    stranger, second = generator.integers(1 << 32, size=(2, 128), dtype=np.uint32)
    third = second.copy()
    third[:20] += 1  # 108 of 128 entries agree
    signatures = np.stack([stranger, second, third, third, stranger])
    sets = [np.sort(part) for part in (stranger, second, third, third, stranger)]
    exact = len(set(second) & set(third)) / len(set(second) | set(third))
    assert similarity(sets[1], sets[2]) == exact == 108 / 148
    assert similar_to_earlier(signatures, sets, 0.72) == [2, 3, 4]
    assert similar_to_earlier(signatures, sets, 0.74) == [3, 4]


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
    write_json_lines(tmp_path / "text.jsonl", originals + changed)
    units = plan_units([str(tmp_path / "text.jsonl")], READ)
    counts = find_duplicates(units, tmp_path / "found", read=READ, near_threshold=0.8)
    assert counts["exact"] == 0 and counts["near"] >= 59


def test_near_duplicates_are_decided_by_their_sets(tmp_path):
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
        similar += len(sets[0] & sets[1]) / len(sets[0] | sets[1]) >= 0.8
        originals.append(" ".join(text))
        changed.append(" ".join(other))
    write_json_lines(tmp_path / "text.jsonl", originals + changed)
    units = plan_units([str(tmp_path / "text.jsonl")], READ, 40_000)
    counts = find_duplicates(units, tmp_path / "found", read=READ, near_threshold=0.8)
    assert 40 < similar < 110 and similar - 1 <= counts["near"] <= similar


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
    times = {path: path.stat().st_mtime_ns for path in (out / "tokens").iterdir()}
    tokenize(text_file, out)
    assert times == {path: path.stat().st_mtime_ns for path in (out / "tokens").iterdir()}
    for part in ((1, 2), (2, 2)):
        assert pack_corpus(out, tiny_tokenizer(), 64, part=part) is None
    pack_corpus(out, tiny_tokenizer(), 64)
    find_duplicates(units, found, read=READ)
    assert tree(out) == tree(tmp_path / "one") and tree(found) == tree(tmp_path / "whole")


def test_two_jobs_in_one_directory_are_one_error(text_file, tmp_path):
    """The second deleted the files of the first."""
    out = tmp_path / "out"
    with job(out, {"version": 1}, finished="manifest.json"):
        for work in (lambda: tokenize(text_file, out),
                     lambda: find_duplicates(plan_units([str(text_file)], READ), out, read=READ)):
            with pytest.raises(UserError, match=r"another command is at work here \(pid \d+ on"):
                work()
    shutil.rmtree(out)
    tokenize(text_file, out)
    assert not (out / ".lock").exists()


def test_a_lock_does_not_outlive_its_process(text_file, tmp_path):
    code = ("import sys, os, signal; from deberta_ds.data.prep.units import job\n"
            "with job(sys.argv[1], {}, finished='x'): os.kill(os.getpid(), signal.SIGKILL)")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")])
    assert (tmp_path / "out" / ".lock").exists()
    with job(tmp_path / "out", {}, finished="x") as is_done:
        assert not is_done


def test_mpirun_without_its_pool_is_an_error(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "mpi4py.futures", raising=False)
    with pytest.raises(UserError, match="mpirun -n N python -m mpi4py.futures"):
        tokenize(text_file, tmp_path / "out")


def test_bad_documents_stop_or_are_counted(tmp_path):
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


def test_bad_documents_of_all_units_together_are_limited(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(('{"text": "fine"}\n' * 50 + "bad\n") * 3)
    with pytest.raises(UserError, match="3 bad documents, --max_bad allows 2"):
        tokenize(path, tmp_path / "out", unit_bytes=900, clean=CleanOptions(max_bad=2))


def test_pack_refuses_another_tokenizer_and_a_truncated_shard(text_file, tmp_path):
    out = tmp_path / "out"
    tokenize(text_file, out)
    text = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(text.replace(tiny_tokenizer().sha256, "0" * 64))
    with pytest.raises(UserError, match="not with"):
        pack_corpus(out, tiny_tokenizer(), 64)
    (out / "manifest.json").write_text(text)
    shard = next((out / "tokens").glob("*.npy"))
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(UserError, match="bytes, the manifest says"):
        pack_corpus(out, tiny_tokenizer(), 64)


def test_a_full_disk_is_an_error_with_its_number(monkeypatch, tmp_path):
    @contextmanager
    def full_disk(path):
        yield "/dev/full"

    monkeypatch.setattr(shards, "atomic_path", full_disk)
    with pytest.raises(OSError) as caught:
        shards.save_array(tmp_path / "x.npy", np.arange(100_000))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(UserError, match="no space left"), no_space_as_user_error(tmp_path):
        raise caught.value


def test_train_tokenizer_round_trips_and_is_bounded(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(random_documents(200)), encoding="utf-8")
    read = ReadOptions(documents="line")
    units = plan_units([str(path)], read)
    tokenizer = train_tokenizer(units, tmp_path / "spm.model", pieces=400, sample_bytes=1 << 20,
                                read=read, threads=1)
    assert tokenizer.mask_id == 400
    for text in SENTENCES:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(UserError, match=r"cannot make 100000 pieces.*--pieces \d+, or give more"):
        train_tokenizer(units, tmp_path / "x.model", pieces=100_000, sample_bytes=1 << 20,
                        read=read, threads=1)
    assert not (tmp_path / "x.model").exists()


def test_docstrings_are_deduplicated_english(tmp_path):
    files = [path for path in installed_python_files() if "/email/" in path or "/http/" in path]
    counts = write_docstrings(files, tmp_path, max_bytes=10**6, heldout_share=0.3, workers=1)
    records = [json.loads(line) for name in ("train", "heldout")
               for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [record["text"] for record in records]
    assert len(texts) == len(set(texts)) == counts["train"] + counts["heldout"] > 20
    assert all(text == normalise(text) and len(text) >= 200 for text in texts)
    assert not any(record["id"].startswith("/") for record in records)


def test_docstrings_of_pinned_packages_are_the_same_everywhere(tmp_path):
    """Files of the named packages alone, whatever else is installed; another version is said."""
    version = metadata.version("networkx")
    (tmp_path / "constraints.txt").write_text(f"# pins\nnetworkx=={version}\nnumpy==0.1\n")
    files, notes = pinned_python_files(tmp_path / "constraints.txt")
    packages = {Path(path).relative_to(sysconfig.get_paths()["purelib"]).parts[0]
                for path in files}
    assert {"numpy", "networkx"} <= packages <= {
        "numpy", "scipy", "sklearn", "pandas", "networkx", "matplotlib", "mpl_toolkits", "pylab.py"}
    assert "networkx" not in " ".join(notes) and notes[0].endswith("not 0.1")
    assert files[0].endswith("numpy/__config__.py") and not any("/tests/" in p for p in files)


def test_stats_of_another_script_warn(tmp_path):
    """Spelled in bytes because the tokenizer has no piece for it, and unknown pieces."""
    path = tmp_path / "thai.jsonl"
    path.write_text("\n".join(json.dumps({"text": "\u0e20\u0e32\u0e29\u0e32" * 20 + str(n)})
                              for n in range(30)), encoding="utf-8")
    tokenize(path, tmp_path / "thai")
    tokenizer = tiny_tokenizer()
    assert re.search(r"WARNING: 9\d\.\d% of the tokens are (single bytes|unknown)",
                     stats_text(corpus_stats(tmp_path / "thai", tokenizer), tokenizer))
    frequencies = np.bincount([tokenizer.unk_id, *range(300, 340)], minlength=tokenizer.size)
    stats = dataclasses.replace(corpus_stats(tmp_path / "thai", tokenizer),
                                frequencies=frequencies)
    assert "WARNING: 2.4% of the tokens are unknown" in stats_text(stats, tokenizer)


def test_stats_count_every_token(text_file, tmp_path):
    tokenize(text_file, tmp_path / "out")
    pack_corpus(tmp_path / "out", tiny_tokenizer(), 64)
    stats = corpus_stats(tmp_path / "out", tiny_tokenizer())
    assert stats.frequencies.sum() == stats.manifest.counts["tokens"]
    assert stats.lengths.sum() == 300
    text = stats_text(stats, tiny_tokenizer())
    assert "rows-64" in text and "top 20 pieces" in text and "WARNING" not in text


def test_commands_print_one_error_line(tmp_path):
    for script, arguments in (
        ("tokenize_corpus.py", ["absent.txt", "--tokenizer", tokenizer_path(), "--out", "x"]),
        ("pack.py", ["absent", "--tokenizer", tokenizer_path(), "--seq_len", "64"]),
        ("verify.py", ["absent"]),
    ):
        result = subprocess.run([sys.executable, str(SCRIPTS / script), *arguments], cwd=tmp_path,
                                capture_output=True, text=True)
        assert result.returncode == 2, result
        assert result.stderr.startswith("error: absent") and result.stderr.count("\n") == 1


def test_show_and_verify_run(text_file, tmp_path):
    out = tmp_path / "out"
    tokenize(text_file, out)
    pack_corpus(out, tiny_tokenizer(), 64)
    tools = {"show.py": ["--tokenizer", tokenizer_path(), "--seq_len", "64"], "verify.py": []}
    printed = [
        subprocess.run([sys.executable, str(SCRIPTS / script), str(out), *arguments], check=True,
                       capture_output=True, text=True).stdout
        for script, arguments in tools.items()
    ]
    assert "[CLS]" in printed[0] and "targets" in printed[0] and "{" in printed[0]
    assert "files agree (full)" in printed[1]
    assert Corpus(out, seq_len=64).fingerprint[:16] in printed[1]


@pytest.mark.parametrize("part", ["tokens", "ends"])
def test_a_flipped_bit_is_named_by_what_reads_whole_shards(tmp_path, part):
    documents = [tiny_tokenizer().encode(text) for text in random_documents(30)]
    corpus = make_corpus(tmp_path / "corpus", documents, tiny_tokenizer(), (64,))
    shard = next((Path(corpus) / part).glob("*.npy"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0x80
    shard.write_bytes(data)
    with pytest.raises(UserError, match=f"{part}/{shard.name}: xxh3 checksum differs"):
        corpus_stats(corpus, tiny_tokenizer())
    info = read_manifest(corpus)[0].shards[0]
    with pytest.raises(UserError, match=f"{part}/{shard.name}: xxh3 checksum differs"):
        pack_shard(str(corpus), info, tiny_tokenizer().word_starts(), 32)
