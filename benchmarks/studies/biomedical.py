"""Write the sentences of biomedical corpora as the text of a domain, without those of the task.

    git clone https://github.com/cambridgeltl/MTL-Bioinformatics-2016
    python -m benchmarks.studies.biomedical MTL-Bioinformatics-2016/data --out biomedical.txt

The task is NCBI-disease (Dogan et al. 2014). No sentence of it is written, and none twice. The
words are joined by spaces, as the task's are. Then, as docs/evidence/models.md, "A domain, with a
task before and after", goes on.
"""

from itertools import groupby
from pathlib import Path

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.files import write_atomic

TASK = "NCBI-disease-IOB"


def sentences(folder: Path) -> list[str]:
    """Return the sentences of the .tsv in `folder`: a word a line, an empty one between two."""
    lines = [line for path in sorted(folder.glob("*.tsv"))
             for line in [*path.read_text(encoding="utf-8").split("\n"), ""]]
    return [" ".join(line.split("\t")[0].strip() for line in group)
            for is_text, group in groupby(lines, key=lambda line: bool(line.strip())) if is_text]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("corpora", type=Path, help="data/ of the repository")
    parser.add_argument("--out", type=Path, required=True, help="text, one sentence a line")
    options = parser.parse_args()
    if not (options.corpora / TASK).is_dir():
        raise UserError(f"{options.corpora}: holds no {TASK}; name data/ of the repository")
    of_task = set(sentences(options.corpora / TASK))
    found: dict[str, None] = {}  # in the order of the folders
    for folder in sorted(options.corpora.glob("*-IOB")):
        new = dict.fromkeys(text for text in sentences(folder)
                            if text not in of_task and text not in found)
        found |= new
        print(f"{folder.name:<24}{len(new):>8,} new sentences")
    write_atomic(options.out, "\n".join(found) + "\n")
    print(f"{sum(len(text.split()) for text in found):,} words in {len(found):,} sentences")


if __name__ == "__main__":
    exit_cleanly(main)
