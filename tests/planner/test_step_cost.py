"""The cost table counts what a step launches, without a GPU."""

import pytest

pytest.importorskip("triton", reason="the fused kernels need the triton package")

from benchmarks.step_cost import CARDS, count_step, summarize  # noqa: E402
from deberta_ds.config import run_config  # noqa: E402
from deberta_ds.model import flops  # noqa: E402

SMALL = ["--model.num_layers=4", "--model.hidden_size=64", "--model.num_heads=1",
         "--model.intermediate_size=128", "--model.vocab_size=20480", "--data.seq_len=512",
         "--objective.generator_layers=2"]


def table(rows: int) -> tuple:
    overrides = [*SMALL, f"--train.micro_batch_size={rows}"]
    run, _ = run_config.load("launch/runs/v3_base.toml", overrides)
    count = count_step(run)
    return run, count, summarize(run, count, CARDS["h100"])


def test_table_adds_up_and_holds_every_product(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    run, count, small = table(4)
    _, _, large = table(8)
    names = [name for name, _ in count.attention]
    forward = 4 + 1 + 2  # layers, and a generator's last one asks twice
    assert names.count("fused_attention") == names.count("fused_attention_backward") == forward
    for result in (small, large):
        for key in ("kernels", "bytes", "flops", "seconds"):
            parts = sum(part[key] for part in result["parts"].values())
            assert parts == pytest.approx(result["total"][key])
    tokens = 4 * run.data.seq_len
    model = run.model
    attention = 2 * model.hidden_size * (2 * run.data.seq_len + 2 * 512)  # fused: not in the table
    needed = 3 * flops.detector(model, run.data.seq_len) * tokens
    needed -= 3 * model.num_layers * attention * tokens
    assert small["total"]["flops"] > needed
    growth = large["parts"]["layers"]["flops"] / small["parts"]["layers"]["flops"]
    assert 1.8 < growth < 2.0  # twice the tokens; the relative table stays
    assert large["total"]["seconds"] > small["total"]["seconds"]
