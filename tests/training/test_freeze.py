"""Parts of a model that are not trained, or not before a step (train.freeze)."""

import dataclasses

import pytest
import rank_helpers
import torch
from launching import ROOT, make_run

import deberta_ds
from deberta_ds.base.errors import ConfigError
from deberta_ds.checkpoint.find import path_of
from deberta_ds.config import run_config
from deberta_ds.config.batch_schedule import Phase
from deberta_ds.config.optim import OptimConfig, learning_rate
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import RowDataset
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.engine.optim import layer_shares, thaw_factor
from deberta_ds.model.backbone import init_parameters
from deberta_ds.objectives.build import (
    build_model,
    held_parameters,
    objective_problems,
    parameter_sizes,
)
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.training import loop
from deberta_ds.training.start import check_run, frozen_lines

FREEZE = ["embeddings", "layers.0"]


def with_train(run, **values):
    return dataclasses.replace(run, train=dataclasses.replace(run.train, **values))


def is_frozen(name: str) -> bool:
    """Return whether FREEZE names a parameter of the tiny pair of networks of two layers."""
    return ".layers.0." in name or name.endswith(("words.weight", "positions.weight")) \
        or ".input." in name


def plain_losses(run) -> tuple[list[float], dict]:
    """Return (losses, first weights) of the run in plain PyTorch, what is frozen without gradient.
    """
    tokenizer = Tokenizer(run.data.tokenizer)
    model = build_model(run, tokenizer.size)
    init_parameters(model, run.model.init_std, run.train.seed)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    networks: dict[bool, list] = {True: [], False: []}
    groups: dict[float, list] = {0.0: [], run.optim.weight_decay: []}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
        if parameter.requires_grad:
            networks[name.startswith("discriminator.")].append(parameter)
            groups[0.0 if parameter.dim() == 1 else run.optim.weight_decay].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for decay, params in groups.items()],
        betas=run.optim.betas, eps=run.optim.eps)
    dataset = RowDataset(run.data.sources[:1], tokenizer, seq_len=run.data.seq_len,
                         seed=run.data.seed, mask=run.objective.mask)
    losses, size = [], run.train.global_batch_size
    for step in range(run.train.steps):
        batch = next(build_loader(dataset, phases=[Phase(step * size, size, 1)], rank=0,
                                  micro_batch_size=size, world_size=1, num_workers=0))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, run.train.steps)
        optimizer.zero_grad()
        loss, *_ = model(batch, {"targets": torch.tensor(batch.num_targets),
                                 "tokens": torch.tensor(batch.num_tokens)})
        loss.backward()
        for parameters in networks.values():
            assert torch.nn.utils.clip_grad_norm_(parameters, run.optim.clip_norm) > \
                run.optim.clip_norm  # or the test would not see whose norm it was
        optimizer.step()
        losses.append(loss.item())
    return losses, first


@pytest.mark.multi
@pytest.mark.slow
def test_a_part_is_frozen_and_thawed_under_every_zero_stage(tmp_path):
    """The worker compares runs that were resumed in both phases with whole ones, bit for bit."""
    run_file = make_run(tmp_path, steps="4", warmup_steps="0", global_batch_size="4",
                        two_layers=True, micro_batch_size=f"2\nfreeze = {FREEZE}",
                        learning_rate="1e-2\nclip_norm = 0.1")
    run, _ = run_config.load(run_file)
    losses, first = plain_losses(run)
    rank_helpers.run(2, [str(run_file), str(tmp_path)], tmp_path / "log",
                     ROOT / "tests/workers/freeze.py")
    for name, found in torch.load(tmp_path / "found.pt", weights_only=True).items():
        waits = name.startswith("thawed")
        if "fp32" in name:
            assert found["losses"][:3] == pytest.approx(losses[:3], rel=1e-6), name
            assert (found["losses"] == pytest.approx(losses, rel=1e-6)) != waits, name
        for key, weights in found["weights"].items():
            same = torch.equal(weights, first[key].to(weights.dtype))
            if "fp32" in name or is_frozen(key) and not waits:  # bf16 rounds small updates away
                assert same == (is_frozen(key) and not waits), (name, key)

    def size(name: str) -> int:
        directory = path_of(tmp_path / name / "3", 2)
        return sum(path.stat().st_size for path in directory.glob("rank-*.safetensors"))

    total = sum(value.numel() for value in first.values())
    frozen = sum(value.numel() for name, value in first.items() if is_frozen(name))
    for kind in ("zero0_fp32", "zero1_fp32", "zero3_fp32"):  # moments: 8 bytes
        assert size(f"frozen/{kind}") == pytest.approx(12 * total - 8 * frozen, rel=0.05)
    assert frozen > total / 2


