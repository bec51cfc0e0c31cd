"""RowDataset[g]: row number g of the run, a pure function of (seed, g).

    g -> slot table of the mixture -> source s, index j
    first_row + j -> epoch e, position p -> Permutation(rows_s, key=(seed, s, e)) -> its row
    row -> pieces, each framed as [CLS] piece [SEP]
    masks from Philox(key=(seed, g)): new ones in every epoch, and no generator state anywhere
"""

from dataclasses import asdict, dataclass

import numpy as np

from deberta_ds.config import DataConfig
from deberta_ds.data.batch import Row
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.masking import mask_row
from deberta_ds.data.mixture import build_mixture
from deberta_ds.data.permutation import Permutation
from deberta_ds.errors import UserError

_PERMUTATIONS_KEPT = 64


@dataclass(frozen=True)
class Source:
    """One corpus of a mixture.

    A later stage of a run goes on where an earlier one stopped (data/stages.py): it starts at
    `first_row`, the rows that the earlier one has used, in the same `order`, which is (seed,
    position in the list) of the stage that used the corpus first; None: this dataset's own. A
    stage of another length takes another `part` (from, to) of the shards.
    """

    path: str
    weight: float = 1.0
    first_row: int = 0
    order: tuple[int, int] | None = None
    part: tuple[float, float] = (0.0, 1.0)


def sources_of(data: DataConfig) -> list[Source]:
    """Return the sources that a run file names."""
    return [Source(**asdict(source)) for source in data.sources]


