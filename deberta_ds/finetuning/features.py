"""Examples -> token ids, token spans and padded batches.

What is unusual: of texts that are too long, one is cut at its end, the first, unless `truncation`
says otherwise; MultiRC, ReCoRD and SQuAD passages are not cut but read in overlapping windows, all
of which stay in one batch, so the model is trained on the same scores that it predicts with. Spans
go from characters to tokens by the tokenizer's offsets.

Legend: E examples, R sequences (rows), L length, S spans, T tokens of the longest span,
K slots (what spans are pooled for: two words, or the mentions of every example; of answers the
start and the end in every row).
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.layouts import PLACEHOLDER, Example, Label, shared
from deberta_ds.tasks.tables import Faults
from deberta_ds.tasks.task import Task
from deberta_ds.tokenizer import Tokenizer

_WINDOWED = ("multirc", "record", "tags", "answers")
_UNCUT = ("wic", "wsc")
_SPANNED = ("wic", "wsc", "record", "tags", "answers")
_MIN_LONG_TOKENS = 8  # at least so much of the text that may be cut must be seen
_KEPT_TEXTS = 64  # examples that share a passage are neighbors


@dataclass(frozen=True, slots=True)
class Feature:
    """One encoded example. Spans are (sequence, slot, first token, end token)."""

    position: int  # in its split
    sequences: tuple[Sequence[int], ...]  # arrays: 4 bytes a token
    spans: tuple[tuple[int, int, int, int], ...]
    num_slots: int
    label: Label  # -1: unknown; several labels: 0 or 1 for each
    # ReCoRD: 1 for a mention of an answer; tags: the class; answers: first and last token of the
    # answer in each row, 0 ([CLS]) if it is not whole in it.
    slot_labels: tuple[float, ...]
    cut_tokens: int  # tokens of the text that may be cut which the model never sees
    offsets: tuple[np.ndarray, ...] = ()  # answers: characters [tokens, 2] of each row's window
    inner: tuple[int, ...] = ()  # tags: words whose token is that of the word before
    lost: tuple[int, ...] = ()  # tags: words without a token, such as a space

    @property
    def num_tokens(self) -> int:
        """The padded cost of the example: its rows times its longest row."""
        return len(self.sequences) * max(map(len, self.sequences))


def encode(task: Task, examples: Iterable[Example], tokenizer: Tokenizer, *, max_length: int,
           window_overlap: int, truncation: str = "first",
           faults: Faults | None = None) -> list[Feature]:
    """Return one Feature per example, in order; without those that go to `faults`, if given.

    Raises TooLongError, for all examples at once, if the part that must not be cut (question and
    answer, WiC and WSC texts) does not fit into `max_length` tokens.
    """
    encoder = _Encoder(task, tokenizer, max_length, window_overlap, truncation)
    features, too_long = [], []
    for position, example in enumerate(examples):
        needed, place = encoder.needed(example), example.place or f"example {example.key}"
        try:
            if needed > max_length and faults is not None:
                raise TooLongError(place, needed, 1, 1, max_length)
            if needed > max_length:
                too_long.append((needed, place))
            elif not too_long:
                features.append(encoder.feature(position, example))
        except UserError as error:
            if faults is None:
                raise
            faults.add(place, error)
    if too_long:
        longest, place = max(too_long)
        raise TooLongError(place, longest, len(too_long), position + 1, max_length)
    return features


def count_unknown(features: Sequence[Feature], tokenizer: Tokenizer) -> np.ndarray:
    """Return [tokens that are unknown, all tokens]."""
    unknown = tokens = 0
    for row in (row for feature in features for row in feature.sequences):
        unknown, tokens = unknown + row.count(tokenizer.unk_id), tokens + len(row)
    return np.array([unknown, tokens])


def count_special(examples: Iterable[Example], tokenizer: Tokenizer) -> int:
    """Return how many examples have the name of a special token in their text."""
    names = tokenizer.subwords(list(tokenizer.special_ids.values()))
    return sum(any(name in text for texts in example.sequences for text in texts
                   for name in names) for example in examples)


class TooLongError(UserError):
    """Texts do not fit into max_length; `needed` is the length at which all of them would."""

    def __init__(self, place: str, needed: int, count: int, total: int, max_length: int):
        others = f"; {count} of {total} examples do not fit" if total > 1 else ""
        super().__init__(f"{place}: {needed} tokens must be seen together, but max_length is "
                         f"{max_length}{others}")
        self.place, self.needed, self.count = place, needed, count


class _Encoder:
    """Encodes examples of one task; keeps the tokens of the last texts, as many share a passage."""

    def __init__(self, task: Task, tokenizer: Tokenizer, max_length: int, window_overlap: int,
                 truncation: str):
        self.task, self.tokenizer = task, tokenizer
        self.truncation = truncation if task.is_cut else "first"
        self.long_text = task.long_text
        self.max_length, self.window_overlap = max_length, window_overlap
        self.tokens = lru_cache(_KEPT_TEXTS)(self._tokens)
        self.plain = lru_cache(_KEPT_TEXTS)(self._plain)
        self.places = lru_cache(_KEPT_TEXTS)(self._places)

    def feature(self, position: int, example: Example) -> Feature:
        if self.task.layout == "answers":
            return self.answer_feature(position, example)
        sequences: list[Sequence[int]] = []
        spans: list[tuple[int, int, int, int]] = []
        cut = 0
        for texts in example.sequences:
            rows, row_spans, lost = self.rows(example, texts)
            spans += [(len(sequences) + row, slot, low, high)
                      for row, slot, low, high in row_spans]
            sequences += rows
            cut += lost
        label, slot_labels = self.labels(example)
        inner, lost = self.tokenless(example) if self.task.head == "tags" else ((), ())
        if unlearned := {*inner, *lost}:
            slot_labels = tuple(-1.0 if slot in unlearned else value
                                for slot, value in enumerate(slot_labels))
        return Feature(
            position=position, sequences=tuple(sequences), spans=tuple(map(shared, spans)),
            num_slots=len(example.spans), label=label,
            slot_labels=tuple(map(shared, slot_labels)), cut_tokens=cut, inner=inner, lost=lost)

    def tokenless(self, example: Example) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return Feature.inner and .lost: where each character is a word, many share a token."""
        _, offsets = self.tokens(example.sequences[0][0])
        inner, lost, before = [], [], -1
        for slot, span in enumerate(example.spans):
            first, _ = token_range(offsets, span.start, span.end)
            low, high = offsets[first]
            if not (low < span.end and span.start < high):
                lost.append(slot)
            elif first == before:
                inner.append(slot)
            else:
                before = first
        return tuple(inner), tuple(lost)

    def labels(self, example: Example):
        """Return (label, label of every slot); where the file has none, what stands for that."""
        head, label = self.task.head, example.label
        if head == "tags":
            unknown = (-1,) * len(example.spans)
            return -1, tuple(map(float, unknown if label is None else label))
        if head == "multilabel" and label is None:
            return (0,) * len(self.task.labels), ()
        answers = set(example.gold)
        slots = tuple(float(name in answers) for name in example.names)
        return -1 if label is None else label, slots

    def needed(self, example: Example) -> int:
        """Return the least max_length at which nothing is lost that must be seen together."""
        lengths = []
        for texts in example.sequences:
            long = self.long_text + (self.truncation == "second")
            sizes = [len(self.tokens(text)[0] if i == self.long_text else self.plain(text))
                     for i, text in enumerate(texts)]
            if self.task.layout not in _UNCUT:
                sizes = [min(size, _MIN_LONG_TOKENS)
                         if i == long or self.truncation == "longest_first" else size
                         for i, size in enumerate(sizes)]
            lengths.append(1 + sum(sizes) + len(texts))
        return max(lengths)

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and the characters of each, which take most of the time: if needed at all."""
        if self.task.layout in _SPANNED:
            return self.tokenizer.encode_with_offsets(text)
        return self.tokenizer.encode(text), []

    def _places(self, text: str) -> np.ndarray:
        return np.array(self.tokens(text)[1], dtype=np.int32).reshape(-1, 2)

    def _plain(self, text: str) -> list[int]:
        """Return ids of a text that is never windowed; a ReCoRD placeholder becomes [MASK]."""
        if self.task.layout != "record":
            return self.tokenizer.encode(text)
        return self.tokenizer.encode_around_masks(text.split(PLACEHOLDER))

    def rows(self, example: Example, texts: tuple[str, ...]):
        """Return (rows of ids, spans (row, slot, start, end), tokens cut off) of one sequence."""
        first, _ = self.tokens(texts[0])
        rest = [self.plain(text) for text in texts[1:]]
        in_windows = self.truncation.startswith("windows")
        if self.truncation != "first" and not in_windows:  # none of these has spans
            whole = [first, *rest]
            kept = shortened(whole, self.max_length - 1 - len(texts), self.truncation)
            return ([_join(self.tokenizer, kept)], [],
                    sum(map(len, whole)) - sum(map(len, kept)))
        room = self.max_length - 2 - len(rest) - sum(map(len, rest))
        starts = [0]
        if self.task.layout in _WINDOWED or in_windows:
            starts = window_starts(len(first), room, min(self.window_overlap, room // 2))
        rows = [_join(self.tokenizer, [first[start : start + room], *rest]) for start in starts]
        spans = self.spans(example, texts, starts, room)
        return rows, spans, 0 if len(starts) > 1 else max(0, len(first) - room)

    def answer_feature(self, position: int, example: Example) -> Feature:
        """Return (question, window of the context) rows; a span is a row's window."""
        question, context = example.sequences[0]
        ids, places = self.tokens(context)
        if not ids:
            raise UserError(f"{example.place}: {context!r} gives no token, so no answer can be "
                            "found in it; remove the line, or use another tokenizer")
        offsets = self.places(context)
        asked = self.plain(question)
        low = 2 + len(asked)
        room = self.max_length - low - 1
        starts = window_starts(len(ids), room, min(self.window_overlap, room // 2))
        answer = None
        if example.spans:
            answer = token_range(places, example.spans[0].start, example.spans[0].end)
        rows, spans = [], []
        targets: list[int] = []
        for number, start in enumerate(starts):
            window = ids[start : start + room]
            rows.append(_join(self.tokenizer, [asked, window]))
            spans.append((number, 2 * number, low, low + len(window)))
            if answer and start <= answer[0] and answer[1] <= start + len(window):
                targets += [low + answer[0] - start, low + answer[1] - start - 1]
            else:
                targets += [0, 0]
        return Feature(
            position=position, sequences=tuple(rows), spans=tuple(spans), num_slots=2 * len(rows),
            label=-1, slot_labels=tuple(map(float, targets)), cut_tokens=0,
            offsets=tuple(offsets[start : start + room] for start in starts))

    def spans(self, example: Example, texts: tuple[str, ...], starts: list[int], room: int):
        """Return (row, slot, start, end) in tokens of the row; a mention once per whole window."""
        found = []
        for slot, span in enumerate(example.spans):
            _, offsets = self.tokens(texts[span.text])
            if not offsets:
                raise UserError(f"{example.place}: {texts[span.text]!r} gives no token, so nothing "
                                "can be marked in it; remove the line, or use another tokenizer")
            first, end = token_range(offsets, span.start, span.end)
            before = 1 + sum(len(self.tokens(text)[0]) + 1 for text in texts[: span.text])
            whole = [w for w, start in enumerate(starts) if start <= first and end <= start + room]
            if span.text > 0 or not whole:
                # Longer than the overlap: taken from the window that shows most of it.
                whole = whole[:1] or [
                    max(range(len(starts)),
                        key=lambda w: min(end, starts[w] + room) - max(first, starts[w]))]
            for window in whole:
                low = max(first - starts[window], 0)
                high = min(end - starts[window], room) if span.text == 0 else end
                found.append((window, slot, before + low, before + high))
        return found


def shortened(texts: Sequence[Sequence[int]], room: int, how: str) -> list[Sequence[int]]:
    """Return texts that have `room` tokens together.

    longest_first: texts longer than others are cut to one length (as `tokenizers` does it, with an
    odd token for the longest); second: the second is cut at its end; head_tail: the first keeps a
    quarter of its tokens from its head and the others from its tail (128 + 382 of Sun et al. 2019,
    arXiv:1905.05583).
    """
    sizes = list(map(len, texts))
    if how == "longest_first":
        for done, number in enumerate(sorted(range(len(texts)), key=lambda i: len(texts[i]))):
            sizes[number] = min(sizes[number], room // (len(texts) - done))
            room -= sizes[number]
    else:
        cut = int(how == "second")
        sizes[cut] = min(sizes[cut], max(0, room - sum(sizes) + sizes[cut]))
    kept = [text[:size] for text, size in zip(texts, sizes, strict=True)]
    if how == "head_tail":
        head = sizes[0] // 4
        kept[0] = [*texts[0][:head], *texts[0][len(texts[0]) - sizes[0] + head:]]
    return kept


def _join(tokenizer: Tokenizer, texts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return [CLS] a [SEP] b [SEP] ..."""
    row = [tokenizer.cls_id]
    for ids in texts:
        row += [*ids, tokenizer.sep_id]
    return array("i", row)


def window_starts(length: int, room: int, overlap: int) -> list[int]:
    """Return where windows of `room` tokens start so that they cover `length` tokens.

    Neighbors share at least `overlap` tokens; the last window is full and ends with the text.
    """
    if length <= room:
        return [0]
    step = room - overlap
    return [*range(0, length - room, step), length - room]


def token_range(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Return tokens [first, end) that overlap characters [start, end); `offsets` are in order.

    Characters that give no token of their own (normalized away) take the next token.
    """
    first = bisect_right(offsets, start, key=lambda place: place[1])
    last = bisect_left(offsets, end, key=lambda place: place[0])
    if first < last:
        return first, last
    first = min(bisect_left(offsets, start, key=lambda place: place[0]), len(offsets) - 1)
    return first, first + 1


@dataclass
class FeatureBatch:
    """Several examples as tensors. Rows of one example are neighbors, as are its slots."""

    input_ids_RL: Tensor
    segments_RL: Tensor  # 1 at tokens, 0 at padding
    example_R: Tensor
    span_row_S: Tensor
    span_slot_S: Tensor
    span_start_S: Tensor
    span_end_S: Tensor
    slot_example_K: Tensor
    labels_E: Tensor
    slot_labels_K: Tensor
    weights_E: Tensor  # 0 for an example that only fills the batch up
    characters_RL2: Tensor  # answers: characters [start, end) of each token of the context
    longest_span: int  # known here, so the model needs no synchronization
    rows: tuple[int, ...]  # the examples' positions in their split

    def to(self, device: torch.device) -> "FeatureBatch":
        """Return the batch on `device`."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()
                                if isinstance(value, Tensor)})


def collate(features: Sequence[Feature], weights: Sequence[float] | None = None) -> FeatureBatch:
    """Return one batch; rows are padded to the longest."""
    rows = [(e, row) for e, feature in enumerate(features) for row in feature.sequences]
    length = max(len(row) for _, row in rows)
    ids_RL = np.zeros((len(rows), length), np.int64)
    segments_RL = np.zeros((len(rows), length), np.int32)
    for r, (_, row) in enumerate(rows):
        ids_RL[r, : len(row)] = row
        segments_RL[r, : len(row)] = 1
    spans, first_row, first_slot = [], 0, 0
    for feature in features:
        spans += [(first_row + r, first_slot + k, low, high) for r, k, low, high in feature.spans]
        first_row += len(feature.sequences)
        first_slot += feature.num_slots
    spans_S4 = torch.tensor(spans, dtype=torch.long).reshape(-1, 4)
    slots = [e for e, feature in enumerate(features) for _ in range(feature.num_slots)]
    slot_labels = [label for feature in features for label in feature.slot_labels]
    offsets = [part for feature in features for part in feature.offsets]
    characters_RL2 = torch.zeros(len(offsets), length if offsets else 0, 2, dtype=torch.int32)
    for part, (r, _, low, high) in zip(offsets, spans, strict=False):
        characters_RL2[r, low:high] = torch.from_numpy(part)
    return FeatureBatch(
        input_ids_RL=torch.from_numpy(ids_RL), segments_RL=torch.from_numpy(segments_RL),
        example_R=torch.tensor([e for e, _ in rows]), span_row_S=spans_S4[:, 0],
        span_slot_S=spans_S4[:, 1], span_start_S=spans_S4[:, 2], span_end_S=spans_S4[:, 3],
        slot_example_K=torch.tensor(slots, dtype=torch.long),
        labels_E=torch.tensor([feature.label for feature in features]),
        slot_labels_K=torch.tensor(slot_labels, dtype=torch.float32),
        weights_E=torch.tensor([1.0] * len(features) if weights is None else list(weights)),
        characters_RL2=characters_RL2,
        longest_span=max((high - low for _, _, low, high in spans), default=0),
        rows=tuple(feature.position for feature in features))
