"""One training trajectory everywhere: plain PyTorch, and ZeRO 0..3 on one rank and on two.

Its batch grows, so that one rank makes 1, 2, 3 and 4 micro-batches, and each of two ranks smaller
ones as well.
"""

import pytest
import rank_helpers
import torch
from launching import ROOT, make_run

from deberta_ds import config
from deberta_ds.batch_schedule import Stretch
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import RowDataset
from deberta_ds.model.decay import decay_groups
from deberta_ds.model.init import init_parameters
from deberta_ds.objectives.build import build_model
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.train.schedule import learning_rate

pytestmark = [pytest.mark.multi, pytest.mark.slow]
TOLERANCE = 1e-5  # relative; fp32 sums in another order
BATCHES = [2, 2, 4, 4, 6, 6, 8, 8, 8, 8]  # rows of each update


def plain_trajectory(run) -> dict:
    """The same run in plain PyTorch: whole batches, losses averaged by hand, one process."""
    tokenizer = Tokenizer(run.data.tokenizer)
    dataset = RowDataset(run.data.sources[:1], tokenizer, seq_len=run.data.seq_len,
                         seed=run.data.seed, mask=run.objective.mask)
    model = build_model(run, tokenizer.size)
    init_parameters(model, run.model.init_std, run.train.seed)
    optimizer = torch.optim.AdamW(decay_groups(model, run.optim.weight_decay), lr=run.optim.lr,
                                  betas=run.optim.betas, eps=run.optim.eps)
    losses = {"generator": [], "discriminator": []}
    for step, rows in enumerate(BATCHES):
        batch = next(build_loader(
            dataset, stretches=[Stretch(sum(BATCHES[:step]), rows, 1)], micro_batch_rows=rows,
            rank=0, world_size=1, num_workers=0))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, run.train.steps)
        optimizer.zero_grad()
        norm = {"targets": torch.tensor(batch.num_targets),
                "tokens": torch.tensor(batch.num_tokens)}
        loss, sums, _ = model(batch, norm)
        loss.backward()
        apart = list(model.discriminator.parameters())
        theirs = {id(p) for p in apart}
        for network in (apart, [p for p in model.parameters() if id(p) not in theirs]):
            norm = torch.nn.utils.clip_grad_norm_(network, run.optim.clip_norm)
            assert norm > run.optim.clip_norm  # or the test would not see which norm it was
        optimizer.step()
        losses["generator"].append(float(sums["generator_loss"]) / batch.num_targets)
        losses["discriminator"].append(float(sums["discriminator_loss"]) / batch.num_tokens)
    return losses | {"words": model.words.weight.detach(),
                     "delta": model.discriminator.words.weight.detach()}


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory):
    root = tmp_path_factory.mktemp("trajectory")
    run_file = make_run(root, steps="10", first_batch_rows="2", batch_growth_steps="6")
    run, _ = config.load(run_file)
    found = {"plain": plain_trajectory(run)}
    for ranks in (1, 2):
        out = root / f"{ranks}.pt"
        rank_helpers.run(ranks, [str(run_file), str(out), "0,1,2,3"], root / f"{ranks}.log",
                         ROOT / "tests/workers/trajectory.py")
        for stage, result in torch.load(out, weights_only=True).items():
            found[f"{ranks} ranks, ZeRO-{stage}"] = result
    return found


def test_all_agree_with_plain_pytorch(trajectories):
    plain = trajectories.pop("plain")
    assert len(trajectories) == 8
    assert plain["generator"][-1] < plain["generator"][0]
    for name, found in trajectories.items():
        for key in ("generator", "discriminator"):
            torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(plain[key]),
                                       rtol=TOLERANCE, atol=0, msg=lambda m, n=name: f"{n}: {m}")
        for key in ("words", "delta"):  # GDES: what each network's loss has done to its own table
            difference = (found[key] - plain[key]).norm() / plain[key].norm()
            assert difference < TOLERANCE, (name, key, difference)
    trajectories["plain"] = plain