class RowDataset:
    """Rows of a weighted mixture of corpora.

    Attributes: fingerprints {path: hex}, num_rows {path: rows in one epoch}, seq_len, seed.
    """

    def __init__(
        self,
        sources: list[Source],
        tokenizer,
        *,
        seq_len: int,
        seed: int,
        mask,
        across_documents: bool = False,
        verify: str = "sizes",
        verify_rank: int = 0,
        verify_world_size: int = 1,
    ):
        """Open and check every source.

        `mask` has the fields of MaskConfig: rate, max_ngram, mask_share, random_share, selection.
        UserError for a missing, damaged or stale corpus and for one of another tokenizer.
        """
        self.sources = tuple(sources)
        self.seq_len, self.seed, self.mask = seq_len, seed, mask
        self.across_documents = across_documents
        paths = [source.path for source in sources]
        for path in paths:
            if paths.count(path) > 1:
                raise UserError(f"data.sources names {path} twice; add up its weights")
        self._mixture = build_mixture([source.weight for source in sources])
        self._corpora = [
            Corpus(source.path, seq_len=seq_len, part=source.part) for source in sources
        ]
        for corpus in self._corpora:
            corpus.check_tokenizer(tokenizer.sha256)
            corpus.verify(verify, rank=verify_rank, world_size=verify_world_size)
        self._word_start, self._special = tokenizer.word_starts(), tokenizer.is_special()
        self._mask_id, self._size = tokenizer.mask_id, tokenizer.size
        self._cls_id, self._sep_id = tokenizer.cls_id, tokenizer.sep_id
        self._permutations: dict[tuple[int, int], Permutation] = {}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return {source path: hex}: what a checkpoint stores to refuse another corpus."""
        pairs = zip(self.sources, self._corpora, strict=True)
        return {source.path: corpus.fingerprint for source, corpus in pairs}

    @property
    def num_rows(self) -> dict[str, int]:
        """Return {source path: rows in one epoch of it}."""
        pairs = zip(self.sources, self._corpora, strict=True)
        return {source.path: corpus.num_rows for source, corpus in pairs}

    def epochs(self, rows_seen: int) -> dict[str, float]:
        """Return {source path: epochs of it used after rows 0 .. rows_seen - 1 of the run}."""
        used = self.consumed(rows_seen)
        return {path: used[path] / rows for path, rows in self.num_rows.items()}

    def consumed(self, rows_seen: int) -> dict[str, int]:
        """Return {source path: index of its next row after rows 0 .. rows_seen - 1}."""
        counts = self._mixture.consumed(rows_seen)
        return {
            source.path: source.first_row + count
            for source, count in zip(self.sources, counts, strict=True)
        }

    def locate(self, g: int) -> tuple[int, int]:
        """Return (source number, row of that corpus) of row g."""
        source, index = self._mixture.locate(g)
        rows = self._corpora[source].num_rows
        epoch, position = divmod(index + self.sources[source].first_row, rows)
        key = (source, epoch)
        permutation = self._permutations.get(key)
        if permutation is None:
            if len(self._permutations) >= _PERMUTATIONS_KEPT:
                self._permutations.clear()
            order = self.sources[source].order or (self.seed, source)
            permutation = Permutation(rows, (*order, epoch))
            self._permutations[key] = permutation
        return source, permutation[position]

    def __getitem__(self, g: int) -> Row:
        source, row = self.locate(g)
        return self._build(self._corpora[source], row, g, self.seed)

    def natural_row(self, row: int, eval_seed: int) -> Row:
        """Return row `row` of the first source as stored; masks are keyed by (eval_seed, row)."""
        return self._build(self._corpora[0], row, row, eval_seed)

    def _build(self, corpus: Corpus, row: int, g: int, seed: int) -> Row:
        ids, segments, positions = frame_pieces(
            corpus.row(row), self.seq_len, self._cls_id, self._sep_id, self.across_documents
        )
        if int(ids.max()) >= self._mask_id:
            raise UserError(
                f"{corpus.place(row)}: token id {int(ids.max())} is outside the tokenizer's "
                f"{self._mask_id} pieces (row {g} of the run); run data_prep/verify.py "
                f"{corpus.path} --verify full and copy the damaged shard again"
            )
        rng = np.random.Generator(np.random.Philox(key=[seed, g]))
        mask = self.mask
        input_ids, labels = mask_row(
            ids,
            self._word_start,
            self._special,
            rate=mask.rate,
            max_ngram=mask.max_ngram,
            mask_share=mask.mask_share,
            random_share=mask.random_share,
            selection=mask.selection,
            mask_id=self._mask_id,
            vocab_size=self._size,
            rng=rng,
        )
        return Row(g, input_ids, labels, segments, positions)


def frame_pieces(
    pieces: list[np.ndarray], seq_len: int, cls_id: int, sep_id: int, across_documents: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids i64[L], segments i32[L], positions i32[L]) of [CLS] piece [SEP] [CLS] ...

    Segments number the pieces and positions restart in each, unless `across_documents`: then the
    row is one segment with positions 0, 1, 2, ... as in the official preparation.
    """
    ids = np.zeros(seq_len, dtype=np.int64)
    segments = np.zeros(seq_len, dtype=np.int32)
    positions = np.zeros(seq_len, dtype=np.int32)
    offset = 0
    for number, piece in enumerate(pieces, start=1):
        end = offset + len(piece) + 2
        ids[offset] = cls_id
        ids[offset + 1 : end - 1] = piece
        ids[end - 1] = sep_id
        segments[offset:end] = number
        positions[offset:end] = np.arange(end - offset)
        offset = end
    if across_documents:
        segments[:offset] = 1
        positions[:offset] = np.arange(offset)
    return ids, segments, positions


def eval_rows(
    path: str, tokenizer, *, seq_len: int, mask, eval_seed: int, num_rows: int | None = None,
    across_documents: bool = False, verify: str = "sizes",
) -> list[Row]:
    """Return rows 0 .. num_rows - 1 of a held-out corpus in stored order, with fixed masks.

    They are the same for every checkpoint and world size. None means all; UserError if the corpus
    has fewer than `num_rows`.
    """
    dataset = RowDataset(
        [Source(path)], tokenizer, seq_len=seq_len, seed=eval_seed, mask=mask,
        across_documents=across_documents, verify=verify,
    )
    available = dataset.num_rows[path]
    if num_rows is not None and num_rows > available:
        raise UserError(
            f"{path}: {num_rows} evaluation rows asked for, but it has {available} rows of "
            f"{seq_len} tokens; ask for fewer or hold out more documents"
        )
    count = available if num_rows is None else num_rows
    return [dataset.natural_row(row, eval_seed) for row in range(count)]
