"""Fill the masked words of a text, with the enhanced mask decoder.

    python launch/fill_mask.py --model MODEL "Paris is the [MASK] of France."

For an exported discriminator, its generator is used.
"""

from deberta_ds.base.command_line import parser_for, positive
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", required=True,
                        help="a run, a checkpoint, or anything that convert.py reads")
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="text with [MASK], in quotes")
    parser.add_argument("--tokenizer", help="tokenizer, if the model has none")
    parser.add_argument("--top", type=positive, default=5, help="predictions per mask")
    arguments = parser.parse_args()

    from deberta_ds.evaluate.fill_mask import fill_mask, load_masked_lm

    model = load_masked_lm(arguments.model, arguments.tokenizer)
    if arguments.top > model.tokenizer.size:
        parser.error(f"--top {arguments.top}: the tokenizer has {model.tokenizer.size:,} ids")
    for text in arguments.texts:
        print(text)
        for number, fillings in enumerate(fill_mask(model, text, arguments.top), start=1):
            proposals = "  ".join(f"{filling.text} {filling.probability:.1%}"
                                  for filling in fillings)
            print(f"  mask {number}: {proposals}")


if __name__ == "__main__":
    exit_cleanly(main)
