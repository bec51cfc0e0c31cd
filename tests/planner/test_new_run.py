"""launch/new.py: run files for a corpus, devices and hours fit these and each other."""

import json
import re
import shlex

import pytest
from data_helpers import run_main
from launching import ROOT, make_run, python

from benchmarks.studies import loss_fit
from deberta_ds.base.errors import UserError
from deberta_ds.config import run_config
from deberta_ds.data.shards import Manifest, ShardInfo, write_manifest
from deberta_ds.engine import ds_config
from deberta_ds.model import cpu
from deberta_ds.planner import new_run, plan
from deberta_ds.planner.activations import Activations


@pytest.fixture(autouse=True)
def weightless(monkeypatch):
    """What is chosen hangs on the text and the hours."""
    monkeypatch.setattr(plan, "trace", lambda *_, **__: Activations({0: 0}))
    monkeypatch.setattr(cpu, "has_bf16", lambda: True)  # fp32 alone is half as fast


def corpus(root, tokens: int, vocabulary: int = 8001):
    """Write manifests of a corpus and what belongs to it; no text is behind them."""
    for name, count in (("train", tokens), ("heldout", max(20_000, tokens // 200))):
        (root / name).mkdir(parents=True)
        shard = ShardInfo("a", count, 1 + count // 500, 2 * count, "", 8, "")
        write_manifest(root / name, Manifest("uint16", vocabulary, "0" * 64, {}, {}, {}, (shard,)))
    (root / "corpus.json").write_text(json.dumps(
        {"sources": {"train": 1.0}, "heldout": {"web": "heldout"}, "tokenizer": "spm.model"}))
    return new_run.open_corpus(str(root), None, None)


@pytest.mark.parametrize("tokens, devices, hours, objective, width, length", [
    (1_250_000, "2 cpu", 0.3, "", 128, 128), (1_250_000, "1 cpu", 0.2, "rtd", 128, 128),
    (12_500_000, "2 cpu", 24, "rtd", 128, 128), (12_500_000, "h100", 24, "", 256, 128),
    (125_000_000, "2 cpu", 24, "", 256, 128), (125_000_000, "4 x a100", 24, "", 384, 128),
    (125_000_000, "3xV100", 5, "mlm", 384, 128), (12_500_000_000, "2 cpu", 24, "", 128, 128),
    (12_500_000_000, "RTX 4090", 24, "", 768, 512), (12_500_000_000, "4 x a100", 24, "", 768, 512),
    (12_500_000_000, "64 cpu", 100, "mlm", 768, 512),
    (50_000_000_000, "16 x h100", 2000, "", 1024, 512)])
def test_values_fit_the_text_the_devices_and_each_other(tmp_path, tokens, devices, hours, objective,
                                                        width, length):
    tmp_path /= "my text"
    text, hardware = corpus(tmp_path, tokens), new_run.open_devices(devices)
    written, stage = new_run.choose(text, hardware, hours, objective, "mine")
    (tmp_path / "mine.toml").write_text(written)
    run, _ = run_config.load(tmp_path / "mine.toml")
    assert (run.model.hidden_size, run.data.seq_len, run.model.vocab_size) == (width, length, 8064)
    assert run.objective.kind == (objective or ("mlm" if width < 384 else "rtd"))
    shape = (run.model.num_layers, width, 64 * run.model.num_heads, run.model.intermediate_size)
    assert width >= 384 or shape[0] == {128: 4, 192: 6, 256: 7}[width]
    assert shape[2:] == (width, 4 * width)
    train, ranks = run.train, hardware.gpus * hardware.nodes
    epochs = train.steps * train.global_batch_size * length / tokens
    few_tokens = tokens < 15_000_000 / 4
    assert 0 < epochs <= (40 if few_tokens else 4)
    words = " ".join(written.replace("#", "").split())
    assert ("Beyond 4 epochs" in words) == (epochs > 4)
    assert train.global_batch_size % (ranks * train.micro_batch_size) == 0
    assert 0 < run.optim.warmup_steps < train.steps / 10 and train.steps >= 100
    assert train.eval_every < train.steps and train.log_every <= train.eval_every
    seconds = re.search(r"about (.*?) at", words)[1]
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    assert sum(int(n) * units[u] for n, u in re.findall(r"(\d+)([smhd])", seconds)) <= hours * 3600
    commands = new_run.commands(str(tmp_path / "mine.toml"), text, hardware, stage)
    assert str(tmp_path / "mine.toml") in shlex.split(commands)  # as a shell reads it
    assert f"--seq_len {length}" in commands and f"--num_gpus {hardware.gpus} " in commands
    ds = ds_config.load(re.search(r"ds_configs/\w+\.json", commands)[0])
    assert (hardware.gpu.peak(ds.matmul_precision) is not None) and stage < 3


def test_more_hours_give_a_larger_model_and_tokens_that_nobody_measured_are_named(tmp_path):
    text, widths = corpus(tmp_path, 12_000_000), []
    for hours in (0.1, 1, 6, 24):
        written, _ = new_run.choose(text, new_run.open_devices("2 cpu"), hours, "", "mine")
        widths.append(int(re.search(r"hidden_size = (\d+)", written)[1]))
        tokens = re.search(r"expected loss after ([\d.]+)M", " ".join(written.split("\n# ")))[1]
        assert ("extrapolated" in written) == (not 8 <= float(tokens) <= 144)
    assert widths == sorted(widths) and (widths[0], widths[-1]) == (128, 256)


def test_the_expected_loss_is_the_fit_of_the_runs():
    constants, errors = loss_fit.fit(json.loads((ROOT / loss_fit.RESULTS).read_text())["runs"])
    assert new_run.LOSS == pytest.approx(constants, abs=1e-3)
    assert max(map(abs, errors.values())) < 0.045  # nats; the run files say 0.04


def test_devices_have_names_in_any_case_and_what_is_none_is_refused():
    assert new_run.open_devices("12 CPU") == new_run.open_devices("12 cpu")
    for devices, problem in (("many", "not listed; one of"), ("0 cpu", "a number and a name"),
                             ("12 x a100", "multiple of 8"), ("4", "a number and a name")):
        with pytest.raises(UserError, match=problem):
            new_run.open_devices(devices)


def test_too_little_and_nothing_known(tmp_path):
    text = corpus(tmp_path / "here", 1_250_000)
    with pytest.raises(UserError, match="too few to learn from.*more --hours"):
        new_run.choose(text, new_run.open_devices("1 cpu"), 0.001, "", "mine")
    few = corpus(tmp_path / "few", 1000)
    with pytest.raises(UserError, match="limit is the text.: give at least [\\d,]+ tokens of text"):
        new_run.choose(few, new_run.open_devices("1 cpu"), 1, "", "mine")
    with pytest.raises(UserError, match="nothing: no corpus.json .*build.py to its end"):
        new_run.open_corpus(str(tmp_path / "nothing"), None, None)
    with pytest.raises(UserError, match="names its heldout; give --heldout"):
        new_run.open_corpus(str(tmp_path / "here/train"), None, None)


def test_cards_that_the_text_does_not_fill_are_said(tmp_path):
    text = corpus(tmp_path, 1_250_000)
    written, _ = new_run.choose(text, new_run.open_devices("8 x h100"), 1, "", "mine")
    words = " ".join(written.replace("#", "").split())
    assert re.search(r"tokens of it would keep 8 GPUs busy; one takes .* all of them ", words)
    written, _ = new_run.choose(text, new_run.open_devices("h100"), 1, "", "mine")
    assert "GPUs busy" not in written


@pytest.mark.slow
def test_what_the_command_writes_passes_the_check_that_it_prints(tmp_path):
    make_run(tmp_path)
    out = tmp_path / "mine.toml"
    words = ("launch/new.py", "--corpus", tmp_path / "train", "--heldout", tmp_path / "heldout",
             "--tokenizer", tmp_path / "spm.model", "--devices", "1 cpu", "--hours", "1", "--out",
             out)
    said = run_main(*words)
    assert "--check" in said and "pack.py" not in said
    assert "seq_len = 64" in out.read_text()  # as packed
    checked = python(ROOT / "launch/pretrain.py", "--config", out, "--deepspeed_config",
                     ROOT / "ds_configs/zero1_fp32.json", "--check")
    assert "check passed" in checked.stdout
    with pytest.raises(UserError, match="exists already"):
        run_main(*words)
