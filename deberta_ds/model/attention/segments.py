"""Split packed sequences into spans of keys, so that attention across documents is not computed.

On the CPU a span is one document segment (or several short ones), so pairs of different documents
and padding are never computed. Short sequences are one span together: masking costs less than many
small matmuls.

Shape legend: B batch, L length, Q queries of the batch; R rows (or 1), X queries and Y keys of a
span.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deberta_ds.model.attention.reference import allowed_pairs

_SHORT = 96  # segments are joined while the span stays this short: fewer, larger matmuls
SHORT_ROWS = 128  # sequences up to this long are one span


@dataclass(frozen=True)
class KeySpan:
    """Keys [start, stop) of some batch rows, and the queries that look at them."""

    rows: slice  # one row, or several alike, of which all columns are queries
    start: int
    stop: int
    queries_X: Tensor | None  # which query rows; None: exactly the columns [start, stop)
    positions_X: Tensor | None  # their columns relative to `start`; None with `queries_X`
    allowed_RXY: Tensor | None  # bool; None: every pair is allowed
    fully_masked: bool  # there may be queries that see no key


def split_into_spans(segments_BL: Tensor, query_positions_BQ: Tensor | None) -> list[KeySpan]:
    """Return the spans of a batch; queries outside of all spans see no key."""
    if query_positions_BQ is not None:
        query_positions_BQ = query_positions_BQ.long()  # kernels read 64 bits
    if query_positions_BQ is None and segments_BL.shape[1] <= SHORT_ROWS:
        return [_all_rows(segments_BL)]
    spans = []
    for row, segments_L in enumerate(segments_BL):
        values, counts = torch.unique_consecutive(segments_L, return_counts=True)
        values, counts = values.tolist(), counts.tolist()
        segments = [value for value in values if value]
        cut = len(set(segments)) < len(segments)  # a segment in two parts
        joined = [(0, len(segments_L), False)] if cut else _joined(values, counts)
        for start, stop, single in joined:
            span = _span(segments_BL, query_positions_BQ, row, start, stop, single, cut)
            if span.queries_X is None or len(span.queries_X):
                spans.append(span)
    return _merged(spans)


def _merged(spans: list[KeySpan]) -> list[KeySpan]:
    """Join equal spans of neighboring sequences: fewer, larger matmuls."""
    merged: list[KeySpan] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last and last.rows.stop == span.rows.start and _alike(last, span):
            merged[-1] = replace(last, rows=slice(last.rows.start, span.rows.stop))
        else:
            merged.append(span)
    return merged


def _alike(one: KeySpan, other: KeySpan) -> bool:
    plain = all(span.queries_X is None and span.allowed_RXY is None for span in (one, other))
    return plain and (one.start, one.stop) == (other.start, other.stop)


def _joined(values: list[int], counts: list[int]) -> list[tuple[int, int, bool]]:
    """Return (start, stop, is a single segment) of spans, without padding."""
    joined: list[tuple[int, int, bool]] = []
    start = 0
    for value, count in zip(values, counts, strict=True):
        stop = start + count
        if value:
            adjacent = joined and joined[-1][1] == start
            if adjacent and stop - joined[-1][0] <= _SHORT:
                joined[-1] = (joined[-1][0], stop, False)
            else:
                joined.append((start, stop, True))
        start = stop
    return joined


def _span(segments_BL, query_positions_BQ, row, start, stop, single, fully_masked) -> KeySpan:
    queries = positions = allowed = None
    if query_positions_BQ is not None:
        columns = query_positions_BQ[row]
        queries = torch.nonzero((columns >= start) & (columns < stop))[:, 0]
        positions = columns[queries] - start
    if not single:
        segments_1Y = segments_BL[row : row + 1, start:stop]
        where = torch.arange(stop - start) if positions is None else positions
        allowed = allowed_pairs(segments_1Y, where[None])
    rows = slice(row, row + 1)
    return KeySpan(rows, start, stop, queries, positions, allowed, fully_masked)


def _all_rows(segments_BL) -> KeySpan:
    batch, length = segments_BL.shape
    allowed = None
    if not bool(((segments_BL == segments_BL[:, :1]) & (segments_BL != 0)).all()):
        allowed = allowed_pairs(segments_BL, torch.arange(length).expand(batch, length))
    fully_masked = not bool(segments_BL.all())
    return KeySpan(slice(0, batch), 0, length, None, None, allowed, fully_masked)
