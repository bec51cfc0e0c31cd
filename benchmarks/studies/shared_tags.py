"""Write pairs of sentences with a tag for each word: is it in the other sentence too?

    python -m benchmarks.studies.shared_tags nli/mnli_en.train.jsonl sentences/train --out shared
    python launch/finetune.py --task shared/task.toml --model MODEL --out runs/shared
    python launch/finetune.py --task mnli.toml --model MODEL --out runs/use \\
        --init_from runs/shared/shared/seed-1

A third are the pairs of the table, by its keys premise and hypothesis; no label is read, and what
is beyond 80 and 50 words is left out. The others are sentences of the text (one a line, as
`benchmarks.studies.novels --sentences` writes them), each with a copy in which words come from
another sentence and which may be cut or shuffled. Between the two stands the word "/". Writes
OUT/train.jsonl, OUT/val.jsonl and OUT/task.toml.
"""

import json
import random
import re
from pathlib import Path

from benchmarks.studies.shared_words import load
from deberta_ds.base.command_line import parser_for
from deberta_ds.base.files import write_atomic

VAL_ROWS = 500
SHORTEST, LONGEST = 5, 25  # words of a sentence of the text
MOST_PREMISE, MOST_HYPOTHESIS = 80, 50  # words that are kept: both fit into 256 tokens
TASK = """name = "shared"
kind = "tags"
texts = ["words"]
label = "tags"
train = "train.jsonl"
val = "val.jsonl"

[settings]
epochs = 1
global_batch_size = 32
learning_rate = 3e-4
"""


def words_of(text: str) -> list[str]:
    """Return words and marks, as they stand."""
    return re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", text)


def copied(words: list[str], others: list[str], chance: random.Random) -> list[str]:
    """Return a copy with a share of the words from `others`; some are cut, some are shuffled."""
    kept = chance.uniform(.2, .9)
    copy = [word if chance.random() < kept else chance.choice(others) for word in words]
    if chance.random() < .3:
        copy = copy[chance.randrange(max(1, len(copy) // 2)):]
    if chance.random() < .4:
        chance.shuffle(copy)
    return copy


def tagged(first: list[str], second: list[str]) -> dict:
    in_first, in_second = ({word.lower() for word in words} for words in (first, second))
    tags = [*(word.lower() in in_second for word in first), False,
            *(word.lower() in in_first for word in second)]
    return {"words": [*first, "/", *second], "tags": ["both" if tag else "one" for tag in tags]}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("table")
    parser.add_argument("text", type=Path, help="directory of .txt, one sentence a line")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chance = random.Random(1)
    rows = [tagged(words_of(row["premise"])[:MOST_PREMISE],
                   words_of(row["hypothesis"])[:MOST_HYPOTHESIS]) for row in load(options.table)]
    sentences = [words for path in sorted(options.text.glob("*.txt"))
                 for words in map(words_of, path.read_text(encoding="utf-8").splitlines())
                 if SHORTEST <= len(words) <= LONGEST]
    for words in chance.sample(sentences, 2 * len(rows)):
        pair = [words, copied(words, chance.choice(sentences), chance)]
        chance.shuffle(pair)
        rows.append(tagged(*pair))
    chance.shuffle(rows)
    for name, part in (("val", rows[:VAL_ROWS]), ("train", rows[VAL_ROWS:])):
        write_atomic(options.out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part))
    write_atomic(options.out / "task.toml", TASK)


if __name__ == "__main__":
    main()
