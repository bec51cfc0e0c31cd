"""Choose ten million words of English novels: the newest first, then two to hold out.

    git clone https://github.com/computationalstylistics/100_english_novels
    python -m benchmarks.studies.novels 100_english_novels/corpus --out text

Files are named AUTHOR_TITLE_YEAR.txt. Left out are those that are not in the public domain
everywhere: published in 1930 or later, or by Forster (died in 1970). Writes OUT/train and
OUT/heldout as UTF-8 and prints the titles with their words. Lines stay as they are, and 45 of the
82 files wrap their paragraphs at some 75 characters; --sentences joins those and writes one
sentence a line. Then, as docs/evidence/novels.md, "A masked LM on ten million words", goes on.
"""

import argparse
import re
from pathlib import Path

from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.files import write_atomic

MOST_WORDS, HELD_OUT, FIRST_PROTECTED = 10_000_000, 2, 1930


def year_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


# Between sentences: behind a full stop and its quotes, but not behind a title or an initial.
_BETWEEN = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)])) +(?=[\"'“‘(]?[A-Z])")
_TITLE = re.compile(r"(?:^|[\W_])(?:Mrs?|Dr|St|Messrs|Esq|Capt|Col|Rev|Hon|Prof|[A-Z])\.$")


def sentences(text: str) -> str:
    """Return `text` with one sentence a line; wrapped lines are joined up to a blank one."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    widths = sorted(len(line) for line in lines if line)
    is_wrapped = widths[len(widths) * 9 // 10] < 120
    paragraphs = "\n".join(lines).split("\n\n" if is_wrapped else "\n")
    found = [" ".join(paragraph.split()) for paragraph in paragraphs]
    return "\n".join(_BETWEEN.sub(_gap, paragraph) for paragraph in found if paragraph) + "\n"


def _gap(between: re.Match) -> str:
    is_title = _TITLE.search(between.string, max(0, between.start() - 10), between.start())
    return " " if is_title else "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("novels", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sentences", action="store_true", help="one sentence a line")
    options = parser.parse_args()
    paths = [path for path in options.novels.glob("*_*_[0-9]*.txt")
             if year_of(path) < FIRST_PROTECTED and not path.name.startswith("Forster_")]
    if not paths:
        raise UserError(f"{options.novels}: no AUTHOR_TITLE_YEAR.txt in it")
    words, held_out = 0, 0
    for path in sorted(paths, key=lambda path: (-year_of(path), path.name)):
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        count = len(text.split())
        if words + count <= MOST_WORDS:
            words, part = words + count, "train"
        elif held_out < HELD_OUT:
            held_out, part = held_out + 1, "heldout"
        else:
            continue
        write_atomic(options.out / part / path.name, sentences(text) if options.sentences else text)
        print(f"{part:<8}{count:>9,} words  {path.stem}")
    print(f"{words:,} words to train on")


if __name__ == "__main__":
    exit_cleanly(main)
