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
from functools import cached_property, lru_cache, wraps
from typing import NamedTuple

import numpy as np
import torch

GROUP_COLUMNS = 128  # of the band: a multiple of every tile side


def kept_tensors(maxsize: int | None) -> Callable:
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
    ModelConfig has checked both.
    """

    max_relative: int
    position_buckets: int

    @property
    def span(self) -> int:
        """Rows of the relative table for distances of one sign."""
        return self.position_buckets or self.max_relative

    @property
    def num_slots(self) -> int:
        """Rows of the relative table."""
        return 2 * self.span

    @cached_property
    def reach(self) -> int:
        """Smallest R such that all distances >= R share a slot and all <= -R share a slot."""
        slots, reach = _slots(self), self.max_relative
        before, behind = slots[:reach][::-1], slots[reach + 1:]  # of distances -1, -2 ..; 1, 2 ..
        while reach > 1 and (behind[reach - 2], before[reach - 2]) == (behind[-1], before[-1]):
            reach -= 1
        return reach

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


def _slots(geometry: Geometry) -> list[int]:
    """Return the slots of distances -M..M."""
    buckets, span = _buckets(geometry), geometry.span
    signed = np.concatenate([-buckets[:0:-1], buckets])
    return (signed + span).clip(0, 2 * span - 1).tolist()


_slots._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile takes its result


@kept_tensors(maxsize=64)
def _slot_table(geometry: Geometry, device: torch.device) -> torch.Tensor:
    """Return the slots of distances -M..M as int64 on `device`."""
    return torch.tensor(_slots(geometry), dtype=torch.int64, device=device)


class Band(NamedTuple):
    """Shape of the bias matrices of one batch in fused attention: pairs outside of the band around
    the diagonal are at distances at which the relative table is constant.

    Columns are counted in groups of 128. A query (or key) in group g has those of groups g - span
    .. g + span.
    """

    span: int  # groups before, and behind, the group of the row itself
    far: bool  # whether pairs outside of the band exist

    def width(self, keys: int) -> int:
        """Return the number of columns of a bias matrix."""
        return min((2 * self.span + 1) * GROUP_COLUMNS, padded(keys))

    def radius(self, keys: int) -> int:
        """Return the rows of an expanded table before the one of distance 0, half of all rows."""
        return min((self.span + 1) * GROUP_COLUMNS, padded(keys))


def padded(length: int) -> int:
    """Return the length rounded up to whole groups."""
    return -(-length // GROUP_COLUMNS) * GROUP_COLUMNS


def make_band(reach: int, keys: int) -> Band:
    """Return the band of a relative table that is constant from distance `reach` on."""
    needed, other_groups = -(-reach // GROUP_COLUMNS), padded(keys) // GROUP_COLUMNS - 1
    return Band(min(needed, other_groups), needed < other_groups)
