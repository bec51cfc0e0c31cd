"""The model's shape where a run file leaves it open.

What neither the file nor the command line says follows, in this order,

1. the checkpoint that the run goes on from: a run keeps its shape, whatever its source has become;
2. the source of `[init]`: all of [model], and the depth of its generator, or how many layers of
   each init.layers and init.generator_layers list; with a tokenizer of other tokens `vocab_size`
   follows that;
3. the tokenizer: `vocab_size` is its number of ids, padded to a multiple of 64.

A preset counts as said, but for its vocabulary: that is the published tokenizer's.
"""

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.base.user_code import is_own
from deberta_ds.config.model import RANDOM, padded_rows
from deberta_ds.config.objective import KINDS
from deberta_ds.config.run_config import FREE_FIELDS, ModelConfig


def complete(values: dict, origins: dict[str, str], resume: str = "auto") -> None:
    """Fill what a run file leaves open into its `values`, and where it came from into `origins`.

    `resume` is what --resume says. What cannot be followed because the file is wrong is left to
    `config.load`, which names it. Raises UserError if the source of [init] is no model, or if there
    is no such tokenizer and nothing else says the vocabulary.
    """
    if not isinstance(values.get("model", {}), dict):
        return
    source, generator = (_text(values, "init", key).removeprefix(RANDOM)
                         for key in ("source", "generator"))
    tokenizer = _text(values, "data", "tokenizer")
    shape, origin = _checkpoint_shape(values.get("out_dir"), resume)
    if not shape and (source or generator):
        shape, origin = _source_shape(source, generator), f"[init] {source or generator}"
        for key, name in (("model.num_layers", "layers"),
                          ("objective.generator_layers", "generator_layers")):
            if isinstance(chosen := values["init"].get(name), list) and chosen:
                shape[key] = len(chosen)
        from deberta_ds.release.initialize import has_other_tokens
        from deberta_ds.tokenizer import Tokenizer

        if tokenizer and Path(tokenizer).exists() and has_other_tokens(
                source or generator, Tokenizer(tokenizer)):
            shape |= _vocabulary(tokenizer, is_needed=True)[0]
            origin += f" with the tokens of {tokenizer}"
    elif not shape and _is_open("model.vocab_size", values, origins):
        of_preset = "vocab_size" in values.get("model", {})
        shape, origin = _vocabulary(tokenizer, is_needed=not of_preset)
    for key, value in shape.items():
        follows = key == "model.vocab_size" or source and (
            key.startswith("model.") or _has_generator(_text(values, "objective", "kind")))
        if follows and _is_open(key, values, origins):
            section, name = key.split(".")
            values.setdefault(section, {})[name] = value
            origins[key] = origin


def _has_generator(kind: str) -> bool:
    from deberta_ds.objectives.build import objective_named

    with suppress(UserError):  # of one's own: said when the run is checked
        return (kind in KINDS or is_own(kind)) and "generator" in objective_named(kind).HEADS
    return False


def _is_open(key: str, values: dict, origins: dict[str, str]) -> bool:
    section, name = key.split(".")
    of_preset = key == "model.vocab_size" and origins.get(key, "").startswith("preset ")
    return of_preset or name not in values.get(section, {})


def _text(values: dict, section: str, name: str) -> str:
    """Return a text of a run file, "" where there is none or something else."""
    found = values.get(section)
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) else ""


def _vocabulary(tokenizer: str, *, is_needed: bool) -> tuple[dict[str, Any], str]:
    """Return the vocabulary that follows a tokenizer; nothing where there is no such file, unless
    nothing else says the vocabulary.
    """
    if not tokenizer or not (is_needed or Path(tokenizer).exists()):
        return {}, ""
    from deberta_ds.tokenizer import Tokenizer

    size = Tokenizer(tokenizer).size
    return {"model.vocab_size": padded_rows(size)}, f"the {size:,} ids of {tokenizer}"


def _checkpoint_shape(out_dir: Any, resume: str) -> tuple[dict[str, Any], str]:
    """Return (shape, origin) by a checkpoint of the run, any whose run.json is whole: they are all
    of one shape. Both are empty where there is none.
    """
    has_own = isinstance(out_dir, str) and (Path(out_dir) / "checkpoints").is_dir()
    if resume == "never" or resume == "auto" and not has_own:
        return {}, ""
    from deberta_ds.checkpoint.find import list_finished, local_copy, read_run_record

    for path in list_finished(out_dir)[::-1] if resume == "auto" else [local_copy(resume)]:
        with suppress(UserError, KeyError, TypeError):  # resuming will say what is wrong with it
            run = read_run_record(path).run(path)
            return _flat(run.model, run.objective.generator_layers), f"checkpoint {path}"
    return {}, ""


def _source_shape(source: str, generator: str) -> dict[str, Any]:
    from deberta_ds.release.reader import read_shapes

    shapes = read_shapes(source or generator)
    if generator:
        generators = read_shapes(generator)
        shapes["generator"] = generators.get("generator", generators["main"])
    layers = shapes["generator"].num_layers if "generator" in shapes else 0
    return _flat(shapes["main" if source else "generator"], layers)


def _flat(model: ModelConfig, generator_layers: int) -> dict[str, Any]:
    shape = {f"model.{name}": value for name, value in dataclasses.asdict(model).items()}
    for key in FREE_FIELDS:  # how a model is computed
        del shape[key]
    return shape | {"objective.generator_layers": generator_layers}
