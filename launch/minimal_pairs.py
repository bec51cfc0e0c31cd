"""Score a model on minimal pairs: does it prefer the sentence that speakers prefer?

    python launch/minimal_pairs.py --model runs/base --data blimp --out pairs

Several ranks under deepspeed give the same result in less time.

MODEL is a run, a checkpoint, an exported directory or a public model. DATA is a directory, a tar
archive or a file in the format of BLiMP or Zorro. It may also be your own JSON lines with
sentence_good, sentence_bad, paradigm and phenomenon. Every head is scored: a masked LM (or
generator) by pseudo-log-likelihood per word and per token, a discriminator by the probability that
nothing was replaced.
"""

import argparse
import json
import os

from deberta_ds.base.command_line import local_path, natural, parser_for
from deberta_ds.base.errors import exit_cleanly


def load(path: str):
    """Return the model at `path` on this rank's GPU, if there is one."""
    import torch

    from deberta_ds.cluster import dist
    from deberta_ds.cluster.launcher import count_gpus
    from deberta_ds.release.reader import load_backbone

    gpus = count_gpus()
    model = load_backbone(path, for_text=True)
    if gpus:
        device = torch.device("cuda", dist.local_rank())
        for module in (model.backbone, *(model.masked_lm or ()), model.replaced_token_head):
            if module is not None:
                module.to(device)
    return model


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", required=True, help="model to score")
    parser.add_argument("--data", required=True, help="minimal pairs")
    parser.add_argument("--out", type=local_path, help="directory for minimal_pairs.json and .html")
    parser.add_argument("--sample", type=natural, default=0, metavar="N",
                        help="score a sample of N pairs per paradigm (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample")
    parser.add_argument("--scoring", choices=("word", "word_ids"), default="word",
                        help="words of the likelihood per word: of whole-word masking (word), or "
                             "the published rule, PLL-word-l2r of Kauf and Ivanova 2023: "
                             "word_ids() of the exported tokenizer")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it
    options = parser.parse_args()

    from hashlib import sha256

    from deberta_ds.base.files import write_atomic
    from deberta_ds.cluster import dist
    from deberta_ds.cluster.launcher import rank_variables
    from deberta_ds.evaluate import pair_scores
    from deberta_ds.release.reader import checkpoint_of
    from deberta_ds.report.pages import render
    from deberta_ds.training.pairs import read_pairs, sample_pairs

    if (rank_variables(os.environ) | os.environ).get("WORLD_SIZE") != "1":  # None: MPI knows it
        from deberta_ds.engine.engine import init_distributed
        from deberta_ds.training.start import versions

        init_distributed()
        dist.check_alike({"version of": versions()} | {
            f"--{name}": value for name, value in vars(options).items() if name != "local_rank"})
    # Of a run in training there may be a newer checkpoint a moment later.
    place = dist.broadcast_object(dist.together(lambda: checkpoint_of(options.model)))
    pairs, model = dist.together(lambda: (read_pairs(options.data), load(place)))
    dist.check_alike({f"hash of the model's {name}": digest
                      for name, digest in model.identity.items()}
                     | {"hash of the pairs": sha256(repr(pairs).encode()).hexdigest()})
    if options.sample:
        pairs = sample_pairs(pairs, options.sample, options.seed)
    scored = dist.together(lambda: pair_scores.score_pairs(model, pairs, options.scoring))
    result = pair_scores.describe(scored, pairs, options.model, options.data)
    if dist.is_main():
        published = pair_scores.published_scores(result)
        print(pair_scores.table(result, published))
        if options.out:
            path = options.out / "minimal_pairs.json"
            write_atomic(path, json.dumps(result, indent=1) + "\n")
            page = path.with_suffix(".html")
            write_atomic(page, render("pairs.html", result=result, published=published,
                                      titles=pair_scores.SCORERS))
            print(f"written: {path}, {page}")
    dist.destroy()


if __name__ == "__main__":
    exit_cleanly(main)
