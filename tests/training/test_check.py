"""--check and a step say what is wrong: numbers that are not finite, rows without a target."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from data_helpers import make_corpus, tiny_tokenizer
from launching import ROOT, deepspeed_json, make_run, options_of
from rank_helpers import PRETRAIN, start, wait

import deberta_ds
from deberta_ds.base.errors import UserError
from deberta_ds.config import run_config
from deberta_ds.engine import ds_config
from deberta_ds.tracking.log import read_metrics
from deberta_ds.training import rehearsal
from deberta_ds.training import start as starting

pytestmark = [pytest.mark.multi]
CHECK_NAN = ROOT / "tests/workers/check_nan.py"


def command_of(root: Path) -> list[str]:
    """Write a run under `root`; return the arguments that name it."""
    return options_of(make_run(root), deepspeed_json(root / "ds.json", 1))


def run_badly(arguments: list[str], log: Path, script: Path = PRETRAIN) -> str:
    """Return the output of a command that must end with code 2 and no traceback."""
    assert wait(start(1, arguments, log, script)) == [2], log.read_text()
    text = log.read_text()
    assert "Traceback" not in text
    return text


def test_a_check_fails_on_a_loss_that_is_not_finite(tmp_path):
    run_file, ds = make_run(tmp_path), deepspeed_json(tmp_path / "ds.json", 1)
    text = run_badly([str(run_file), str(ds)], tmp_path / "log", CHECK_NAN)
    assert "check failed" in text and "check passed" not in text
    assert "loss nan" in text and "first at generator.head.bias in backward order" in text


def test_rows_without_a_target_are_called_so(tmp_path):
    command, tokenizer = command_of(tmp_path), tiny_tokenizer()
    make_corpus(tmp_path / "unknown", [[tokenizer.unk_id] * 40] * 60, tokenizer)
    source = f'--data.sources=[{{path = "{tmp_path / "unknown"}"}}]'
    for extra in (["--check"], []):
        text = run_badly([*command, source, *extra], tmp_path / f"log{len(extra)}")
        assert "masked" in text and "mask.rate" in text and "optim.learning_rate" not in text
    text = run_badly([*command, f"--data.heldout={tmp_path / 'unknown'}", "--train.eval_every=1"],
                     tmp_path / "eval.log")
    assert "data.heldout" in text and "masked token" in text
    failures = [record["detail"] for record in read_metrics(tmp_path / "out/metrics.jsonl")
                if record.get("event") == "fail"]  # for the page: the run is not in progress
    assert len(failures) == 2 and "mask.rate" in failures[0] and "data.heldout" in failures[1]


def test_a_check_refuses_what_a_start_would(tmp_path, process_group):
    run_file = make_run(tmp_path)

    def check(*extra: str, resume: str = "auto") -> None:
        run, origins = run_config.load(run_file, extra)
        ds = ds_config.load("ds_configs/zero1_fp32.json")
        rehearsal.rehearse(run, ds, resume=resume, place="run.toml", origins=origins)

    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"{tmp_path}/file is a file; choose another directory"):
        check(f"--out_dir={tmp_path / 'file' / 'out'}")
    deberta_ds.train(run_file, {"train.stop_after": 1})
    for extra, resume, said in (
            ((), "never", "use --resume auto, or another out_dir"),
            (("--train.global_batch_size=7",), "auto", "micro_batch_size x world size"),
            (("--train.global_batch_size=4",), "auto", "is of another run"),
            ((), str(tmp_path), "not a whole checkpoint"),
            (("--train.upload=ftp://127.0.0.1:9/run",), "auto", "must allow to write")):
        with pytest.raises(UserError, match=said):
            check(*extra, resume=resume)
    command = options_of(run_file, deepspeed_json(tmp_path / "ds.json", 1))
    assert wait(start(1, [*command, "--check"], tmp_path / "good.log")) == [0]
    assert "would go on from" in (tmp_path / "good.log").read_text()
    assert "step-00000001, step 1\n" in (tmp_path / "good.log").read_text()


def test_what_is_rarely_meant_is_said(tmp_path):
    arguments = [*command_of(tmp_path), "--check", "--model.vocab_size=4096",
                 "--train.global_batch_size=4096", "--train.steps=5000",
                 f'--data.heldout={{own = "{tmp_path}/train", it = "{tmp_path}/heldout"}}']
    assert wait(start(1, arguments, tmp_path / "log")) == [0], (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    size = tiny_tokenizer().size
    fitting = -(-size // 64) * 64
    assert f"WARNING: {4096 - fitting:,} of 4,096 token embeddings are never used" in text
    assert f"without model.vocab_size would have {fitting:,} embeddings" in text
    assert text.count("is held out and trained on as well") == 1
    assert "one step repeats some" in text and "times; after a few epochs" in text
    epochs, fewer = (int(number.replace(",", "")) for number in re.search(
        r"train is seen ([\d,]+) times; .*\(train.steps = ([\d,]+)[^:]*: 4 times\)", text).groups())
    assert fewer == max(1, 5000 * 4 // epochs)


def test_kernels_are_named_by_check_at_the_start_and_in_the_runs_config(tmp_path):
    command = [*command_of(tmp_path), "--model.attention=reference", "--train.stop_after=1"]
    for extra in (["--check"], []):
        log = tmp_path / f"log{len(extra)}"
        assert wait(start(1, [*command, *extra], log)) == [0], log.read_text()
        text = log.read_text()
        assert "kernels: attention reference (attention = 'reference'); " in text
        assert "cross-entropy chunked, LayerNorm torch" in text and "(not fused: no GPU)" in text
    begun = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[0])
    assert begun["event"] == "start" and begun["kernels"].startswith("attention reference (")
    saved = json.loads((tmp_path / "out/config.json").read_text())["kernels"]
    assert saved["attention"] == {"kernel": "reference", "why": "attention = 'reference'"}
    assert saved["dropout"]["kernel"] == "hash"


def test_tf32_is_for_gpus_alone_and_only_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(starting.engine, "check_machine", lambda *_: [])
    monkeypatch.setattr(starting, "agreed_kernels", lambda choose: None)
    monkeypatch.setattr(starting.engine, "init_distributed", lambda: None)
    monkeypatch.setattr(starting.cpu, "use_onednn", lambda: None)
    run_file, found = str(make_run(tmp_path)), []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", found.append)
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(starting, "local_device", partial(torch.device, device))
        for given in ("false", "true"):
            run, _ = run_config.load(run_file, [f"--train.tf32={given}"])
            starting.join_group(run, ds_config.DeepSpeedConfig(), "run.toml")
            found.append(f"{device} {given}")
    assert found == ["cpu false", "cpu true", "cuda false", "high", "cuda true"]
