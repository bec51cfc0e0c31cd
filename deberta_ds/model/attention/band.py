"""Size of the band around the diagonal in which relative positions differ (fused attention).

Columns are counted in groups of 128. The bias matrix of a position term has, for a query (or key)
in group g, the columns of groups g - span .. g + span. All pairs outside of the band are at
distances at which the relative table is constant.
"""

from typing import NamedTuple

GROUP_COLUMNS = 128  # a multiple of every tile side


class Band(NamedTuple):
    """Shape of the bias matrices of one batch."""

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
