"""Round trips between Hugging Face, microsoft and our format, and files that must be refused.

Sources are made by transformers itself, or by hand from the names in microsoft's files, so a
mistake that our reader and our writer share still shows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data_helpers import tokenizer_path
from export_cases import FAMILIES, make_release, same_networks
from safetensors.torch import load_file, save_file

from deberta_ds.config import ModelConfig
from deberta_ds.errors import UserError
from deberta_ds.formats import configs
from deberta_ds.formats.convert import convert
from deberta_ds.formats.release import build_backbone
from deberta_ds.formats.release_reader import SIDE_FILE, read_release, read_shapes

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent
MS_FILES = ("pytorch_model.bin", "model_config.json")


def transformers_model(family, head="Model"):
    config = ModelConfig(**FAMILIES[family])
    kind = configs.V1 if family == "v1" else configs.V2
    values = configs.to_hugging_face(config, kind=kind, rest={"legacy": False})
    prefix = {"v1": "Deberta"}.get(family, "DebertaV2")
    model = getattr(transformers, prefix + head)(
        getattr(transformers, prefix + "Config")(**values)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def microsoft_directory(path, family, *, key_bias=0.0, **tensors):
    """Write a microsoft pair for a masked LM, from transformers' weights and names."""
    path.mkdir()
    config = ModelConfig(**FAMILIES[family])
    model = transformers_model("v1_key_bias" if family == "v1" else family, "ForMaskedLM")
    state = dict(model.state_dict())
    state["deberta.embeddings.position_embeddings.weight"] = torch.randn(
        config.max_position, config.hidden_size)
    for name in state:
        if name.endswith("key_proj.bias") and family == "v1":
            state[name] = torch.full_like(state[name], key_bias)
    torch.save(state | tensors, path / MS_FILES[0])
    values = configs.to_microsoft(config, {}) | {
        "pooling": {"hidden_size": 32, "dropout": 0.2, "hidden_act": "gelu"}, "cls_drop_out": 0.3}
    (path / MS_FILES[1]).write_text(json.dumps(values))
    return path


def same_tensors(first, second, names=None):
    names = names or first.keys() | second.keys()
    for name in names:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification",
                                  "ForTokenClassification", "ForQuestionAnswering"])
@pytest.mark.parametrize("family", ["v1", "v2", "v3", "mdeberta"])
def test_hugging_face_round_trip_is_bit_identical(tmp_path, family, head):
    model = transformers_model(family, head)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ours", "ours")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors")
                     for name in ("source", "back"))
    for name in before:
        if name.endswith("rel_embeddings.weight") and family != "v1":
            before[name][0] = before[name][1]  # the one row that only transformers reads
    same_tensors(before, after)
    again = type(model).from_pretrained(tmp_path / "back").eval()
    ids, mask = torch.randint(4, 600, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask)[0], again(ids, attention_mask=mask)[0])
    assert again.config.architectures == [type(model).__name__]


@pytest.mark.parametrize("family", ["v1", "v2", "v3", "mdeberta"])
def test_microsoft_round_trip_is_bit_identical(tmp_path, family):
    source = microsoft_directory(tmp_path / "source", family)
    convert(source, tmp_path / "ours", "ours")
    convert(tmp_path / "ours", tmp_path / "back", "ms")
    before, after = (torch.load(path / MS_FILES[0], weights_only=True)
                     for path in (source, tmp_path / "back"))
    same_tensors(before, after)
    before, after = (json.loads((path / MS_FILES[1]).read_text())
                     for path in (source, tmp_path / "back"))
    assert before == after


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_microsoft_to_hugging_face_and_back_keeps_what_transformers_drops(tmp_path, family):
    source = microsoft_directory(tmp_path / "source", family)
    summary = convert(source, tmp_path / "hf", "hf")
    assert any("position_embeddings" in note and SIDE_FILE in note for note in summary.notes)
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["pooler_dropout"] == 0.2 and values["cls_dropout"] == 0.3
    convert(tmp_path / "hf", tmp_path / "back", "ms")
    same_tensors(*(torch.load(path / MS_FILES[0], weights_only=True)
                   for path in (source, tmp_path / "back")))


