"""Fixtures that several modules share."""

import os

import pytest


@pytest.fixture(scope="module")
def process_group():
    """A group of one, which stays: DeepSpeed holds on to the first one of a process."""
    from deberta_ds.train.engine import init_distributed

    kept = dict(os.environ)
    init_distributed()
    yield
    os.environ.clear()
    os.environ.update(kept)
