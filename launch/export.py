"""Export a training run to a Hugging Face directory, and check it.

    python launch/export.py --run runs/v3_base --out DIR
    python launch/export.py --run runs/v3_base --out DIR --onnx int8

`--run` takes a run's out_dir (its newest checkpoint), one of its checkpoints/step-NNNNNNNN, or
any model that convert.py reads, such as a fine-tuned one. The discriminator is merged (token
embeddings of the generator + delta, in fp32). The generator is written to DIR/generator; the
position embeddings of its enhanced mask decoder are in a separate file. The directory is created
only if AutoModel loads it with the same hidden states. `--onnx` adds onnx/model.onnx for any batch
size and length, and one for the generator, both compared with PyTorch. README.md is the model card;
`--license`, `--language` and `--dataset` are for it.
`--push` uploads the directory to the Hub (log in with `hf auth login`).
"""

from pathlib import Path

from deberta_ds.base.command_line import local, parser_for
from deberta_ds.base.errors import exit_cleanly


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--run", required=True, help="run or checkpoint directory")
    parser.add_argument("--out", type=local, required=True, help="new directory")
    parser.add_argument("--onnx", nargs="?", const="fp32", choices=("fp32", "int8"),
                        help="add ONNX files: fp32 (the default), or also int8; needs "
                             'pip install "deberta_ds[onnx]"')
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="",
                        help="round the weights to 32 or 16 bits (default: as the source has them)")
    parser.add_argument("--tokenizer", help="tokenizer, if the source has none")
    parser.add_argument("--license", default="", metavar="NAME",
                        help="as the Hub names it, such as apache-2.0")
    parser.add_argument("--language", nargs="+", action="extend", default=[], metavar="CODE",
                        help="languages by ISO 639, the main one first, such as de")
    parser.add_argument("--dataset", nargs="+", action="extend", default=[], metavar="NAME",
                        help="names of the corpora on the Hub or in your words, one for each of "
                             "data.sources (default: the end of its path)")
    parser.add_argument("--push", metavar="NAME/REPOSITORY",
                        help="upload the result to this repository of the Hugging Face Hub")
    parser.add_argument("--private", action="store_true",
                        help="with --push: make a new repository private")
    arguments = parser.parse_args()
    if arguments.private and not arguments.push:
        parser.error("--private is for --push")

    from deberta_ds.api.jobs import export
    from deberta_ds.publish.hf import check_repository, push
    from deberta_ds.report.model_card import CARD

    if arguments.push:
        check_repository(arguments.push)
    summary = export(arguments.run, arguments.out, tokenizer=arguments.tokenizer,
                     onnx=arguments.onnx, precision=arguments.precision,
                     repository=arguments.push or "", license=arguments.license,
                     language=arguments.language, dataset=arguments.dataset)
    for note in summary.notes:
        if not note.startswith(("main: kept", "generator: kept", "copied")):
            print(f"  {note}")
    aside = sum("kept aside" in note for note in summary.notes)
    print(f"  kept aside: {aside} tensors that transformers' classes have no place for")
    for line in summary.findings():
        print(f"  {line}")
    out = Path(arguments.out)
    print(f"exported {arguments.run} to {out}; model card: {out / CARD}")
    if arguments.push:
        print(f"pushed to {push(out, arguments.push, arguments.private)}")


if __name__ == "__main__":
    exit_cleanly(main)
