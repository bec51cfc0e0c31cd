"""The tokenizer files of a published directory: the source's own, and what AutoTokenizer needs.

transformers 5 rebuilds `DebertaV2Tokenizer` from the pieces alone: the SentencePiece normalizer and
the byte fallback are lost, and ids differ from those the model was trained on. So
`tokenizer.json` is written here from spm.model itself, with every step of the original.

Difference that remains: transformers finds the names of special tokens ("[MASK]") in text and gives
their ids; our tokenizer never searches text for them.
"""

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.base.json_files import read_json
from deberta_ds.release.configs import CODE
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.files import (
    ADDED,
    FORMS,
    JSON,
    NAMES,
    OTHER_MODELS,
    SETTINGS,
    SPM,
    Files,
    read_known,
)
from deberta_ds.tokenizer.publish import write_tokenizer_json
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json

# Everything that a published directory may keep its tokenizer in.
KNOWN_FILES = (*itertools.chain(*FORMS), SETTINGS, NAMES, ADDED, "bpe_encoder.bin", "dict.txt")


def find_tokenizer_files(directory: Path) -> Files:
    """Return the tokenizer files in a directory, read. A SentencePiece model that lies there alone
    under another usual name gets the name that it is published under.
    """
    found = read_known(directory, KNOWN_FILES)
    if found.keys() & {names[0] for names in FORMS}:
        return found
    others = list(read_known(directory, OTHER_MODELS).values())
    return ({SPM: others[0]} if others else {}) | found


def open_tokenizer(files: Files) -> Tokenizer | None:
    """Return the tokenizer among a directory's files; None if there is none that is read."""
    for names in FORMS:
        if set(names) <= files.keys():
            return Tokenizer(files[names[0]].path.parent, files)
    return None


def pad_id_of(files: Files) -> dict[str, int]:
    """Return {"pad_token_id": id} of the tokenizer among a directory's files, {} without one."""
    tokenizer = open_tokenizer(files)
    return {"pad_token_id": tokenizer.pad_id} if tokenizer else {}


def copy_tokenizer_files(files: Files, out: Path) -> list[str]:
    """Write tokenizer files, as they were read, to `out`; return a note for each. Of settings that
    name code of a stranger ("auto_map") the rest is written.
    """
    for name, file in files.items():
        data = file.data
        if name == SETTINGS and CODE.encode() in data:
            values = {key: value for key, value in read_json(file).items() if key != CODE}
            data = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
        write_atomic(out / name, data)
    return [f"copied: {name}" for name in files]


def write_tokenizer_files(files: Files, out: Path, max_length: int) -> list[str]:
    """Write tokenizer files to `out`, adding what AutoTokenizer needs; return a note for each."""
    notes = copy_tokenizer_files(files, out)
    tokenizer = open_tokenizer(files)
    if tokenizer is None or {SPM, JSON} <= files.keys():
        return notes
    text = build_tokenizer_json(tokenizer) if tokenizer.specification is None else None
    write_tokenizer_json(tokenizer, out, max_length, text)
    made_of = ", ".join(tokenizer.files)
    return [*notes, f"derived: {JSON} and {SETTINGS} from {made_of}"]


def exported_word_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return `word_ids()` of the exported tokenizer for each text, without [CLS] and [SEP]."""
    import tokenizers

    with TemporaryDirectory() as out:
        write_tokenizer_files(tokenizer.files, Path(out), max_length=0)
        exported = tokenizers.Tokenizer.from_file(str(Path(out) / JSON))
    found = exported.encode_batch(texts, add_special_tokens=False)
    for text, encoding, ids in zip(texts, found, tokenizer.encode_batch(texts), strict=True):
        if encoding.ids != ids or " " in text.strip() and not any(encoding.word_ids):
            raise UserError(f"{text!r}: the exported tokenizer gives it other tokens, or takes it "
                            "for one word; use --scoring word, or take the sentence out")
    return [encoding.word_ids for encoding in found]
