"""Memory that steps keep: the heap, and what large gradients lie in."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time

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
for _ in range(24):  # a heap grows a little in the first few, seldom later
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


def test_shapes_in_turns_take_their_own_memory_until_there_are_too_many():
    shapes = [LARGE, LARGE.view(2, -1), LARGE.view(4, -1), LARGE.view(8, -1)]
    places = [empty_like(shape).data_ptr() for shape in shapes]  # each is dropped at once
    assert len(set(places)) == kept_memory._MOST
    assert [empty_like(shape).data_ptr() for shape in shapes] == places
    used = empty_like(LARGE)
    other = empty_like(LARGE.view(16, -1))
    assert [one.memory.data_ptr() for one in kept_memory._kept] == [
        used.data_ptr(), other.data_ptr()]
    kept_memory.forget()
    assert not kept_memory._kept


def test_a_tensor_of_inference_is_not_kept():
    with torch.inference_mode():
        empty_like(LARGE)
    assert not kept_memory._kept


def test_a_forked_process_waits_for_no_lock_of_another_thread():
    with kept_memory._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            empty_like(LARGE)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_storage_that_is_held_is_in_use():
    first = empty_like(LARGE).fill_(1)
    storage = first.untyped_storage()
    del first
    empty_like(LARGE).fill_(2)
    assert torch.empty(0).set_(storage)[0] == 1


def test_memory_that_others_see_or_that_is_gone_is_not_taken():
    shared = empty_like(LARGE)
    shared.share_memory_()
    freed = empty_like(LARGE)
    freed.untyped_storage().resize_(0)
    place = shared.data_ptr()
    del shared, freed
    assert empty_like(LARGE).fill_(2).data_ptr() != place


def test_few_are_kept():
    held = [empty_like(LARGE) for _ in range(9)]
    assert len({x.data_ptr() for x in held}) == 9
    assert len(kept_memory._kept) == kept_memory._MOST


def test_threads_take_different_memory():
    wrong = []

    def work(number):
        for _ in range(300):
            mine = empty_like(LARGE)
            mine[:3] = number
            time.sleep(0)
            if mine[0] != number:
                wrong.append(number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_small_tensors_and_those_of_no_memory_are_torchs():
    for tensor in (torch.empty(3), torch.empty(LARGE.shape, device="meta")):
        assert empty_like(tensor).device == tensor.device
    assert kept_memory._kept == []
    with torch.device("meta"):
        assert empty_like(LARGE).device == LARGE.device


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
