"""Write docs/reference/recipes.md by the planner: python docs/make_recipes.py (minutes)."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from deberta_ds.base.numbers import format_count
from deberta_ds.config import run_config
from deberta_ds.config.batch_schedule import rows_of_run
from deberta_ds.engine import ds_config
from deberta_ds.engine.gpus import card_of, cpu_ranks
from deberta_ds.model.backbone import count_parameters, on_meta
from deberta_ds.objectives.build import build_model
from deberta_ds.planner import plan
from deberta_ds.planner.speed import expected_mfu

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/recipes.md"
RECIPES = ROOT / "launch/runs/lab"
PIECES = 32_000  # of the tokenizer in README.md
ROWS = -(-(PIECES + 1) // 64) * 64  # of the token embedding
BYTES_A_TOKEN = 4.0  # of English text with that many pieces
CARDS = {  # recipe: (card, GPUs)
    "lab_xsmall_cpu": [("cpu", 16)],  # cores
    "lab_xsmall_1gpu": [("rtx4090", 1), ("a100", 1), ("h100", 1)],
    "lab_small_1gpu": [("rtx4090", 1), ("rtx4090", 4), ("a100", 1), ("h100", 1)],
    "lab_base_8gpu": [("rtx4090", 8), ("a100", 4), ("a100", 8), ("h100", 8)],
}
HEAD = f"""# Recipes for a small laboratory

After this page you can choose a shipped run file for your text and your GPUs.

Made by `python docs/make_recipes.py` from `launch/runs/lab/` and the planner; do not edit.

Time and memory are the planner's ([Plan](../how-to/plan.md)), for {PIECES:,} subwords and bf16 (on
the CPU fp32). The share of the peak that a card reaches is expected from the price of
a step on an H100, not measured ([Scale](../explanation/scale.md#the-planner)). That of a CPU is
measured. The peak memory of a GPU includes {plan.RESERVED_BYTES >> 30} GiB for CUDA, NCCL and
fragmentation. The `PEAK` that `launch/plan.py` prints does not, but its `fits` counts them.

Take the days as an order of magnitude. Ask again with your card, your count and the share that your
first hundred steps log as `mfu`:

    python launch/plan.py --config launch/runs/lab/lab_small_1gpu.toml --gpu rtx4090 --gpus 2
    python launch/plan.py --config launch/runs/lab/lab_small_1gpu.toml --gpu mine --gpus 2 \\
        --tflops 120 --memory_gb 48 --mfu 0.2

Before the tokenizer is there, say its size: `--model.vocab_size={ROWS}`. Else the plan is for the
128,100 rows of the preset; it says which vocabulary it took.

For a corpus, devices and hours of your own, from 1 MB of text on,
`launch/new.py` writes a run file:
the recipe of the largest model that is worth it (below 0.3 GB of text
`launch/runs/small_mlm.toml`), with what has to differ and the reasons.

    python launch/new.py --corpus shards/web --heldout shards/heldout --tokenizer spm.model \\
        --devices "2 cpu" --hours 24

A GB of English text is about {1000 / BYTES_A_TOKEN:.0f} M tokens. Text that is seen four times
teaches nearly as much as new text (arXiv 2305.16264), so the steps are for four epochs or fewer of
the text named. With less text take fewer `--train.steps`: a start says how many epochs it will be.
Hyper-parameters come from ELECTRA and DeBERTaV3, as the head of each file says; nobody has tuned
them for these sizes.

| recipe | model | text | tokens | card | peak memory of one | how | days |
|---|---|---|---|---|---|---|---|
"""


def rows(path: Path) -> list[str]:
    """Return the lines of the table for one recipe."""
    run, origins = run_config.load(path)
    preset = origins["model.hidden_size"].removeprefix("preset ")
    run = replace(run, model=replace(run.model, vocab_size=ROWS))
    tokens = rows_of_run(run.train) * run.data.seq_len
    text = tokens * BYTES_A_TOKEN / 1e9
    parameters = format_count(count_parameters(on_meta(build_model, run)))
    found = []
    for name, count in CARDS[path.stem]:
        gpu, on_cpu = card_of(name), name == "cpu"
        ds = ds_config.load(
            ROOT / f"ds_configs/zero1_{'fp32' if on_cpu else 'bf16'}.json")
        where = f"{count} x {name.upper()}"
        if on_cpu:
            gpu, ranks, _ = cpu_ranks(gpu, count)
            count, where = ranks, f"CPU, {count} cores, {ranks} ranks"
        choices = plan.make_plan(run, ds, gpu=gpu, gpus=count, nodes=1,
                                 mfu=expected_mfu(run, gpu, ds))
        best = min((c for c in choices if c.stage == 1 and c.fits), key=lambda c: c.days)
        if on_cpu:
            best = next(c for c in choices if c.stage == 1 and c.checkpointing == "full")
        peak = best.memory.peak + (0 if on_cpu else plan.RESERVED_BYTES)
        found.append(f"| `{path.stem}` | {preset.removeprefix('deberta-v3-')}, {parameters} | "
                     f"{text / 4:.1f} GB four times | {format_count(tokens)} | {where} | "
                     f"{peak / 1e9:.0f} GB | ZeRO-1, checkpointing {best.checkpointing} | "
                     f"{best.days:.1f} |")
    return found


if __name__ == "__main__":
    plan.trace = cache(plan.trace)
    lines = [line for name in CARDS for line in rows(RECIPES / f"{name}.toml")]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
