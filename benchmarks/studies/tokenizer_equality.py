"""Are our ids those of AutoTokenizer? Tokenizers in the layouts of public models, trained here.

    python -m benchmarks.studies.tokenizer_equality --languages DIR/LANG/*.md --code DIR \
        --scratch DIR

For each tokenizer and each kind of text, the number of texts whose ids differ: from AutoTokenizer
on the same directory (of a SentencePiece model: from that library on the text as it stands), from
AutoTokenizer on what we export, and (for documents) in the shards that data_prep writes. Of a few
lines of each language: whether words begin where they do in the text (tests/word_boundaries.py).
"names" are texts with the names of special tokens, which transformers finds in text unless told not
to (split_special_tokens), and we never do.
"""

import argparse
import json
import random
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
import transformers

from deberta_ds.base.files import write_atomic
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.tokenize import CleanOptions, tokenize_corpus
from deberta_ds.release.tokenizer_files import write_tokenizer_files
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.publish import add_special_tokens

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import tokenizer_cases  # noqa: E402  (needs the path above)
from word_boundaries import compare_words  # noqa: E402

_NAMES = ("[MASK]", "<mask>", "[CLS]", "<s>", "</s>", "[PAD]", "<pad>", "[UNK]", "<unk>", "[SEP]")


def nasty_texts(count: int, seed: int) -> list[str]:
    """Return strings of controls, marks, joiners, spaces, emoji, private use and plain letters."""
    generator = random.Random(seed)
    spaces = [chr(code) for code in range(0x3001) if chr(code).isspace()]
    marks = [chr(code) for code in range(0x300, 0x1200) if unicodedata.combining(chr(code))]
    pools = [
        lambda: chr(generator.randrange(0x20)), lambda: generator.choice(spaces),
        lambda: generator.choice(marks),
        lambda: generator.choice("\u200b\u200c\u200d\ufeff\u00ad" "\u202e\u2066\u2581\ufffd\0"),
        lambda: chr(generator.randrange(0x1F300, 0x1FAFF)),
        lambda: chr(generator.randrange(0xE000, 0xF900)),
        lambda: chr(generator.randrange(0x10000, 0x110000)),
        lambda: chr(generator.randrange(0x80, 0xD800)),
        lambda: generator.choice("abcXYZ019.,_-<>[]#'\"\\/ĠĊ▁"),
        lambda: generator.choice(["##ing", "<0x0A>", "don't", "https://a.b/c?d=1", "\r\n", "  "])]
    texts = []
    for _ in range(count):
        some = generator.sample(pools, generator.randint(1, len(pools)))
        texts.append("".join(generator.choice(some)() for _ in range(generator.randint(1, 60))))
    return texts


def named_texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choice([*_NAMES, " ", "a", "the", "."]) for _ in range(12))
            for _ in range(count)]


def differing(wanted: list[list[int]], found) -> int:
    return sum(list(one) != list(other) for one, other in zip(wanted, found, strict=True))


def make(name: str, place: Path):
    """Return (directory of the tokenizer, what it is compared with)."""
    if name in tokenizer_cases.MAKERS:
        directory = tokenizer_cases.MAKERS[name](place)
        return directory, transformers.AutoTokenizer.from_pretrained(directory)
    model = tokenizer_cases.SENTENCEPIECE[name](place / "their.model")
    add_special_tokens(model, place / "whole")
    return place / "whole", sentencepiece.SentencePieceProcessor(model_file=str(model))


def auto_ids(auto, texts: list[str], **options) -> list[list[int]]:
    if isinstance(auto, sentencepiece.SentencePieceProcessor):
        return auto.encode(texts)
    return auto(texts, add_special_tokens=False, **options)["input_ids"] if texts else []


def shard_ids(tokenizer: Tokenizer, inputs: list[str], out: Path) -> list[np.ndarray]:
    """Return the ids of each document as data_prep stores them, in the order of the inputs."""
    read = ReadOptions()
    units = plan_units(inputs, read, 0)
    manifest = tokenize_corpus(units, out, tokenizer, read=read, clean=CleanOptions())[str(out)]
    documents = []
    for shard in manifest.shards:
        tokens = np.load(out / "tokens" / f"{shard.name}.npy")
        documents += np.split(tokens, np.load(out / "ends" / f"{shard.name}.npy")[:-1])
    return documents


def word_counts(ours: Tokenizer, texts: list[str], lines: int) -> dict[str, int]:
    """Return the sums of `compare_words` over the first lines of each text that have words."""
    total: Counter[str] = Counter()
    for text in texts:
        for line in list(filter(str.strip, text.split("\n")))[:lines]:
            total.update(compare_words(ours, line))
    return dict(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--languages", nargs="+", required=True, help="one document a file")
    parser.add_argument("--code", required=True, help="directory of Python files")
    parser.add_argument("--code_bytes", type=int, default=4_000_000)
    parser.add_argument("--lines", type=int, default=10, help="of each document, for words")
    parser.add_argument("--nasty", type=int, default=10_000)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--names", nargs="+",
                        default=[*tokenizer_cases.MAKERS, *tokenizer_cases.SENTENCEPIECE],
                        help="tokenizers; rows that the file has are kept")
    parser.add_argument("--out", type=Path, default="benchmarks/results/tokenizer_equality.json")
    args = parser.parse_args()
    paths = sorted(args.languages)
    groups = {"languages": [Path(path).read_bytes().decode("utf-8") for path in paths],
              "code": [], "nasty": nasty_texts(args.nasty, 0), "names": named_texts(1000, 1)}
    for path in sorted(Path(args.code).glob("*.py")):
        if sum(map(len, groups["code"])) < args.code_bytes:
            groups["code"].append(path.read_bytes().decode("utf-8", "ignore"))
    tokenizer_cases.TEXTS = [line for text in groups["languages"][::3] for line in text.split("\n")]
    tokenizer_cases.SCALE = 12
    rows = json.loads(args.out.read_text())["tokenizers"] if args.out.is_file() else []
    done = {row["tokenizer"] for row in rows}
    for name in [name for name in args.names if name not in done]:
        directory, theirs = make(name, args.scratch / name)
        ours = Tokenizer(directory)
        write_tokenizer_files(ours.files, args.scratch / f"{name}-exported", 512)
        autos = {"auto": theirs, "exported": transformers.AutoTokenizer.from_pretrained(
                     args.scratch / f"{name}-exported")}
        row = {"tokenizer": name, "kind": ours.kind, "size": ours.size}
        for group, texts in groups.items():
            wanted = [ours.encode_array(text).tolist() for text in texts]
            options = {"split_special_tokens": True} if group == "names" else {}
            for label, auto in autos.items():
                row[f"{group}_{label}"] = differing(wanted, auto_ids(auto, texts, **options))
            row[f"{group}_texts"] = len(texts)
            row[f"{group}_tokens"] = sum(map(len, wanted))
            if group == "languages":
                stored = shard_ids(ours, paths, args.scratch / f"{name}-corpus")
                row["shards"] = differing(wanted, stored)
                row["words"] = word_counts(ours, texts, args.lines)
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_atomic(args.out, json.dumps({"versions": {
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__}, "tokenizers": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
