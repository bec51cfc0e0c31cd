"""What changed rows, or what reads them, without a test noticing (docs/evidence/reliability.md)."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from deberta_ds.config.batch_schedule import Stretch
from deberta_ds.data import loader


def test_a_worker_reads_ahead_of_its_own_rows_alone_and_not_without_end(monkeypatch):
    monkeypatch.setattr(loader, "get_worker_info", lambda: SimpleNamespace(num_workers=3))
    rows = loader.RankRows([Stretch(0, 4, 100)], 4, 0, 1)
    reader = loader._Reader(SimpleNamespace(read=lambda g: [g]), rows)
    with ThreadPoolExecutor(2) as threads:
        assert reader._read_ahead(threads, 0) == [[0], [1], [2], [3]]
        assert list(reader._ahead) == list(range(3, 51, 3))  # 68 rows with its own
        assert reader._read_ahead(threads, 3) == [[12], [13], [14], [15]]
        assert list(reader._ahead) == list(range(6, 54, 3))
