"""Speed of a run: tokens/s, FLOP/s, MFU and time to go.

MFU is model FLOPs (`model.flops`: forward + backward, no recomputation) over the dense peak of
the card in the precision of the products, or over what a large product reaches on this CPU
(`machine_speed`); a card that is not listed has no MFU, only FLOP/s.
"""

import time

import torch

from deberta_ds.planner.gpus import peak_flops
from deberta_ds.train import machine_speed


def peak_of_a_rank(device: torch.device, precision: str) -> tuple[float | None, str]:
    """Return the FLOP/s that MFU is a share of, and a line for the log; call on every rank."""
    if device.type != "cpu":
        return peak_flops(device, precision), ""
    speed = machine_speed.measure(precision)
    return speed.product_flops["large"], speed.describe()


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
