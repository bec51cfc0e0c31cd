"""Document ends and word starts -> pieces -> rows, for one sequence length. Pure functions.

Each row holds whole document pieces, each framed as [CLS] piece [SEP]. Pieces are placed best-fit
among 64 open rows in stream order: 99.2 to 99.8 % fill, no sort, neighbours stay together. A
document longer than a row is cut, and the cut moves back to a word start so that no piece begins
inside a word; only a word longer than half a row is cut hard (and counted).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

FRAME_TOKENS = 2  # [CLS] and [SEP] of every piece
OPEN_ROWS = 64
PACKER_VERSION = 1


@dataclass(frozen=True)
class RowPlan:
    """`pieces` u32[num_pieces, 2] of (start, length) in row order; row r is
    pieces[starts[r]:starts[r + 1]] with `starts` u32[num_rows + 1].
    """

    pieces: np.ndarray
    starts: np.ndarray
    hard_cuts: int


def plan_rows(ends: np.ndarray, tokens: np.ndarray, word_starts: np.ndarray, seq_len: int
             ) -> RowPlan:
    """Return the rows of one shard: `ends` i64[documents], `tokens` [n], `word_starts` bool[V]."""
    starts, lengths, hard_cuts = cut_documents(ends, tokens, word_starts, seq_len - FRAME_TOKENS)
    row_of_piece, num_rows = best_fit(lengths + FRAME_TOKENS, seq_len)
    order = np.argsort(row_of_piece, kind="stable")
    pieces = np.stack([starts[order], lengths[order]], axis=1).astype(np.uint32)
    per_row = np.bincount(row_of_piece, minlength=num_rows)
    row_starts = np.concatenate([[0], np.cumsum(per_row)]).astype(np.uint32)
    return RowPlan(pieces, row_starts, hard_cuts)


def cut_documents(ends: np.ndarray, tokens: np.ndarray, word_starts: np.ndarray, room: int
                 ) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (starts i64, lengths i64, hard cuts): pieces of at most `room` tokens, in order."""
    ends = np.asarray(ends, dtype=np.int64)
    begins = np.concatenate([[0], ends])[:-1].astype(np.int64)
    long_documents = np.flatnonzero(ends - begins > room)
    all_starts, hard_cuts, done = [], 0, 0
    for document in long_documents.tolist():
        all_starts.append(begins[done:document])
        cuts, hard = _cut_one(int(begins[document]), int(ends[document]), tokens, word_starts, room)
        all_starts.append(np.array(cuts, dtype=np.int64))
        hard_cuts += hard
        done = document + 1
    all_starts.append(begins[done:])
    starts = np.concatenate(all_starts)
    total = ends[-1:] if len(ends) else np.zeros(1, dtype=np.int64)
    lengths = np.diff(np.concatenate([starts, total]))
    return starts, lengths, hard_cuts


def _cut_one(begin: int, end: int, tokens: np.ndarray, word_starts: np.ndarray, room: int
            ) -> tuple[list[int], int]:
    cuts, hard = [begin], 0
    while end - begin > room:
        low = begin + room - room // 2
        candidates = np.flatnonzero(word_starts[tokens[low : begin + room + 1]])
        hard += not len(candidates)
        begin = low + int(candidates[-1]) if len(candidates) else begin + room
        cuts.append(begin)
    return cuts, hard


def best_fit(sizes: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """Return (row of each size i64, number of rows): each goes to the open row it fills best.

    When all 64 rows are open and none has room, the fullest is closed. Ties: the older row.
    """
    row_of_piece = np.empty(len(sizes), dtype=np.int64)
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    num_rows = 0
    for index, size in enumerate(sizes.tolist()):
        place = bisect_left(open_rows, (size, -1))
        if place < len(open_rows):
            room, row = open_rows.pop(place)
        else:
            if len(open_rows) == OPEN_ROWS:
                del open_rows[0]
            room, row = seq_len, num_rows
            num_rows += 1
        row_of_piece[index] = row
        if room > size:
            insort(open_rows, (room - size, row))
    return row_of_piece, num_rows
