"""A frozen generator replaces the masked tokens of a packed corpus, once for many discriminators.

Masks and samples of a row are functions of (seed, draw, row), and a batch is a fixed part of a
shard, computed by one thread: the files are the same bytes for any number of workers.
"""

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import xxhash

from deberta_ds.base.errors import UserError
from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig
from deberta_ds.corpus.units import job, run_units
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.replaced import ReplacedManifest, write_replaced_manifest, write_shard
from deberta_ds.data.rows import RowDataset, collate
from deberta_ds.data.shards import MANIFEST, token_dtype
from deberta_ds.objectives.rtd import replace_targets
from deberta_ds.release.reader import LoadedModel, load_backbone

VERSION = 1
_ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class Recipe:
    """What decides the replacements of a corpus."""

    corpus: str
    generator: str
    seq_len: int
    temperatures: tuple[float, ...]
    seed: int = 0
    mask: MaskConfig = MaskConfig()
    attend_across_documents: bool = False


def replace_corpus(recipe: Recipe, out: str | Path, *, workers: int = 1) -> None:
    """Write the replacements of `recipe` to `out`.

    Does nothing if they are complete; goes on where a killed run stopped.
    """
    generator, weights = _generator(recipe.generator)
    assert generator.tokenizer is not None
    corpus = Corpus(recipe.corpus, seq_len=recipe.seq_len)
    corpus.check_tokenizer(generator.tokenizer.sha256)
    generator.check_length(recipe.seq_len, recipe.generator)
    made_by = {"generator": weights, "seed": recipe.seed,
               "mask": {name: value for name, value in asdict(recipe.mask).items()
                        if name != "final_rate"}}  # stored draws have one rate
    out = Path(out)
    description = {"version": VERSION, "rows": corpus.rows_content_hash, "made_by": made_by,
                   "temperatures": list(recipe.temperatures),
                   "attend_across_documents": recipe.attend_across_documents}
    with job(out, description, finished=MANIFEST) as is_done:
        if not is_done:
            read = {recipe.corpus: corpus.rows_content_hash, recipe.generator: weights}
            units = {f"draw-{draw}-{name}": (recipe, str(out), draw, name, read)
                     for draw in range(len(recipe.temperatures)) for name in corpus.shard_rows}
            results = run_units(out, replace_shard, units, workers=workers, label="replace")
            shards: list[dict] = [{} for _ in recipe.temperatures]
            for (_, _, draw, name, _), result in zip(units.values(), results, strict=True):
                shards[draw][name] = result["files"]
            write_replaced_manifest(out, ReplacedManifest(
                corpus.rows_content_hash, recipe.seq_len, recipe.attend_across_documents,
                list(recipe.temperatures), made_by, shards))


@torch.no_grad()
def replace_shard(recipe: Recipe, out: str, draw: int, name: str, read: dict[str, str]) -> dict:
    """Replace the targets of one shard's rows in one draw and write its files. `read`: hashes of
    what the command began with; UserError if it is something else by now.
    """
    torch.set_num_threads(1)
    generator, weights = _generator(recipe.generator)
    assert generator.masked_lm is not None and generator.tokenizer is not None
    seed = recipe.seed * 1_000_003 + draw  # of masks and samples: a draw repeats neither
    dataset = RowDataset(
        [SourceConfig(path=recipe.corpus)], generator.tokenizer, seq_len=recipe.seq_len, seed=seed,
        mask=recipe.mask, attend_across_documents=recipe.attend_across_documents)
    corpus = Corpus(recipe.corpus, seq_len=recipe.seq_len)
    for path, now in (*dataset.content_hashes.items(), (recipe.corpus, corpus.rows_content_hash),
                      (recipe.generator, weights)):
        if now != read[path]:
            raise UserError(f"{path}: changed while this command read it; run it again")
    rows = corpus.shard_rows[name]
    is_replaced, samples = [], []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        batch = collate(list(map(dataset.natural_row, rows[start:start + _ROWS_AT_ONCE])))
        _, _, ids_BL = replace_targets(
            *generator.masked_lm, batch, seed=seed, temperature=recipe.temperatures[draw],
            valid_vocab=generator.tokenizer.size)
        differs_BL = (batch.labels >= 0) & (ids_BL != batch.labels)
        is_replaced.append(differs_BL.numpy())
        samples.append(ids_BL[differs_BL].numpy())
    mask_RL = np.concatenate(is_replaced) if is_replaced else np.zeros((0, recipe.seq_len), bool)
    ids_N = np.concatenate(samples or [np.zeros(0)]).astype(token_dtype(generator.tokenizer.size))
    return {"files": write_shard(Path(out), draw, name, mask_RL, ids_N)}


@cache
def _generator(path: str) -> tuple[LoadedModel, str]:
    """Return a generator, and a checksum of its weights, so that another one is not mixed in."""
    model = load_backbone(path)
    if model.masked_lm is None or model.tokenizer is None:
        raise UserError(f"{path}: no masked LM with an absolute position table and a tokenizer; "
                        "give a masked-LM run, or one of replaced-token detection")
    digest = xxhash.xxh3_128()
    for module in model.masked_lm:
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy())
    return model, digest.hexdigest()
