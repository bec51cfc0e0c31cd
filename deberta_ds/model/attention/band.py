"""Which columns lie in the band around the diagonal that the fused attention's planes hold.

Columns are counted in groups. A row at column y of group g has the plane columns of the groups
g - span .. g + span, so that all pairs outside are farther apart than the relative table reaches.
"""

from typing import NamedTuple

GROUP_COLUMNS = 128  # a multiple of every tile side


class Band(NamedTuple):
    """Shape of the planes of one batch."""

    span: int  # groups on either side of the own one
    far: bool  # whether pairs outside of the band exist

    def width(self, keys: int) -> int:
        """Return the columns of a plane."""
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
