"""Small random models of every family as releases, for the tests of export and convert."""

import dataclasses
from pathlib import Path

import torch
from data_helpers import tokenizer_path
from torch import nn

from deberta_ds.base.files import read_file
from deberta_ds.config.run_config import InitConfig, RunConfig, from_dict
from deberta_ds.objectives.build import build_model
from deberta_ds.release.initialize import initial_tensors
from deberta_ds.release.model_files import release_of_state
from deberta_ds.release.networks import Network, Release

BASE = {"vocab_size": 640, "hidden_size": 32, "num_layers": 4, "num_heads": 4,
        "intermediate_size": 64, "max_position": 64, "position_buckets": 16}
V1_SHAPE = {"position_buckets": 0, "share_position_projections": False, "relative_norm": False}
FAMILIES = {
    "v1": BASE | V1_SHAPE | {"key_bias": False},
    "v1_key_bias": BASE | V1_SHAPE,
    "v2": BASE | {"conv_kernel": 3},
    "v3": BASE,
    "mdeberta": BASE | {"vocab_size": 1280},
}


def random_state(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random values for every parameter; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, parameter in model.named_parameters():
        values = 0.1 * torch.randn(parameter.shape, generator=generator)
        state[name] = values + ("norm.weight" in name)
    return state


def run_config(family: str, kind: str = "rtd", **objective) -> RunConfig:
    """Return a run of a tiny model of `family`."""
    return from_dict({"name": "tiny", "out_dir": "unused", "model": FAMILIES[family],
                      "objective": {"kind": kind} | objective,
                      "data": {"sources": [{"path": "unused"}], "tokenizer": tokenizer_path()},
                      "optim": {"learning_rate": 1e-3},
                      "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1}})


def started(run: RunConfig, source: Path, **init) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the first tensors of a run from `source`, and what is said of them."""
    return initial_tensors(dataclasses.replace(run, init=InitConfig(source=str(source), **init)))


def make_release(family: str, kind: str = "rtd", **objective) -> Release:
    """Return a random release: generator and discriminator, or a masked LM."""
    run = run_config(family, kind, **objective)
    release = release_of_state(random_state(build_model(run)), run)
    release.tokenizer_files = {"spm.model": read_file(tokenizer_path())}
    return release


def with_classifier(release: Release, classes: int = 3) -> Release:
    """Return the main network alone with the head of a fine-tuned sequence classifier."""
    config = release.main.config
    size = config.hidden_size
    tensors = {name: tensor for name, tensor in release.main.tensors.items()
               if name.startswith(("words.weight", "trunk."))}
    tensors |= {"pooler.dense.weight": torch.randn(size, size), "pooler.dense.bias":
                torch.randn(size), "classifier.weight": torch.randn(classes, size),
                "classifier.bias": torch.randn(classes)}
    return Release(Network(config, tensors), tokenizer_files=release.tokenizer_files)


@torch.no_grad()
def same_states(first, *others, lengths: tuple[int, ...] = (50,)) -> None:
    """Assert that encoders, ours or those of transformers, give the same hidden states."""
    for length in lengths:
        ids = torch.randint(4, 600, (2, length), generator=torch.Generator().manual_seed(length))
        expected, *found = (model(ids, torch.ones_like(ids)) for model in (first, *others))
        for states in found:
            torch.testing.assert_close(*(getattr(one, "last_hidden_state", one) for one in (
                states, expected)), rtol=1e-5, atol=1e-5)


def same_networks(first: Release, second: Release) -> None:
    """Assert that two releases hold the same configurations and bit-identical tensors."""
    assert first.networks().keys() == second.networks().keys()
    for name, network in first.networks().items():
        other = second.networks()[name]
        assert dataclasses.asdict(network.config) == dataclasses.asdict(other.config), name
        assert network.tensors.keys() == other.tensors.keys(), name
        for key, tensor in network.tensors.items():
            assert tensor.dtype == other.tensors[key].dtype, key
            assert torch.equal(tensor, other.tensors[key]), key


