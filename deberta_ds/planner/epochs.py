"""How often a run sees its text."""

from deberta_ds.base.errors import UserError
from deberta_ds.config.batch_schedule import rows_of_run
from deberta_ds.config.run_config import RunConfig, SourceConfig
from deberta_ds.data import shards
from deberta_ds.data.mixture import FEW_EPOCHS, MANY_EPOCHS

_ROUNDED = 1.1  # new.py counts tokens, a run sequences, of which some are not full
_LEARNS = 15_000_000  # tokens in which the smallest model learns (docs/evidence/recipes.md)
_BYTES_A_TOKEN = 4.0  # of English text with 32,000 subwords


def epochs_worth(tokens: float) -> float:
    """Return how often a text of `tokens` is worth being seen: of little text more often, as fewer
    epochs would teach nothing.
    """
    return max(FEW_EPOCHS, min(MANY_EPOCHS, _LEARNS / max(1, tokens)))


def epochs_of(run: RunConfig, source: SourceConfig) -> float | None:
    """Return how often the run sees a corpus; None for one that is not here, or not yet.

    Before the corpus is packed, its sequences are about as many as its tokens fill.
    """
    length = run.data.seq_len
    rows = shards.rows_directory(source.path, length)
    try:
        if (rows / shards.MANIFEST).exists():
            sequences = sum(shard.rows for shard in shards.read_rows_manifest(rows)[0].shards)
        else:
            tokens = shards.read_manifest(source.path)[0].tokens
            sequences = -(-tokens // (length - shards.FRAME_TOKENS))
    except UserError:
        return None
    share = source.weight / sum(one.weight for one in run.data.sources)
    part = source.part[1] - source.part[0]
    return rows_of_run(run.train) * share / max(1, sequences * part)


def describe_epochs(run: RunConfig) -> list[str]:
    """Return a line per corpus: its epochs, with a warning beyond a few of them."""
    lines = []
    for source in run.data.sources:
        epochs = epochs_of(run, source)
        if epochs is None:
            text = rows_of_run(run.train) * run.data.seq_len * _BYTES_A_TOKEN / FEW_EPOCHS
            lines.append(f"epochs: unknown, {source.path} is no corpus on this machine; of English "
                         f"text {text / 1e9:.3g} GB in all would be seen {FEW_EPOCHS} times")
            continue
        lines.append(f"epochs: {epochs:,.2f} of {source.path}")
        worth = epochs_worth(rows_of_run(run.train) * run.data.seq_len / epochs)
        if epochs > worth * _ROUNDED:
            fewer = max(1, int(run.train.steps * worth / epochs))
            lines.append(
                f"WARNING: over {worth:.3g} epochs. Beyond {FEW_EPOCHS}, repeated text teaches "
                f"less, and from {MANY_EPOCHS} on nothing (Muennighoff et al. 2023, for decoders; "
                "encoders take more, because each epoch has other masks: BERT had 40). Use more "
                f"text, or train.steps = {fewer:,} with a warm-up below that")
    return lines
