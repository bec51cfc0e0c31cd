"""Tokenizer training, the docstring corpus, and what shows a corpus: stats, show, verify."""

import dataclasses
import importlib
import json
import random
import re
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from data_helpers import (
    SENTENCES,
    random_documents,
    run_main,
    tiny_tokenizer,
    tokenize,
    tokenizer_path,
    write_json_lines,
)
from launching import ROOT

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.stats import corpus_stats, stats_text
from deberta_ds.corpus.train_tokenizer import languages_of, sample_texts, train_tokenizer
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.shards import planned_lengths
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json
from deberta_ds.tokenizer.text import normalize


def test_train_tokenizer_round_trips_and_is_bounded(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(random_documents(200)), encoding="utf-8")
    read = ReadOptions(documents="line")
    units = plan_units([str(path)], read)
    tokenizer = train_tokenizer(units, tmp_path / "spm.model", TokenizerRecipe(vocab_size=400),
                                read=read)
    assert tokenizer.mask_id == 400
    for text in SENTENCES:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for pieces in (100_000, 270):
        with pytest.raises(UserError, match=f"make {pieces:,} subwords.*--vocab_size") as refused:
            train_tokenizer(units, tmp_path / "x.model", TokenizerRecipe(vocab_size=pieces),
                            read=read)
        assert "INTERNAL" not in str(refused.value) and not (tmp_path / "x.model").exists()


def test_a_word_has_the_same_ids_wherever_it_stands(tmp_path):
    """Words of random letters, which can be cut in many ways that are nearly as good."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", weights=range(30, 6, -2),
                                       k=generator.randint(3, 12))) for _ in range(4000)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(words[n : n + 20]) for n in range(0, len(words), 20)))
    read = ReadOptions(documents="line")
    tokenizer = train_tokenizer(plan_units([str(path)], read), tmp_path / "spm.model",
                                TokenizerRecipe(vocab_size=500), read=read)
    ids = tokenizer.encode(" ".join(words))
    assert ids == [number for word in words for number in tokenizer.encode(word)]
    exported = tokenizers.Tokenizer.from_str(build_tokenizer_json(tokenizer))
    assert exported.encode(" ".join(words), add_special_tokens=False).ids == ids


def test_a_bad_document_of_the_sample_is_named_as_elsewhere(tmp_path):
    """SentencePiece worded the error again, with a stack, as if --vocab_size were at fault."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a b c"}\n{"texd": "x"}\n')
    with pytest.raises(UserError, match=r"^\S*bad.jsonl:2: no string under 'text' .found: texd."):
        train_tokenizer(plan_units([str(path)], ReadOptions()), tmp_path / "spm.model",
                        TokenizerRecipe(vocab_size=400), read=ReadOptions())


@pytest.mark.parametrize("temperature", [1.0, 3.3])
def test_languages_are_sampled_by_temperature(tmp_path, temperature):
    """Exact to one piece of 1,000 characters, spread over all of the input, in any units."""
    sizes, generator = {"en": 400, "de": 40, "sw": 4}, random.Random(0)
    lines = [{"text": f"{lang}{number} " + lang[0] * generator.randint(10, 3000), "lang": lang}
             for lang, size in sizes.items() for number in range(size)]
    generator.shuffle(lines)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = ReadOptions(label_key="lang")
    units = plan_units([str(tmp_path / "a.jsonl")], read, 50_000)
    languages = languages_of(units, read, 100_000, temperature)
    there = {lang: sum(len(line["text"]) for line in lines if line["lang"] == lang)
             for lang in sizes}
    raised = {lang: size ** (1 / temperature) for lang, size in there.items()}
    texts = list(sample_texts(units, 100_000, read, languages))
    found = {lang: [text for text in texts if lang[0] in text[-5:]] for lang in sizes}
    for lang, size in there.items():
        wanted = 100_000 * raised[lang] / sum(raised.values())
        assert languages[lang] == (size, pytest.approx(wanted))
        assert abs(sum(map(len, found[lang])) - wanted) <= 1000
    order = [line["text"][:1000] for line in lines if line["lang"] == "en"]
    assert 0.3 < sum(text in order[:200] for text in found["en"]) / max(
        1, sum(text in order for text in found["en"])) < 0.7
    whole = plan_units([str(tmp_path / "a.jsonl")], read)
    assert texts == list(sample_texts(whole, 100_000, read, languages))
    natural = languages_of(whole, read, 1 << 40, 1.0)
    assert natural["sw"] == (there["sw"], pytest.approx(there["sw"]))


