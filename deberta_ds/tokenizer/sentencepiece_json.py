"""A SentencePiece model as a tokenizer.json: the same segmentation by Hugging Face `tokenizers`.

Unusual: pieces that a user defined have a bonus in SentencePiece's unigram models, and are cut out
of the text before BPE; unused ones are skipped; BPE has scores in place of merges.
Source: google/sentencepiece, unigram_model.cc and bpe_model.cc.
"""

import json
import re

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from deberta_ds.base.errors import UserError
from deberta_ds.tokenizer import SPACE_MARK, Tokenizer, normalization
from deberta_ds.tokenizer.files import SPM
from deberta_ds.tokenizer.publish import framing
from deberta_ds.tokenizer.spm import RULES_NAME, model_proto, with_control_roles


def build_tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the text of a `tokenizer.json` that gives the ids of a SentencePiece tokenizer."""
    path, data = tokenizer.files[SPM]
    proto = model_proto(data, path)
    with_control_roles(proto, tokenizer.subwords(tokenizer.special_ids.values()))
    fast = FastTokenizer(_model(proto, tokenizer))
    fast.normalizer, fast.pre_tokenizer = _before(proto, tokenizer)
    fast.decoder = normalization.decoder()
    special = set(tokenizer.special_ids.values())
    special |= {number for number, piece in enumerate(proto.pieces) if piece.type == piece.CONTROL}
    fast.add_special_tokens([
        AddedToken(name, special=True, normalized=False, lstrip=number == tokenizer.mask_id)
        for number, name in zip(sorted(special), tokenizer.subwords(sorted(special)), strict=True)])
    return json.dumps(json.loads(fast.to_str()) | framing(tokenizer), ensure_ascii=False)


def _before(proto, tokenizer: Tokenizer):
    """Return (normalizer, pre-tokenizer) that give the model its text as SentencePiece does."""
    rules = proto.normalizer_spec
    steps = [] if tokenizer.normalizes_itself else normalization.plain_spaces()
    if rules.name == RULES_NAME:
        steps += normalization.characters()
    elif rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    plain = rules.remove_extra_whitespaces and not _defined(proto) and not any(
        SPACE_MARK in piece.piece[1:] for piece in proto.pieces)
    scheme, ends = "first", normalization.OUTER_SPACES
    if not rules.add_dummy_prefix:
        scheme = "never"
    elif plain:
        ends = normalization.LAST_SPACE
    if rules.remove_extra_whitespaces:
        steps += normalization.single_spaces(ends)
    if plain:
        return (normalizers.Sequence(steps),
                pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme))
    # Metaspace puts no mark before a text that has one, and cuts at each: here both would be wrong.
    steps += [normalizers.Prepend(SPACE_MARK)] if rules.add_dummy_prefix else []
    cut = None
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE and (names := _defined(proto)):
        names = sorted(names, key=len, reverse=True)  # the longest is found first
        cut = pre_tokenizers.Split(Regex("|".join(map(re.escape, names))), "isolated")
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)]), cut


def _defined(proto) -> list[str]:
    """Return the pieces that a user defined: they are found in text whatever else is there."""
    return [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]


def _model(proto, tokenizer: Tokenizer):
    """Return the model of `tokenizers` that segments as a SentencePiece model does."""
    trainer = proto.trainer_spec
    names = [piece.piece if piece.type != piece.UNUSED else f"\U0010FFFF{number}"
             for number, piece in enumerate(proto.pieces)]  # no text holds a noncharacter
    if trainer.model_type == trainer.UNIGRAM:
        best = max((piece.score for piece in proto.pieces if piece.type == piece.NORMAL), default=0)
        scores = [len(piece.piece.encode()) * best - 0.1 if piece.type == piece.USER_DEFINED
                  else piece.score for piece in proto.pieces]
        return models.Unigram(list(zip(names, scores, strict=True)), unk_id=tokenizer.unk_id,
                              byte_fallback=trainer.byte_fallback)
    if trainer.model_type != trainer.BPE:
        raise UserError(f"{tokenizer.path}: neither a unigram nor a BPE model, and only those are "
                        "converted to a tokenizer.json")
    ids = {name: number for number, name in enumerate(names)}
    merged = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
    merges = []
    for piece in sorted(merged, key=lambda piece: -merged[piece]):  # the best score goes first
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += sorted((split for split in splits if split[0] in merged and split[1] in merged),
                         key=lambda split: (ids[split[0]], ids[split[1]]))
    assert tokenizer.unk_id is not None, "a SentencePiece model has one"
    return models.BPE(ids, merges, unk_token=names[tokenizer.unk_id], fuse_unk=True,
                      byte_fallback=trainer.byte_fallback, ignore_merges=bool(_defined(proto)))
