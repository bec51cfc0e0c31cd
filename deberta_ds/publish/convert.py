"""Read a model of any format, write another, check it, and say what happened to every part."""

import glob
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.base.version import __version__
from deberta_ds.publish.hf import write_hugging_face
from deberta_ds.publish.onnx_files import require_onnx, write_onnx
from deberta_ds.release import foreign, model_files, networks
from deberta_ds.release.networks import Network, Release
from deberta_ds.release.read_back import check_hugging_face, check_tensors, check_tokenizer
from deberta_ds.release.reader import read_release

RECORD = "conversion.json"  # what a directory was written from, and how
FILES = {"main": (model_files.PICKLE, "model_config.json"),  # microsoft's names on the Hub
         "generator": ("pytorch_model.generator.bin", "generator_config.json")}


@dataclass(frozen=True)
class Summary:
    """What a conversion did, as lines to print; `warnings` are differences a user must know."""

    notes: tuple[str, ...]
    checks: tuple[str, ...]
    warnings: tuple[str, ...]
    place: Path | None = None  # that was read: of a run, its checkpoint

    def findings(self) -> list[str]:
        """Return the lines after the notes: warnings and what was checked."""
        return [*(f"WARNING: {line}" for line in self.warnings),
                *(f"checked: {line}" for line in self.checks)]


Finish = Callable[[Path, Summary], object]


def convert(source: str | Path, out: str | Path, to: str, *, tokenizer: str | Path | None = None,
            onnx: str | None = None, precision: str = "", finish: Finish | None = None) -> Summary:
    """Write the model at `source` to directory `out` in format "hf", "ms" or "ours".

    `tokenizer` is the path of the model's tokenizer, where `source` has none; `onnx`, of "hf" only,
    is "fp32" or "int8" for ONNX files as well. `precision` ("fp32", "bf16", "fp16") is that of the
    weights, by default the source's. `finish` writes what else belongs there, before it is there.
    UserError if the source cannot be read, and as `write_release`.
    """
    if onnx:
        require_onnx()  # before anything is read
    check_out(out)
    release = read_release(source, tokenizer)
    if precision:
        release.store_in(precision)
    return write_release(release, source, Path(out), to, onnx, finish)


def write_release(release: Release, source: str | Path, out: Path, to: str, onnx: str | None = None,
                  finish: Finish | None = None) -> Summary:
    """Write a release to the new directory `out`; `source` is what conversion.json says of it.

    It is written next to `out`, checked, and only then moved there. UserError if a check fails.
    """
    if out.is_symlink():
        out = out.resolve()
    _clean_up_after_killed(out)
    fresh = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    described = [f"read: {name}: {_shape(network)}" for name, network in release.networks().items()]
    changes = networks.changes_beyond_reach(release)
    if to == "hf":
        release = _with_readable_tables(release)
    try:
        fresh.mkdir(parents=True)
        notes = [*described, *release.notes, *WRITERS[to](release, fresh)]
        checks, warnings = _check(release, fresh, to)
        if onnx:
            checks += write_onnx(release, fresh, onnx)
        notes = [note.replace(str(fresh), str(out)) for note in notes]
        record = {"source": str(source), "content_hashes": release.identity, "format": to,
                  "version": __version__, "notes": notes, "checks": checks}
        write_atomic(fresh / RECORD, json.dumps(record, indent=1) + "\n")
        summary = Summary(tuple(notes), tuple(checks), (*changes, *warnings), release.place)
        if finish:
            finish(fresh, summary)
        check_out(out)  # it took minutes
        os.replace(fresh, out)
    except UserError as error:
        raise UserError(str(error).replace(str(fresh), str(out))) from error
    except OSError as error:
        if isinstance(error.filename, str | Path):
            error.filename = str(error.filename).replace(str(fresh), str(out))
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return summary


def check_out(out: str | Path) -> None:
    """Raise UserError unless `out` can be made as a new directory; nothing is ever replaced."""
    if "://" in str(out):
        raise UserError(f"{out}: is a URL; name a local directory")
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a directory to write")
    if out.resolve() == Path.cwd() or out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out}: is not empty, or is the working directory; name a new directory, "
                        "or delete this one first")


def _clean_up_after_killed(out: Path) -> None:
    """Delete what conversions to `out` that were killed have left next to it.

    The number in a name is the writer's process id: a living one is at work (or something else that
    happens to have its number, which costs a cleaning).
    """
    for path in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):
        number = path.name.removeprefix(f".{out.name}.").removesuffix(".tmp")
        if number.isdigit() and (int(number) == os.getpid() or not psutil.pid_exists(int(number))):
            shutil.rmtree(path)


def _with_readable_tables(release: Release) -> Release:
    plain, notes = {}, list(release.notes)
    for name, network in release.networks().items():
        plain[name], more = networks.with_a_row_a_distance(network, name)
        notes += more
    return replace(release, main=plain["main"], generator=plain.get("generator"), notes=notes)


def _shape(network: Network) -> str:
    config = network.config
    parts = {"rtd_head.": "replaced-token head", "mlm_head.": "masked-LM head",
             "positions.weight": "absolute position table", "words.delta": "GDES delta",
             "classifier.": "classifier", "proj.": "projection", "qa_outputs.": "answer head"}
    heads = [label for prefix, label in parts.items() if network.has(prefix)]
    return (f"{config.num_layers} layers x {config.hidden_size}, vocabulary {config.vocab_size}, "
            f"{', '.join(['encoder', *heads])}")


def _check(release: Release, out: Path, to: str) -> tuple[list[str], list[str]]:
    checks = [f"{check_tensors(release, out)} tensors read back bit for bit"]
    warnings = []
    if to == "hf":
        checks += check_hugging_face(release, out)
        if not model_files.open_tokenizer(release.tokenizer_files):
            warnings = ["no tokenizer: the source has none; give its path with --tokenizer"]
        elif differing := check_tokenizer(out):
            warnings = [f"AutoTokenizer differs from the training tokenizer on {line}"
                        for line in differing]
        else:
            checks.append("AutoTokenizer gives the ids of the training tokenizer")
    return checks, warnings


def write_microsoft(release: Release, out: Path) -> list[str]:
    """Write a directory in microsoft's format; return notes on what was written and derived."""
    notes: list[str] = []
    own = model_files.pad_id_of(release.tokenizer_files)
    for name, network in release.networks().items():
        weights, config = FILES[name]
        tensors = microsoft_tensors(network, notes)
        model_files.write_bin(out / weights, tensors)
        values = foreign.to_microsoft(network.config, network.rest | own)
        write_atomic(out / config, json.dumps(values, indent=2) + "\n")
        notes.append(f"written: {out / weights} ({len(tensors)} tensors)")
        if not network.config.absolute_input and "positions.weight" not in network.tensors:
            notes.append(f"absent: {name} has no absolute position table in the source; the "
                         "official code starts it at random")
    return notes + model_files.copy_tokenizer_files(release.tokenizer_files, out)


def microsoft_tensors(network: Network, notes: list[str]) -> dict[str, Tensor]:
    """Return the tensors under microsoft's names, v1's zero key biases (official code) included."""
    config = network.config
    tensors = network.tensors
    if not config.key_bias:
        tensors = networks.with_zero_key_biases(network)
        notes.append("derived: zero key biases, which the official code gives v1 models")
    theirs = foreign.to_theirs(tensors, config)
    return {(foreign.PREFIX if foreign.is_encoder_name(name) else "") + name: tensor
            for name, tensor in theirs.items()}


WRITERS = {"hf": write_hugging_face, "ms": write_microsoft, "ours": model_files.write_ours}
