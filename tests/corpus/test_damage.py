"""Inputs that are damaged, repaired, replaced, touched, or change while they are read."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_helpers import READ, random_documents, run_main, tiny_tokenizer, tokenize, tree

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.contamination import find_contamination
from deberta_ds.corpus.damage import damaged_files, refuse_huge
from deberta_ds.corpus.dedup import find_duplicates
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.filter_rules import FilterRules
from deberta_ds.corpus.filters import try_filters
from deberta_ds.corpus.origins import Origins
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.train_tokenizer import train_tokenizer
from deberta_ds.data.shards import read_manifest

LINES = "".join(json.dumps({"text": text}) + "\n" for text in random_documents(40)).encode()
OTHER = "".join(json.dumps({"text": text}) + "\n" for text in random_documents(30, 9)).encode()


def tokenized(units, out):
    tokenize(units, out, heldout_out=f"{out}-held", heldout_share=0.2)
    pack_corpus(out, tiny_tokenizer(), 64)


def contaminated(units, out):
    against = out.parent / "against.jsonl"
    if not against.exists():
        against.write_bytes(OTHER[:2000].rpartition(b"\n")[0])
    find_contamination(units, [str(against)], out, read=READ)


COMMANDS = {
    "tokenize": tokenized, "decontaminate": contaminated,
    "dedup": lambda units, out: find_duplicates(units, out, read=READ, near_threshold=0.8),
    "filter": lambda units, out: try_filters(
        units, out, FilterRules(use=("gopher", "repetition")), read=READ)}


def markers(out):
    """Return when the units of inputs were done."""
    return {path.name: path.stat().st_mtime_ns for path in (out / ".units").glob("*.json")
            if len(path.stem) == 32}


@pytest.mark.parametrize("name", COMMANDS)
def test_only_the_units_of_changed_inputs_are_done_again(tmp_path, capsys, name):
    """A touched, replaced, added or removed file made a finished job that of "other inputs"."""
    text, out = tmp_path / "text", tmp_path / "out"
    text.mkdir()
    for number in range(6):
        (text / f"{number}.jsonl").write_bytes(LINES[: 2000 + 900 * number].rpartition(b"\n")[0])

    def made(directory):
        COMMANDS[name](plan_units([str(text)], READ, 2000), directory)
        return tree(directory) | tree(f"{directory}-held")

    first = made(out)
    before = markers(out)
    (text / "0.jsonl").touch()
    assert made(out) == first and markers(out) == before and not capsys.readouterr().err
    (text / "2.jsonl").write_bytes(OTHER)
    (text / "3a.jsonl").write_bytes(OTHER[:1500].rpartition(b"\n")[0])
    (text / "4.jsonl").unlink()
    again = made(out)
    assert again == made(tmp_path / "new") and again != first
    note = capsys.readouterr().err.splitlines()[0]
    assert all(f"{number}.jsonl" in note for number in ("2", "3a", "4")), note
    assert "0.jsonl" not in note
    kept = [one for one, when in markers(out).items() if before.get(one) == when]
    units = plan_units([str(text)], READ, 2000)
    others = [unit for unit in units if not re.search("/(2|3a).jsonl", str(unit))]
    assert len(kept) >= len(others) - 2 > 2  # the neighbors of 3a and 4 share units with them


@pytest.mark.parametrize("change", ["replaced", "cut"])
def test_an_input_that_changes_while_it_is_read_is_named(tmp_path, change):
    """Two states of a file were mixed: "60,000 documents, nothing was left out"."""
    path, model = tmp_path / "text.jsonl", tmp_path / "spm.model"
    commands = {**COMMANDS, "train": lambda units, out: train_tokenizer(
        units, model, TokenizerRecipe(vocab_size=400, sample_bytes=1 << 16), read=READ)}
    for name, command in commands.items():
        path.write_bytes(LINES)
        units, times = plan_units([str(path)], READ), os.stat(path)
        if change == "cut":
            path.write_bytes(LINES[: LINES.index(b"\n") + 1])
        else:  # at the same size and time, as `cp -p` and `mv` do
            (tmp_path / "other").write_bytes(LINES)
            os.utime(tmp_path / "other", ns=(times.st_atime_ns, times.st_mtime_ns))
            os.replace(tmp_path / "other", path)
        with pytest.raises(UserError, match="text.jsonl: changed while this command read it"):
            command(units, tmp_path / name)
        assert not list(tmp_path.glob(f"{name}/manifest.json"))


def test_all_damaged_files_are_named_in_one_pass(tmp_path):
    """Each cost a run of its own."""
    lz4, rows = pytest.importorskip("lz4.frame"), pa.table({"text": random_documents(40)})
    pq.write_table(rows, parquet := io.BytesIO())
    with pa.ipc.new_file(arrow := io.BytesIO(), rows.schema) as writer:
        writer.write_table(rows)
    whole = {"a.jsonl.gz": gzip.compress(LINES), "a.jsonl.xz": lzma.compress(LINES),
             "a.jsonl.bz2": bz2.compress(LINES), "a.jsonl.zst": zstandard.compress(LINES),
             "a.jsonl.lz4": lz4.compress(LINES), "a.jsonl": LINES,
             "a.parquet": parquet.getvalue(), "a.arrow": arrow.getvalue()}
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"cut-{name}").write_bytes(data[: len(data) * 2 // 3])
        (tmp_path / f"flipped-{name}").write_bytes(
            data[:700] + bytes(byte ^ 0x55 for byte in data[700:800]) + data[800:])
    bad = damaged_files([str(tmp_path)], READ, 2)
    names = {os.path.basename(path) for path in bad}
    assert names >= {f"cut-{name}" for name in whole} and not names & whole.keys()
    assert names >= {f"flipped-{name}" for name in whole.keys() - {"a.arrow", "a.parquet"}}
    assert all(why.startswith(path) for path, why in bad.items())


def test_bad_files_are_left_out_and_done_when_they_are_repaired(tmp_path, capfd):
    """Taking one out, or fetching it again, lost all finished work."""
    text, spare, out = tmp_path / "text", tmp_path / "spare", tmp_path / "out"
    spare.mkdir()
    for number in range(12):
        (spare / f"{number:02d}.jsonl.gz").write_bytes(gzip.compress(
            LINES[: 3000 + 500 * number].rpartition(b"\n")[0]))
    shutil.copytree(spare, text)
    names = [f"{number:02d}.jsonl.gz" for number in (3, 4, 9)]
    (text / names[0]).write_bytes((spare / names[0]).read_bytes()[:-30])
    (text / names[1]).write_bytes(gzip.compress(LINES[:1000]))  # a line that is cut
    (text / names[2]).write_bytes(b"<html>404</html>")

    def made(directory, bad):
        run_main("data_prep/tokenize_corpus.py", text, "--tokenizer", tiny_tokenizer().path,
                 "--out", directory, "--unit_bytes", 400, "--workers", 1, "--skip_bad_files", bad)
        return tree(directory)

    with pytest.raises(UserError, match="--skip_bad_files allows 2"):
        made(out, 2)
    assert capfd.readouterr().err.count("bad file: ") == 3
    for left in (3, 2, 1, 0):
        found = made(out, 3)
        listed = json.loads(found["documents/manifest.json"]).get("bad_files", {})
        assert sorted(map(os.path.basename, listed)) == names[3 - left :]
        assert json.loads(found["manifest.json"])["counts"].get("bad_files", 0) == left
        assert capfd.readouterr().err.count("bad file: ") == left
        assert found == made(tmp_path / f"new-{left}", 3)
        capfd.readouterr()
        if left:
            shutil.copy(spare / names[3 - left], text / names[3 - left])
    assert len(markers(out)) == 12


def test_a_bad_file_at_a_url_is_left_out(tmp_path):
    """Why it is bad was compared with its state: "changed while this command read it"."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_text("{")
    run_main("data_prep/tokenize_corpus.py", f"file://{tmp_path}/*.jsonl", "--tokenizer",
             tiny_tokenizer().path, "--out", tmp_path / "out", "--skip_bad_files", 1)
    run_main("data_prep/take_down.py", tmp_path / "out", "--out", tmp_path / "less",
             "--tokenizer", tiny_tokenizer().path, "--document", f"file://{tmp_path}/a.jsonl@0")
    for made in ("out", "less"):
        assert read_manifest(tmp_path / made)[0].counts["bad_files"] == 1
        assert list(Origins(tmp_path / made).bad_files) == [f"file://{tmp_path}/b.jsonl"]


def test_a_large_text_file_of_one_document_is_refused_with_the_other_rules(tmp_path):
    path = tmp_path / "big.txt"
    path.write_text(("one line\nanother line\n\n" * 50_000)[:-1] + "x" * (1 << 22))
    with pytest.raises(UserError, match=r"blank_line gives 50,000 documents and.* line 100,00"):
        refuse_huge(plan_units([str(path)], ReadOptions()))
