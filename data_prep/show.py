#!/usr/bin/env python
"""Print rows as the model sees them: pieces, with the masked tokens coloured."""

import sys
from typing import TYPE_CHECKING

from options import fraction, natural, parser_for, positive, share

from deberta_ds.errors import exit_cleanly

if TYPE_CHECKING:
    from deberta_ds.tokenizer import Tokenizer

_MASKED, _REPLACED, _KEPT, _SPECIAL, _PLAIN = (
    "\x1b[7;31m", "\x1b[7;35m", "\x1b[7;32m", "\x1b[2;36m", "\x1b[0m"
)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpus", help="corpus directory")
    parser.add_argument("--tokenizer", required=True, help="spm.model")
    parser.add_argument("--seq_len", type=positive, required=True, help="tokens in a row")
    parser.add_argument("--rows", type=positive, default=2, help="how many")
    parser.add_argument("--first", type=natural, default=0, help="first row number of the run")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the run")
    parser.add_argument("--rate", type=share, default=0.15, help="share of tokens masked")
    parser.add_argument("--max_ngram", type=positive, default=1, help="longest span of words")
    parser.add_argument("--mask_share", type=fraction, default=1.0, help="targets shown as [MASK]")
    parser.add_argument("--random_share", type=fraction, default=0.0, help="targets replaced")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto",
                        help="colours; without them targets stand in braces")
    args = parser.parse_args()

    from deberta_ds.config import MaskConfig, SourceConfig
    from deberta_ds.data.rows import RowDataset
    from deberta_ds.tokenizer import Tokenizer

    tokenizer = Tokenizer(args.tokenizer)
    mask = MaskConfig(rate=args.rate, max_ngram=args.max_ngram, mask_share=args.mask_share,
                      random_share=args.random_share)
    dataset = RowDataset([SourceConfig(path=args.corpus)], tokenizer, seq_len=args.seq_len,
                         seed=args.seed, mask=mask)
    color = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
    for g in range(args.first, args.first + args.rows):
        row = dataset[g]
        real, targets = int((row.segments > 0).sum()), int((row.labels >= 0).sum())
        print(f"row {g} (row {dataset.locate(g)[1]} of {args.corpus}): {real} of {args.seq_len} "
              f"tokens, {int(row.segments.max())} pieces, {targets} targets "
              f"({targets / real:.1%})")
        print(render(row, tokenizer, color), end="\n\n")
    if color:
        print(f"{_MASKED}masked{_PLAIN} {_REPLACED}shown as another{_PLAIN} "
              f"{_KEPT}shown unchanged{_PLAIN} {_SPECIAL}special{_PLAIN}")


def render(row, tokenizer: "Tokenizer", color: bool) -> str:
    """Return the row as text; each target as its original, coloured by what the model is shown."""
    from deberta_ds.tokenizer import SPACE_MARK

    special, parts = tokenizer.is_special(), []
    for shown, label, segment in zip(row.input_ids, row.labels, row.segments, strict=True):
        if segment == 0:
            break
        original = label if label >= 0 else shown
        piece = tokenizer.pieces([original])[0]
        text = piece.replace(SPACE_MARK, " ")
        if label < 0:
            style = _SPECIAL if special[shown] else ""
            text = f"\n{text}" if shown == tokenizer.cls_id and parts else text
        else:
            style = _MASKED if shown == tokenizer.mask_id else _KEPT
            style = _REPLACED if shown not in (tokenizer.mask_id, original) else style
            space = " " if text.startswith(" ") else ""
            text = text if color else f"{space}{{{text.strip()}}}"
        parts.append(f"{style}{text}{_PLAIN}" if color and style else text)
    return "".join(parts)


if __name__ == "__main__":
    exit_cleanly(main)
