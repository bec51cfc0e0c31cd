"""Work units: done in any order, by any number of workers, each exactly once.

A job is a directory, a description and a list of named units. A unit writes its files atomically
and then its marker, `.units/NAME.json`; a restart runs only units without one. The output depends
on the description alone, never on the number of workers. Workers are processes
(concurrent.futures), or ranks under `mpirun -n N python -m mpi4py.futures script.py ...`, where
rank 0 works too. Or the units are shared out over the jobs of an array: part i of n does its units
and no more, on any host; the same command without a part then finishes.

Units that read inputs are named by their contents, and stay: where inputs have changed, the same
command does their units again and no others. Size, time of modification and inode of a local file,
its stamp, say at the first look whether it must be hashed again; `.inputs.json` of a job remembers
both.
"""

import fcntl
import itertools
import json
import multiprocessing
import os
import platform
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from deberta_ds.base.errors import UserError, listed, naming, still_at_work, tell
from deberta_ds.base.files import read_file, read_json, write_atomic, xxh3
from deberta_ds.cluster import signals
from deberta_ds.corpus.documents import BAD, Extent
from deberta_ds.files.remote import remote_state, stamp_of

Part = tuple[int, int] | None  # (i, n): units i, i + n, ... of n parts; None: all, and the end
Units = dict[str, list[Extent]]  # by their names, 32 hexadecimal digits
PLAN = ".job.json"
RECORDS = ".inputs*.json"
MARKERS = ".units"
LOCK = ".lock"
_TEMPORARY = ".*.tmp"  # what files.atomic_path writes first
_OWN = (PLAN, f"{LOCK}*", RECORDS, _TEMPORARY)
_NAME = re.compile("[0-9a-f]{32}(?![0-9a-f])")  # begins the names of what a unit of inputs writes
_OTHERS = ("{}: holds the output of other inputs or options (see {}); remove it or give another "
           "directory")
# Workers are this process's children and share its end (_die_with_parent). By default Python 3.14
# has a server start them.
FORK = multiprocessing.get_context("fork")


def identified(units: list[list[Extent]], out: str | Path, part: Part = None) -> Units:
    """Return the work units with the contents of local files as their states, by names that follow
    from these; a part of an array looks at the files of its own units alone.
    """
    extents = [extent for extent in extents_of(units, part) if extent.stamp]
    files = {extent.path: extent.stamp for extent in extents}
    known = read_inputs(out) | {extent.path: [extent.stamp, extent.state] for extent in extents
                                if extent.state != extent.stamp}  # by an earlier call
    new = [path for path, stamp in files.items() if known.get(path, [""])[0] != stamp]
    with futures.ThreadPoolExecutor() as pool, still_at_work(lambda: f"hash {len(new):,} inputs"):
        known |= {path: [files[path], state]
                  for path, state in zip(new, pool.map(_content, new), strict=True)}
    named = [[replace(one, state=known[one.path][1]) if one.path in files else one for one in unit]
             for unit in units]
    return {digest_of(f"{one.path} {one.kind} {one.start} {one.end} {one.state}{one.read or ''}"
                      for one in unit if one.kind != BAD): unit for unit in named}


def digest_of(parts: Iterable[str]) -> str:
    """Return one xxh3 digest of several lines."""
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _content(path: str) -> str:
    with naming(path):
        return f"{os.path.getsize(path)} bytes, xxh3 {xxh3(path)}"


def check_unchanged(extents: Iterable[Extent]) -> None:
    """Raise UserError for an input that is not the file that it was when the work was planned."""
    for extent in {extent.path: extent for extent in extents if extent.kind != BAD}.values():
        path, before = extent.path, extent.stamp or extent.state
        # A web server's versions are compared as it is read, a dataset of the Hub has a commit.
        if extent.stamp or "://" in path and not path.startswith("http"):
            with naming(path):
                now = stamp_of(os.stat(path)) if extent.stamp else remote_state(path)
            if now != before:
                raise UserError(f"{path}: changed while this command read it (from {before} to "
                                f"{now}); when nothing writes to it any more, run the same command "
                                "again: units of other files are kept")


def _of_part(units: Iterable, part: Part) -> list:
    return list(units)[part[0] - 1::part[1]] if part else list(units)


def extents_of(units: Iterable[list[Extent]], part: Part = None) -> list[Extent]:
    """Return what the units read, or those of a part of an array."""
    return list(itertools.chain.from_iterable(_of_part(units, part)))


def inputs_of(units: Units, part: Part = None) -> dict[str, list[str]]:
    """Return {path: [stamp, state]}."""
    return {extent.path: [extent.stamp, extent.state]
            for extent in extents_of(units.values(), part)}


