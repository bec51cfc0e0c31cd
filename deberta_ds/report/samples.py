"""What a run puts for the masks of a text, beside the same network untrained."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from deberta_ds.evaluate.fill_mask import Filling, fill_mask, load_masked_lm
from deberta_ds.model.init import init_parameters
from deberta_ds.release.pretrained import LoadedModel
from deberta_ds.report.tables import Cell, Table

PROPOSALS = 4


def filled_masks(run_directory: str | Path, texts: Sequence[str]) -> Table:
    """Return a table with a row for each [MASK] of `texts`; the generator's, where there is one.

    UserError if the run has no checkpoint, or a text no mask or no room.
    """
    trained = load_masked_lm(run_directory)
    untrained = _untrained(trained)
    rows = []
    for text in texts:
        pairs = zip(fill_mask(untrained, text, PROPOSALS), fill_mask(trained, text, PROPOSALS),
                    strict=True)
        for number, (before, after) in enumerate(pairs, start=1):
            rows.append([Cell(text if number == 1 else "", kind="text"), Cell(str(number)),
                         Cell(_proposals(before), kind="what text"),
                         Cell(_proposals(after), kind="text")])
    head = [Cell("Text", kind=""), Cell("Mask"), Cell("Untrained", kind=""),
            Cell("Newest checkpoint", kind="")]
    return Table("Masks filled", "The likeliest pieces for each mask, by the same network with "
                 "random weights and with the newest checkpoint's.", head, rows)


def _untrained(model: LoadedModel) -> LoadedModel:
    assert model.masked_lm is not None, "load_masked_lm refuses a model without"
    words, masked_lm = copy.deepcopy(model.masked_lm)
    init_parameters(nn.ModuleList([words, masked_lm]), model.model_config.init_std, seed=0)
    return replace(model, masked_lm=(words, masked_lm))


def _proposals(fillings: list[Filling]) -> str:
    return " · ".join(f"{filling.text} {filling.probability:.1%}" for filling in fillings)
