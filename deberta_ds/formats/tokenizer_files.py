"""The tokenizer files of a published directory: the source's own, and what AutoTokenizer needs.

transformers 5 rebuilds `DebertaV2Tokenizer` from the pieces alone: the SentencePiece normalizer and
the byte fallback are lost, and ids differ from those the model was trained on. So
`tokenizer.json` is written here from spm.model itself, with every step of the original.

Difference that remains: transformers finds the names of special tokens ("[MASK]") in text and gives
their ids; our tokenizer never searches text for them.
"""

import shutil
from pathlib import Path

from deberta_ds.data.prep import fast_rules
from deberta_ds.data.prep.spm_rules import RULES_NAME
from deberta_ds.errors import UserError
from deberta_ds.files import atomic_path
from deberta_ds.tokenizer import MASK_PIECE, SPACE_MARK, SPECIAL_PIECES, Tokenizer
from deberta_ds.tokenizer.files import (
    ADDED,
    JSON,
    MERGES,
    NAMES,
    SETTINGS,
    SPM,
    VOCAB,
    WORDPIECES,
)
from deberta_ds.tokenizer.publish import write_tokenizer_json

# Everything that a published directory may keep its tokenizer in.
KNOWN_FILES = (SPM, JSON, SETTINGS, NAMES, ADDED, VOCAB, MERGES, "bpe_encoder.bin", "dict.txt",
               WORDPIECES)


def find_tokenizer_files(directory: Path) -> dict[str, Path]:
    """Return {name: path} of the tokenizer files in a directory."""
    return {name: directory / name for name in KNOWN_FILES if (directory / name).is_file()}


def open_tokenizer(files: dict[str, Path]) -> Tokenizer | None:
    """Return the tokenizer among a directory's files; None if there is none that is read."""
    for needed in ({SPM}, {JSON}, {VOCAB, MERGES}, {WORDPIECES}):
        if needed <= files.keys():
            return Tokenizer.of_files(files, files[min(needed)].parent)
    return None


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
    tokenizer = open_tokenizer(files)
    if tokenizer is None or {SPM, JSON} <= files.keys():
        return notes
    text = build_tokenizer_json(tokenizer) if tokenizer.specification is None else None
    write_tokenizer_json(tokenizer, out, max_length, text)
    made_of = ", ".join(tokenizer.files)
    return [*notes, f"derived: {JSON} and {SETTINGS} from {made_of}"]


def build_tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the text of a `tokenizer.json` that gives the ids of a SentencePiece tokenizer."""
    import tokenizers
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import normalizers, pre_tokenizers, processors

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files[SPM].read_bytes())
    rules = proto.normalizer_spec
    if proto.pieces[0].piece != SPECIAL_PIECES[0]:
        raise UserError(f"{tokenizer.path}: not a model with DeBERTa's special ids, and only those "
                        "are turned into a tokenizer.json; export from a source that has one")
    fast = tokenizers.Tokenizer(_fast_model(proto, tokenizer))
    steps = fast_rules.plain_spaces()
    if rules.name == RULES_NAME:
        steps += fast_rules.characters()
    elif rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += fast_rules.single_spaces()
    fast.normalizer = normalizers.Sequence(steps)
    scheme = "always" if rules.add_dummy_prefix else "never"
    fast.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    fast.decoder = fast_rules.decoder()
    fast.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False)
                             for name in (*SPECIAL_PIECES, MASK_PIECE)])
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.cls_id), ("[SEP]", tokenizer.sep_id)])
    return fast.to_str(pretty=False)


def _fast_model(proto, tokenizer: Tokenizer):
    """Return the model of `tokenizers` that segments as a SentencePiece model does."""
    from tokenizers import models

    trainer = proto.trainer_spec
    if trainer.model_type == trainer.UNIGRAM:
        vocabulary = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(vocabulary, unk_id=tokenizer.unk_id,
                              byte_fallback=trainer.byte_fallback)
    if trainer.model_type != trainer.BPE:
        raise UserError(f"{tokenizer.path}: neither a unigram nor a BPE model, and only those are "
                        "turned into a tokenizer.json")
    ids = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    merged = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
    merges = []
    for piece in sorted(merged, key=lambda piece: -merged[piece]):  # the best score goes first
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += sorted((split for split in splits if split[0] in merged and split[1] in merged),
                         key=lambda split: (ids[split[0]], ids[split[1]]))
    return models.BPE(ids, merges, unk_token=SPECIAL_PIECES[3], fuse_unk=True,
                      byte_fallback=trainer.byte_fallback)
