"""Which checkpoints a run has, here or at a URL, and whether they are whole.

    OUT/checkpoints/step-00000100/
        rank-00000.safetensors ...   what each rank holds (saved_state.py)
        layout.json                  where every parameter lies in those files
        run.json                     step, rows seen, corpus content hashes, configs, versions
        spm.model                    the tokenizer
        manifest.json                every file with its size and xxh3; written last
    OUT/best                         points to the checkpoint with the best train.best_metric

A directory without manifest.json is a save that never finished. There is no `latest` file: every
file is verified before a tensor is loaded, and only a verified directory is ever loaded.

What lies at a URL or on the Hugging Face Hub is copied to the cache: of a URL to a directory that
is named by what is listed there (sizes, times, ETags), so what has changed is fetched again.
"""

import fcntl
import itertools
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import Field

from deberta_ds.base.errors import UserError, first_line, listed, looked_in, naming
from deberta_ds.base.files import MANIFEST, cache_directory, parse_json, read_json, typed, xxh3
from deberta_ds.base.numbers import counted
from deberta_ds.cluster import dist
from deberta_ds.config.run_config import RunConfig, from_dict
from deberta_ds.engine.ds_config import DeepSpeedConfig, recorded
from deberta_ds.engine.state import CheckpointError
from deberta_ds.files import remote
from deberta_ds.objectives.base import Metric
from deberta_ds.tracking.log import METRICS_FILE

DIRECTORY, BEST = "checkpoints", "best"  # in a run's out_dir
RUN_FILE, LAYOUT_FILE = "run.json", "layout.json"  # in a checkpoint's directory
RANK_FILE = re.compile(r"rank-(\d{5,})\.safetensors")
VERSION = 2  # of the manifest
T = TypeVar("T")
_NAME = re.compile(r"step-(\d{8,})")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB = "hf://"
_NEVER_READ = ["*.h5", "*.ot", "*.msgpack", "*.onnx", "onnx/*", "openvino/*"]  # other frameworks'
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from; `warnings` name newer ones that are not whole, and why."""

    path: Path | None
    warnings: tuple[str, ...] = ()
    begun_from: str = ""  # the PATH of --resume from which the run began


@dataclass
class Best:
    """What `train.best_metric` has come to."""

    score: str = ""  # a metric's key; empty: none is looked at
    scored: str = field(default="", kw_only=True)  # checksum of what it is a score of
    value: float | None = None
    step: int = 0
    without: int = 0  # evaluations since then, none of them better

    def accept(self, metric: Metric, step: int, value: float | None) -> bool:
        """Take note of an evaluation; return whether it is the best one so far."""
        if value is not None and math.isfinite(value) and (
                self.value is None or metric.is_better(value, self.value)):
            self.value, self.step, self.without = value, step, 0
            return True
        self.without += 1
        return False

    def __str__(self) -> str:
        return f"{self.score} = {self.value:.6g} at step {self.step:,}" if self.value is not None \
            else f"{self.score} was never measured"


@dataclass(frozen=True)
class RunRecord:
    """run.json of a checkpoint: where a run was when it was saved, and of what run it is."""

    step: _Count
    sequences_seen: _Count
    tokens_seen: _Count
    seconds: float  # of training, over all starts
    world_size: Annotated[int, Field(ge=1)]
    config: dict[str, Any]  # the run file, complete
    deepspeed: dict[str, Any]
    content_hashes: dict[str, str]  # {path of a corpus, or FILE.py:NAME: checksum of its content}
    tokenizer_sha256: str
    versions: dict[str, str]
    recent_losses: list[float]  # for the spike rule
    since_line: dict[str, float]  # sums since the last logged line
    time_use: dict[str, float]  # seconds of saves and evaluations
    best: Best
    begun_from: str  # the PATH of --resume from which the run began

    def run(self, place: str | Path) -> RunConfig:
        """Return the run's config; `place` is named in errors."""
        return from_dict(self.config, str(place))


def read_run_record(path: str | Path) -> RunRecord:
    """Return run.json of a checkpoint directory. Raises CheckpointError."""
    file = Path(path) / RUN_FILE
    if not file.exists():
        raise CheckpointError(f"{file}: missing; {path} is not a checkpoint directory "
                              "(those are named OUT/checkpoints/step-NNNNNNNN)")
    try:
        with naming(file):
            data = file.read_bytes()
        record = typed(RunRecord, parse_json(data))
        recorded(record.deepspeed)
    except UserError as error:
        raise CheckpointError(f"{error}; use an older checkpoint") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: damaged: {error}; use an older checkpoint") from None
    return record


def rank_file(rank: int) -> str:
    """Return the name of a rank's tensors in a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def path_of(out_dir: str | Path, step: int) -> Path:
    """Return where a run keeps the checkpoint of a step."""
    return Path(out_dir) / DIRECTORY / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint directory that is named as `path_of` does."""
    return int(path.name.removeprefix("step-"))