def read_inputs(out: str | Path) -> dict[str, list[str]]:
    """Return `inputs_of` the units of a job, as it has noted them, or its parts."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(out).glob(RECORDS)):
        found |= read_json(path)
    return found


class AtWorkError(UserError):
    """Another process is at work in the directory of a job."""


@contextmanager
def job(directory: str | Path, description: dict, *, finished: str, part: Part = None,
        other: Path | None = None, units: Units | None = None) -> Iterator[bool]:
    """Context in which this process alone (or the parts of an array together) works in `directory`;
    yields whether the job is done.

    `description` is JSON of all that decides the output but the inputs, which the names of `units`
    do; `finished` is the file that is written last. UserError if the directory holds another job's
    output, or another process is at work in it. Temporary files of a killed run are removed at the
    start, markers (but of `units`) at the end. What another job left is taken for a first try that
    ended on an error if no file is finished here and `other`, where the markers of a job in two
    directories lie.
    """
    directory, home = Path(directory), Path(other or directory)
    if units is not None and not part:  # which does not know the contents of all inputs
        description = description | {"units": digest_of(units)}
    description = json.loads(json.dumps(description))  # as it is read
    if (directory / finished).exists() and (units or not (directory / MARKERS).exists()):
        check_description(directory, description, home)
        if part or _plan_of(directory) == description:
            yield True
            return
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_locked(directory, LOCK, shared=part is not None))
        if part:
            stack.enter_context(_locked(directory, f"{LOCK}-{part[0]}-of-{part[1]}", shared=False))
        check_description(directory, description, home)
        for leftover in [] if part else directory.rglob(_TEMPORARY):
            leftover.unlink(missing_ok=True)
        if units and not part:
            _renew(directory, home, units, finished)
        is_done = (directory / finished).exists()
        if not is_done:
            if not part or not _is_same_job(directory, description):
                write_plan(directory, description)
            (directory / MARKERS).mkdir(exist_ok=True)
            if units and directory == home:
                name = f".inputs-{part[0]}-of-{part[1]}.json" if part else ".inputs.json"
                write_atomic(home / name, json.dumps(inputs_of(units, part), indent=0))
        yield is_done
        if not part and not units:
            shutil.rmtree(directory / MARKERS, ignore_errors=True)


def _renew(directory: Path, home: Path, units: Units, finished: str) -> None:
    """Make ready for units of inputs that have changed, and say so; UserError if all have, or if
    they are only divided in another way.
    """
    digest, before, now = digest_of(units), read_inputs(home), inputs_of(units)
    if _plan_of(directory).get("units", digest) != digest and _is_begun(home):
        changed = [path for path in before | now
                   if before.get(path, [""])[-1] != now.get(path, [""])[-1]]
        if not before.keys() & now.keys() or not changed:
            raise UserError(_OTHERS.format(directory, directory / PLAN))
        if directory == home:
            missing = sum(not (home / MARKERS / f"{name}.json").exists() for name in units)
            tell(f"note: {directory}: other inputs than before ({listed(changed)}); "
                 f"{missing:,} of {len(units):,} units have to be done")
        (directory / finished).unlink(missing_ok=True)
    for path in list(directory.rglob("*")):  # of units that are no more
        if _NAME.match(path.name) and path.name[:32] not in units and path.name[:32] != digest:
            path.unlink()


def begin_again(directory: Path, description: dict, *, finished: str, part: Part,
                is_stale: Callable[[], bool]) -> None:
    """Make a directory ready for a job that is finished there for something else, and say so."""
    while is_stale():
        try:
            with _locked(directory, LOCK, shared=False):
                if is_stale():  # still, now that no other command can do it
                    tell(f"note: {directory}: of an earlier state of its input; done again")
                    write_plan(directory, description)
                    shutil.rmtree(directory / MARKERS, ignore_errors=True)
                    (directory / finished).unlink()
        except AtWorkError:
            if not part:
                raise
            time.sleep(0.1)  # another part does it


def write_plan(directory: Path, description: dict) -> None:
    """Say in a directory what job its files are of."""
    write_atomic(directory / PLAN, json.dumps(description, sort_keys=True, indent=1) + "\n")


def _is_begun(directory: Path) -> bool:
    """Return whether a job has finished a file there."""
    return any(not entry.is_dir() and not any(map(entry.match, _OWN))
               for entry in directory.rglob("*"))


def _plan_of(directory: Path) -> dict:
    """Return the plan in a directory; {} if there is none that can be read."""
    with suppress(UserError):
        return read_json(directory / PLAN)
    return {}


def _is_same_job(directory: Path, description: dict) -> bool:
    """Return whether a plan differs in the inputs at most."""
    return _plan_of(directory) | {"units": 0} == description | {"units": 0}


def check_description(directory: Path, description: dict, home: Path) -> None:
    """Raise UserError if a directory holds the begun output of another job."""
    path, is_begun = directory / PLAN, _is_begun(directory)
    if not path.exists():
        if is_begun:
            raise UserError(f"{directory}: not empty and not made by this command; remove it")
        return
    if not (is_begun or _is_begun(home)) or _is_same_job(directory, description):
        return
    if _plan_of(directory).get("version") != description.get("version"):
        raise UserError(f"{directory}: the output of another version of this program (see {path}); "
                        "what is finished can be used, but to go on or make it again, give another "
                        "directory")
    raise UserError(_OTHERS.format(directory, path))


@contextmanager
def _locked(directory: Path, name: str, *, shared: bool) -> Iterator[None]:
    """Context that holds a lock, which the system gives up when this process dies."""
    path = directory / name
    with naming(path):
        descriptor = _take_lock(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        if not shared:  # other parts may hold it
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _take_lock(path: Path, kind: int) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise AtWorkError(
                f"{path.parent}: another command is at work here ({owner or 'just started'}); let "
                "it end, or give another directory") from None
        except OSError as error:  # a file system without locks
            tell(f"note: {path.parent}: cannot be locked ({error.strerror}); run one command at a "
                 "time here")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"pid {os.getpid()} on {platform.node()} since "
                          f"{time.strftime('%Y-%m-%d %H:%M:%S')}".encode(), 0)
                return descriptor
        os.close(descriptor)  # its owner has just ended and removed the file: take a new one


def run_units(directory: str | Path, function: Callable[..., dict], units: dict[str, tuple], *,
              workers: int, label: str, part: Part = None,
              keep: Callable[[dict], Any] = lambda result: result) -> list:
    """Return `keep(function(*units[name]))` for each name, in the order of `units`; [] for a part,
    of which only its units are done.

    `function` must be importable, write its files atomically, and return a JSON-able dict. `keep`
    takes from it what adds up: only what it returns stays in memory of all units at once.
    """
    markers = Path(directory) / MARKERS
    finished = {path.stem for path in markers.glob("*.json")}
    mine = _of_part(units.items(), part)
    missing = deque((markers, name, function, args) for name, args in mine
                    if name not in finished)
    with still_at_work(
            lambda: f"{label}: {len(mine) - len(missing):,} of {len(mine):,} units begun"):
        if under_mpi():
            _run_mpi(missing)
        elif (workers := min(workers, len(missing))) > 1:
            try:
                with futures.ProcessPoolExecutor(workers, FORK, _die_with_parent,
                                                 (os.getpid(),)) as pool:
                    drive(pool, missing, 2 * workers)
            except BrokenProcessPool as error:
                raise UserError("a worker process died (killed, or out of memory); run the same "
                                "command again, finished units are kept") from error
        else:
            while missing:
                run_one(*missing.popleft())
    return [] if part else [keep(json.loads(read_file(markers / f"{name}.json").data))
                            for name in units]


def run_one(markers: Path, name: str, function: Callable[..., dict], args: tuple) -> None:
    """Run a unit, and write its result as the marker that it is done."""
    result = function(*args)
    write_atomic(markers / f"{name}.json", json.dumps(result, sort_keys=True) + "\n")


def _run_mpi(missing: deque) -> None:
    if "mpi4py.futures" not in sys.modules:  # else every rank would do the whole job
        raise UserError("under mpirun, start it as: mpirun -n N python -m mpi4py.futures "
                        f"{sys.argv[0]} ... (rank 0 hands out the work)")
    from mpi4py import MPI
    from mpi4py.futures import MPIPoolExecutor

    others = MPI.COMM_WORLD.Get_size() - 1
    with MPIPoolExecutor() as pool:
        drive(pool, missing, 4 * others, work_here=True)


def drive(pool, missing: deque, depth: int, *, work_here: bool = False) -> None:
    """Keep `depth` units in flight until all are done; with `work_here`, do some in this process.

    While a unit runs here nothing new is submitted, hence a depth that lasts meanwhile; and what is
    still waiting when nothing is missing any more is taken back, so that all finish together.
    """
    running: dict[futures.Future, tuple] = {}
    try:
        while missing or running:
            while missing and len(running) < depth:
                unit = missing.popleft()
                running[pool.submit(run_one, *unit)] = unit
            unit = None
            if work_here and missing:
                unit = missing.popleft()
            elif work_here:  # that of the last future that no worker has begun
                mine = next((one for one in reversed(list(running)) if one.cancel()), None)
                unit = running.pop(mine) if mine else None
            if unit:
                run_one(*unit)
            done, _ = futures.wait(running, 0 if unit else None, futures.FIRST_COMPLETED)
            for future in done:
                del running[future]
                future.result()
    finally:  # where one has failed
        for future in running:
            future.cancel()


def under_mpi() -> bool:
    """Return whether mpirun started several processes."""
    return any(os.environ.get(name, "") not in ("", "1")
               for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this worker when its parent dies: kill -9 leaves no orphans."""
    signals.end_with_parent()
    if os.getppid() != parent:  # it died before
        os._exit(1)
