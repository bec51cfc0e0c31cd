"""Fine-tuning's rows: every epoch a permutation, known from the step, of like lengths together."""

import numpy as np
import pytest

from deberta_ds.finetuning.loop import stream


def rows_of_stream(lengths, updates, global_batch_size, group_updates, seed=3) -> list[list[int]]:
    return [
        stream(lengths, seed, step, global_batch_size, group_updates) for step in range(updates)]


def test_the_stream_is_every_epoch_a_permutation_and_knows_its_place():
    lengths = np.arange(12)
    rows = [row for batch in rows_of_stream(lengths, 9, 4, 1) for row in batch]
    for epoch in range(3):
        assert sorted(rows[12 * epoch : 12 * epoch + 12]) == list(range(12))
    assert rows[:12] != rows[12:24]
    assert rows[8:12] == stream(lengths, 3, 2, 4, 1)
    assert sorted(stream(np.arange(5), 1, 0, 8, 1)[:5]) == list(range(5))  # a batch above the data


@pytest.mark.parametrize("num_rows", [96, 100, 7, 3])
@pytest.mark.parametrize("group_updates", [2, 5, 16])
def test_batches_of_like_lengths_still_see_every_row_once_an_epoch(num_rows, group_updates):
    lengths = np.random.default_rng(0).integers(5, 300, num_rows)
    plain = rows_of_stream(lengths, 60, 4, 1)
    dealt = rows_of_stream(lengths, 60, 4, group_updates)
    assert plain == rows_of_stream(lengths, 60, 4, 1) and all(len(batch) == 4 for batch in dealt)
    for epoch in range(60 * 4 // num_rows):
        # Whole updates of an epoch are dealt among themselves, so the counts at its end agree.
        seen = [row for batch in dealt for row in batch][: (epoch + 1) * num_rows]
        assert sorted(seen) == sorted([row for batch in plain for row in batch][: len(seen)])
    if num_rows >= 96:
        def padded(batches):
            return sum(len(batch) * max(lengths[batch]) for batch in batches)

        assert padded(dealt) < (0.9 if group_updates == 2 else 0.8) * padded(plain)
