"""`[init] from` with another tokenizer: which vector each token begins with, and that all agree."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from data_helpers import make_corpus, random_documents, tokenizer_path
from export_cases import make_release, random_state, run_config
from launching import deepspeed_json
from tokenizer_cases import directory_of
from transformers import AutoTokenizer

import deberta_ds
from deberta_ds.base.errors import UserError
from deberta_ds.checkpoint.find import path_of
from deberta_ds.checkpoint.saved_state import load_whole_state
from deberta_ds.config.run_config import InitConfig, SourceConfig
from deberta_ds.config.toml_files import as_toml
from deberta_ds.corpus.extend_tokenizer import extend_tokenizer
from deberta_ds.objectives.build import build_model, held_parameters
from deberta_ds.publish.convert import WRITERS, convert
from deberta_ds.publish.hf import write_hugging_face
from deberta_ds.release.initialize import CLASSES, initial_tensors, starting_points
from deberta_ds.release.model_files import release_of_state, write_ours
from deberta_ds.release.reader import read_release
from deberta_ds.release.shape import complete, padded_rows
from deberta_ds.tokenizer import Tokenizer

KINDS = ("sentencepiece", "roberta", "bert_cased", "unigram", "llama", "deberta_v1")


def started(tmp_path, source, tokenizer, kind="rtd", generator="", **objective):
    """Return ({parameter: first value}, notes, report) of a run with `tokenizer` from `source`."""
    run, own = run_config("v3", kind, **objective), Tokenizer(tokenizer)
    make_corpus(tmp_path / "corpus", [own.encode("The quick brown fox jumps.")] * 9, own)
    run = dataclasses.replace(
        run, out_dir=str(tmp_path / "out"),
        init=InitConfig(source=str(source), generator=str(generator)),
        model=dataclasses.replace(run.model, vocab_size=padded_rows(own.size)),
        data=dataclasses.replace(run.data, tokenizer=str(tokenizer), seq_len=64,
                                 sources=(SourceConfig(path=str(tmp_path / "corpus")),)))
    tensors, notes = initial_tensors(run)
    return tensors, notes, json.loads((tmp_path / "out/vocabulary.json").read_text())


@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("own", KINDS)
def test_a_token_begins_with_what_its_text_was(own, theirs):
    """" the" is one token wherever it is one, however a tokenizer marks the space."""
    own, theirs = Tokenizer(directory_of(own)), Tokenizer(directory_of(theirs))
    parts, kinds = starting_points(own, theirs)
    assert [parts[number] for number in own.special_ids.values()] == [
        [theirs.special_ids[role]] if role in theirs.special_ids else []
        for role in own.special_ids]
    if own.sha256 == theirs.sha256:
        assert parts == [[number] for number in range(own.size)] and not kinds.any()
    for word in (" the", " quick", " lazy", " language", " of"):
        ids, known = own.encode_after(word), theirs.encode_after(word)
        if len(ids) == 1:  # shared where they have it whole, else the pieces that they have
            assert parts[ids[0]] == known and (kinds[ids[0]] == 0) == (len(known) == 1), word
    text = own.encode("The quick brown fox jumps over the lazy dog.")
    assert np.mean(kinds[text] < 2) > 0.7  # the tiny WordPiece has no letter for some
    marks = own.encode_after(".") + theirs.encode_after(".")
    assert parts[marks[0]] == marks[1:] and kinds[marks[0]] == 0  # WordPiece, too


@pytest.mark.parametrize(("to", "sharing", "tokenizer"), [
    ("hf", "gdes", "roberta"), ("ms", "nes", "bert_cased"), ("ours", "es", "unigram"),
    ("ours", "gdes", "grown"), ("hf", "mlm", "grown")])
def test_every_table_by_id_follows_the_tokenizer(tmp_path, to, sharing, tokenizer):
    objective = {"kind": "mlm"} if sharing == "mlm" else {"embedding_sharing": sharing}
    release = make_release("v3", **objective)
    WRITERS[to](release, tmp_path / "source")
    theirs = Tokenizer(release.tokenizer_files["spm.model"].path)
    path = grown(tmp_path) if tokenizer == "grown" else directory_of(tokenizer)
    own = Tokenizer(path)
    tensors, notes, report = started(tmp_path, tmp_path / "source", path, **objective)
    again, _, _ = started(tmp_path, tmp_path / "source", path, **objective)
    assert all(torch.equal(tensors[name], again[name]) for name in again)
    parts, kinds = starting_points(own, theirs)
    sources = {"words.weight": release.networks().get("generator", release.main).tensors,
               "discriminator.words.weight": release.main.tensors,
               f"{'masked_lm' if sharing == 'mlm' else 'generator'}.head.bias":
               release.networks().get("generator", release.main).tensors}
    for name, table in tensors.items():
        if name not in sources:
            assert padded_rows(own.size) not in table.shape, name
            continue
        assert len(table) == padded_rows(own.size)
        key = "mlm_head.bias" if name.endswith("bias") else \
            "words.delta" if name[0] == "d" and sharing == "gdes" else "words.weight"
        old = sources[name][key].double()
        seen: set[tuple] = set()
        for number in np.flatnonzero(kinds < 2):
            is_alike = len(parts[number]) > 1 and tuple(parts[number]) in seen
            seen.add(tuple(parts[number]))
            assert not is_alike or name.endswith("bias") or key == "words.delta" or (
                table == table[number]).all(1).sum() == 1
            if is_alike:
                continue
            wanted = sum(old[part] for part in parts[number]) / len(parts[number])
            assert torch.allclose(table[number].double(), wanted, atol=1e-6, rtol=0), name
        shared = torch.tensor(np.flatnonzero(kinds == 0))
        assert torch.equal(table[shared].float(), old[[parts[n][0] for n in shared]].float())
        at_random = table[np.flatnonzero(kinds > 1).tolist() + list(range(own.size, len(table)))]
        assert 0.01 < at_random.std() < 0.04 if key == "words.weight" else (at_random == 0).all()
    if tokenizer == "grown":
        assert (kinds[:theirs.size] == 0).all() and own.size == theirs.size + 6
    warning, = [note for note in notes if "has other tokens" in note]
    assert f"{report['shared']['tokens']} tokens shared" in warning
    assert sum(report[name]["share_of_text"] for name in CLASSES) \
        == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("to", "sharing", "tokenizer", "zero"), [
    ("hf", "gdes", "grown", 3), ("ms", "es", "roberta", 1), ("ours", "nes", "bert_cased", 1),
    ("hf", "mlm", "unigram", 1)])
def test_all_changes_at_once(tmp_path, process_group, to, sharing, tokenizer, zero):
    """Other tokens, longer, fewer layers, a part frozen: trained, resumed, exported."""
    kind = {"kind": "mlm"} if sharing == "mlm" else {"kind": "rtd", "embedding_sharing": sharing}
    WRITERS[to](make_release("v3", **kind), tmp_path / "source")
    path = grown(tmp_path) if tokenizer == "grown" else directory_of(tokenizer)
    own = Tokenizer(path)
    make_corpus(tmp_path / "train", [own.encode(f"{text} an electrocardiogram <drug>")
                                     for text in random_documents(20)], own)
    lists = {"layers": [0, 1, 3]} | ({} if sharing == "mlm" else {"generator_layers": [1, 0, 1]})
    run = {"name": "all", "objective": kind, "model": {"max_position": 128, "position_buckets": 32},
           "init": {"from": str(tmp_path / "source")} | lists,
           "data": {"sources": [{"path": str(tmp_path / "train")}], "workers": 0, "seq_len": 64,
                    "tokenizer": str(path)},
           "optim": {"learning_rate": 0.01, "warmup_steps": 0},
           "train": {"steps": 2, "global_batch_size": 2, "micro_batch_size": 2, "save_every": 1,
                     "freeze": ["embeddings", "layers.0"]}}
    file, out = tmp_path / "run.toml", tmp_path / "out"
    file.write_text("\n".join(f"{key} = {as_toml(value)}" for key, value in run.items()))
    ds = deepspeed_json(tmp_path / "zero.json", zero)
    deberta_ds.train(file, {"out_dir": str(out)}, deepspeed_config=ds)
    state, trained = load_whole_state(out)
    deberta_ds.train(file, {"out_dir": str(tmp_path / "again")}, deepspeed_config=ds,
                     resume=str(path_of(out, 1)))
    again, _ = load_whole_state(tmp_path / "again")
    assert all(torch.equal(again[name], state[name]) for name in state)
    first, _ = initial_tensors(trained)
    assert held_parameters(trained, state)[0] == {
        name for name in state if torch.equal(state[name], first[name].float())}
    convert(out, tmp_path / "hf", "hf")  # compares AutoModel and AutoTokenizer with ours
    main = read_release(tmp_path / "hf").main
    assert (main.config.max_position, main.config.num_layers) == (128, 3)
    if sharing == "gdes":
        assert torch.equal(main.tensors["words.weight"],
                           state["words.weight"] + state["discriminator.words.weight"])


def grown(tmp_path):
    extend_tokenizer(tokenizer_path(), tmp_path / "grown", ["<drug>"], 5,
                     ["an electrocardiogram " * 9])
    return tmp_path / "grown"


def test_tokens_that_transformers_added_to_an_export_are_read(tmp_path):
    """spm.model in the same directory was read in their place, without a word."""
    write_hugging_face(make_release("v3"), tmp_path / "hf")
    before = Tokenizer(tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs.add_tokens(["<drug>", "tnf-alpha"])
    theirs.save_pretrained(tmp_path / "hf")
    texts = ["a <drug> b", "tnf-alpha again", "The quick brown fox."]
    after, auto = Tokenizer(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert after.size == before.size + 2 and len(after.encode("<drug>")) <= 2
    assert after.encode_batch(texts) == [auto(text, add_special_tokens=False).input_ids
                                         for text in texts]
    tensors, _, report = started(tmp_path, make_source(tmp_path), tmp_path / "hf")
    assert report["not_shared"].keys() == {"<drug>", "tnf-alpha"}
    with pytest.raises(UserError, match="adds tokens that spm.model lacks; give the directory"):
        Tokenizer(tmp_path / "hf/spm.model")


def make_source(tmp_path):
    write_ours(make_release("v3"), tmp_path / "source")
    return tmp_path / "source"


def test_the_shape_follows_a_tokenizer_of_other_tokens(tmp_path):
    source, path = make_source(tmp_path), directory_of("bert_cased")
    for tokenizer, rows in ((path, padded_rows(Tokenizer(path).size)),
                            (source, make_release("v3").main.config.vocab_size)):
        values = {"init": {"source": str(source)}, "data": {"tokenizer": str(tokenizer)}}
        origins: dict[str, str] = {}
        complete(values, origins)
        assert values["model"]["vocab_size"] == rows
        assert ("with the tokens of" in origins["model.vocab_size"]) == (tokenizer == path)


def test_a_named_generator_of_another_vocabulary_and_shape(tmp_path):
    """It was to be set as the source has it, which has no generator."""
    release, run = make_release("v3"), run_config("v3")
    release.generator = None
    del release.main.tensors["words.delta"]
    write_ours(release, tmp_path / "source")

    def started_with(run, name="generator", layers=2, **shape):
        first = dataclasses.replace(run_config("v3", "mlm"), model=dataclasses.replace(
            run.model, num_layers=layers, **shape))
        state = random_state(build_model(first))
        if not (tmp_path / name).exists():
            write_ours(release_of_state(state, first), tmp_path / name)
        return state, initial_tensors(dataclasses.replace(run, init=InitConfig(
            source=str(tmp_path / "source"), generator=str(tmp_path / name))))[0]

    with pytest.raises(UserError, match=r"640 \(source: 704\); put the files of the tokenizer"):
        started_with(run, vocab_size=704)
    shutil.copy(tokenizer_path(), tmp_path / "generator/spm.model")
    state, tensors = started_with(run, vocab_size=704)
    assert torch.equal(tensors["words.weight"], state["words.weight"][:640])
    used = slice(Tokenizer(tokenizer_path()).size)
    torch.testing.assert_close(
        (tensors["words.weight"] + tensors["discriminator.words.weight"])[used],
        release.main.tensors["words.weight"][used], rtol=0, atol=1e-7)
    with pytest.raises(UserError, match="set objective.generator_layers = 3"):
        started_with(run, "deeper", layers=3)
    with pytest.raises(UserError, match="name one of the discriminator's shape"):
        started_with(run, "wider", hidden_size=64)


def test_a_named_generator_has_a_report_of_its_own(tmp_path):
    """It was written over that of the source."""
    for name in ("source", "generator"):
        write_hugging_face(make_release("v3"), tmp_path / name)
    _, _, report = started(tmp_path, tmp_path / "source", directory_of("roberta"),
                           generator=tmp_path / "generator")
    other = json.loads((tmp_path / "out/vocabulary-generator.json").read_text())
    assert report.pop("source").endswith("source") and other.pop("source").endswith("generator")
    assert report == other


def test_a_source_whose_tokenizer_has_ids_beyond_its_table_is_refused(tmp_path):
    source = make_source(tmp_path)
    extend_tokenizer(source, tmp_path / "grown", [f"<{n}>" for n in range(299)], 0, [])
    (source / "spm.model").unlink()
    shutil.copy(tmp_path / "grown/tokenizer.json", source)
    with pytest.raises(UserError, match="ids, but the token embedding only 640 rows"):
        started(tmp_path, source, directory_of("bert_cased"))


def test_tokens_of_another_script_are_not_composed_of_bytes(tmp_path):
    """Means of bytes are alike (cosine 0.94), and were 83 % of a log that read as a success."""
    (tmp_path / "vocab.txt").write_text(
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nდედა\nცა\nthe\ntheდ\n", encoding="utf-8")
    parts, kinds = starting_points(Tokenizer(tmp_path), Tokenizer(tokenizer_path()))
    assert [CLASSES[kind] for kind in kinds[5:]] == ["bytes", "bytes", "shared", "composed"]
    assert parts[5] == parts[6] == []
