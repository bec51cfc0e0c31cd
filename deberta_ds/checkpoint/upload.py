"""Copies of a run's checkpoints at a URL (train.upload), made in the background by rank 0.

    URL/checkpoints/step-00000100/...   as in out_dir; manifest.json last, when every other file was
                                        read back and has its size and checksum
    URL/best                            text: checkpoints/step-N, with the best train.best_metric
    URL/metrics.jsonl, config.json ...  as they were at the newest checkpoint

Nothing is remembered: each round copies what out_dir has and the URL lacks, so after a failure or a
kill the next round, or the next start, copies the rest. Nothing here ends a run.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import xxhash

from deberta_ds.base.errors import UserError, first_line
from deberta_ds.base.files import parse_json, read_json, write_atomic
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.find import BEST
from deberta_ds.checkpoint.save import is_permanent, outdated
from deberta_ds.config.run_config import TrainConfig
from deberta_ds.files import remote
from deberta_ds.tracking.log import METRICS_FILE
from deberta_ds.tracking.trackers import MLFLOW_RUN_FILE, WANDB_RUN_FILE

OWNER = "upload.json"  # in OUT and at the URL
_CHUNK_BYTES = 1 << 26
_SMALL_FILES = (METRICS_FILE, "config.json", WANDB_RUN_FILE, MLFLOW_RUN_FILE)


def check_owner(out_dir: str | Path, url: str, resume: str, *, claims: bool) -> None:
    """UserError if what is at train.upload is another run's; else, with `claims`, it is this one's.

    A run is known by a number of its own in OUT/upload.json and at the URL. What version 0.2.0 has
    put there is known by a checkpoint that is here, too. A run that begins from the URL goes on.
    """
    own, (system, root) = Path(out_dir) / OWNER, remote.file_system(url.rstrip("/"))
    system.invalidate_cache()
    mine = read_json(own).get("run") if own.is_file() else None
    there = _owner_at(system, f"{root}/{OWNER}")
    begins_there = resume.startswith(url.rstrip("/"))
    if there is None:
        known = [path for path in find.list_finished(out_dir) if remote.remote_bytes(
            system, f"{root}/{find.DIRECTORY}/{path.name}/{find.MANIFEST}")
            == (path / find.MANIFEST).read_bytes()]
        with suppress(FileNotFoundError):
            if not (known or begins_there) and system.find(f"{root}/{find.DIRECTORY}"):
                there = "a run that has no checkpoint in common with this one"
    if there is not None and there != mine and not begins_there:
        raise UserError(f"train.upload = {url}: is another run's ({there}), whose checkpoints this "
                        f"one would replace; set another URL, or --resume {url} to go on from it "
                        "if its out_dir is lost")
    if claims and (there is None or mine != there):
        mine = there or mine or os.urandom(8).hex()
        write_atomic(own, json.dumps({"run": mine, "url": url}) + "\n")
        if there is None:
            remote.put(system, f"{root}/{OWNER}", own)
            if (first := _owner_at(system, f"{root}/{OWNER}")) != mine:
                raise UserError(f"train.upload = {url}: another run ({first}) begins there at the "
                                "same moment; set another URL")


def _owner_at(system, place: str) -> str | None:
    try:
        return str(parse_json(system.cat_file(place))["run"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return "unknown"


class Uploads:
    """The copies of one run. `current` is the checkpoint that must not be deleted meanwhile."""

    def __init__(self, out_dir: str | Path, train: TrainConfig, say: Callable[[str], None]):
        """UserError if the URL is of no known kind."""
        self._out, self._train, self._say = Path(out_dir), train, say
        self._system, self._root = remote.file_system(train.upload.rstrip("/"))
        self.current: Path | None = None
        self._is_due, self._is_at_work = threading.Event(), False
        threading.Thread(target=self._work, name="upload", daemon=True).start()

    def begin_round(self) -> None:
        """Copy what is missing, after the round that is at work."""
        self._is_due.set()

    def is_running(self) -> bool:
        """Return whether something is being copied, or waits for it."""
        return self._is_due.is_set() or self._is_at_work

    def _work(self) -> None:
        while self._is_due.wait():
            self._is_at_work = True
            self._is_due.clear()
            self._attempt()
            self._is_at_work = False

    def _attempt(self) -> None:
        try:
            if whole := find.list_finished(self._out):
                self._copy_what_is_missing(whole)
        except Exception as error:  # each file system has errors of its own
            self._say("WARNING: upload failed; it is tried again at the next checkpoint or start: "
                      f"{type(error).__name__}: {first_line(error)}")
        self.current = None

    def _copy_what_is_missing(self, whole: list[Path]) -> None:
        best = read_json(whole[-1] / find.RUN_FILE).get("best", {})
        best_step = best["step"] if best.get("value") is not None else None
        old = partial(outdated, keep=self._train.keep, is_spared=lambda path:
                      find.step_of(path) == best_step
                      or is_permanent(self._train.keep_every, find.step_of(path)))
        for path in sorted(set(whole) - set(old(whole, whole)), reverse=True):
            self.current = path
            if (path / find.MANIFEST).exists():  # it may have been deleted just now
                self._copy(path)
        for name in _SMALL_FILES:
            if (self._out / name).is_file():
                remote.put(self._system, f"{self._root}/{name}", self._out / name)
        # Later ones are of a continuation that was given up: nobody's to delete here.
        there = {path: names for path, names in self._steps_there().items()
                 if find.step_of(path) <= find.step_of(whole[-1])}
        finished = [path for path, names in there.items() if find.MANIFEST in names]
        for path in finished:
            if find.step_of(path) == best_step:
                remote.put(self._system, f"{self._root}/{BEST}",
                           f"{find.DIRECTORY}/{path.name}\n".encode())
        for path in old(list(there), finished):
            if find.MANIFEST in there[path]:
                self._system.rm_file(f"{self._place(path)}/{find.MANIFEST}")
            self._system.rm(self._place(path), recursive=True)

    def _copy(self, path: Path) -> None:
        """Copy a checkpoint, unless it is there."""
        began, place = time.monotonic(), self._place(path)
        manifest = (path / find.MANIFEST).read_bytes()
        if find.MANIFEST in self._steps_there().get(path, ()):
            if self._system.cat_file(f"{place}/{find.MANIFEST}") == manifest:
                return
            self._system.rm_file(f"{place}/{find.MANIFEST}")  # of another continuation
        for name, entry in json.loads(manifest)["files"].items():
            if not self._is_there(f"{place}/{name}", entry):
                remote.put(self._system, f"{place}/{name}", path / name)
                if not self._is_there(f"{place}/{name}", entry):
                    raise OSError(f"{place}/{name} has another checksum than what was uploaded")
        remote.put(self._system, f"{place}/{find.MANIFEST}", manifest)
        self._say(f"uploaded {self._train.upload.rstrip('/')}/{find.DIRECTORY}/{path.name} "
                  f"in {time.monotonic() - began:,.1f} s")

    def _place(self, path: Path) -> str:
        return f"{self._root}/{find.DIRECTORY}/{path.name}"

    def _steps_there(self) -> dict[Path, set[str]]:
        """Return the names of the files at the URL by checkpoint (as a path here), oldest first."""
        found: dict[Path, set[str]] = {}
        self._system.invalidate_cache()
        try:
            listed = self._system.find(f"{self._root}/{find.DIRECTORY}")
        except FileNotFoundError:
            listed = []
        for place in listed:
            step, _, name = place.rpartition(f"/{find.DIRECTORY}/")[2].partition("/")
            if find.is_step(step):
                found.setdefault(self._out / find.DIRECTORY / step, set()).add(name)
        return dict(sorted(found.items(), key=lambda item: find.step_of(item[0])))

    def _is_there(self, place: str, entry: dict) -> bool:
        """Return whether a file at the URL has the size and checksum of the manifest."""
        self._system.invalidate_cache()
        if not self._system.exists(place) or self._system.size(place) != entry["bytes"]:
            return False
        digest = xxhash.xxh3_128()
        for begin in range(0, entry["bytes"], _CHUNK_BYTES):
            end = min(begin + _CHUNK_BYTES, entry["bytes"])
            digest.update(remote.tried(partial(self._system.cat_file, place, begin, end), place,
                                       bool))
        return digest.hexdigest() == entry["xxh3"]
