"""Score a masked LM on EWoK by the rule of BabyLM's pipeline of 2025.

    python -m benchmarks.studies.ewok --model MODEL --data ewok_filtered --out OUT

Each row has a context and two targets of which the first one fits. The score of a target is the sum
of log p of its tokens, masked one at a time, after its context. Prints the accuracy by domain and
their mean. The pipeline's BLiMP and its supplement are whole sentences under the same rule:
`launch/minimal_pairs.py` scores them as PLL-token.
"""

import json
from pathlib import Path

import numpy as np

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.evaluate import pair_scores
from deberta_ds.objectives.mlm import queries_of
from deberta_ds.release.reader import LoadedModel, load_backbone
from deberta_ds.training.pairs import encode_sentences, outcomes


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", required=True, help="run or export of a masked LM")
    parser.add_argument("--data", required=True, help="directory of EWoK's .jsonl")
    parser.add_argument("--out", required=True, help="JSON file of the scores")
    args = parser.parse_args()
    rows = [json.loads(line) for file in sorted(Path(args.data).glob("*.jsonl"))
            for line in file.read_text(encoding="utf-8").splitlines()]
    if not rows:
        raise UserError(f"{args.data}: no .jsonl; name the directory of EWoK's tables")
    model = load_backbone(args.model, for_text=True)
    texts = [(row["Context1"], row[f"Target{number}"]) for row in rows for number in (1, 2)]
    different = list(dict.fromkeys(texts))  # two of three
    score_of = dict(zip(different, target_scores(model, different), strict=True))
    outcome = outcomes(np.array([score_of[text] for text in texts]).reshape(-1, 2))
    domains = np.array([row["Domain"] for row in rows])
    found = {str(name): float(outcome[domains == name].mean()) for name in np.unique(domains)}
    rng = np.random.default_rng(0)
    draws = np.mean([rng.choice(values, (2_000, len(values))).mean(1) for values in (
        outcome[domains == name] for name in found)], axis=0)
    result = {"accuracy": float(np.mean(list(found.values()))), "rows": len(rows),
              "interval": np.percentile(draws, [2.5, 97.5]).tolist(), "domains": found}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def target_scores(model: LoadedModel, texts: list[tuple[str, str]]) -> np.ndarray:
    """Return the sum of log p of the target's tokens of each (context, target)."""
    assert model.masked_lm is not None and model.tokenizer is not None
    longest, tokenizer = model.model_config.max_position, model.tokenizer
    encoded = encode_sentences([f"{one} {other}" for one, other in texts], tokenizer, longest)
    contexts = encode_sentences([context for context, _ in texts], tokenizer, longest)
    assert all(one[:-1] == both[:len(one) - 1] for one, both in zip(contexts, encoded, strict=True))
    before = np.array([len(ids) - 1 for ids in contexts])  # without [SEP]
    queries = queries_of(encoded, tokenizer)
    asked = np.flatnonzero(queries.by_token & (queries.target >= before[queries.sentence]))
    lengths = np.array([len(ids) for ids in encoded])[queries.sentence[asked]]
    words, masked_lm = model.masked_lm
    sums = np.zeros(len(texts))
    for items, scores in pair_scores.over_ranks(
            lambda items: pair_scores.masked_scores(words, masked_lm, tokenizer, encoded, queries,
                                                    asked[items]),
            pair_scores.cut_work(lengths), "masked LM"):
        np.add.at(sums, queries.sentence[asked[items]], scores)
    return sums


if __name__ == "__main__":
    exit_cleanly(main)
