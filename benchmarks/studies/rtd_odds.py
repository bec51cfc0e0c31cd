"""Score minimal pairs by generator and discriminator together.

    python -m benchmarks.studies.rtd_odds --model runs/rtd --data blimp.tar.xz --sample 100

A discriminator at its optimum says logit = log p_G / p + constant of every token, where p_G is the
generator's and p the text's distribution of tokens there. So log p = log p_G - logit + constant:
the pseudo-log-likelihood of the generator plus the sum of the negative logits. Prints the scores of
both and of their sum, and what the sum adds to the generator (interval: bootstrap over pairs).
"""

import numpy as np

from deberta_ds.base.command_line import parser_for, positive
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.evaluate import pair_scores
from deberta_ds.release.reader import LoadedModel, load_backbone
from deberta_ds.training.pairs import encode_sentences, outcomes, read_pairs, sample_pairs


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", required=True, help="run of replaced-token detection")
    parser.add_argument("--data", required=True, help="minimal pairs")
    parser.add_argument("--sample", type=positive, required=True, help="pairs per paradigm")
    args = parser.parse_args()
    pairs = sample_pairs(read_pairs(args.data), args.sample, 0)
    model = load_backbone(args.model, for_text=True)
    scores = pair_scores.score_pairs(model, pairs).scores
    texts = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    odds = scores["negative logits"] = negative_logits(model, texts).reshape(-1, 2)
    for name in ("pll_word", "pll_token"):
        scores[f"{name} - logits"] = scores[name] + odds
    summary = pair_scores.summarize(pair_scores.PairScores(scores, 0, 0.0), pairs)
    for name, score in summary.items():
        low, high = score["interval"]
        print(f"{name:<24} {score['accuracy']:.2%} ({low:.2%} to {high:.2%})")
    paradigms, generator = np.array([pair.paradigm for pair in pairs]), np.random.default_rng(0)
    for name in ("pll_word", "pll_token"):
        gain = outcomes(scores[f"{name} - logits"]) - outcomes(scores[name])
        of_paradigm = [gain[paradigms == one] for one in np.unique(paradigms)]
        draws = np.mean([generator.choice(values, (10_000, len(values))).mean(1)
                         for values in of_paradigm], axis=0)
        low, high = np.percentile(draws, [2.5, 97.5])
        print(f"added to {name:<15} {draws.mean():+.2%} ({low:+.2%} to {high:+.2%})")


def negative_logits(model: LoadedModel, texts: list[str]) -> np.ndarray:
    """Return the sum of the discriminator's negative logits over the tokens of each text."""
    assert model.tokenizer is not None and model.replaced_token_head is not None
    encoded = encode_sentences(texts, model.tokenizer, model.model_config.max_position)
    sums = np.empty(len(texts))
    for items in pair_scores.cut_work(np.array([len(ids) for ids in encoded])):
        log_p_BL = pair_scores.original_scores(model.backbone, model.replaced_token_head, encoded,
                                               items)[:, 1:-1]  # not of [CLS] and [SEP]
        sums[items] = (log_p_BL - np.log(-np.expm1(log_p_BL))).sum(1)  # log p / (1 - p)
    return sums


if __name__ == "__main__":
    exit_cleanly(main)
