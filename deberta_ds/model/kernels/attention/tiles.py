"""Tile sizes of the Triton kernels, from a table (docs/attention.md says how to refresh it)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

LONG_ROW = 1024
TABLE = Path(__file__).with_name("tiles.json")


class Tile(NamedTuple):
    """Query rows and key columns of a program's tile, and how Triton runs it."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@lru_cache
def table() -> dict:
    """Return {architecture: {head size: {class: {direction: [m, n, warps, stages]}}}}.

    class: "short" or "long" sequences, or "gathered" queries; next to them the kernels of the bias
    matrices. "sm100" overrides single "sm90" entries; it is not keyed by head size.
    """
    return json.loads(TABLE.read_text())


@lru_cache
def choose(
    capability: tuple[int, int], size: int, length: int, direction: str, gathered: bool,
    far: bool = False,
) -> Tile:
    """Return the tile of a flash kernel for a device capability, head size and row length.

    direction: "forward", "query" (backward by query blocks) or "key" (backward by key blocks).
    gathered: gathered queries, which read the position terms pair by pair. far: pairs
    beyond the band, whose loops take registers, so that tiles for short rows would spill.
    """
    architecture = _architecture(capability)
    length_class = "gathered" if gathered else "long" if far or length > LONG_ROW else "short"
    return Tile(*table()[architecture][str(max(size, 32))][length_class][direction])


@lru_cache
def choose_product(capability: tuple[int, int], size: int, kind: str) -> Tile:
    """Return the tile of a product with a bias matrix: rows, columns or table rows, warps, stages.

    kind: "bias" (write it), "rows" and "table" (their gradients), "spread" (gathered queries).
    """
    own = table()["sm100"] if (10, 0) <= capability < (12, 0) else {}
    return Tile(*own.get(kind, table()[_architecture(capability)][str(max(size, 32))][kind]))


def _architecture(capability: tuple[int, int]) -> str:
    large = (9, 0) <= capability < (12, 0)  # sm_120 has the shared memory of sm_86
    return "sm90" if large else "sm80"
