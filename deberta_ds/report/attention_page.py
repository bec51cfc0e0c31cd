"""The page of attention's parts: five maps a head to point at, and the position tables' likeness.

Unusual: the script paints a map from the rounded integers that the pointer reads, one pixel a pair,
whose color says the sign and whose transparency says the size: it suits light and dark.
"""

import json
from pathlib import Path

import numpy as np

from deberta_ds.base.errors import UserError, of_extra
from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import format_count
from deberta_ds.evaluate.attention_parts import (
    PART_NAMES,
    HeadParts,
    Similarity,
    attention_parts,
    position_similarity,
)
from deberta_ds.release.reader import load_backbone
from deberta_ds.report.charts import Chart, Series
from deberta_ds.report.pages import render

MAX_PAIRS = 1_000_000  # about 5 MB of page
_POSITIVE, _NEGATIVE = (0x6C, 0x63, 0xF5), (0xE0, 0x86, 0x1C)  # as in script.js
_LABELED_TOKENS = 24  # next to a map, more would overlap
_STEPS = 9999  # of the integers that stand for a map's numbers


def write_attention(model_path: str, text: str, layers: list[int] | None, heads: list[int] | None,
                    out: Path, *, png: bool, tokenizer: str | None = None) -> list[Path]:
    """Write the page of `text` (and a picture next to it); return what was written."""
    picture = out.parent / f"{out.stem}.png"  # "." has no suffix to replace
    if png and picture == out:
        raise UserError(f"{out}: --out names the report; the picture gets its name with .png")
    model = load_backbone(model_path, tokenizer, for_text=True)
    config = model.model_config
    if layers is None:
        layers = sorted({0, config.num_layers // 2, config.num_layers - 1})
    if heads is None:
        heads = list(range(min(4, config.num_heads)))
    pieces, found = attention_parts(model, text, layers, heads)
    pairs = len(found) * len(pieces) ** 2
    if pairs > MAX_PAIRS:
        raise UserError(f"{format_count(pairs)} pairs of tokens are too many for a report (at most "
                        f"{format_count(MAX_PAIRS)}); choose fewer --layers or --heads")
    by_layer: dict[int, list[tuple]] = {}
    for one in found:
        by_layer.setdefault(one.layer, []).append(_head(one))
    write_atomic(out, render(
        "attention.html", model=str(model_path), text=text, pieces=json.dumps(pieces),
        shown=pieces, labeled=len(pieces) <= _LABELED_TOKENS, layers=by_layer,
        charts=_charts(position_similarity(model, layers))))
    if png:
        write_picture(picture, pieces, found)
    return [out, picture] if png else [out]


def _planes(one: HeadParts) -> list[tuple[str, np.ndarray, float, str]]:
    """Return (name, values, what full color stands for, unit) of each map; scores share a scale."""
    scores = {PART_NAMES.get(name, name): part for name, part in one.parts.items()}
    if len(scores) > 1:
        scores["sum of the scores"] = one.scores
    scale = max(float(np.abs(plane).max()) for plane in scores.values()) or 1.0
    return [*((name, plane, scale, "score") for name, plane in scores.items()),
            ("probability", one.probabilities, float(one.probabilities.max()), "share")]


def _head(one: HeadParts) -> tuple[str, list[tuple[str, str, float, str]], str]:
    """Return (title, maps, range of the colors) of a card; a map is (name, integers as JSON, what 1
    stands for, unit).
    """
    planes = _planes(one)
    maps = [(name, json.dumps(np.rint(plane / scale * _STEPS).astype(int).flatten().tolist(),
                              separators=(",", ":")), scale / _STEPS, unit)
            for name, plane, scale, unit in planes]
    return (f"Head {one.head}", maps, f"Scores from −{planes[0][2]:.3g} to {planes[0][2]:.3g}, "
            f"probabilities to {100 * planes[-1][2]:.3g} %.")


def colored(shares_LL: np.ndarray) -> np.ndarray:
    """Return uint8 [L, L, 4] of values in [-1, 1]: one color a sign, the size as opacity."""
    pixels = np.empty((*shares_LL.shape, 4), np.uint8)
    pixels[..., :3] = np.where((shares_LL < 0)[..., None], _NEGATIVE, _POSITIVE)
    pixels[..., 3] = np.rint(255 * np.abs(shares_LL).clip(0, 1))
    return pixels


_CHARTS = {
    "table": ("Relative table", "The table that all layers share, by signed distance."),
    "c2p": ("Projected for content to position", "As keys, the mean over a layer's heads; queries "
            "after their keys."),
    "p2c": ("Projected for position to content", "As queries, the mean over a layer's heads; "
            "queries after their keys."),
}
_MAX_LINES = 8  # colors of the page


def _charts(similarities: dict[str, list[Similarity]]) -> list[Chart]:
    """Return charts over the size of the distance; the shared table has a line for each sign."""
    charts = []
    for key, tables in similarities.items():
        title, note = _CHARTS.get(key, (key, ""))
        if key == "table":
            lines = [("query after key", tables[0], 1), ("query before key", tables[0], -1)]
        else:
            lines = [(table.name, table, 1) for table in tables[:_MAX_LINES]]
        series = [Series(name, sorted(
            (abs(float(distance)), float(cosine)) for distance, cosine in zip(
                table.distances, table.cosines, strict=True) if distance * sign >= 0),
            f"run{number}", "plain")
                  for number, (name, table, sign) in enumerate(lines)]
        last = float(tables[0].distances[-1])
        charts.append(Chart(key, title, note, "", series, last_x=last, x_name="distance",
                            legend=True))
    return charts


def write_picture(path: Path, pieces: list[str], found: list[HeadParts]) -> None:
    """Write a PNG with a row for each head."""
    with of_extra("pages", str(path)):
        from matplotlib.figure import Figure

    if len(found) > 40:
        raise UserError(f"{path}: a picture of {len(found)} heads is too tall (at most 40); choose "
                        "fewer --layers or --heads")
    rows = [_planes(one) for one in found]
    columns = len(rows[0])
    height = 2.1 * len(found)
    figure = Figure(figsize=(2.1 * columns + 1, height + 1.1))
    grid = figure.subplots(len(found), columns, squeeze=False)
    figure.subplots_adjust(0.9 / (2.1 * columns + 1), 0.7 / (height + 1.1), 0.99,
                           1 - 0.3 / (height + 1.1), 0.06, 0.06)
    labeled = len(pieces) <= _LABELED_TOKENS
    # A dollar sign would begin a formula.
    names = [piece.replace("$", r"\$") for piece in pieces]
    for one, row, planes in zip(found, grid, rows, strict=True):
        for axes, (name, plane, scale, _) in zip(row, planes, strict=True):
            axes.imshow(colored(plane / scale), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if one is found[0]:
                axes.set_title(name, fontsize=8)
            if one is found[-1] and labeled:
                axes.set_xticks(range(len(names)), names, rotation=90, fontsize=5)
        row[0].set_ylabel(f"layer {one.layer}, head {one.head}", fontsize=8)
        if labeled:
            row[0].set_yticks(range(len(names)), names, fontsize=5)
    figure.savefig(path, dpi=120)