def is_step(name: str) -> bool:
    """Return whether a file name is that of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def list_steps(out_dir: str | Path) -> list[Path]:
    """Return the checkpoint directories of a run, whole or not, oldest first."""
    directory = Path(out_dir) / DIRECTORY
    found = [p for p in directory.glob("step-*") if is_step(p.name)]
    return sorted(found, key=step_of)


def list_finished(out_dir: str | Path) -> list[Path]:
    """Return those of `list_steps` whose save ended; their files may have been damaged since."""
    return [path for path in list_steps(out_dir) if (path / MANIFEST).exists()]


def is_unsaved_run(directory: Path) -> bool:
    """Return whether a run was begun here that has written its metrics, but no checkpoint yet."""
    return (directory / METRICS_FILE).is_file() and not list_finished(directory)


def newest(directory: str | Path) -> Path:
    """Return a checkpoint directory itself, or the newest finished one of a run's out_dir.

    Of a URL it is a copy in the cache.
    """
    directory = local_copy(directory)
    if (directory / RUN_FILE).exists():
        return directory
    finished = list_finished(directory)
    if not finished and is_unsaved_run(directory):
        raise CheckpointError(f"{directory}: this run has saved no checkpoint yet; run its command "
                              "again, and end it after train.save_every steps or with one Ctrl-C, "
                              "which saves before it stops")
    if not finished:
        raise CheckpointError(f"{directory}: no checkpoint; give the out_dir of a run, or one of "
                              f"its {DIRECTORY}/step-NNNNNNNN")
    return finished[-1]


def read_newest(directory: str | Path, read: Callable[[Path], T]) -> T:
    """Return what `read` returns of the checkpoint that `newest` names.

    A run that goes on may delete it meanwhile, once it has a newer one, which is read then.
    """
    path = newest(directory)
    try:
        return read(path)
    except (UserError, OSError):
        if (path / MANIFEST).exists() or newest(directory) == path:
            raise
    return read_newest(directory, read)


def find(out_dir: str | Path, resume: str) -> Found:
    """Return what `--resume auto|never|PATH` means for a run; verified, equal on every rank.

    auto: the newest whole checkpoint; newer broken ones are named. PATH: that one, or the newest
    whole one that a run which began there has saved here, so that a command can be given again
    after an interruption. Raises CheckpointError if there are finished checkpoints but none is
    whole, if PATH is not whole, or if `never` meets any. A run killed in its very first save has an
    unfinished one only, and starts from step 0.
    """
    candidates = dist.from_main(lambda: list_steps(out_dir))
    if resume == "never":
        if candidates:
            raise CheckpointError(f"{out_dir}/{DIRECTORY} holds checkpoints, but --resume never "
                                  "was given; use --resume auto, or another out_dir")
        return Found(None)
    begun_from = ""
    if resume != "auto":
        place = dist.together(lambda: local_copy(resume))
        begun_from = os.path.realpath(place)
        candidates = [place, *dist.from_main(lambda: [
            path for path in list_finished(out_dir) if os.path.realpath(path) != begun_from
            and _recorded(path, "begun_from") == begun_from])]
    skipped: list[str] = []
    whole: Path | None = None
    for path in reversed(candidates):
        if not (problems := problems_of(path)):
            whole = path
            break
        skipped.append(f"{path}: {listed(problems)}")
    else:
        if begun_from:
            if of_a_run := dist.from_main(lambda: list_finished(place)):
                raise CheckpointError(
                    f"{resume}: is a run; name a checkpoint, such as {of_a_run[-1]}")
            raise CheckpointError(f"{resume}: not a whole checkpoint: {listed(problems)}")
        if dist.from_main(lambda: list_finished(out_dir)):
            raise CheckpointError("no whole checkpoint to resume from:\n  " + "\n  ".join(skipped)
                                  + "\n  delete them to start from step 0")
    said = dist.from_main(lambda: whole and _recorded(whole, "begun_from"))
    return Found(whole, tuple(f"WARNING: checkpoint skipped: {line}" for line in skipped),
                 begun_from or said or "")


def problems_of(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint's files; each rank checks its share, all agree."""
    files, problems = dist.from_main(lambda: _read_manifest(path))
    share = {name: files[name] for name in sorted(files)[dist.rank()::dist.world_size()]}
    parts = dist.gather_objects(_problems_of_files(path, share))
    return [*problems, *itertools.chain(*parts)]


def problems_read_alone(path: Path) -> list[str]:
    """As `problems_of`, on one rank."""
    files, problems = _read_manifest(path)
    return problems + _problems_of_files(path, files)


