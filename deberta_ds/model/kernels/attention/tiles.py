"""Tile sizes of the kernels, by card, head size and kind of kernel (tiles.json)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

TILES = Path(__file__).with_name("tiles.json")  # to refresh it: docs/explanation/attention.md
LONG_ROW, _SHORT_ROW = 1024, 256


class Tile(NamedTuple):
    """Query rows and key columns of a program's tile, and how Triton runs it."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# Of gathered queries. Beyond the band, four warps for the columns would spill on sm_100.
COLUMN_TILES = {"columns": Tile(64, 64, 4, 3), "far columns": Tile(64, 64, 8, 3),
                "skew": Tile(16, 64, 4, 3)}


@lru_cache
def tile_table() -> dict:
    """Return {architecture: {head size: {class: {direction: [m, n, warps, stages]}}}}.

    class: "short" or "long" sequences, or "gathered" queries; next to them the kernels of the bias
    matrices. "sm100" overrides single "sm90" entries; it is not keyed by head size.
    """
    return json.loads(TILES.read_text())


@lru_cache
def choose_tile(capability: tuple[int, int], size: int, kind: str, length: int = 0,
                gathered: bool = False, far: bool = False) -> Tile:
    """Return the tile of a kernel for a device capability and head size.

    kind: of products with a bias matrix "bias" (write it), "rows", "content" and "table" (their
      gradients), "spread" (gathered queries); or a flash kernel, for sequences of a length:
      "forward", "query" (backward by query blocks) or "key" (backward by key blocks).
    gathered: gathered queries, which read the position terms pair by pair. far: pairs
      beyond the band, whose loops take registers, so that tiles for short rows would spill.
    """
    length_class = "gathered" if gathered else "long" if far or length > LONG_ROW else "short"
    own = tile_table()["sm100"] if (10, 0) <= capability < (12, 0) else {}
    table = tile_table()[architecture_of(capability)][str(max(size, 32))]
    return Tile(*(table | table[length_class] | own)[kind])


def rows_tile(x: Tensor, kind: str) -> Tile:
    """Return the tile of a product by residue; short sequences would not fill a large one."""
    tile = choose_tile(capability_of(x.device), x.shape[-1], kind)
    return tile._replace(block_m=min(tile.block_m, 32)) if x.shape[2] <= _SHORT_ROW else tile


def architecture_of(capability: tuple[int, int]) -> str:
    """Return the part of the table; sm_120 has the shared memory of sm_86."""
    return "sm90" if (9, 0) <= capability < (12, 0) else "sm80"


@lru_cache  # asked at nearly every launch
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; that of an H100 for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
