"""Fixtures that several modules share."""

import os

import pytest

_OF_THE_GROUP: dict[str, str] = {}  # variables that joining it has set


@pytest.fixture(scope="module")
def process_group():
    """A group of one, which stays: DeepSpeed holds on to the first one of a process."""
    from deberta_ds.train.engine import init_distributed

    kept = dict(os.environ)
    os.environ.update(_OF_THE_GROUP)
    init_distributed()
    _OF_THE_GROUP.update({key: os.environ[key] for key in os.environ.keys() - kept.keys()})
    yield
    os.environ.clear()
    os.environ.update(kept)
