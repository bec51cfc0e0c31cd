"""Relative positions: the row of the relative table for each signed distance (query minus key).

Sources: the log buckets of DeBERTa v2/v3 (`make_log_bucket_position`, official
`DeBERTa/deberta/da_utils.py` and transformers' modeling_deberta_v2.py) and the plain clamp of
DeBERTa v1 (He et al. 2021, section 3.1). The table is built on the CPU and shipped as integers: a
distance such as 511 lands exactly on an integer before `ceil`, so a device's fast logarithm must
never decide a bucket. Both codes compute in fp32, and round to the other side of such an integer
for a few geometries: the steps of transformers, which exports are read by, are taken here in fp32,
each of them correctly rounded. The official code rounds one of them later, which moves the largest
distance, onto which farther ones are clamped, to the next bucket in about 1 of 20 geometries; none
where buckets // 2 is a power of two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps

import numpy as np
import torch


def kept_tensors(maxsize: int) -> Callable:
    """Return `lru_cache` for a function that makes tensors.

    A tensor that was made under FakeTensorMode or torch.export has no numbers: it is returned to
    nobody else, and no real tensor to the code under that mode.
    """
    def decorate(make: Callable) -> Callable:
        kept = lru_cache(maxsize)(lambda _mode, *key: make(*key))

        @wraps(make)
        def find(*key) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return make(*key)
            with torch.inference_mode(False):  # or training could not use it
                return kept(getattr(torch.empty(0), "fake_mode", None), *key)
        return find
    return decorate


@dataclass(frozen=True)
class Geometry:
    """Shape of the relative table: `position_buckets` log buckets, or a clamp when it is 0.

    max_relative: largest distance told apart, M in the papers (512 in every released model).
    position_buckets: buckets for positive distances, as many for negative: 256 in v2/v3; 0 in v1.
    """

    max_relative: int
    position_buckets: int

    def __post_init__(self) -> None:
        if self.max_relative < 2 or self.position_buckets < 0 or self.position_buckets == 1:
            raise ValueError(f"impossible relative-position geometry: {self}")

    @property
    def span(self) -> int:
        """Rows of the relative table for distances of one sign."""
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


def _buckets(geometry: Geometry) -> np.ndarray:
    """Return the bucket of each distance 0..M (v1: the distance itself)."""
    sizes = np.arange(geometry.max_relative + 1)
    if not geometry.position_buckets:
        return sizes
    middle, last = geometry.position_buckets // 2, geometry.max_relative - 1
    sizes = np.minimum(sizes, last)
    far = sizes > middle
    if far.any():
        fraction = _log(sizes[far] / middle) / _log(last / middle) * np.float32(middle - 1)
        sizes[far] = np.ceil(fraction) + np.float32(middle)
    return sizes


def _log(ratios) -> np.ndarray:
    """Return the fp32 logarithm of ratios rounded to fp32; the one of float64 rounds correctly."""
    return np.log(np.float32(ratios).astype(np.float64)).astype(np.float32)


def _slots(geometry: Geometry) -> np.ndarray:
    """Return the slots of distances -M..M."""
    buckets, span = _buckets(geometry), geometry.span
    signed = np.concatenate([-buckets[:0:-1], buckets])
    return (signed + span).clip(0, 2 * span - 1)


@kept_tensors(maxsize=64)
def _slot_table(geometry: Geometry, device: torch.device) -> torch.Tensor:
    """Return the slots of distances -M..M as int64 on `device`."""
    return torch.tensor(_slots(geometry), dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _reach(geometry: Geometry) -> int:
    slots = _slots(geometry).tolist()
    limit = geometry.max_relative
    reach = limit
    while (
        reach > 1
        and slots[limit + reach - 1] == slots[2 * limit]
        and slots[limit - reach + 1] == slots[0]
    ):
        reach -= 1
    return reach