def _read_manifest(path: Path) -> tuple[dict[str, dict], list[str]]:
    """Return ({file: size and checksum}, problems) of a checkpoint's manifest.

    It must name the file of every rank that saved, and every file that is there.
    """
    if not (path / MANIFEST).exists():
        return {}, ["no manifest.json: the save did not finish"]
    try:
        with naming(path / MANIFEST):
            data = (path / MANIFEST).read_bytes()
        manifest = parse_json(data)
        name = _NAME.fullmatch(path.name)
        version, files = manifest["version"], manifest["files"]
        if name and manifest["step"] != int(name[1]):
            raise ValueError
        for entry in files.values():
            int(entry["bytes"]), str(entry["xxh3"])
        if version != VERSION:
            return {}, [f"manifest.json has version {version}; this program reads {VERSION}"]
        ranks, saved_by = manifest["world_size"], _recorded(path, "world_size")
        if saved_by is not None and ranks != saved_by:
            return {}, [f"manifest.json is of {ranks} ranks, {RUN_FILE} of {saved_by}"]
        wanted = {RUN_FILE, LAYOUT_FILE, *map(rank_file, range(int(ranks)))}
    except UserError as error:  # of reading it
        return {}, [str(error)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # not what we write
        return {}, ["manifest.json is damaged"]
    # os.walk: a listing says what is a file, and a rank of 4,096 need not ask for each.
    there = {Path(directory, name).relative_to(path).as_posix()
             for directory, _, names in os.walk(path) for name in names
             if not name.startswith(".")} - {MANIFEST}
    unsafe = [name for name in files if ".." in Path(name).parts or Path(name).is_absolute()
              or "\0" in name]
    problems = [f"manifest.json names {name}, outside the directory" for name in unsafe]
    problems += [f"manifest.json does not name {name}" for name in
                 sorted((wanted | there) - files.keys())[:5]]
    return ({}, problems) if unsafe else (files, problems)


def _recorded(path: Path, field: str) -> Any:
    """Return what run.json says; None if it cannot be read, which its checksum will say."""
    try:
        return read_json(path / RUN_FILE).get(field)
    except UserError:
        return None


def _problems_of_files(path: Path, files: dict[str, dict]) -> list[str]:
    return [problem for name, entry in files.items()
            if (problem := _file_problem(path / name, entry))]


def _file_problem(file: Path, entry: dict) -> str | None:
    try:
        if not file.is_file():
            return f"{file.name} is missing"
        size = file.stat().st_size
        if size != entry["bytes"]:
            return f"{file.name} has {size} bytes, not {entry['bytes']} (truncated?)"
        if xxh3(file) != entry["xxh3"]:
            return f"{file.name} has another checksum than when it was saved (flipped bits)"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return None


def layout_changes(record: RunRecord, ds: DeepSpeedConfig) -> str:
    """Return "2 ranks, ZeRO-3, fp32 -> 1 rank, ..." if a checkpoint's layout differs, or ""."""
    saved, now = (f"{counted(ranks, 'rank')}, ZeRO-{one.stage}, {one.precision}" for ranks, one in (
        (record.world_size, recorded(record.deepspeed)), (dist.world_size(), ds)))
    return f"{saved} -> {now}" if saved != now else ""


def local_copy(source: str | Path) -> Path:
    """Return where a run, checkpoint or model lies on this machine.

    `source`: a path; a URL, of a run (its newest whole checkpoint), its best, one of its
    checkpoints or a model; hf://OWNER/NAME, also with @REVISION, or OWNER/NAME where neither that
    path nor a directory OWNER exists. Raises UserError.
    """
    name = str(source)
    if name.startswith(_HUB) or (_HUB_NAME.fullmatch(name) and not Path(name).parent.exists()):
        return _of_the_hub(name)
    return _of_a_url(name.rstrip("/")) if "://" in name else Path(source)


def _of_a_url(url: str) -> Path:
    system, root, found = remote.listed_at(url)
    if not found:
        raise UserError(f"{url}: nothing is there; check the address")
    if root in found:
        if url.rpartition("/")[2] != BEST:
            raise UserError(f"{url}: is a file; name the directory of a run or a model")
        text = remote.tried(lambda: system.cat_file(root), url, bool).decode(errors="replace")
        return _of_a_url(f"{url.rpartition('/')[0]}/{text.strip()}")
    whole = re.compile(re.escape(f"{root}/{DIRECTORY}/") + r"(step-\d{8,})/" + re.escape(MANIFEST))
    if steps := [match[1] for path in found if (match := whole.fullmatch(path))]:
        return _of_a_url(f"{url}/{DIRECTORY}/{max(steps, key=lambda step: int(step[5:]))}")
    if any(path.startswith(f"{root}/{DIRECTORY}/") for path in found):
        raise UserError(f"{url}: no whole checkpoint; the upload of the first one has not ended")
    version = xxhash.xxh3_64_hexdigest(repr(sorted(found.items())).encode())
    place = cache_directory(remote.DEFAULT_CACHE.directory) / "models" / version
    place.mkdir(parents=True, exist_ok=True)
    with open(place / ".lock", "w") as held:  # one of a node's ranks fetches, the others wait
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(held, fcntl.LOCK_EX)
        return Path(remote.fetch(url, cache=str(place)))


def _of_the_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, revision = name.removeprefix(_HUB).partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None,
                                      ignore_patterns=_NEVER_READ))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"{name}: no such file or directory{looked_in(name)}, and no model that "
                        f"can be fetched from the Hugging Face Hub ({first_line(error)}); check "
                        "the name, log in with `hf auth login`, or download it elsewhere and name "
                        "its directory") from error
