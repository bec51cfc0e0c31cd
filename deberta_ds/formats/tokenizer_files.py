"""The tokenizer files of a published directory: spm.model, and what AutoTokenizer needs.

transformers 5 rebuilds `DebertaV2Tokenizer` from the pieces alone: the SentencePiece normalizer and
the byte fallback are lost, and ids differ from those the model was trained on. So
`tokenizer.json` is written here from spm.model itself, with every step of the original, and is
loaded as a plain `PreTrainedTokenizerFast`, which takes it as it stands.

Difference that remains: transformers finds the names of special tokens ("[MASK]") in text and gives
their ids; our tokenizer never searches text for them.
"""

import json
import shutil
from pathlib import Path

from deberta_ds.data.prep.spm_rules import RULES_NAME
from deberta_ds.data.prep.text import is_removed
from deberta_ds.errors import UserError
from deberta_ds.files import atomic_path, write_atomic
from deberta_ds.tokenizer import MASK_PIECE, SPACE_MARK, SPECIAL_PIECES, Tokenizer

SPM, JSON, SETTINGS = "spm.model", "tokenizer.json", "tokenizer_config.json"
# Everything that a published directory may keep its tokenizer in.
KNOWN_FILES = (SPM, JSON, SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json",
               "merges.txt", "bpe_encoder.bin", "dict.txt", "vocab.txt")
# A class of all characters that Python and our tokenizer take for white space.
_SPACES = "[" + "".join(f"\\x{{{code:X}}}" for code in range(0x3001) if chr(code).isspace()) + "]"
_NAMES = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]",
          "mask_token": "[MASK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}


def find_tokenizer_files(directory: Path) -> dict[str, Path]:
    """Return {name: path} of the tokenizer files in a directory."""
    return {name: directory / name for name in KNOWN_FILES if (directory / name).is_file()}


def open_tokenizer(files: dict[str, Path]) -> Tokenizer | None:
    """Return the tokenizer among a directory's files; None if there is none that we read."""
    return Tokenizer(files[SPM]) if SPM in files else None


def files_of(tokenizer: Tokenizer | Path) -> dict[str, Path]:
    """Return {published name: path} of what a tokenizer is made from."""
    return {SPM: Path(getattr(tokenizer, "path", tokenizer))}


def copy_tokenizer_files(files: dict[str, Path], out: Path) -> list[str]:
    """Copy tokenizer files to `out`; return a note for each."""
    notes = []
    for name, source in files.items():
        if source.resolve() != (out / name).resolve():
            with atomic_path(out / name) as temporary:
                shutil.copyfile(source, temporary)
        notes.append(f"copied: {name}")
    return notes


def write_tokenizer_files(files: dict[str, Path], out: Path, max_length: int) -> list[str]:
    """Copy tokenizer files to `out`, adding what AutoTokenizer needs; return a note for each."""
    notes = copy_tokenizer_files(files, out)
    if SPM in files and JSON not in files:
        tokenizer = Tokenizer(files[SPM])
        write_atomic(out / JSON, build_tokenizer_json(tokenizer))
        settings = _NAMES | {"tokenizer_class": "PreTrainedTokenizerFast",
                             "model_max_length": max_length, "padding_side": "right",
                             "model_input_names": ["input_ids", "attention_mask"]}
        write_atomic(out / SETTINGS, json.dumps(settings, indent=2) + "\n")
        notes.append(f"derived: {JSON} and {SETTINGS} from {SPM}")
    return notes


def build_tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the text of a `tokenizer.json` that gives the ids of a SentencePiece tokenizer."""
    import tokenizers
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.path.read_bytes())
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != trainer.UNIGRAM:
        raise UserError(f"{tokenizer.path}: not a unigram model; DeBERTa's tokenizers are")
    vocabulary = [(piece.piece, piece.score) for piece in proto.pieces]
    fast = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=tokenizer.unk_id,
                                               byte_fallback=trainer.byte_fallback))
    steps = [normalizers.Replace(tokenizers.Regex(_SPACES), " ")]
    if rules.name == RULES_NAME:  # `Precompiled` leaves clusters of 6 bytes and more uncomposed
        # What the text rules remove, but NUL, which SentencePiece cannot name.
        removed = "".join(f"\\x{{{code:X}}}" for code in range(1, 0x10000)
                          if is_removed(chr(code)))
        steps += [normalizers.Replace(tokenizers.Regex(f"[{removed}]"), ""),
                  normalizers.Replace(SPACE_MARK, "_"), normalizers.NFC()]
    elif rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        marks = tokenizers.Regex(f"[ {SPACE_MARK}]+")
        steps += [normalizers.Replace(marks, " "), normalizers.Strip()]
    fast.normalizer = normalizers.Sequence(steps)
    scheme = "always" if rules.add_dummy_prefix else "never"
    fast.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    fast.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(),
                                      decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False)
                             for name in (*SPECIAL_PIECES, MASK_PIECE)])
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.cls_id), ("[SEP]", tokenizer.sep_id)])
    return fast.to_str(pretty=False)
