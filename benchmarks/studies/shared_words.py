"""Does a model of sentence pairs compare them? Six counts of the words, next to its scores.

    python -m benchmarks.studies.shared_words nli/mnli_en.train.jsonl nli/mnli_en.valid.jsonl \\
        runs/use/MNLI-small/seed-*/val_predictions.jsonl

The tables need the keys premise, hypothesis and label. Prints accuracies of logistic regression in
percent: of the counts, fitted to the first table; and, by tenfold cross-validation in the second,
of the counts, of the scores of each fine-tuned model, and of both.
"""

import json
import re

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from deberta_ds.base.command_line import parser_for

NEGATIONS = {"not", "no", "never", "nothing", "none", "t"}  # t: the end of "don't"


def counts(row: dict) -> list[float]:
    """Return six numbers of both sentences: words shared or not, lengths, negations."""
    premise, hypothesis = (re.findall(r"\w+", row[key].lower())
                           for key in ("premise", "hypothesis"))
    shared = sum(word in premise for word in hypothesis)
    return [shared / max(len(hypothesis), 1), len(hypothesis) - shared, len(premise) / 10,
            len(hypothesis) / 10, any(word in NEGATIONS for word in premise),
            any(word in NEGATIONS for word in hypothesis)]


def load(path: str) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("train", help="table that the counts are fitted to")
    parser.add_argument("val", help="table that is scored")
    parser.add_argument("predictions", nargs="*", help="val_predictions.jsonl of a model, for val")
    options = parser.parse_args()
    train, val = load(options.train), load(options.val)
    train_counts, val_counts = (np.array([counts(row) for row in rows]) for rows in (train, val))
    train_labels, val_labels = ([row["label"] for row in rows] for rows in (train, val))
    model = LogisticRegression(max_iter=5000)

    def crossed(inputs: np.ndarray) -> float:
        return 100 * cross_val_score(model, inputs, val_labels, cv=10).mean()

    accuracy = 100 * model.fit(train_counts, train_labels).score(val_counts, val_labels)
    print(f"counts: {accuracy:.1f}, {crossed(val_counts):.1f} crossed")
    for path in options.predictions:
        scores = np.array([row["scores"] for row in load(path)])
        both = np.hstack([scores, val_counts])
        print(f"{path}: scores {crossed(scores):.1f}, with the counts {crossed(both):.1f}")


if __name__ == "__main__":
    main()
