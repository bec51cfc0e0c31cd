"""A run that is longer, shallower or deeper than its source: what is the source's stays so."""

import dataclasses

import pytest
import torch
from export_cases import make_release, random_state, run_config, started
from launching import make_run

from deberta_ds.base.errors import UserError
from deberta_ds.config import run_config as config
from deberta_ds.config.run_config import InitConfig
from deberta_ds.model.attention import Geometry
from deberta_ds.objectives.build import build_model
from deberta_ds.release.initialize import initial_tensors, reshape
from deberta_ds.release.model_files import release_of_state, write_ours
from deberta_ds.release.networks import build_backbone
from deberta_ds.release.shape import complete

LENGTH = 200


def text(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of the first tokens of one text."""
    ids = torch.randint(4, 600, (1, LENGTH), generator=torch.Generator().manual_seed(1))[:, :length]
    return ids, torch.ones_like(ids)


def hidden(network, length: int) -> torch.Tensor:
    with torch.no_grad():
        return build_backbone(network)(*text(length))


@pytest.mark.parametrize("family, reach, same_up_to", [
    ("v3", {"max_position": 256, "max_relative": 64}, None),  # a longer position table alone
    ("v3", {"max_position": 256}, 8),  # as many buckets: those of one distance each stay
    ("v3", {"max_position": 256, "position_buckets": 128}, None),  # a row for each old distance
    ("v3", {"max_position": 256, "position_buckets": 0}, None),  # a row for every distance
    ("v2", {"max_position": 256, "position_buckets": 32}, 26),
    ("v1", {"max_position": 256}, None),  # the clamp of v1: new rows repeat the last
])
def test_a_longer_reach(family, reach, same_up_to):
    source = make_release(family, "mlm").main
    wanted = dataclasses.replace(source.config, **reach)
    longer = reshape(source, wanted, (), "source", notes := [])
    assert longer.config == wanted
    table, long_table = (one.tensors["trunk.encoder.relative"] for one in (source, longer))
    old, new = (Geometry(c.largest_distance, c.position_buckets) for c in (source.config, wanted))
    first_other = LENGTH
    for distance in range(-LENGTH, LENGTH):
        before, after = (int(geometry.slots(torch.tensor(distance))) for geometry in (old, new))
        if not torch.equal(long_table[after], table[before]):
            first_other = min(first_other, abs(distance))
    assert first_other == (LENGTH if same_up_to is None else same_up_to + 1)
    length = first_other  # of texts, so that the largest distance is one less
    # Of states up to 3: five roundings of fp32, as the library that multiplies may be another.
    torch.testing.assert_close(hidden(longer, length), hidden(source, length), rtol=1e-6, atol=1e-6)
    if same_up_to is not None:
        gap = hidden(longer, length + 1) - hidden(source, length + 1)
        assert gap.abs().max() > 1e-5 and f"in texts of up to {length} tokens" in " ".join(notes)
    positions = longer.tensors["positions.weight"]
    assert torch.equal(positions[64:128], source.tensors["positions.weight"])
    assert torch.equal(positions[192:], source.tensors["positions.weight"])


@pytest.mark.parametrize("family, kind, layers, generator_layers", [
    ("v3", "rtd", [0, 2, 3], [0, 0, 1, 1]), ("v2", "rtd_cached", [0, 0, 1, 1, 2, 2, 3, 3], []),
    ("v1", "mlm", [3, 1, 3], [])])
def test_layers_are_dropped_and_repeated(tmp_path, family, kind, layers, generator_layers):
    """Compared with the source whose layers are dropped and repeated in the built model."""
    source = make_release(family, "rtd" if kind == "rtd_cached" else kind)
    write_ours(source, tmp_path / "source")
    file = make_run(tmp_path, kind=f'"{kind}"', preset=None, vocab_size=None)
    run, _ = config.load(file, [
        f"--init.from={tmp_path}/source", f"--init.layers={layers}",
        f"--init.generator_layers={generator_layers}"], complete)
    assert run.model.num_layers == len(layers)
    tensors, notes = initial_tensors(run)
    assert tensors.keys() == dict(build_model(run).named_parameters()).keys()
    found = release_of_state(tensors, run)
    pairs = [(source.main, found.main, layers)]
    if generator_layers:
        pairs.append((source.generator, found.generator, generator_layers))
    for before, after, chosen in pairs:
        wanted = build_backbone(before)
        stack = wanted.trunk.encoder.layers
        wanted.trunk.encoder.layers = torch.nn.ModuleList(stack[number] for number in chosen)
        with torch.no_grad():
            torch.testing.assert_close(hidden(after, 60), wanted(*text(60)), rtol=1e-6, atol=1e-6)
    assert any("layers 3, 1, 3 of the 4" in note for note in notes) == (kind == "mlm")
    assert not any("WARNING: the enhanced" in note for note in notes)  # all end with the last layer


@pytest.mark.parametrize("family, layers, message", [
    ("v3", [0, 9], "init.layers: source has no layer 9; its layers are 0 to 3"),
    ("v3", [0], "1 layers for the 4 of the run"),
    ("v2", [1, 2, 3, 3], "convolution next to its layer 0; begin the list with 0")])
def test_layers_that_do_not_fit(family, layers, message):
    network = make_release(family, "mlm").main
    with pytest.raises(UserError, match=message):
        reshape(network, network.config, layers, "init.layers: source", [])


def test_what_is_said_of_layers_that_end_elsewhere_and_of_a_run_that_has_less(tmp_path):
    run = run_config("v3", "mlm")
    write_ours(release_of_state(random_state(build_model(run)), run), tmp_path)

    def start(init, **shape):
        other = dataclasses.replace(run, model=dataclasses.replace(run.model, **shape))
        return started(other, tmp_path, **init)[1]

    notes = start({"layers": (0, 1)}, num_layers=2)
    assert sum("mask decoder, trained with layer 3, now applies layer 1" in note
               for note in notes) == 1
    with pytest.raises(UserError, match="max_position = 32 .source: 64."):
        start({}, max_position=32)
    with pytest.raises(UserError, match="init.generator_layers: this run has no generator"):
        start({"generator_layers": (0, 1)})
    with pytest.raises(ValueError, match="layers needs init.from"):
        InitConfig(layers=(0,))
