"""Speed of a run: tokens/s, FLOP/s, MFU and time to go.

MFU is model FLOPs (`model.flops`: forward + backward, no recomputation) over the dense peak of
the card in the precision of the matmuls. A CPU, or a card that is not listed, has FLOP/s alone.
"""

import time


class SpeedMeter:
    """Time and tokens since the last reading; evaluation and saving are left out."""

    def __init__(self, flops_per_token: float, peak: float | None, world_size: int,
                 rows_seen: int):
        """`rows_seen` are those of the run before this process."""
        self._flops_per_token, self._peak, self._world_size = flops_per_token, peak, world_size
        self._seconds = 0.0
        self._rows_seen, self._tokens = rows_seen, 0.0
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def pause(self) -> None:
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
        self._started = None

    def count(self, tokens: float) -> None:
        """Count tokens of this process; a resumed line holds some of an earlier one, too."""
        self._tokens += tokens

    def read(self, rows_seen: int, rows_of_run: int) -> dict[str, float | None]:
        """Return the speed since the last reading, and reset."""
        self.pause()
        tokens, seconds = self._tokens, max(self._seconds, 1e-9)
        rows = max(rows_seen - self._rows_seen, 1)
        flops = self._flops_per_token * tokens / seconds
        self._seconds, self._rows_seen, self._tokens = 0.0, rows_seen, 0.0
        self.start()
        return {"tokens_per_second": tokens / seconds, "flops_per_second": flops,
                "mfu": flops / (self._peak * self._world_size) if self._peak else None,
                "eta_seconds": seconds / rows * (rows_of_run - rows_seen)}
