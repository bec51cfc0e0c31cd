"""Convert a DeBERTa between formats, exactly, and check the result.

    python launch/convert.py --model SOURCE --out DIR --to hf|ms|ours

SOURCE is a Hugging Face directory, or a run, checkpoint or consolidated directory of this project.
It may also be a microsoft `.bin` with model_config.json next to it, or an official training output
(discriminator/ and generator/). DIR is a new directory. If something cannot be converted, a line
says so.
"""

from deberta_ds.base.command_line import local, parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", required=True, metavar="SOURCE", help="model to convert")
    parser.add_argument("--out", type=local, required=True, metavar="DIR",
                        help="directory to write")
    parser.add_argument("--to", choices=("hf", "ms", "ours"), required=True,
                        help="format: Hugging Face, microsoft's release, or the weights and "
                             "config of this project")
    parser.add_argument("--tokenizer", help="tokenizer, if the source has none")
    arguments = parser.parse_args()

    from deberta_ds.publish.convert import convert

    summary = convert(arguments.model, arguments.out, arguments.to, tokenizer=arguments.tokenizer)
    for line in (*summary.notes, *summary.findings()):
        print(f"  {line}")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    exit_cleanly(main)
