"""Probe a frozen encoder: logistic regression on its hidden states, for any classification file.

    python launch/probe.py --model runs/base --train train.jsonl --test a.jsonl
    python launch/probe.py ... --text premise hypothesis --pooling cls

Files are tables (.jsonl .csv .tsv .parquet .arrow). Prints accuracy with its interval and the
majority baseline.
"""

import json

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", required=True,
                        help="a run, a checkpoint, an exported directory or a public model")
    parser.add_argument("--train", required=True, metavar="TABLE",
                        help="labelled examples to train on")
    parser.add_argument("--test", required=True, metavar="TABLE", help="labelled examples to score")
    parser.add_argument("--text", nargs="+", default=["text"], metavar="COLUMN",
                        help="column of the text, or of the two texts of a pair (default: text)")
    parser.add_argument("--label", default="label", metavar="COLUMN", help="column of the class")
    parser.add_argument("--pooling", choices=("mean", "cls"), default="mean",
                        help="pooling of the last hidden states (default: mean)")
    options = parser.parse_args()
    if len(options.text) > 2:
        parser.error("--text takes one column, or the two of a pair")

    from deberta_ds.evaluate.probe import features, probe, read_examples
    from deberta_ds.release.reader import load_backbone

    train, test = (read_examples(path, options.text, options.label)
                   for path in (options.train, options.test))
    model = load_backbone(options.model, for_text=True)
    result = probe(features(model, train[0], options.pooling), train[1],
                   features(model, test[0], options.pooling), test[1])
    print(json.dumps({"model": options.model, "pooling": options.pooling} | result, indent=1))


if __name__ == "__main__":
    exit_cleanly(main)
