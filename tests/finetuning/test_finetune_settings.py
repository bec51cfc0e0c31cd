"""Settings of fine-tuning: checked, later ones win, and every preset fits every task."""

import argparse
import dataclasses

import numpy as np
import pytest
import torch
from launching import ROOT
from superglue_helpers import sample, tiny_start

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import MODELS
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.finetuning import options
from deberta_ds.finetuning.features import encode
from deberta_ds.tasks.settings import Settings, learning_rate_for, load, resolve
from deberta_ds.tasks.task import TASK_NAMES, TASKS, task_named


def settings_of(name: str, file=None, *overrides: str) -> Settings:
    return resolve(task_named(name), load(file, overrides, TASK_NAMES))


def test_settings_are_checked_and_later_ones_win(tmp_path):
    file = tmp_path / "preset.toml"
    file.write_text("[all]\nepochs = 3\nglobal_batch_size = 8\n[RTE]\nepochs = 4\n")
    given = ("--all.global_batch_size=24", "--CB.epochs=9", "--RTE.patience=1")
    rte = settings_of("RTE", file, *given)
    assert (rte.epochs, rte.global_batch_size, rte.patience, rte.max_length) == (4, 24, 1, 320)
    assert settings_of("CB", file, "--CB.epochs=9").epochs == 9
    assert settings_of("RTE", file, "--all.epochs=1").epochs == 1  # the file's [RTE] won before
    assert settings_of("RTE", file, "--RTE.epochs=2", "--all.epochs=1").epochs == 2
    assert settings_of("SQuAD-v2.0", file, "--SQuAD-v2.0.max_length=400").max_length == 400
    for text, message in (
        ("[RTE]\nepoch = 3\n", "settings of RTE\n  epoch: unknown key; did you mean epochs"),
        ("[CB]\nepoch = 3\n", "settings of CB\n  epoch: unknown key"),  # another task's, too
        ("[RTE]\nepochs = 0\n", "epochs = 0: must be at least 1"),
        ("[RTE]\nepochs = 1.5\n", "epochs = 1.5: input should be a valid integer"),
        ("[RTTE]\nepochs = 1\n", r"\[RTTE\] is not a table .* did you mean RTE"),
        ("epochs = 1\n", r"\[epochs\] is not a table named all or after a task"),
        ("[RTE\n", "not valid TOML"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            settings_of("RTE", file)
    for override, message in (("--RTTE.epochs=1", r"\[RTTE\] is not a table .* did you mean RTE"),
                              ("epochs", "not an option")):
        with pytest.raises(UserError, match=message):
            settings_of("RTE", None, override)
    with pytest.raises(UserError, match="no such settings file"):
        settings_of("RTE", tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read"):
        settings_of("RTE", tmp_path)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Settings)
                                  if field.type in (int, float)])
def test_no_setting_takes_nonsense(name):
    for value in ("nan", "inf", "-inf", "-5", "1e400", "99999999999999999999999", '"x"', "[]"):
        try:
            found = getattr(settings_of("RTE", None, f"--all.{name}={value}"), name)
        except UserError as error:
            assert name in str(error)
        else:  # large rates and lengths are a user's own affair, as long as they are numbers
            assert np.isfinite(found) and (found >= 0 or name == "dropout")


@pytest.mark.parametrize(("model", "low", "high"), [
    ("deberta-v3-base", 2e-5, 2e-5), ("deberta-base", 2e-5, 2e-5), ("deberta-v3-large", 7e-6, 1e-5),
    ("deberta-v3-small", 3e-5, 4.5e-5), ("deberta-v3-xsmall", 4.5e-5, 5.4e-5),
    ("deberta-v2-xxlarge", 1e-6, 5e-6), ("tiny", 3e-4, 1e-3)])
def test_the_default_learning_rate_is_the_published_one_of_a_size(model, low, high):
    assert low <= learning_rate_for(ModelConfig(**MODELS[model])) <= high


def test_the_optimizer_is_the_official_one():
    """microsoft/DeBERTa: AdamW 0.9, 0.999 and 1e-6, decay 0.01, norms up to 1, a linear decay."""
    optim = Settings(learning_rate=2e-5).optim(250)
    assert (optim.name, optim.betas, optim.eps) == ("adamw", (0.9, 0.999), 1e-6)
    assert (optim.weight_decay, optim.clip_norm, optim.schedule) == (0.01, 1.0, "linear")
    assert (optim.warmup_steps, optim.min_learning_rate_share) == (15, 0.0)
    assert Settings(learning_rate=2e-5, warmup_steps=500).optim(250).warmup_steps == 250


def test_sift_has_the_published_weight_unless_it_is_set(tmp_path, monkeypatch):
    monkeypatch.setattr("deberta_ds.engine.engine.check_machine", lambda *_: [])
    monkeypatch.setattr("deberta_ds.finetuning.models.open_start", lambda *_: tiny_start())
    monkeypatch.setattr("deberta_ds.training.start.agreed_kernels", lambda choose: ["none"])
    monkeypatch.setattr("deberta_ds.training.start.join", lambda asked: torch.device("cpu"))
    given = argparse.Namespace(
        sift=True, config=None, data="x", deepspeed_config=None, model="m", tokenizer=None, seeds=1,
        out=tmp_path, carve_train=[], any_size=True, max_bad=0, skip_test=False)
    tasks = tuple(map(task_named, ("RTE", "CB")))
    plan = options.build_sweep(given, ["--RTE.sift_weight=0.5"], tasks, {}, keep_models=False)
    assert [resolve(task, plan.settings).sift_weight for task in tasks] == [0.5, 5.0]


@pytest.mark.parametrize("size", ["1p5b", "base", "demo", "large", "small", "xsmall"])
def test_every_preset_file_resolves_for_every_task_and_fits_its_texts(size):
    path = ROOT / f"launch/runs/superglue/{size}.toml"
    for task in TASKS:
        settings = settings_of(task.name, path)
        assert settings.max_length >= 128
        if task.name in ("RTE", "COPA", "WiC"):
            examples = sample(task.name).examples
            encode(task, examples, tiny_start().tokenizer, max_length=settings.max_length,
                   window_overlap=settings.window_overlap)


@pytest.mark.parametrize(("gpus", "able", "name"), [
    (0, True, "fp32 without ZeRO"), (1, False, "fp32 without ZeRO"),
    (8, True, "ds_configs/zero1_bf16.json")])
def test_a_gpu_with_bf16_takes_it_unless_told(monkeypatch, gpus, able, name):
    monkeypatch.setattr("deberta_ds.cluster.launcher.count_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: able)
    found, ds = options.deepspeed(None)
    assert found == name and ds.precision == ("bf16" if "bf16" in name else "fp32")
    assert options.deepspeed("ds_configs/zero1_fp32.json")[0] == "ds_configs/zero1_fp32.json"
