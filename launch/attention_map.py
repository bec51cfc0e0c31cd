"""Draw the parts of the attention scores of a text in an HTML report.

    python launch/attention_map.py --model MODEL "The cat sat on the mat."
    python launch/attention_map.py --model MODEL "..." --layers 0 5 11 --png

For every selected head the report shows the content-to-content, content-to-position and
position-to-content parts of the scores, their sum, and the probabilities. It also shows how similar
position embeddings are by distance. Layers and heads count from 0, as in the names of the weights.
The report is one self-contained file. --png writes a picture as well.
"""

from pathlib import Path

from deberta_ds.base.command_line import local_path, parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", required=True,
                        help="a run, a checkpoint, or anything that convert.py reads")
    parser.add_argument("text", metavar="TEXT", help="text to read, in quotes")
    parser.add_argument("--layers", type=int, nargs="+", action="extend", metavar="N",
                        help="default: the first, the middle and the last")
    parser.add_argument("--heads", type=int, nargs="+", action="extend", metavar="N",
                        help="default: the first four")
    parser.add_argument("--tokenizer", help="tokenizer, if the model has none")
    parser.add_argument("--out", type=local_path, default=Path("attention.html"), metavar="FILE",
                        help="HTML report to write")
    parser.add_argument("--png", action="store_true", help="also write FILE as .png")
    options = parser.parse_args()

    from deberta_ds.report.attention_page import write_attention

    for path in write_attention(options.model, options.text, options.layers, options.heads,
                                options.out, png=options.png,
                                tokenizer=options.tokenizer):
        print(f"report: {path} ({path.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    exit_cleanly(main)
