"""A second stage goes on where a run stopped: new weights, other sources, longer rows."""

import dataclasses
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from data_helpers import (
    fake_checkpoint,
    make_corpus,
    random_documents,
    run_main,
    tiny_tokenizer,
    tokenizer_path,
)
from tokenizer_cases import directory_of

from deberta_ds.base.errors import UserError
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.find import read_run_record
from deberta_ds.config import run_config
from deberta_ds.config.run_config import DataConfig, SourceConfig
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.mixture import next_source, stage_of
from deberta_ds.data.remote import upload
from deberta_ds.data.rows import RowDataset
from deberta_ds.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
SEQ_LEN, ROWS_SEEN = 64, 70
DEMO, _ = run_config.load(ROOT / "launch/runs/demo.toml")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    directory, paths = tmp_path_factory.mktemp("stages"), []
    for number, name in enumerate(("web", "wiki", "books")):
        texts = random_documents(40, seed=number)
        documents = [tiny_tokenizer().encode(text) for text in texts]
        paths.append(str(make_corpus(directory / name, documents, tiny_tokenizer(),
                                     (SEQ_LEN, 128), shards=10)))
    return paths


def read_stage(directory):
    path = find.newest(directory)
    record = read_run_record(path)
    return stage_of(path, config=record.config, sequences_seen=record.sequences_seen,
                    content_hashes=record.content_hashes)


def run_of(sources, seed=7, seq_len=SEQ_LEN):
    data = DataConfig(sources=tuple(sources), tokenizer=tokenizer_path(), seq_len=seq_len,
                      seed=seed, workers=0)
    return dataclasses.replace(DEMO, data=data)


def dataset_of(run):
    return RowDataset(run.data.sources, tiny_tokenizer(), seq_len=run.data.seq_len,
                      seed=run.data.seed, mask=run.objective.mask)


def write_checkpoint(run, out_dir, sequences_seen=ROWS_SEEN):
    fake_checkpoint(find.path_of(out_dir, 100), sequences_seen=sequences_seen,
                    config=run_config.to_dict(run), content_hashes=dataset_of(run).content_hashes)


def rows_of(run, count=ROWS_SEEN):
    dataset = dataset_of(run)
    located = [dataset.locate(g) for g in range(count)]
    return {(run.data.sources[source].path, row) for source, row in located}


def test_a_stage_with_other_sources_weights_and_seed_repeats_no_row(corpora, tmp_path):
    web, wiki, books = corpora
    first = run_of([SourceConfig(path=web, weight=2.0), SourceConfig(path=wiki)])
    write_checkpoint(first, tmp_path / "first")
    stages = [read_stage(tmp_path / "first")]
    sources = [next_source(path, stages, seq_len=SEQ_LEN)[0] for path in (wiki, books)]
    assert sources[0].order == (7, 1) and sources[0].first_sequence == stages[0].used[1] > 20
    assert sources[1] == SourceConfig(path=books)
    second = run_of(sources, seed=8)
    seen, later = rows_of(first), rows_of(second, 60)
    assert len(seen) == ROWS_SEEN and len(later) == 60 and not seen & later

    write_checkpoint(second, tmp_path / "second", 60)
    stages.append(read_stage(tmp_path / "second" / "checkpoints" / "step-00000100"))
    third = next_source(wiki, stages, seq_len=SEQ_LEN)[0]
    assert third.order == (7, 1) and third.first_sequence == stages[1].used[0]
    assert not (seen | later) & rows_of(run_of([third]), 10)


def test_a_part_is_a_sample_of_all_inputs(corpora):
    """Shards lie in input order: the tail of them is one input, often another language."""
    def shards_of(part):
        corpus = Corpus(corpora[0], seq_len=SEQ_LEN, part=part)
        places = {corpus.place(row).split(" ")[0] for row in range(corpus.num_rows)}
        return {int(Path(place).stem.split("-")[0]) for place in places}

    for cut in (0.27, 0.5):  # of 10 shards: 2.7 and 5
        first, second = shards_of((0.0, cut)), shards_of((cut, 1.0))
        assert first | second == set(range(10)) and not first & second
    assert first & set(range(5)) and second & set(range(5))


def test_a_corpus_that_lies_elsewhere_now_repeats_no_row(corpora, tmp_path, capsys):
    web, wiki, books = corpora
    write_checkpoint(run_of([SourceConfig(path=web, part=(0.0, 0.8)), SourceConfig(path=wiki)]),
                     tmp_path / "first")
    stages = [read_stage(tmp_path / "first")]
    copy = str(shutil.copytree(web, tmp_path / "copy"))
    there, here = (next_source(path, stages, seq_len=SEQ_LEN)[0] for path in (web, copy))
    assert here == dataclasses.replace(there, path=copy) and here.first_sequence > 20
    with pytest.raises(UserError, match="would repeat tokens"):
        next_source(copy, stages, seq_len=128)
    assert not capsys.readouterr().err
    assert next_source(books, stages, seq_len=SEQ_LEN)[0].first_sequence == 0
    assert f"{books}: no stage of --after has read it" in capsys.readouterr().err
    assert next_source(books, [], seq_len=SEQ_LEN) and not capsys.readouterr().err


