"""The MFU that the planner starts from: `python -m benchmarks.studies.mfu_table` (minutes, no GPU).

Prints deberta_ds/planner/speed.py's table: steps of 16,384 tokens of models from 128 to 1,536 wide,
RTD (the widest: masked LM), on an H100 as benchmarks/step_cost.py prices their kernels; and next to
it the same on an A100, which the table does not hold, to show how far the planner's rule for other
cards is from it.
"""

from benchmarks.step_cost import CARDS, count_step, summarize
from deberta_ds.config import run_config
from deberta_ds.engine.gpus import GPUS
from deberta_ds.planner.speed import priced_mfu

TOKENS = 16_384
RUNS = {128: "launch/runs/small_rtd.toml", 256: "launch/runs/small_rtd.toml",
        384: "launch/runs/v3_xsmall.toml", 768: "launch/runs/v3_base.toml",
        1024: "launch/runs/v3_large.toml", 1536: "launch/runs/deberta_1p5b.toml"}
ELECTRA_SMALL = ["--model.hidden_size=256", "--model.num_layers=12", "--model.num_heads=4",
                 "--model.intermediate_size=1024", "--objective.generator_layers=6"]


def priced(hidden: int, length: int) -> dict[str, float]:
    """Return {card: MFU of one step}, and by the planner's rule for an A100."""
    overrides = [f"--data.seq_len={length}", f"--train.micro_batch_size={TOKENS // length}",
                 f"--model.max_position={max(512, length)}",
                 "--train.activation_checkpointing=none", *ELECTRA_SMALL * (hidden == 256)]
    if hidden < 1536:
        overrides.append("--model.vocab_size=32064")
    run, _ = run_config.load(RUNS[hidden], overrides)
    count = count_step(run)
    found = {}
    for card in ("h100", "a100"):
        total = summarize(run, count, CARDS[card])["total"]
        found[card] = total["mfu"]
    return found | {"a100 by rule": priced_mfu(run, GPUS["a100"], "bf16")}


if __name__ == "__main__":
    for hidden in RUNS:
        for length in (128, 512, 2048):
            mfu = ", ".join(f"{card} {share:.3f}" for card, share in priced(hidden, length).items())
            print(f"{hidden:5} x {length:5}: {mfu}", flush=True)
