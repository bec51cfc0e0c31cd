"""The mean of models: weights, formats, refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from export_cases import make_release, random_state, run_config, same_networks

from deberta_ds.base.errors import UserError
from deberta_ds.objectives.build import build_model
from deberta_ds.publish.average import average, last_checkpoints
from deberta_ds.publish.convert import convert, write_release
from deberta_ds.release.model_files import release_of_state, write_ours
from deberta_ds.release.networks import changes_beyond_reach
from deberta_ds.release.reader import read_release
from deberta_ds.tokenizer.spm import model_proto


def write_models(root, count, family="v3", **objective):
    """Write `count` models with other weights; return their directories and releases."""
    run = run_config(family, **objective)
    places, releases = [], []
    for seed in range(count):
        release = release_of_state(random_state(build_model(run), seed), run)
        release.tokenizer_files = make_release(family).tokenizer_files
        places.append(root / f"{family}-{seed}")
        write_ours(release, places[-1])
        releases.append(release)
    return places, releases


def with_another_tokenizer(root):
    (root / "other").mkdir()
    (place,), _ = write_models(root / "other", 1)
    path = place / "spm.model"
    proto = model_proto(path.read_bytes(), path)
    proto.pieces[-1].score -= 1.0
    path.write_bytes(proto.SerializeToString())
    return place


@pytest.mark.parametrize("objective", [{}, {"embedding_sharing": "nes"}, {"kind": "mlm"}])
def test_every_tensor_is_the_mean(tmp_path, objective):
    places, releases = write_models(tmp_path, 3, **objective)
    mean = average(places)
    assert mean.networks().keys() == releases[0].networks().keys()
    for name, network in mean.networks().items():
        for key, tensor in network.tensors.items():
            parts = [release.networks()[name].tensors[key].double().numpy()
                     for release in releases]
            np.testing.assert_allclose(tensor.numpy(), np.mean(parts, axis=0), rtol=1e-6,
                                       atol=1e-7, err_msg=key)
    if not objective:  # GDES: as every reader forms it
        table = mean.generator.tensors["words.weight"] + mean.main.tensors["words.delta"]
        assert torch.equal(mean.main.tensors["words.weight"], table)


@pytest.mark.parametrize("to", ["hf", "ms", "ours"])
def test_it_is_written_as_any_model_is(tmp_path, to):
    places, (release, _) = write_models(tmp_path, 2)
    same_networks(average([places[0]] * 2), release)
    mean = average(places)
    summary = write_release(mean, "two models", tmp_path / "out", to)
    assert not summary.warnings and sum("averaged: " in note for note in summary.notes) == 2
    same_networks(read_release(tmp_path / "out"), mean)


def test_the_mean_of_exports_is_the_same_function_in_transformers(tmp_path):
    """The relative table of the first one's file was compared with the mean's, and warned of."""
    places, _ = write_models(tmp_path, 2, kind="mlm")
    for place in places:
        convert(place, tmp_path / f"{place.name}-hf", "hf")
    mean = average([tmp_path / f"{place.name}-hf" for place in places])
    assert mean.main.source_table is not None and not changes_beyond_reach(mean)
    assert average([tmp_path / f"{places[0].name}-hf", places[1]]).main.source_table is None


def test_models_that_differ_are_refused(tmp_path):
    (first,), _ = write_models(tmp_path, 1)
    (wider,), _ = write_models(tmp_path, 1, "mdeberta")
    with pytest.raises(UserError, match="mdeberta-0: its generator mlm_head.bias is not as in"):
        average([first, wider])
    (masked,), _ = write_models(tmp_path / "masked", 1, kind="mlm")
    with pytest.raises(UserError, match="only models of one shape can be averaged"):
        average([first, masked])
    run = run_config("v3")
    for field, value in (("num_heads", 2), ("max_relative", 64)):
        changed = release_of_state(random_state(build_model(run)), run)
        for network in changed.networks().values():
            network.config = dataclasses.replace(network.config, **{field: value})
        changed.tokenizer_files = make_release("v3").tokenizer_files
        write_ours(changed, tmp_path / field)
        with pytest.raises(UserError, match=f"its generator {field} is not as in"):
            average([first, tmp_path / field])
    other = with_another_tokenizer(tmp_path)
    with pytest.raises(UserError, match="has another tokenizer than"):
        average([first, other])


def test_tokenizers_are_compared_where_the_first_model_has_none(tmp_path):
    (bare, one), _ = write_models(tmp_path, 2)
    (bare / "spm.model").unlink()
    assert average([bare, one]).tokenizer_files
    other = with_another_tokenizer(tmp_path)
    with pytest.raises(UserError, match="has another tokenizer than"):
        average([bare, one, other])


def test_a_run_with_too_few_checkpoints_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run, it has no checkpoints/"):
        last_checkpoints(tmp_path, 3)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has 0 finished checkpoints .*not 3; raise train.keep"):
        last_checkpoints(tmp_path, 3)
