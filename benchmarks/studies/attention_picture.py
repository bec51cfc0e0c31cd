"""Draw how the fused kernels see a score matrix: docs/images/attention-tiles.png.

All edges come from the kernels' own rules (`fused.bands`), so the picture cannot drift from them.

  python -m benchmarks.studies.attention_picture [--out docs/images/attention-tiles.png]
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

from deberta_ds.base.errors import exit_cleanly  # noqa: E402
from deberta_ds.model.attention import Geometry  # noqa: E402
from deberta_ds.model.attention.geometry import GROUP_COLUMNS, make_band  # noqa: E402

REACH = Geometry(512, 256).reach
LENGTHS = (512, 1024, 2048, 4096, 8192)
SKIPPED, DENSE, FAR = "#eceff1", "#1b6ca8", "#f2b134"
COLORS = ListedColormap([SKIPPED, DENSE, FAR])


def tile_classes(length: int, pieces: list[int]) -> np.ndarray:
    """Return 0 (never visited), 1 (dense bias tiles) or 2 (two vectors) of each pair of groups."""
    groups = length // GROUP_COLUMNS
    span = make_band(REACH, length).span
    ends = np.cumsum(pieces)
    piece = np.searchsorted(ends, np.arange(length), side="right").reshape(groups, -1)
    first, last = piece[:, 0], piece[:, -1]
    visited = (first[:, None] <= last[None, :]) & (first[None, :] <= last[:, None])
    index = np.arange(groups)
    near = np.abs(index[:, None] - index[None, :]) <= span
    return visited * np.where(near, 1, 2)


def draw_skew(axes) -> None:
    """Draw the plain product and, beside it, the plane it is stored in."""
    length = 5
    titles = ("the product x T$^T$: a column is a distance", "the plane: a column is a key")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.axis("off")
    for row in range(length):
        for c in range(2 * length - 1):
            key = row + c - (length - 1)
            inside = 0 <= key < length
            color = plt.cm.viridis(0.15 + 0.8 * c / (2 * length - 2)) if inside else "#ffffff"
            axes[0].add_patch(Rectangle((c, row), 1, 1, fc=color, ec="#90a4ae", lw=0.6))
            if inside:
                axes[1].add_patch(Rectangle((key, row), 1, 1, fc=color, ec="#90a4ae", lw=0.6))
                for axis, x in ((axes[0], c), (axes[1], key)):
                    axis.text(x + 0.5, row + 0.5, f"{c - length + 1:+d}", ha="center",
                              va="center", fontsize=7, color="white")
    axes[0].set_xlim(-0.1, 2 * length - 0.9)
    axes[1].set_xlim(-1, length + 1)
    axes[1].add_patch(Rectangle((1, 1), 2, 2, fill=False, ec="#d32f2f", lw=2))
    axes[1].text(2, 5.6, "a flash tile is a rectangle", color="#d32f2f", fontsize=8, ha="center")
    axes[0].text(4.5, 5.6, "row r is moved by r where it is stored", fontsize=8, ha="center")
    for axis in axes:
        axis.set_ylim(6, -0.2)
        axis.set_aspect("equal")


def draw_tiles(axis, length: int, pieces: list[int], title: str) -> None:
    """Draw the classes of all pairs of groups."""
    axis.imshow(tile_classes(length, pieces), cmap=COLORS, vmin=0, vmax=2,
                extent=(0, length, length, 0))
    ticks = np.arange(0, length + 1, length // 4)
    axis.set_xticks(ticks)
    axis.set_yticks(ticks)
    axis.set_xticks(np.arange(0, length, GROUP_COLUMNS), minor=True)
    axis.set_yticks(np.arange(0, length, GROUP_COLUMNS), minor=True)
    axis.grid(which="minor", color="white", lw=0.5)
    axis.tick_params(which="minor", length=0)
    axis.tick_params(labelsize=7)
    axis.set_xlabel("keys", fontsize=8)
    axis.set_ylabel("queries", fontsize=8)
    axis.set_title(title, fontsize=9)


def draw_shares(axis) -> None:
    """Draw the share of dense tiles by row length."""
    shares = [100 * (tile_classes(length, [length]) == 1).mean() for length in LENGTHS]
    names = [str(length) for length in LENGTHS]
    axis.bar(names, shares, color=DENSE)
    drawn = axis.bar(names, [100 - share for share in shares], bottom=shares, color=FAR)
    for bar, share in zip(drawn, shares, strict=True):
        axis.text(bar.get_x() + bar.get_width() / 2, share / 2, f"{share:.0f} %", ha="center",
                  va="center", color="white", fontsize=8)
    axis.set_title("tiles with a dense bias, by row length", fontsize=9)
    axis.set_box_aspect(1)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_ylabel("% of tiles", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/attention-tiles.png"))
    options = parser.parse_args()
    figure = plt.figure(figsize=(10.5, 5.9))
    grid = figure.add_gridspec(2, 6, height_ratios=(1, 1.5), hspace=0.18, wspace=1.1)
    draw_skew([figure.add_subplot(grid[0, :4]), figure.add_subplot(grid[0, 4:])])
    draw_tiles(figure.add_subplot(grid[1, :2]), 2048, [2048], "one piece of 2048 tokens")
    packed = [300, 212, 900, 636]
    draw_tiles(figure.add_subplot(grid[1, 2:4]), 2048, packed, "packed: 300 + 212 + 900 + 636")
    draw_shares(figure.add_subplot(grid[1, 4:]))
    names = ((DENSE, "two dense bias tiles"), (FAR, "beyond the band: a row and a column vector"),
             (SKIPPED, "never visited"))
    handles = [Patch(color=color, label=label) for color, label in names]
    figure.legend(handles=handles, loc="lower center", ncols=3, fontsize=8, frameon=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130, bbox_inches="tight")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    exit_cleanly(main)
