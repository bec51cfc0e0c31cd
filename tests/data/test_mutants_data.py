"""What changed rows, or what reads them, without a test noticing (docs/evidence/reliability.md)."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from deberta_ds.config.batch_schedule import Stretch
from deberta_ds.data import loader, masking


def test_a_worker_reads_ahead_of_its_own_rows_alone_and_not_without_end(monkeypatch):
    monkeypatch.setattr(loader, "get_worker_info", lambda: SimpleNamespace(num_workers=3))
    rows = loader.RankRows([Stretch(0, 4, 100)], 4, 0, 1)
    reader = loader._Reader(SimpleNamespace(read=lambda g: [g]), rows)
    with ThreadPoolExecutor(2) as threads:
        assert reader._read_ahead(threads, 0) == [[0], [1], [2], [3]]
        assert list(reader._ahead) == list(range(3, 51, 3))  # 68 rows with its own
        assert reader._read_ahead(threads, 3) == [[12], [13], [14], [15]]
        assert list(reader._ahead) == list(range(6, 54, 3))


def test_where_no_word_fits_the_shortest_is_chosen():
    """Characters of several bytes are words of their own in a long word, of unlike lengths."""
    starts, lengths, dice = np.array([1, 4, 6]), np.array([3, 2, 4]), np.random.default_rng(0)
    assert masking._choose_words(lengths, 1, dice).tolist() == [1]
    assert masking._choose_ngrams(starts, lengths, 1, 3, dice).tolist() == [1]
