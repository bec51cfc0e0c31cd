"""The model card says where a model came from; --push brings a directory to the Hub."""

import base64
import dataclasses
import json
import re
import runpy
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from data_helpers import RUN_RECORD
from export_cases import make_release
from launching import ROOT
from report_cases import make_result
from safetensors.torch import load_file
from superglue_helpers import save_random

from deberta_ds.api import jobs
from deberta_ds.base.errors import UserError
from deberta_ds.publish import hf
from deberta_ds.publish.convert import Summary, convert
from deberta_ds.release.model_files import write_ours
from deberta_ds.report import model_card
from deberta_ds.tasks.task import task_named


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Exports without a card: {kind: (directory, summary)}."""
    root, found = tmp_path_factory.mktemp("exports"), {}
    for family, kind in (("v3", "rtd"), ("v2", "mlm")):
        write_ours(make_release(family, kind), root / f"{kind}-ours")
        found[kind] = root / kind, convert(root / f"{kind}-ours", root / kind, "hf")
    return found


def exported(exports, tmp_path, source, kind="rtd", **said):
    """Return (card, its metadata) of an exported model, which `source` says it came from."""
    directory, summary = exports[kind]
    out = shutil.copytree(directory, tmp_path / "out", dirs_exist_ok=True)
    path = model_card.write_card(source, out, summary, "me/mine", model_card.Publisher(**said))
    text = path.read_text()
    return text, yaml.safe_load(text.split("---")[1])


def make_checkpoint(directory):
    """Write what a card reads of a run: run.json of its checkpoint, and metrics.jsonl."""
    step = directory / "checkpoints" / "step-00000040"
    step.mkdir(parents=True)
    run = {
        "objective": {"kind": "rtd", "mask": {"rate": 0.3, "final_rate": 0.15}, "temperature": 1.0,
                      "final_temperature": None},
        "train": {"steps": 50, "global_batch_size": 8, "initial_batch_size": 0},
        "data": {
            "seq_len": 64,
            "sources": [{"path": "gone | <b>", "weight": 3.0}, {"path": "other", "weight": 1.0}]},
        "optim": {"name": "adamw", "learning_rate": 1e-3, "betas": [0.9, 0.999], "schedule": "wsd"},
    }
    (step / "run.json").write_text(json.dumps(RUN_RECORD | {
        "step": 40, "sequences_seen": 320, "tokens_seen": 20480, "config": run,
        "content_hashes": {"gone | <b>": "ab12", "other": "cd34"}, "versions": {"torch": "2.13.0"},
        "tokenizer_sha256": "ef56"}))
    (step / "manifest.json").write_text("{}")
    records = [{"kind": "eval", "step": at, "roc_auc": at / 90, "generator_loss": 5.0}
               for at in (20, 40, 50)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def test_a_card_names_data_tokens_scores_and_the_generator(exports, tmp_path):
    run = make_checkpoint(tmp_path / "run")
    (run / "best").symlink_to("checkpoints/step-00000040")  # of it a card had no scores
    text, metadata = exported(exports, tmp_path, run / "best")
    (index,) = metadata.pop("model-index")
    assert index["results"][0]["metrics"][1] == {"type": "roc_auc", "name": "ROC-AUC",
                                                 "value": 0.444444}
    assert metadata == {"library_name": "transformers", "pipeline_tag": "feature-extraction",
                        "tags": ["deberta_ds", "deberta-v2", "replaced-token-detection"]}
    assert "| gone \\| &lt;b> | 75.0% | – | – | `ab12` |" in text
    assert "20,480 tokens in 320 sequences" in text and "| sha256 of the tokenizer | ef56 |" in text
    assert "| masked share of the tokens | 0.3 to 0.15, linearly |" in text
    assert "| learning rate | 0.001, schedule wsd |" in text
    assert "On held-out sequences at step 40." in text and "0.444" in text and "0.556" not in text
    weights = load_file(exports["rtd"][0] / "model.safetensors").values()
    assert f"| parameters | {sum(weight.numel() for weight in weights):,} |" in text
    assert "generator in `generator/`" in text and 'load_masked_lm("me/mine")' in text
    assert "This is a discriminator" in text and "no missing, no unexpected keys" in text


def test_a_card_is_of_the_checkpoint_that_was_exported(tmp_path, monkeypatch):
    run, given = make_checkpoint(tmp_path / "run"), []
    shutil.copytree(run / "checkpoints/step-00000040", run / "checkpoints/step-00000050")
    summary = Summary((), (), (), run / "checkpoints/step-00000040")
    monkeypatch.setattr(jobs, "convert", lambda *_, finish, **__: finish(tmp_path, summary))
    monkeypatch.setattr(jobs, "write_card", lambda source, *_: given.append(source))
    jobs.export(run, tmp_path / "out")
    assert given == [run / "checkpoints/step-00000040"]


def test_a_card_says_what_its_publisher_says(exports, tmp_path):
    run = make_checkpoint(tmp_path / "run")
    text, metadata = exported(exports, tmp_path, run, license="apache-2.0", language=["de"],
                              dataset=["me/web", "me/books"])
    assert metadata["license"] == "apache-2.0" and metadata["language"] == ["de"]
    assert metadata["datasets"] == ["me/web", "me/books"] and "| me/web | 75.0%" in text
    assert "1, 2, [MASK], 4, 5" in text and "France" not in text
    assert "## Limitations" in text and "for these languages alone: de." in text
    assert "`pretraining_heads.safetensors` (" in text and "# license" not in text
    text, _ = exported(exports, tmp_path / "unsaid", tmp_path, language=["xx"])
    assert "1, 2, [MASK], 4, 5" in text and "Paris" not in text


def test_code_of_a_card_runs(exports, tmp_path, monkeypatch):
    """The snippets are run as they stand, on a discriminator with its generator."""
    text, _ = exported(exports, tmp_path, tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    (tmp_path / "out").rename(tmp_path / "me" / "mine")
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        values = {}
        exec(code, values)  # noqa: S102
        assert "states" not in values or values["states"].shape[-1] == 32


def test_a_discriminator_in_a_fill_mask_pipeline_warns(exports, caplog):
    """What the card says of transformers is true: its own warning names the head as new."""
    from transformers import pipeline
    from transformers.utils import logging

    logging.set_verbosity_warning()  # tests of this process before may have silenced it
    pipeline("fill-mask", str(exports["rtd"][0]))
    assert re.search(r"cls.predictions.*MISSING", caplog.text)
    assert "newly initialized" in caplog.text


def test_cards_of_a_masked_lm_and_of_a_fine_tuned_model(exports, tmp_path):
    text, metadata = exported(exports, tmp_path, tmp_path, "mlm")
    assert "masked-lm" in metadata["tags"] and "pipeline_tag" not in metadata
    assert "filled by this model" in text and "discriminator" not in text
    save_random(tmp_path / "seed-1" / "model", CB)
    write_result(tmp_path / "seed-1")
    summary = convert(tmp_path / "seed-1" / "model", tmp_path / "cb", "hf")
    card = model_card.write_card(tmp_path / "seed-1", tmp_path / "cb", summary).read_text()
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "text-classification"
    assert "| validation: accuracy | 0.8100 (0.7000 to 0.9000) | majority 0.5000 |" in card
    assert "| task | CB |" in card and "# cb\n" in card and "## Checks" in card


def write_result(directory, **changes):
    """Write what a card reads of a fine-tuning run's result.json."""
    table = {"examples": 56, "majority": {"accuracy": 0.5, "macro_f1": 0.2},
             "metrics": {"accuracy": {"value": 0.81, "low": 0.7, "high": 0.9},
                         "macro_f1": {"value": 0.7}}}
    (directory / "result.json").write_text(json.dumps(
        make_result(scores={"val": table, "test": table}) | changes))


