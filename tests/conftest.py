"""Fixtures that several modules share."""

import gc
import os
import sys

import pytest

gc.disable()  # until all is imported
_OF_THE_GROUP: dict[str, str] = {}  # variables that joining it has set


def pytest_collection_modifyitems(items):
    """Long files first, so that no worker of `-n 2 --dist loadfile` is left alone with one."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish():
    """What is imported by now is no garbage: each full collection looked at all of it, 0.6 s."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def process_group():
    """A group of one, which stays: DeepSpeed holds on to the first one of a process."""
    from deberta_ds.engine.engine import init_distributed

    kept = dict(os.environ)
    os.environ.update(_OF_THE_GROUP)
    init_distributed()
    _OF_THE_GROUP.update({key: os.environ[key] for key in os.environ.keys() - kept.keys()})
    yield
    os.environ.clear()
    os.environ.update(kept)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Runs Python scripts as forks of one process that has imported everything."""
    from rank_helpers import quick_python

    from tools.fuzz.commands import Server

    place = tmp_path_factory.mktemp("server")
    with quick_python(place) as python, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python)
        with Server() as started:
            patch.undo()
            yield started
