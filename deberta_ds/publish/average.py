"""The mean of several models' weights, such as the last checkpoints of a run.

Averages of recent checkpoints reach in fewer steps what the newest one alone reaches later, as long
as the learning rate has not fallen (LAWA, arXiv 2209.14981; figures: docs/evidence/recipes.md).
"""

import dataclasses
from pathlib import Path

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.checkpoint.find import DIRECTORY, list_finished
from deberta_ds.config.model import FREE, without_unused
from deberta_ds.release.networks import Release, derive_words
from deberta_ds.release.reader import read_release


def last_checkpoints(run: str | Path, count: int) -> list[Path]:
    """Return the `count` newest finished checkpoints of a run; UserError if it has fewer."""
    if not (Path(run) / DIRECTORY).is_dir():
        raise UserError(f"{run}: no run, it has no {DIRECTORY}/; name the out_dir of a run")
    found = list_finished(run)
    if len(found) < count:
        fewer = "ask for fewer with --last, or " if len(found) > 1 else ""
        raise UserError(f"{run}: has {len(found)} finished checkpoints in {DIRECTORY}/, not "
                        f"{count}; {fewer}raise train.keep in the run file")
    return found[-count:]


def average(models: list[str | Path]) -> Release:
    """Return the mean of models of one shape and tokenizer: fp32, added up in float64.

    Any that `read_release` reads; one is in memory at a time, next to the sums. UserError for
    models that differ in shape, heads, labels or tokenizer.
    """
    first = read_release(models[0])
    digests = {f"{models[0]}: {name}": digest for name, digest in first.identity.items()}
    sums = {name: {key: tensor.double() for key, tensor in network.tensors.items()}
            for name, network in first.networks().items()}
    form = _form(first)
    tables = {name: network.source_table for name, network in first.networks().items()}
    for network in first.networks().values():
        network.tensors = {}
    for place in models[1:]:
        other = read_release(place)
        own = other.tokenizer
        digests |= {f"{place}: {name}": digest for name, digest in other.identity.items()}
        if own and first.tokenizer and own.sha256 != first.tokenizer.sha256:
            raise UserError(f"{place}: has another tokenizer than {models[0]}; only models of one "
                            "tokenizer can be averaged")
        found = _form(other)
        for key in sorted(form | found):
            if form.get(key) != found.get(key):
                raise UserError(f"{place}: its {key} is not as in {models[0]}; only models of one "
                                "shape can be averaged")
        if own:  # the newest has its files longest: a run deletes its oldest checkpoint
            first.tokenizer, first.tokenizer_files = own, other.tokenizer_files
        for name, network in other.networks().items():
            for key, tensor in network.tensors.items():
                sums[name][key] += tensor
            table, more = tables[name], network.source_table
            tables[name] = None if table is None or more is None else table.double() + more
    for name, network in first.networks().items():
        network.tensors = {key: (total / len(models)).to(torch.float32)
                           for key, total in sums.pop(name).items()}
        table = tables[name]  # from which transformers would compute the mean model
        network.source_table = None if table is None else (table / len(models)).float()
    derive_words(first)  # the sum of the rounded means, as every reader forms it
    first.notes, first.identity = [f"averaged: {place}" for place in models], digests
    return first


def _form(release: Release) -> dict[str, object]:
    """Return what a model computes with next to the values of its weights."""
    form: dict[str, object] = {}
    for name, network in release.networks().items():
        values = dataclasses.asdict(without_unused(network.config))
        form |= {f"{name} {key}": value for key, value in values.items() if key not in FREE}
        form |= {f"{name} {key}": tensor.shape for key, tensor in network.tensors.items()}
        form[f"{name} label2id"] = network.rest.get("label2id")
    return form