CB = task_named("CB")


def finetuned_card(out, task=CB, **changes):
    """Return the card of OUT/TASK/seed-1/model as the commands write it."""
    run = out / task.name / "seed-1"
    save_random(run / "model", task)
    write_result(run, **changes)
    model_card.write_finetuned_card(out, task.name, 1)
    return (run / "model" / "README.md").read_text()


def test_the_hub_reads_the_scores_of_a_fine_tuned_model(tmp_path):
    """The reference is huggingface_hub, which reads model-index as the Hub does."""
    from huggingface_hub import ModelCard

    card = finetuned_card(tmp_path)
    data = ModelCard(card).data
    assert data.base_model == "microsoft/deberta-v3-small" and data.model_name == "CB/seed-1"
    assert [(one.task_type, one.dataset_type, one.dataset_name, one.dataset_split,
             one.metric_type, one.metric_name, one.metric_value) for one in data.eval_results] == [
        ("text-classification", "aps/super_glue", "CB", split, *metric)
        for split in ("validation", "test")
        for metric in (("accuracy", "accuracy", 0.81), ("f1", "macro_f1", 0.7))]
    assert "| training data | train.jsonl, 1,250 examples |" in card
    assert "| labels | contradiction, neutral, entailment |" in card
    assert "/home" not in card and "WARNING" not in card and "## Checks" not in card


