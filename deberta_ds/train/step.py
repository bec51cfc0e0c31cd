"""One optimizer step: exact token means over ranks and micro-batches, no update from a bad loss."""

import hashlib

import torch
from torch import Tensor

from deberta_ds import dist
from deberta_ds.errors import UserError


class NonFiniteLossError(UserError):
    """A loss became NaN or infinite; the step's update was not made."""


def seed_step(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Make dropout of one micro-batch a function of (seed, step, micro-step, rank)."""
    text = f"{seed} {step} {micro_step} {rank}".encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))


def count_over_ranks(batches: list, device: torch.device) -> dict[str, Tensor]:
    """Return {"targets", "tokens"}: fp64 scalars on `device`, over all micro-batches and ranks."""
    counts = torch.tensor([sum(b.num_targets for b in batches), sum(b.num_tokens for b in batches)],
                          dtype=torch.float64)
    counts = dist.sum_over_ranks(counts.to(device))
    return {"targets": counts[0], "tokens": counts[1]}


def train_step(engine, batches: list, *, step: int, seed: int) -> tuple[dict, dict]:
    """Make one update from this rank's micro-batches; return (sums, counts).

    `sums` are this rank's, `counts` those of the whole step; both stay on the device. Raises
    NonFiniteLossError on every rank, before the update, if any rank's loss is not finite.
    """
    counts = count_over_ranks(batches, engine.device)
    # DeepSpeed averages over ranks and micro-batches; dividing the counts undoes that exactly.
    share = dist.world_size() * len(batches)
    norm = {name: (count / share).float() for name, count in counts.items()}
    finite = torch.ones((), dtype=torch.bool, device=engine.device)
    totals: dict[str, Tensor] = {}
    for micro_step, batch in enumerate(batches):
        seed_step(seed, step, micro_step, dist.rank())
        loss, sums, _ = engine(batch.to(engine.device), norm)
        engine.backward(loss)
        finite &= torch.isfinite(loss.detach())
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value.double()
        if micro_step + 1 == len(batches) and not dist.all_true(finite):
            raise _non_finite(step, batches, totals)
        engine.step()
    return totals, counts


def _non_finite(step: int, batches: list, totals: dict[str, Tensor]) -> NonFiniteLossError:
    rows = [int(row) for batch in batches for row in batch.rows]
    mine = {name: value.item() for name, value in totals.items() if name.endswith("loss")}
    every_rank = dist.gather_objects((rows, mine))
    bad = [f"rank {rank}: {name} = {value}, rows {rows[0]}..{rows[-1]}"
           for rank, (rows, losses) in enumerate(every_rank)
           for name, value in losses.items() if not torch.isfinite(torch.tensor(value))]
    return NonFiniteLossError(
        f"step {step + 1}: the loss is not finite ({'; '.join(bad)}); no update was made. "
        "Resume from the last checkpoint with a lower optim.lr or more warm-up, or look at those "
        "rows with data_prep/show.py")