def test_longer_rows_come_from_other_shards_or_are_refused(corpora, tmp_path):
    web = corpora[0]
    write_checkpoint(run_of([SourceConfig(path=web)]), tmp_path / "all")
    with pytest.raises(UserError, match="would repeat tokens.*--part outside"):
        next_source(web, [read_stage(tmp_path / "all")], seq_len=128, part=(0.8, 1.0))
    write_checkpoint(run_of([SourceConfig(path=web, part=(0.0, 0.8))]), tmp_path / "most")
    stages = [read_stage(tmp_path / "most")]
    found, _ = next_source(web, stages, seq_len=128, part=(0.8, 1.0))
    assert found == SourceConfig(path=web, part=(0.8, 1.0))
    assert next_source(web, stages, seq_len=SEQ_LEN)[0].part == (0.0, 0.8)
    with pytest.raises(UserError, match="would repeat tokens"):
        next_source(web, stages, seq_len=SEQ_LEN, part=(0.5, 1.0))


def test_refuses_what_is_no_checkpoint_and_a_corpus_that_changed(corpora, tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        read_stage(tmp_path)
    web = corpora[0]
    write_checkpoint(run_of([SourceConfig(path=web)]), tmp_path / "first")
    stage = read_stage(tmp_path / "first")
    cached = dataclasses.replace(stage, content_hashes={
        web: f"{stage.content_hashes[web]}, replaced abc"})  # of objective.kind = "rtd_cached"
    assert next_source(web, [cached], seq_len=SEQ_LEN)[0].first_sequence == stage.used[0]
    changed = dataclasses.replace(stage, content_hashes={web: "0" * 64})
    with pytest.raises(UserError, match="not the corpus"):
        next_source(web, [changed], seq_len=SEQ_LEN)


def test_the_printed_lines_go_into_a_run_file(corpora, tmp_path):
    from deberta_ds.training.inputs import open_inputs

    web, wiki, _ = corpora
    first = run_of([SourceConfig(path=web), SourceConfig(path=wiki)])
    write_checkpoint(first, tmp_path / "first")
    printed = run_main("data_prep/mixture.py", wiki, "--seq_len", SEQ_LEN, "--after",
                       tmp_path / "first")
    values = run_config.to_dict(run_of([SourceConfig(path=wiki)], seed=9))
    values["data"]["sources"] = tomllib.loads(printed)["data"]["sources"]
    second = run_config.from_dict(values)
    dataset = open_inputs(second, {}, "").dataset
    assert np.array_equal([dataset.locate(g) for g in range(20)],
                          [dataset_of(second).locate(g) for g in range(20)])
    assert not rows_of(first) & {(wiki, dataset.locate(g)[1]) for g in range(20)}


def test_corpora_of_two_tokenizers_make_no_mixture(corpora, tmp_path, capsys):
    tokenizer = Tokenizer(directory_of("bert"))
    documents = [tokenizer.encode(text) for text in random_documents(40)]
    other = make_corpus(tmp_path / "other", documents, tokenizer, (SEQ_LEN,))
    with pytest.raises(UserError) as refused:
        run_main("data_prep/mixture.py", corpora[0], other, "--seq_len", SEQ_LEN)
    assert capsys.readouterr().out == ""
    assert (f"{other}/manifest.json: made with tokenizer sha256 {tokenizer.sha256[:16]}..., "
            f"but that of {corpora[0]} is {tiny_tokenizer().sha256[:16]}") in str(refused.value)


def test_corpora_at_a_url_are_kept_where_the_run_keeps_them(corpora, tmp_path, monkeypatch):
    url, home, kept = f"file://{tmp_path}/web", tmp_path / "home", tmp_path / "kept"
    upload(corpora[0], url)
    run = run_of([SourceConfig(path=url)])
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, cache=str(kept)))
    monkeypatch.setenv("HOME", str(home))
    write_checkpoint(run, tmp_path / "first")  # opens it in the home directory
    for script, *arguments in (
            ("data_prep/mixture.py", url, "--seq_len", SEQ_LEN, "--after", tmp_path / "first"),
            ("data_prep/mixture.py", url, "--seq_len", SEQ_LEN, "--cache", tmp_path / "given"),
            ("data_prep/show.py", "--config", ROOT / "launch/runs/demo.toml",
             f"--data.seq_len={SEQ_LEN}", f'--data.sources=[{{path="{url}"}}]',
             f"--data.tokenizer={tokenizer_path()}", f"--data.cache={kept}")):
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(kept, ignore_errors=True)
        run_main(script, *arguments)
        assert (tmp_path / "given" if "--cache" in arguments else kept).is_dir()
        assert not (home / ".cache/deberta_ds").exists()
