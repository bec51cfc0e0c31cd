"""Relative positions: which row of the relative table serves a signed distance (query minus key).

Sources: the log buckets of DeBERTa v2/v3 (`make_log_bucket_position`, official
`DeBERTa/deberta/da_utils.py`) and the plain clamp of DeBERTa v1 (He et al. 2021, section 3.1).
The table is built in float64 on the CPU and shipped as integers: a distance such as 511 lands
exactly on an integer before `ceil`, so a device's fast logarithm must never decide a bucket.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Geometry:
    """Shape of the relative table: `position_buckets` log buckets, or a clamp when it is 0.

    max_relative: largest distance told apart, M in the papers (512 in every released model).
    position_buckets: buckets a side, 256 in v2/v3; 0 for v1.
    """

    max_relative: int
    position_buckets: int

    def __post_init__(self) -> None:
        if self.max_relative < 2 or self.position_buckets < 0 or self.position_buckets == 1:
            raise ValueError(f"impossible relative-position geometry: {self}")

    @property
    def span(self) -> int:
        """Slots on one side of distance 0."""
        return self.position_buckets or self.max_relative

    @property
    def num_slots(self) -> int:
        """Rows of the relative table."""
        return 2 * self.span

    @property
    def reach(self) -> int:
        """Smallest R such that all distances >= R share a slot and all <= -R share a slot."""
        return _reach(self)

    def slots(self, distances: torch.Tensor) -> torch.Tensor:
        """Return the int64 table row in [0, num_slots) of each signed distance, same shape."""
        limit = self.max_relative
        table = _slot_table(self, distances.device)
        return table[distances.clamp(-limit, limit) + limit]


def _bucket(distance: int, geometry: Geometry) -> int:
    """Return the signed bucket of one distance (v1: the distance itself)."""
    if not geometry.position_buckets:
        return distance
    middle = geometry.position_buckets // 2
    last = geometry.max_relative - 1
    size = min(abs(distance), last)
    if size > middle:
        share = math.log(size / middle) / math.log(last / middle)
        size = math.ceil(share * (middle - 1)) + middle
    return -size if distance < 0 else size


@lru_cache(maxsize=64)
def _slot_table(geometry: Geometry, device: torch.device) -> torch.Tensor:
    """Return the slots of distances -M..M as int64 on `device`."""
    limit, span = geometry.max_relative, geometry.span
    slots = [
        min(max(_bucket(distance, geometry) + span, 0), 2 * span - 1)
        for distance in range(-limit, limit + 1)
    ]
    return torch.tensor(slots, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _reach(geometry: Geometry) -> int:
    slots = _slot_table(geometry, torch.device("cpu")).tolist()
    limit = geometry.max_relative
    reach = limit
    while (
        reach > 1
        and slots[limit + reach - 1] == slots[2 * limit]
        and slots[limit - reach + 1] == slots[0]
    ):
        reach -= 1
    return reach
