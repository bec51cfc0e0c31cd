"""The ranks of this host, as one of them sees them: who is silent, who is gone, and who leads.

Only the memory and the process table of the host are read, so the answer takes microseconds and
does not depend on any network or file system.
"""

import time
from collections import deque
from dataclasses import dataclass

from deberta_ds.cluster import beats, process

SILENT_SHARE = 0.3  # of train.watchdog_seconds without a new heartbeat

_LEADER_INTERVALS = 3  # a leader that is silent for so long is followed by the next rank
_EARLIER_TICKS = 10 * 100  # a dead process that started so long before this one (10 s) is no peer
_LATELY = 10  # own looks that are remembered


@dataclass
class Seen:
    """One rank of this host; the seconds are those in which this process looked."""

    beat: beats.RankBeat
    silent_seconds: float = 0.0
    gone_seconds: float = 0.0  # its process does not run any more
    ended: bool = False  # it left by itself


class Neighbours:
    """The ranks of one job on this host; `seconds` is train.watchdog_seconds."""

    def __init__(self, key: str, rank: int, seconds: float, interval: float):
        self.files = beats.LocalBeats(key)
        self.ranks: dict[int, Seen] = {}
        self._expected: set[int] | None = None  # all ranks of this host
        self._rank, self._me = rank, process.look()
        self._seconds, self._interval = seconds, interval
        self._looked_at = time.monotonic()
        self._looks: deque[float] = deque([interval], _LATELY)
        for beat in self.files.read().values():
            before = self._me.started - beat.process.started
            if before > _EARLIER_TICKS and not beat.process.lives():
                self.files.remove(beat.rank)  # of a job that was killed
        self.files.clear_verdict()

    def show(self, tick: int, step: int) -> None:
        """Show that this rank lives."""
        self.files.write(beats.RankBeat(self._rank, tick, step, self._me))

    def expect(self, ranks: set[int]) -> None:
        """Note which ranks this host has; each of them has shown itself."""
        self._expected = ranks
        self.ranks = {rank: seen for rank, seen in self.ranks.items() if rank in ranks}

    @property
    def complete(self) -> bool:
        """Whether every rank of this host is known."""
        return self._expected is not None

    def look(self) -> None:
        """Read the heartbeats of all ranks of this host; one that raises OSError counts nothing."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        self._looks.append(elapsed)
        counted = min(elapsed, 2 * self._interval)  # this process may have been frozen itself
        found = {rank: beat for rank, beat in self.files.read().items()
                 if self._expected is None or rank in self._expected}
        live = {rank for rank, beat in found.items() if beat.process.lives()}
        for rank, beat in found.items():
            seen = self.ranks.get(rank)
            if seen is None or seen.beat != beat:
                seen = self.ranks[rank] = Seen(beat)
            else:
                seen.silent_seconds += counted
            seen.gone_seconds = 0.0 if rank in live else seen.gone_seconds + counted
        for rank in self.ranks.keys() - found.keys():
            self.ranks[rank].ended = True

    def patience_seconds(self) -> float:
        """Return the silence after which a rank is missed: longer where this rank is starved."""
        return max(SILENT_SHARE * self._seconds, 3 * max(self._looks))

    def leads(self) -> bool:
        """Return whether this rank speaks for its host: the lowest one that lives does."""
        limit = _LEADER_INTERVALS * self._interval
        live = [rank for rank, seen in self.ranks.items() if not seen.ended
                and not seen.gone_seconds and seen.silent_seconds < limit]
        return self._rank <= min(live, default=self._rank)

    def steps(self) -> dict[int, int]:
        """Return the last finished step of each rank that lives."""
        return {rank: seen.beat.step for rank, seen in list(self.ranks.items())
                if not seen.ended and not seen.gone_seconds}

    def gone(self, seconds: float) -> bool:
        """Return whether a rank's process ended this long ago, and not by itself."""
        return any(seen.gone_seconds >= seconds and not seen.ended for seen in self.ranks.values())

    def suspects(self, silent_seconds: float) -> dict[int, str]:
        """Return what is wrong with which rank; silent for at least `silent_seconds`."""
        found = {}
        for rank, seen in sorted(self.ranks.items()):
            if rank == self._rank:
                continue
            if seen.ended:
                found[rank] = "ENDED"
            elif seen.gone_seconds:
                found[rank] = "GONE: its process has ended"
            elif seen.silent_seconds >= silent_seconds:
                stopped = ", stopped by a signal" if _is_stopped(seen.beat.process.pid) else ""
                found[rank] = f"SILENT: frozen{stopped}"
        return found

    def leave(self) -> None:
        """Show that this rank ends by itself."""
        self.files.remove(self._rank)


def _is_stopped(pid: int) -> bool:
    try:
        now = process.look(pid)
    except OSError:  # no descriptor left
        return False
    return now is not None and now.state in "Tt"