def test_v1_without_key_bias_becomes_the_v1_class(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v1", key_bias=0.0)
    state = torch.load(source / MS_FILES[0], weights_only=True)
    for name in state:
        if name.endswith("pos_key_proj.bias"):
            state[name] = torch.zeros_like(state[name])
    torch.save(state, source / MS_FILES[0])
    convert(source, tmp_path / "hf", "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "deberta"


def test_v1_with_key_bias_becomes_debertav2_with_the_same_logits(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v1", key_bias=0.5)
    summary = convert(source, tmp_path / "hf", "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["model_type"] == "deberta-v2" and not values["share_att_key"]
    assert any("key biases" in note for note in summary.notes)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    backbone = build_backbone(read_release(source).main)
    ids = torch.randint(4, 600, (2, 20))
    with torch.no_grad():
        expected = model.deberta(ids).last_hidden_state
        found = backbone(ids, torch.ones_like(ids))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def rtd_directory(path, drop):
    """Write a microsoft directory of an RTD model without the names in `drop`."""
    release = make_release("v3")
    from deberta_ds.formats.microsoft import write_microsoft
    write_microsoft(release, path)
    state = torch.load(path / MS_FILES[0], weights_only=True)
    torch.save({name: tensor for name, tensor in state.items() if not name.endswith(drop)},
               path / MS_FILES[0])
    return release


def test_delta_only_file_takes_its_words_from_the_generator(tmp_path):
    release = rtd_directory(tmp_path / "ms", drop=("word_embeddings.weight",))
    found = read_release(tmp_path / "ms")
    same_networks(release, found)
    assert any("word table = generator's + delta" in note for note in found.notes)
    convert(tmp_path / "ms", tmp_path / "hf", "hf")
    same_networks(release, read_release(tmp_path / "hf"))


def test_delta_only_file_without_generator_is_refused(tmp_path):
    rtd_directory(tmp_path / "ms", drop=("word_embeddings.weight",))
    (tmp_path / "ms" / "pytorch_model.generator.bin").unlink()
    with pytest.raises(UserError, match="_weight.*generator"):
        read_release(tmp_path / "ms")


def test_file_with_table_and_delta_reads_as_it_is(tmp_path):
    same_networks(rtd_directory(tmp_path / "ms", drop=("nothing",)), read_release(tmp_path / "ms"))


def test_stale_table_is_replaced_by_the_exact_sum(tmp_path):
    release = rtd_directory(tmp_path / "ms", drop=("nothing",))
    state = torch.load(tmp_path / "ms" / MS_FILES[0], weights_only=True)
    state["deberta.embeddings.word_embeddings.weight"] += 0.01
    torch.save(state, tmp_path / "ms" / MS_FILES[0])
    found = read_release(tmp_path / "ms")
    same_networks(release, found)
    assert any("1.0e-02" in note for note in found.notes)


def test_file_without_delta_keeps_its_table(tmp_path):
    release = rtd_directory(tmp_path / "ms", drop=("_weight",))
    found = read_release(tmp_path / "ms")
    assert "words.delta" not in found.main.tensors
    assert torch.equal(found.main.tensors["words.weight"], release.main.tensors["words.weight"])


def test_old_prefix_config_entry_and_buffer(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3")
    state = torch.load(source / MS_FILES[0], weights_only=True)
    old = {name.replace("deberta.", "bert."): tensor for name, tensor in state.items()}
    old |= {"config": {"hidden_size": 32}, "bert.embeddings.position_ids": torch.arange(64)[None]}
    (tmp_path / "old").mkdir()
    torch.save(old, tmp_path / "old" / MS_FILES[0])
    (tmp_path / "old" / MS_FILES[1]).write_text((source / MS_FILES[1]).read_text())
    found = read_release(tmp_path / "old")
    same_networks(read_release(source), found)
    assert sum(note.startswith("dropped") for note in found.notes) == 2


def test_official_training_output_takes_the_newest_common_step(tmp_path):
    release = make_release("v3")
    from deberta_ds.formats.microsoft import microsoft_tensors
    for folder, network in (("discriminator", release.main), ("generator", release.generator)):
        (tmp_path / folder).mkdir()
        values = configs.to_microsoft(network.config, {})
        (tmp_path / folder / "model_config.json").write_text(json.dumps(values))
        for step in ("000003", "000006"):
            tensors = microsoft_tensors(network, [])
            if step == "000003":
                tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            torch.save(tensors, tmp_path / folder / f"pytorch.model-{step}.bin")
    torch.save({}, tmp_path / "generator" / "pytorch.model-000007.bin")  # the generator's last
    same_networks(release, read_release(tmp_path))


def test_sharded_and_legacy_hugging_face_files(tmp_path):
    config = configs.to_hugging_face(ModelConfig(**FAMILIES["v3"]), kind=configs.V2,
                                     rest={"legacy": True})
    model = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**config))
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    whole = read_release(tmp_path / "whole")
    same_networks(whole, read_release(tmp_path / "parts"))
    assert torch.equal(whole.main.tensors["mlm_head.dense.weight"],
                       model.cls.predictions.transform.dense.weight)


# ------------------------------------------------------------------------- hostile or broken files

class Payload:
    """A pickle that would create a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def command(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, ROOT / "launch" / "convert.py", *arguments]
    return subprocess.run(list(map(str, line)), capture_output=True, text=True, env=environment,
                          timeout=120)


def test_pickle_with_code_is_refused_and_not_run(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3")
    torch.save({"deberta.x": Payload(str(tmp_path / "ran"))}, source / MS_FILES[0])
    result = command("--model", source, "--out", tmp_path / "out", "--to", "hf")
    assert result.returncode == 2 and "code in it was not run" in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def break_truncated(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def edit(**changes):
    def apply(path):
        tensors = load_file(path / "model.safetensors")
        for name, change in changes.items():
            tensors[name] = change
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return apply


def edit_config(**changes):
    def apply(path):
        values = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(values))
    return apply


def remove(name):
    return lambda path: (path / name).unlink()


HOSTILE = {
    "truncated": (break_truncated, "truncated safetensors"),
    "wrong shape": (edit(**{"embeddings.word_embeddings.weight": torch.zeros(5, 32)}), "shape"),
    "missing key": (edit(**{"encoder.layer.3.output.dense.weight": None}), "missing"),
    "foreign key": (edit(**{"encoder.layer.0.mystery": torch.zeros(2)}), "mystery"),
    "integers": (edit(**{"embeddings.LayerNorm.bias": torch.arange(32)}), "floats"),
    "config of BERT": (edit_config(model_type="bert"), "not a DeBERTa"),
    "config of another size": (edit_config(hidden_size=64), "shape"),
    "fewer layers": (edit_config(num_hidden_layers=2), "unknown tensors"),
    "more layers": (edit_config(num_hidden_layers=6), "missing"),
    "token types": (edit_config(type_vocab_size=2), "type_vocab_size = 2"),
    "factorized": (edit_config(embedding_size=16), "embedding_size = 16"),
    "p2p": (edit_config(pos_att_type="p2c|p2p"), "p2p"),
    "relu": (edit_config(hidden_act="relu"), "hidden_act"),
    "text for a number": (edit_config(num_hidden_layers="four"), "num_hidden_layers"),
    "text for buckets": (edit_config(position_buckets="many"), "position_buckets"),
    "terms not a list": (edit_config(pos_att_type=[3]), "pos_att_type"),
    "no config": (remove("config.json"), "not a model"),
    "no weights": (remove("model.safetensors"), "no weight file"),
    "config not JSON": (lambda path: (path / "config.json").write_text("{"), "not valid JSON"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "hf"
    transformers_model("v3").save_pretrained(path)
    return path


@pytest.mark.parametrize("case", HOSTILE)
def test_broken_source_is_one_clear_error(tmp_path, sound, case):
    spoil, wanted = HOSTILE[case]
    source = tmp_path / "source"
    source.mkdir()
    for file in sound.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    spoil(source)
    with pytest.raises(UserError) as error:
        convert(source, tmp_path / "out", "hf")
    assert wanted in str(error.value) and str(tmp_path) in str(error.value)
    assert list(tmp_path.iterdir()) == [source]  # nothing half-written is left


def test_a_run_that_has_saved_nothing_yet_is_named_as_such(tmp_path):
    """It was "no weight file; model.safetensors or pytorch_model.bin is expected"."""
    run = tmp_path / "run"
    (run / "heartbeats").mkdir(parents=True)
    (run / "config.json").write_text('{"run": {}}')
    (run / "metrics.jsonl").write_text("")
    for directories in ((), ("checkpoints",), ("checkpoints/step-00000010",)):
        for name in directories:  # of the last one the manifest is missing: its save was killed
            (run / name).mkdir()
        with pytest.raises(UserError, match="run: this run has saved no checkpoint yet; .*Ctrl-C"):
            convert(run, tmp_path / "out", "hf")
    with pytest.raises(UserError, match="this run has saved no checkpoint yet"):
        read_shapes(run)


def test_truncated_pickle_and_foreign_content_are_refused(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3")
    data = (source / MS_FILES[0]).read_bytes()
    for content in (data[: len(data) // 2], b"", b"not a pickle at all"):
        (source / MS_FILES[0]).write_bytes(content)
        with pytest.raises(UserError, match="pytorch_model.bin"):
            read_release(source)
    torch.save([torch.zeros(2)], source / MS_FILES[0])
    with pytest.raises(UserError, match="not named tensors"):
        read_release(source)


def test_damaged_directory_of_ours_is_one_clear_error(tmp_path, sound):
    convert(sound, tmp_path / "ours", "ours")
    file = tmp_path / "ours" / "model.json"
    values = json.loads(file.read_text())
    for damaged in ({}, values | {"format": "deberta_ds-9"}, values | {"networks": {}},
                    values | {"networks": {"main": {"config": {}}}},
                    values | {"networks": {"main": {"config": {"hidden_size": 3}, "rest": {}}}}):
        file.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="model.json"):
            read_release(tmp_path / "ours")


def test_output_directory_of_others_is_not_touched(tmp_path, sound):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not empty"):
        convert(sound, tmp_path / "out", "ours")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_leftovers_of_a_killed_conversion_are_cleaned_up_by_the_next(tmp_path, sound):
    """Also between the two renames: the older conversion was moved aside and comes back first."""
    convert(sound, tmp_path / "out", "hf")
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "out").rename(tmp_path / f".out.{ended.pid}.old")
    at_work = f".out.{os.getppid()}.tmp"
    for name in (f".out.{ended.pid}.tmp", f".out.{os.getpid()}.tmp", at_work, ".out.notes.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    convert(sound, tmp_path / "out", "ms")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", at_work, ".out.notes.tmp"}


def test_command_prints_what_became_of_every_part(tmp_path):
    source = microsoft_directory(tmp_path / "source", "v3", **{
        "mask_predictions.dense.weight": torch.randn(32, 32),
        "mask_predictions.dense.bias": torch.randn(32),
        "mask_predictions.LayerNorm.weight": torch.randn(32),
        "mask_predictions.LayerNorm.bias": torch.randn(32),
        "mask_predictions.classifier.weight": torch.randn(1, 32),
        "mask_predictions.classifier.bias": torch.randn(1)})
    (source / "spm.model").write_bytes(Path(tokenizer_path()).read_bytes())
    result = command("--model", source, "--out", tmp_path / "out", "--to", "hf")
    assert result.returncode == 0, result.stderr
    for wanted in ("replaced-token head", "kept aside: mask_predictions.dense.weight",
                   "kept aside: lm_predictions", "position_embeddings", "AutoModel",
                   "AutoTokenizer gives the ids", "wrote"):
        assert wanted in result.stdout, wanted