@pytest.fixture
def docstrings(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "data_prep"))
    return importlib.import_module("docstrings")


def test_docstrings_are_deduplicated_english(tmp_path, docstrings):
    files = [path for path in docstrings.installed_files() if "/email/" in path or "/http/" in path]
    said = docstrings.write(files, tmp_path, 10**6, 0.3, workers=1)
    records = [json.loads(line) for name in ("train", "heldout")
               for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [record["text"] for record in records]
    assert len(texts) == len(set(texts)) == sum(map(int, re.findall(r"(\d+) [th]", said))) > 20
    assert all(text == normalize(text) and len(text) >= 200 for text in texts)
    assert not any(record["id"].startswith("/") for record in records)


def test_docstrings_of_pinned_packages_are_the_same_everywhere(tmp_path, docstrings):
    """Files of the named packages alone, whatever else is installed; another version is said."""
    version = metadata.version("networkx")
    (tmp_path / "constraints.txt").write_text(f"# pins\nnetworkx=={version}\nnumpy==0.1\n")
    files, notes = docstrings.pinned_files(tmp_path / "constraints.txt")
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


def test_what_build_made_is_no_corpus_but_holds_some(tmp_path):
    """verify.py took its manifests for bad input: "25 bad files"."""
    (tmp_path / "corpus.json").write_text("{}")
    with pytest.raises(UserError, match="name one of the corpora in .*/train"):
        run_main("data_prep/verify.py", tmp_path)


def test_stats_count_every_token_and_show_and_verify_run(text_file, tmp_path):
    out = tmp_path / "out"
    tokenize(text_file, out)
    pack_corpus(out, tiny_tokenizer(), 64)
    stats = corpus_stats(out, tiny_tokenizer())
    assert stats.frequencies.sum() == stats.manifest.counts["tokens"]
    assert stats.lengths.sum() == 300
    text = stats_text(stats, tiny_tokenizer())
    assert "rows-64" in text and "top 20 tokens" in text and "WARNING" not in text
    for name in ("rows-backup", "rows-64.old"):  # whose names were tracebacks
        shutil.copytree(out / "rows-64", out / name)
    assert planned_lengths(out) == [64]
    shown = run_main("data_prep/show.py", out, "--tokenizer", tokenizer_path(), "--seq_len", 64)
    assert "[CLS]" in shown and "targets" in shown and "{" in shown
    verified = run_main("data_prep/verify.py", out)
    assert "files agree (full)" in verified
    assert Corpus(out, seq_len=64).content_hash[:16] in verified


@pytest.mark.parametrize("options, message", [
    (["--min_characters", "9999"], "web: no document is left"),
    ([], "held: no document fell to it")])
def test_a_part_that_got_no_document_is_said_at_once(tmp_path, capsys, options, message):
    """It was first said by the training, which asked to widen a "part (0.0, 1.0) of 0 shards"."""
    write_json_lines(tmp_path / "few.jsonl", SENTENCES[:4])
    run_main("data_prep/tokenize_corpus.py", tmp_path / "few.jsonl", "--out", tmp_path / "web",
             "--tokenizer", tokenizer_path(), "--heldout_out", tmp_path / "held", *options)
    assert message in (said := capsys.readouterr().err)
    if not options:
        assert "--heldout_share 0.5" in said
        pack_corpus(tmp_path / "held", tiny_tokenizer(), 32)
        with pytest.raises(UserError, match="held: has no documents; .*--heldout_share"):
            Corpus(tmp_path / "held", seq_len=32)
