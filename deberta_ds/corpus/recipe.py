"""A recipe of a corpus, corpus.toml: from any text to the packed shards that a run file names.

Keys have the names of the options of the single commands, whose help is made from them.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from deberta_ds.base import command_line, user_code
from deberta_ds.base.files import flatten
from deberta_ds.config.options import STRICT, option, validate
from deberta_ds.config.toml_files import read_with_overrides
from deberta_ds.corpus.documents import ReadOptions

READING = [field.name for field in dataclasses.fields(ReadOptions)]
_Size = Annotated[int, Field(ge=1, le=1 << 40)]
_Count = Annotated[int, Field(ge=0, le=1 << 40)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CorpusRecipe:
    """One corpus of the mixture."""

    name: str = option("name of the corpus: letters, digits, _ . and -",
                       pattern=r"^\w[\w.-]{0,59}$")
    inputs: tuple[str, ...] = option("files, directories, patterns, remote URLs or "
                                     "hub:NAME[@CONFIG][#SPLIT]", min_length=1)
    documents: str = option("what a document is in a text file: file, line, blank_line, "
                            "match:PATTERN, or FILE.py:NAME, a function that returns the texts of "
                            "a file's bytes; empty: file, if none is large", "")
    text_key: str = option("key or column of the text; meta.text is the key text under meta",
                           "text", min_length=1)
    id_key: str = option("key or column of the document's id, kept with the shards", "")
    label_key: str = option("key or column of the label to count by (language)", "")
    label_from_directory: bool = option("use the name of the directory as the label", False)
    max_document_bytes: _Size = option("a longer document counts as unreadable", 1 << 26)
    extract_html: bool = option("take the main text of the pages in .warc files (needs "
                                "resiliparse)", False)
    filters: str = option("rules that drop or change documents, a file such as data_prep/filters/"
                          "web_en.toml (try them with filter.py); empty: none", "")
    min_characters: _Size = option("shorter documents are skipped", 1)
    min_letter_share: float = option("documents with a smaller share of letters are skipped", 0.0,
                                     ge=0, le=1)
    words: str = option("FILE.py:NAME, a function that returns the words of a text, for whole-word "
                        "masks in scripts without spaces; empty: each token of these is a word", "")
    heldout: bool = option("hold out documents for evaluation; false: drop them, as other corpora "
                           "may hold out copies", True)
    weight: float = option("share of the sequences, relative to the other corpora; 0: by tokens "
                           "and mixture_temperature", 0.0, ge=0, le=1e12)

    @property
    def read(self) -> ReadOptions:
        """How the files of this corpus are read."""
        return read_options_of(self)


def read_options_of(values: Any) -> ReadOptions:
    """Return the ReadOptions of a corpus of a recipe, or of the options of a command."""
    found = {name: getattr(values, name) for name in READING}
    documents = found["documents"] or "file"
    if user_code.is_own(documents) and not documents.startswith("match:"):
        user_code.load("documents", documents, ("data",))
        # An edited one gives another corpus.
        documents += f"#{user_code.digest('documents', documents)}"
    return ReadOptions(**found | {"documents": documents})


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TokenizerRecipe:
    """A tokenizer to take, or how to train one on a sample of all corpora."""

    path: str = option("tokenizer to take, a file or directory; empty: train one", "")
    kind: Literal["unigram", "byte_bpe", "bpe", "wordpiece"] = option(
        "unigram: SentencePiece; byte_bpe: as GPT-2 and DeBERTa v1; bpe: with space marks, and "
        "bytes for rare characters; wordpiece: as BERT, cased", "unigram")
    vocab_size: int = option("vocabulary size without [MASK], which is added at the end", 32000,
                             ge=1, le=1 << 24)
    sample_bytes: _Size = option("size of the text to train on", 1 << 26)
    temperature: float = option(
        "take each language (label_key, label_from_directory) in proportion to its characters to "
        "the power of 1 / temperature (1: as they are, 3.3: as XLM-R), which reads the input "
        "twice; 0: do not count languages", 0.0, ge=0, le=1000)
    character_coverage: float = option("rarer characters are spelled in bytes (wordpiece: unknown)",
                                       0.9995, ge=0, le=1)
    threads: int = option("threads of unigram training; the model depends on their number", 2, ge=1,
                          le=1024)
    add_tokens: str = option("file of symbols, one per line, each a token wherever it stands", "")
    normalization: Literal["", "nfkc"] = option(
        "nfkc in place of nfc: full-width letters, ligatures and the like become plain ones", "")
    lower_case: bool = option("all letters become lower case", False)
    split_digits: bool = option("each digit is a token", False)
    keep_white_space: bool = option("keep line ends, tabs and runs of spaces, as code needs it "
                                    "(unigram and byte_bpe)", False)

    def __post_init__(self):
        if self.lower_case and self.keep_white_space and not self.normalization:
            raise ValueError("lower_case with keep_white_space needs normalization nfkc")
        if self.path and dataclasses.replace(self, path="") != TokenizerRecipe():
            raise ValueError("a tokenizer with a path is not trained; leave out its other keys")


TRAINED = [field.name for field in dataclasses.fields(TokenizerRecipe) if field.name != "path"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Recipe:
    """Everything that one build makes."""

    out: str = option("directory to make, for data.corpus of a run file", min_length=1)
    corpora: tuple[CorpusRecipe, ...] = option("the mixture: one entry per corpus", min_length=1)
    seq_len: tuple[Annotated[int, Field(ge=8, le=1 << 20)], ...] = option(
        "sequence lengths to pack, in tokens", (512,), min_length=1)
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    dedup: bool = option("leave out duplicates: of equal documents of all corpora the first stays",
                         True)
    near: float = option("leave out near duplicates of at least this Jaccard similarity, 0.3 or "
                         "more (needs datasketch); 0: none", 0.0, ge=0, lt=1)
    against: tuple[str, ...] = option("evaluation files, directories or patterns: documents with "
                                      "text of theirs are left out", ())
    words: int = option("successive words of `against` that make a document contaminated", 13, ge=8,
                        le=1000)
    heldout_share: float = option("share of documents held out, by a hash of their text; 0: none",
                                  0.01, ge=0, lt=1)
    mixture_temperature: float = option("1: corpora in proportion to their tokens; above 1 raises "
                                        "small ones", 1.0, gt=0, le=1000)
    max_bad: _Count = option("unreadable documents allowed per corpus (skipped and named)", 0)
    skip_bad_files: _Count = option("damaged files allowed per corpus (skipped and listed); all "
                                    "inputs are read once more for it", 0)
    unit_bytes: _Count = option("size of a work unit; 0: automatic", 0)

    def __post_init__(self):
        if len({corpus.name for corpus in self.corpora}) < len(self.corpora):
            raise ValueError("corpora: two have one name; give each its own")
        if len({bool(corpus.weight) for corpus in self.corpora}) > 1:
            raise ValueError("corpora: some have a weight; give all of them one, or none")
        if "://" in self.out:
            raise ValueError(f"out = {self.out!r} is a URL; name a local or mounted directory, and "
                             "copy its corpora with data_prep/upload.py afterwards")
        if self.near and (self.near < 0.3 or not self.dedup):
            raise ValueError(f"near = {self.near} must be 0, or at least 0.3 with dedup = true")


def load(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, dict[str, str]]:
    """Return (recipe, origin of every value) of a TOML file and `--section.key=value` overrides."""
    path = command_line.find(path)
    values, origins = read_with_overrides(path, overrides, "recipe", "examples/corpus.toml")
    recipe = validate(Recipe, values, str(path))
    return recipe, dict.fromkeys(flatten(dataclasses.asdict(recipe)), "default") | origins