@pytest.mark.parametrize("kind, freeze, frozen", [
    ("mlm", ["embeddings"], "words.weight masked_lm.positions.weight masked_lm.trunk.input.norm."),
    ("mlm", ["encoder", "head"], "masked_lm.trunk.encoder. masked_lm.head."),
    ("rtd", ["generator", "discriminator.layers.1-3"],
     "words. generator. " + " ".join(
         f"discriminator.trunk.encoder.layers.{n}." for n in (1, 2, 3))),
    ("rtd", ["discriminator.embeddings", "relative"],
     "discriminator.words. discriminator.trunk.input. discriminator.trunk.encoder.relative "
     "generator.trunk.encoder.relative"),
])
def test_names_of_parts(tmp_path, kind, freeze, frozen):
    run = with_train(run_config.load(make_run(tmp_path, kind=f'"{kind}"'))[0], freeze=tuple(freeze))
    names = dict(build_model(run).named_parameters())
    assert held_parameters(run, names)[0] == {
        name for name in names if name.startswith(tuple(frozen.split()))}
    assert not objective_problems(run, False)


def test_layers_learn_slower_from_the_top_of_each_network(tmp_path):
    run, _ = run_config.load(make_run(tmp_path))  # of four layers; the generator has two
    shares = layer_shares(list(dict(build_model(run).named_parameters())), 0.5)
    for name, power in (
            ("discriminator.trunk.encoder.layers.3.ffn_in.weight", 1),
            ("discriminator.trunk.encoder.layers.0.ffn_in.weight", 4),
            ("discriminator.trunk.encoder.relative", 5), ("discriminator.words.weight", 5),
            ("generator.trunk.encoder.layers.1.ffn_in.weight", 1), ("words.weight", 3),
            ("generator.positions.weight", 3), ("generator.head.bias", 0)):
        assert shares[name] == 0.5**power, name


def test_the_log_says_how_far_a_thawed_part_jumps(tmp_path):
    """With betas (0.9, 0.999) the docs said 1.5 learning rates, and it was up to 6.6."""
    for betas, expected in (((0.9, 0.999), 6.1), ((0.9, 0.98), 1.6)):
        optim = OptimConfig(learning_rate=1.0, betas=betas)
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([weight], lr=1.0, betas=betas, weight_decay=0.0)
        moves = []
        for step in range(2100):
            weight.grad = torch.full((1,), float(step >= 2000))
            before = weight.item()
            optimizer.step()
            moves.append(before - weight.item())
        assert max(moves) == pytest.approx(thaw_factor(optim, 2000), rel=1e-3)
        run, _ = run_config.load(make_run(tmp_path), [f"--optim.betas={list(betas)}"])
        run = with_train(run, freeze=("embeddings",), freeze_steps=2000)
        _, line = frozen_lines(run, parameter_sizes(run), "fp32")
        assert f"up to {expected} learning rates" in line and ("WARNING" in line) == (expected > 2)


def test_what_cannot_be_frozen_is_named(tmp_path):
    run, _ = run_config.load(make_run(tmp_path))

    def problems(*freeze, **train) -> str:
        with pytest.raises(ConfigError) as error:
            check_run(with_train(run, freeze=freeze, **train), DeepSpeedConfig(zero_optimization={
                "stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/"}}), 1, "run.toml")
        return str(error.value)

    text = problems("embedings", "layers.2-9", "layers.3-1", freeze_steps=20)
    assert "no 'embedings' in this model; did you mean embeddings?; there are" in text
    assert "no 'layers.2-9'" in text and "no 'layers.3-1'" in text
    assert "layers.0-3, generator.layers.0-1, discriminator.layers.0-3\n" in text
    assert "generator, discriminator" not in text.split("did you mean")[0]
    assert "train.freeze_steps = 20: not below train.steps = 20" in text
    text = problems("embeddings", "encoder", "head")
    assert "every parameter" in text and "NVMe" in text
    with pytest.raises(ConfigError, match="freeze_steps needs freeze"):
        run_config.load(tmp_path / "run.toml", ["--train.freeze_steps=3"])


def test_schedules_of_the_objective_end_at_the_last_step(tmp_path, monkeypatch, process_group):
    seen, thawed = [], []
    train_step, set_rate = loop.train_step, loop.engine.set_learning_rate
    monkeypatch.setattr(loop, "train_step", lambda engine, micro, **more: (
        seen.append(micro[0].run_fraction), train_step(engine, micro, **more))[1])
    monkeypatch.setattr(loop.engine, "set_learning_rate", lambda engine, rate, is_thawed: (
        thawed.append(is_thawed), set_rate(engine, rate, is_thawed=is_thawed))[1])
    deberta_ds.train(make_run(tmp_path, steps="5", warmup_steps="0", two_layers=True),
                     {"train.freeze": ["embeddings"], "train.freeze_steps": 2})
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert thawed == [False, False, True, True, True]
