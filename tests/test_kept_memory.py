"""Memory that steps keep: the heap, and what large gradients lie in."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from deberta_ds import kept_memory
from deberta_ds.kept_memory import empty_like
from deberta_ds.model.embeddings import WordEmbedding
from deberta_ds.model.table_gradient import TableGradient

LARGE = torch.empty(kept_memory._LARGE // 4)
STEPS = """
import resource, sys, torch
from deberta_ds.kept_memory import keep_heap

def step():
    held = [torch.ones(size << 20) for size in (1, 2, 3, 4, 5, 6, 7)]  # MiB, four bytes each
    del held

print(keep_heap())
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch):
    monkeypatch.setattr(kept_memory, "_kept", [])


def pages_of_steps(**variables) -> tuple[str, int]:
    """Return what `keep_heap` said, and the bytes of fresh pages in five steps of 112 MiB."""
    done = subprocess.run([sys.executable, "-c", STEPS], env=os.environ | variables, check=True,
                          capture_output=True, text=True)
    said, fresh = done.stdout.split()
    return said, int(fresh)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_steps_do_not_ask_for_their_pages_again():
    said, fresh = pages_of_steps()
    assert said == "True" and fresh < 16 << 20
    assert pages_of_steps(MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"  # the user's word


def test_a_large_gradient_takes_the_memory_of_one_that_is_gone():
    first = empty_like(LARGE)
    place, part = first.data_ptr(), first[5:9]
    assert empty_like(LARGE).data_ptr() != place  # `first` is in use
    del first
    assert empty_like(LARGE).data_ptr() != place  # a part of it still is
    del part
    assert empty_like(LARGE).data_ptr() == place
    assert empty_like(LARGE, torch.bfloat16).nbytes == LARGE.nbytes // 2  # too small to keep


def test_idle_memory_of_another_shape_is_freed():
    used, idle = empty_like(LARGE), empty_like(LARGE)
    del idle
    other = empty_like(LARGE.view(2, -1))
    assert [memory.data_ptr() for memory, _ in kept_memory._kept] == [
        used.data_ptr(), other.data_ptr()]


def test_small_tensors_and_those_of_no_memory_are_torchs():
    for tensor in (torch.empty(3), torch.empty(LARGE.shape, device="meta")):
        assert empty_like(tensor).device == tensor.device
    assert kept_memory._kept == []


@pytest.mark.parametrize("predicts", [False, True])
def test_gradients_that_are_held_stay_what_they_are(predicts):
    """A table's gradient of one step, added up and kept beyond the next, beside autograd's own."""
    torch.manual_seed(0)
    words = WordEmbedding(len(LARGE) // 64, 64)
    torch.nn.init.normal_(words.weight)
    bias, places = torch.zeros(len(words.weight)), []
    for step in range(4):
        ids = torch.randint(0, len(words.weight), (5,))
        found = []
        for whole in (False, True):
            gradient = None if whole else TableGradient()
            vectors = words.weight[ids] if whole else words(ids, gradient=gradient)
            if not predicts:
                loss = vectors.square().sum()
            elif whole:
                loss = torch.nn.functional.cross_entropy(vectors @ words.weight.t(), ids,
                                                         reduction="sum")
            else:
                loss, *_ = words(vectors, labels_T=ids, bias_V=bias, gradient=gradient)
            found += torch.autograd.grad(loss, words.weight)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        if step != 1:  # one is kept beyond its step
            places.append(found[0].data_ptr())
            del found[0]
        else:
            held, copy = found[0], found[0].clone()
    assert torch.equal(held, copy) and held.data_ptr() == places[0]
    assert places[1] == places[2] != places[0]
