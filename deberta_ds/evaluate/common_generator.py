"""A discriminator's scores on rows that a generator of another run has replaced.

A better generator sets its discriminator a harder task, so what a run logs of its own pair says
little about another run's. One common frozen generator gives all of them the same task.
"""

from pathlib import Path

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.data.batch import Row, collate
from deberta_ds.objectives import rtd
from deberta_ds.release.pretrained import LoadedModel, load_backbone

_SEED = 0  # of the samples: the same for every discriminator
_ROWS_AT_ONCE = 16


def score_discriminator(discriminator: str | Path, generator: str | Path, rows: list[Row]
                        ) -> dict[str, float]:
    """Return the scores of `objectives.rtd` over `rows`, whose targets `generator` replaces."""
    judge, writer = load_backbone(discriminator), load_backbone(generator)
    if judge.replaced_token_head is None:
        raise UserError(f"{discriminator}: has no discriminator's head; give a run of "
                        "replaced-token detection")
    if writer.masked_lm is None:
        raise UserError(f"{generator}: has no masked LM with an absolute position table; give a "
                        "masked-LM run, or one of replaced-token detection with its generator")
    if not (judge.tokenizer and writer.tokenizer
            and judge.tokenizer.sha256 == writer.tokenizer.sha256):
        raise UserError(f"{generator}: its tokenizer is not that of {discriminator}, so its "
                        "replacements mean nothing to it")
    longest = max(len(row.input_ids) for row in rows)
    judge.check_length(longest, discriminator)
    writer.check_length(longest, generator)
    return score_rows(judge, writer, rows)


@torch.no_grad()
def score_rows(judge: LoadedModel, writer: LoadedModel, rows: list[Row]) -> dict[str, float]:
    """Return the scores of `judge` on `rows` with `writer`'s samples at their targets."""
    assert writer.masked_lm is not None and writer.tokenizer is not None
    assert judge.replaced_token_head is not None
    total = dict.fromkeys(("targets", "tokens"), 0.0)
    views: dict[str, list[torch.Tensor]] = {"logits": [], "replaced": []}
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        batch = collate(rows[start:start + _ROWS_AT_ONCE])
        loss_sum, correct, ids_BL = rtd.replace_targets(
            *writer.masked_lm, batch, seed=_SEED, temperature=1.0,
            valid_vocab=writer.tokenizer.size)
        original_BL = torch.where(batch.labels >= 0, batch.labels, batch.input_ids)
        replaced_BL, real_BL = ids_BL != original_BL, batch.segments > 0
        logits_BL = judge.replaced_token_head(
            judge.backbone(ids_BL, batch.segments, batch.positions), batch.positions)
        sums = {"targets": batch.num_targets, "tokens": batch.num_tokens,
                "generator_loss": loss_sum, "generator_correct": correct,
                **rtd.detection_sums(logits_BL, replaced_BL, real_BL)}
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + float(value)
        views["logits"].append(logits_BL[real_BL])
        views["replaced"].append(replaced_BL[real_BL])
    return rtd.scores(total, {name: torch.cat(parts) for name, parts in views.items()})
