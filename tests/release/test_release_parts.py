"""The parts of a release that belong together: refused where they are of different models."""

import errno
import os

import pytest
import torch
from export_cases import make_release

from deberta_ds.base.errors import UserError
from deberta_ds.release.model_files import read_tensors, write_ours, write_safetensors
from deberta_ds.release.networks import Network, Release, derive_words
from deberta_ds.release.reader import read_release


def test_tables_of_another_shape_are_refused_before_they_are_added():
    words = torch.zeros(4, 2)
    generator = Network(None, {"words.weight": words})
    for whole in (torch.zeros(0), torch.zeros(5, 2)):
        main = Network(None, {"words.delta": words, "words.weight": whole})
        with pytest.raises(UserError, match=r"shapes \[4, 2\], \[4, 2\], .* of one model"):
            derive_words(Release(main, generator))


@pytest.mark.parametrize("name", ["positions.weight", "trunk.input.positions.weight"])
def test_a_position_table_is_the_sum_wherever_it_belongs(name):
    """The official hook shares both tables of a GDES pair (apps/tasks/rtd_task.py)."""
    base, delta = torch.randn(4, 2), torch.randn(4, 2)
    for stored in ({name: torch.zeros(4, 2)}, {}):
        main = Network(None, {"positions.delta": delta} | stored)
        derive_words(Release(main, Network(None, {name: base})))
        assert torch.equal(main.tensors[name], base + delta)


def test_a_generator_of_another_vocabulary_is_refused(tmp_path):
    """With another tokenizer a run began with rows of both, as if they were of one model."""
    release = make_release("v3")
    release.generator = make_release("mdeberta").generator
    write_ours(release, tmp_path)
    with pytest.raises(UserError, match="640 rows, the generator's 1280; they must be of one"):
        read_release(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_cannot_be_read_are_not_called_damaged(tmp_path, monkeypatch, name, number):
    """safetensors says of a file without rights that there is none."""
    def refuse(path, *_):
        raise OSError(number, os.strerror(number), path)

    (tmp_path / name).touch()
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError) as caught:
        read_tensors(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and os.strerror(number) in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_weights_can_be_read_by_whom_the_umask_lets(tmp_path):
    """safetensors 0.8 writes files for their owner alone."""
    before = os.umask(0o027)
    try:
        write_safetensors(tmp_path / "model.safetensors", {"weight": torch.zeros(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640
