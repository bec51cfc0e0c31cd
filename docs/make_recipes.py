"""Write docs/reference/recipes.md by the planner: python docs/make_recipes.py (minutes).

The figures also go to benchmarks/results/planned_cost.json, which README and docs cite.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from deberta_ds.base.numbers import format_count
from deberta_ds.config import run_config
from deberta_ds.config.batch_schedule import rows_of_run
from deberta_ds.engine import ds_config
from deberta_ds.engine.gpus import card_of, cpu_ranks
from deberta_ds.objectives.build import parameter_sizes
from deberta_ds.planner import plan
from deberta_ds.planner.speed import expected_mfu

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/recipes.md"
RUNS = ROOT / "launch/runs"
RESULTS = ROOT / "benchmarks/results/planned_cost.json"
PRICES = {"rtx4090": 0.40, "a100": 1.50, "h100": 2.50}  # dollars per GPU hour, assumed
PIECES = 32_000  # of the tokenizer in README.md
ROWS = -(-(PIECES + 1) // 64) * 64  # of the token embedding
BYTES_A_TOKEN = 4.0  # of English text with that many pieces
CARDS = {  # run file: (card, GPUs)
    "lab/lab_xsmall_cpu": [("cpu", 16)],  # cores
    "lab/lab_xsmall_1gpu": [("rtx4090", 1), ("a100", 1), ("h100", 1)],
    "lab/lab_small_1gpu": [("rtx4090", 1), ("rtx4090", 4), ("a100", 1), ("h100", 1)],
    "lab/lab_base_8gpu": [("rtx4090", 8), ("a100", 4), ("a100", 8), ("h100", 8)],
    "v3_base": [("a100", 8), ("h100", 8)],
    "v3_large": [("h100", 8)],
}
HEAD = f"""# Recipes for a small laboratory

After this page you can choose a shipped run file for your text and your GPUs.

Made by `python docs/make_recipes.py` from `launch/runs/` and the planner; do not edit.

All figures are planned, not measured ([Plan](../how-to/plan.md)). They hold for bf16 (on the CPU
fp32) and, in `lab/`, for {PIECES:,} subwords. The share of the peak that a card reaches is expected
from the price of a step on an H100 ([Scale](../explanation/scale.md#the-planner)). That of a CPU is
measured. [What it costs](../explanation/cost.md) says how far to trust them. Assumed prices per GPU
hour: {', '.join(f'{name.upper()} {price:.2f} dollars' for name, price in PRICES.items())}.

The peak memory of a GPU includes {plan.RESERVED_BYTES >> 30} GiB for CUDA, NCCL and fragmentation.
The `PEAK` that `launch/plan.py` prints does not, but its `fits` counts them.

Take the days as an order of magnitude. Ask again with your card, your count and the share that your
first hundred steps log as `mfu`:

    python launch/plan.py --config launch/runs/lab/lab_small_1gpu.toml --devices "2 x rtx4090"
    python launch/plan.py --config launch/runs/lab/lab_small_1gpu.toml --devices "2 x mine" \\
        --tflops 120 --memory_gb 48 --mfu 0.2

Before there is a tokenizer, give its size: `--model.vocab_size={ROWS}`. Else the plan is for the
128,100 tokens of the preset. It says which vocabulary it took.

For a corpus, devices and hours of your own, `launch/new.py` writes a run file. 1 MB of text is
enough. It takes the recipe of the largest model that is worth it, with what has to differ and the
reasons. Below 0.3 GB of text that is `launch/runs/small_mlm.toml`.

    python launch/new.py --corpus shards/web --heldout shards/heldout --tokenizer spm.model \\
        --devices "2 cpu" --hours 24

A GB of English text is about {1000 / BYTES_A_TOKEN:.0f} M tokens. Text that is seen four times
teaches nearly as much as new text (arXiv 2305.16264). So the steps are for four epochs or fewer of
the text named. With less text take fewer `--train.steps`: a start says how many epochs it will be.
Hyper-parameters come from ELECTRA and DeBERTaV3, as the head of each file says. Nobody has tuned
them for these sizes. All rows use ZeRO-1.

| recipe | model | text | tokens | card | memory | checkpointing | tok/s | days | GPU hours | $ |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def planned(name: str) -> dict[str, dict]:
    """Return what the planner says of one run file, by the card and its count."""
    run, origins = run_config.load(RUNS / f"{name}.toml")
    if name.startswith("lab/"):
        run = replace(run, model=replace(run.model, vocab_size=ROWS))
    tokens = rows_of_run(run.train) * run.data.seq_len
    known = {"recipe": name, "tokens": tokens, "text_gb": round(tokens * BYTES_A_TOKEN / 4e9, 1),
             "model": origins["model.hidden_size"].removeprefix("preset deberta-v3-"),
             "parameters": sum(parameter_sizes(run).values())}
    found = {}
    for card, count in CARDS[name]:
        gpu, on_cpu, ranks = card_of(card), card == "cpu", count
        ds = ds_config.load(ROOT / f"ds_configs/zero1_{'fp32' if on_cpu else 'bf16'}.json")
        if on_cpu:
            gpu, ranks, _ = cpu_ranks(gpu, count)
        mfu = expected_mfu(run, gpu, ds)
        choices = plan.make_plan(run, ds, gpu=gpu, gpus=ranks, nodes=1, mfu=mfu)
        best = min((c for c in choices if c.stage == 1 and c.fits), key=lambda c: c.days)
        if on_cpu:
            best = next(c for c in choices if c.stage == 1 and c.checkpointing == "full")
        hours = best.days * 24 * count
        found[f"{Path(name).name}-{count}x{card}"] = known | {
            "card": f"CPU, {count} cores, {ranks} ranks" if on_cpu else f"{count} x {card.upper()}",
            "peak_gb": round((best.memory.peak + (0 if on_cpu else plan.RESERVED_BYTES)) / 1e9),
            "checkpointing": best.checkpointing, "mfu": round(mfu, 3),
            "tokens_per_second": round(tokens / best.days / 86_400), "days": round(best.days, 2),
            "gpu_hours": None if on_cpu else round(hours, 1),
            "dollars": None if on_cpu else round(hours * PRICES[card])}
    return found


def row(one: dict) -> str:
    """Return a line of the table."""
    hours, dollars = one["gpu_hours"], one["dollars"]
    money = "- | -" if hours is None else f"{hours:,.0f} | {dollars:,}"
    return (f"| `{Path(one['recipe']).name}` | {one['model']}, {format_count(one['parameters'])} | "
            f"{one['text_gb']:,.1f} GB four times | {format_count(one['tokens'])} | "
            f"{one['card']} | {one['peak_gb']} GB | {one['checkpointing']} | "
            f"{format_count(one['tokens_per_second'])} | {one['days']:.1f} | {money} |")


if __name__ == "__main__":
    plan.trace = cache(plan.trace)
    found = {key: one for name in CARDS for key, one in planned(name).items()}
    content = json.dumps({"dollars_per_gpu_hour": PRICES, "plans": found}, indent=1)
    RESULTS.write_text(content + "\n", encoding="utf-8")
    PAGE.write_text(HEAD + "\n".join(map(row, found.values())) + "\n", encoding="utf-8")