TAGS = dataclasses.replace(task_named("RTE"), name="people", hub="", head="tags", layout="tags",
                           words="raw", labels=("O", "B-PER"))


@pytest.mark.parametrize(("task", "loads"), [
    (CB, "TextClassificationPipeline"), (TAGS, "TokenClassificationPipeline"),
    (task_named("COPA"), "DebertaV2ForMultipleChoice"), (task_named("WiC"), "DebertaV2Model"),
    (task_named("SQuAD-v1.1"), "DebertaV2ForQuestionAnswering")])
def test_code_of_a_fine_tuned_models_card_runs_in_out(task, loads, tmp_path, monkeypatch):
    card = finetuned_card(tmp_path, task)
    monkeypatch.chdir(tmp_path)
    values = {}
    exec(re.search(r"```python\n(.*?)```", card, re.S)[1], values)  # noqa: S102
    assert loads in {type(value).__name__ for value in values.values()}
    assert ("no class for the head" in card) == (task.name == "WiC")
    if task is TAGS:
        assert 'aggregation_strategy="simple"' in card and isinstance(values["ask"]("Anna"), list)


def test_the_card_of_a_diverged_run_warns(tmp_path):
    """Such a run has no scores, and may have left the weights of an earlier evaluation."""
    card = finetuned_card(tmp_path, failure="step 7: the loss is nan | inf", scores={},
                          start="random:/home/me/tiny")
    assert "WARNING: the run of this model failed:** step 7: the loss is nan \\| inf" in card
    assert "model-index" not in card and "base_model" not in card
    assert "| base model | random:me/tiny |" in card


def test_an_edited_card_stays(tmp_path):
    """A finished run is reused, and the license that was written into its card is, too."""
    finetuned_card(tmp_path)
    path = tmp_path / "CB/seed-1/model/README.md"
    path.write_text("license: mit")
    model_card.write_finetuned_card(tmp_path, "CB", 1)
    assert path.read_text() == "license: mit"
    model_card.write_finetuned_card(tmp_path, "CB", 2)  # no weights were kept: no card
    assert not (tmp_path / "CB/seed-2").exists()


