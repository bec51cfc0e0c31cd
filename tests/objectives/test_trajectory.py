"""One training trajectory everywhere: plain PyTorch, and ZeRO 0..3 on one rank and on two.

Its batch grows, so that one rank makes 1, 2, 3 and 4 micro-batches, and each of two ranks smaller
ones as well.
"""

import pytest
import rank_helpers
import torch
from launching import ROOT, make_run

from deberta_ds.config import run_config
from deberta_ds.config.batch_schedule import Phase
from deberta_ds.config.optim import learning_rate
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import RowDataset
from deberta_ds.engine.optim import decay_groups
from deberta_ds.model.backbone import init_parameters
from deberta_ds.objectives.build import build_model
from deberta_ds.tokenizer import Tokenizer

pytestmark = [pytest.mark.multi, pytest.mark.slow]
TOLERANCE = 1e-5  # relative; fp32 sums in another order
BATCHES = [2, 2, 4, 6, 8, 8]  # rows of each update
SHARED = "words."  # the table; under "es" of no network, as both losses train it


def networks_of(model, run) -> list[list]:
    """Return the parameters of each norm."""
    es = run.objective.embedding_sharing == "es"
    found = {"discriminator.": [], SHARED: [], "": []}
    for name, parameter in model.named_parameters():
        own = [prefix for prefix in found if name.startswith(prefix)][0]
        found["" if own == SHARED and not es else own].append(parameter)
    return [parameters for parameters in found.values() if parameters]


def plain_trajectory(run, batches=tuple(BATCHES)) -> dict:
    """The same run in plain PyTorch: whole batches, losses averaged by hand, one process."""
    tokenizer = Tokenizer(run.data.tokenizer)
    dataset = RowDataset(run.data.sources[:1], tokenizer, seq_len=run.data.seq_len,
                         seed=run.data.seed, mask=run.objective.mask)
    model = build_model(run, tokenizer.size)
    init_parameters(model, run.model.init_std, run.train.seed)
    optimizer = torch.optim.AdamW(decay_groups(model, run.optim.weight_decay),
                                  lr=run.optim.learning_rate, betas=run.optim.betas,
                                  eps=run.optim.eps)
    losses = {"generator": [], "discriminator": []}
    first = model.words.weight.detach().clone()
    for step, rows in enumerate(batches):
        batch = next(build_loader(
            dataset, phases=[Phase(sum(batches[:step]), rows, 1)], micro_batch_size=rows,
            rank=0, world_size=1, num_workers=0))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, run.train.steps)
        optimizer.zero_grad()
        norm = {"targets": torch.tensor(batch.num_targets),
                "tokens": torch.tensor(batch.num_tokens)}
        loss, sums, _ = model(batch, norm)
        loss.backward()
        for network in networks_of(model, run):
            norm = torch.nn.utils.clip_grad_norm_(network, run.optim.clip_norm)
            assert norm > run.optim.clip_norm  # or the test would not see which norm it was
        optimizer.step()
        losses["generator"].append(float(sums["generator_loss"]) / batch.num_targets)
        losses["discriminator"].append(float(sums["discriminator_loss"]) / batch.num_tokens)
    tables = {"words": model.words.weight.detach()}
    if run.objective.embedding_sharing != "es":
        tables["delta"] = model.discriminator.words.weight.detach()
    return losses | tables | {"first": first}


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory):
    root = tmp_path_factory.mktemp("trajectory")
    run_file = make_run(root, steps="6", initial_batch_size="2", batch_warmup_steps="4",
                        two_layers=True)
    run, _ = run_config.load(run_file)
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


def test_a_shared_table_is_clipped_by_its_own_norm_on_three_ranks(tmp_path):
    """With eps = 1 an update is nearly the gradient, so that Adam hides no factor of it."""
    run_file = make_run(tmp_path, steps="3", global_batch_size="12", learning_rate="0.3",
                        two_layers=True,
                        warmup_steps="1\neps = 1.0\nclip_norm = 0.1",
                        kind='"rtd"\nembedding_sharing = "es"')
    run, _ = run_config.load(run_file)
    plain = plain_trajectory(run, [12] * 3)
    rank_helpers.run(3, [str(run_file), str(tmp_path / "out.pt"), "3"], tmp_path / "log",
                     ROOT / "tests/workers/trajectory.py")
    moved = plain["words"] - plain["first"]
    for stage, found in torch.load(tmp_path / "out.pt", weights_only=True).items():
        for key in ("generator", "discriminator"):
            assert found[key] == pytest.approx(plain[key], rel=TOLERANCE), (stage, key)
        difference = (found["words"] - plain["words"]).norm() / moved.norm()
        assert difference < 1e-4, (stage, difference)