class StandIn(BaseHTTPRequestHandler):
    """As much of the Hub's HTTP API as an upload of small files needs."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in body.splitlines()]
        hub_state = self.server.state
        hub_state["tokens"].append(self.headers.get("Authorization"))
        if hub_state.get("refuse"):
            return self.answer(403, {"error": "You are not allowed"})
        if self.path == "/api/repos/create":
            hub_state["created"] = lines[0]
            return self.answer(200, {"url": f"{self.server.url}/me/mine", "name": "me/mine"})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.path == "/api/models/me/mine/preupload/main":
            large = (".safetensors", ".onnx") if "large" in hub_state else ()
            return self.answer(200, {"files": [
                {"path": one["path"], "shouldIgnore": False, "oid": None,
                 "uploadMode": "lfs" if one["path"].endswith(large) else "regular"}
                for one in lines[0]["files"]]})
        if self.path == "/me/mine.git/info/lfs/objects/batch":
            return self.answer(200, {"transfer": "basic", "objects": [
                one | {"actions": {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}}
                for one in lines[0]["objects"]]})
        if self.path.startswith("/api/models/me/mine/commit/main"):
            for line in lines:
                if line["key"] == "file":
                    hub_state["files"][line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"])
                if line["key"] == "lfsFile":
                    hub_state["files"][line["value"]["path"]] = hub_state["large"][
                        line["value"]["oid"]]
            return self.answer(200, {"commitUrl": f"{self.server.url}/me/mine/commit/1",
                                     "commitOid": "1" * 40, "success": True})
        return self.answer(404, {"error": self.path})

    def do_PUT(self):
        if self.server.state["large"] is None:
            return self.answer(403, {"error": "Storage is full"})
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.state["large"][self.path.removeprefix("/lfs/")] = data
        return self.answer(200, {})

    def do_GET(self):
        self.answer(404, {"error": self.path})

    def answer(self, code, values):
        data = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def stand_in(monkeypatch):
    """The Hub's address points to this machine, with a token of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.state = {"files": {}, "tokens": []}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    from huggingface_hub import constants, hf_api

    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for module in (constants, hf_api.constants):
        monkeypatch.setattr(module, "ENDPOINT", server.url)
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()


def files_to_push(out: Path) -> dict[str, bytes]:
    """Return the files of an exported directory that belong on the Hub."""
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*")
            if path.is_file() and path.name != "conversion.json"}


def test_a_refused_push_says_what_to_do(exports, stand_in):
    out = exports["rtd"][0]
    stand_in.state["refuse"] = True
    with pytest.raises(UserError, match="the Hub did not take it .*403.*hf auth login") as refused:
        hf.push(out, "me/mine", private=True)
    # To the letter it made a public repository, with the paths of this machine in it.
    assert str(refused.value).endswith(f"{out} --private --exclude conversion.json`")
    assert stand_in.state["files"] == {}
    with pytest.raises(UserError, match="--push me/my/model"):
        hf.check_repository("me/my/model")


@pytest.fixture
def large_files(stand_in, monkeypatch):
    """The stand-in takes weights by the protocol for large files (LFS), as the Hub does."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    stand_in.state["large"] = {}
    return stand_in


def test_export_with_onnx_and_push_uploads_all_of_it(tmp_path, large_files, monkeypatch, capsys):
    """The command as it is typed: ONNX files, card, and then every file on the Hub."""
    pytest.importorskip("onnxruntime")
    write_ours(make_release("v3"), tmp_path / "ours")
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["export.py", "--run", str(tmp_path / "ours"), "--out",
                                     str(out), "--onnx", "int8", "--push", "me/mine", "--private"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "launch/export.py"), run_name="__main__")
    assert end.value.code == 0
    written = files_to_push(out)
    assert {"onnx/model.onnx", "onnx/model_quantized.onnx", "generator/onnx/model.onnx"
            } <= written.keys()
    assert large_files.state["files"] == written
    assert large_files.state["created"]["visibility"] == "private"
    assert set(large_files.state["tokens"]) == {"Bearer hf_test"}
    assert set(large_files.state["large"].values()) == {
        data for path, data in written.items() if path.endswith((".safetensors", ".onnx"))}
    assert f"pushed to {large_files.url}/me/mine/commit/1" in capsys.readouterr().out


def test_a_push_whose_large_file_is_refused_is_one_error(exports, large_files):
    large_files.state["large"] = None
    with pytest.raises(UserError, match="the Hub did not take it .*hf auth login"):
        hf.push(exports["rtd"][0], "me/mine")
    assert large_files.state["files"] == {}
