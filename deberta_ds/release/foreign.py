"""Foreign models: their configurations and the names of their parameters <-> ours.

A foreign configuration (Hugging Face `config.json`, microsoft `model_config.json`) that our encoder
does not compute (token types, factorized embeddings, position-to-position attention ...) is
rejected with the key that asks for it; nothing is ignored. Sources: transformers'
configuration_deberta*.py, microsoft/DeBERTa deberta/config.py, and the released config.json files.

Both worlds have the same parameter names for v2/v3 (transformers modeling_deberta_v2.py,
microsoft/DeBERTa deberta/bert.py), so one table serves both; Hugging Face's v1 class alone packs
query, key and value of each head into one `in_proj`, which `pack_v1` and `unpack_v1` translate to
and from the microsoft form. Our names here are those of one network: a token embedding, a trunk and
whatever heads it has (`words.weight`, `trunk.*`, `positions.weight`, `mlm_head.*`, `rtd_head.*`,
`words.delta`). Heads of fine-tuned models (`pooler.*`, `classifier.*`, ...) keep their names.
"""

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, stack

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import without_unused
from deberta_ds.config.run_config import ModelConfig

V1, V2 = "deberta", "deberta-v2"
_SAME_MEANING = {  # ours: theirs
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position": "max_position_embeddings",
    "max_relative": "max_relative_positions",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}
_REQUIRED = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
# Keys whose other values would change what is computed: {key: our value, and its default}.
_FIXED = {"type_vocab_size": 0, "hidden_act": "gelu", "conv_groups": 1, "talking_head": False}
# Of what type others are, if not null: the text "false" would count as true.
_TYPES = {"relative_attention": int, "share_att_key": int, "position_biased_input": int,
          "id2label": dict, "label2id": dict, "architectures": list}
_PARTLY_SAME = {  # ours: theirs, where the values differ
    "position_terms": "pos_att_type", "share_position_projections": "share_att_key",
    "relative_norm": "norm_rel_ebd", "absolute_input": "position_biased_input",
    "conv_kernel": "conv_kernel_size", "conv_activation": "conv_act"}
CODE = "auto_map"  # names code of a stranger: never carried into what is written
_UNDERSTOOD = {*_SAME_MEANING.values(), *_PARTLY_SAME.values(), *_FIXED, "position_buckets",
               "relative_attention", "embedding_size", "attention_head_size", "pad_token_id",
               "padding_idx", "model_type", "dtype", "torch_dtype", "transformers_version",
               "tie_word_embeddings", "_name_or_path"}


def is_v1_shape(config: ModelConfig) -> bool:
    """Return whether transformers' v1 class can hold the encoder (apart from a key bias)."""
    return (config.relative_attention and not config.share_position_projections
            and not config.relative_norm and not config.position_buckets
            and not config.conv_kernel and bool(config.position_terms))


def from_theirs(values: dict, place: str, *, key_bias: bool) -> tuple[ModelConfig, dict]:
    """Return (ModelConfig, remaining keys) of a Hugging Face or microsoft configuration.

    The remaining keys (labels, pooler, class ...) do not concern the encoder and are written back
    on export. Whether a v1 model has key biases is in its tensors only, so the caller says.
    """
    if not isinstance(values, dict):
        raise UserError(f"{place}: not a JSON object; a model configuration is expected")
    kind = values.get("model_type", V2)
    if kind not in (V1, V2):
        raise UserError(f"{place}: model_type = {kind!r} is not a DeBERTa; only 'deberta' and "
                        "'deberta-v2' can be converted")
    ours = {name: values[key] for name, key in _SAME_MEANING.items() if key in values}
    missing = [_SAME_MEANING[name] for name in _REQUIRED if name not in ours]
    if missing:
        raise UserError(f"{place}: {', '.join(missing)} missing; not a DeBERTa configuration")
    _refuse_unsupported(values, ours, place)
    terms = _terms(values, place)
    buckets = values.get("position_buckets", -1)
    if not isinstance(buckets, int):
        raise UserError(f"{place}: position_buckets = {buckets!r} is not a whole number")
    relative = bool(values.get("relative_attention", False))
    if terms and not relative:
        given = values.get("pos_att_type", "c2p, microsoft's default,")
        raise UserError(f"{place}: pos_att_type = {given!s} without relative_attention changes the "
                        "scale of the official attention; only \"none\" is supported")
    ours |= {"relative_attention": relative, "position_terms": terms,
             "position_buckets": max(0, buckets),
             "share_position_projections": bool(values.get("share_att_key", False)),
             "relative_norm": relative and "layer_norm" in str(values.get("norm_rel_ebd")).lower(),
             "absolute_input": bool(values.get("position_biased_input", True)),
             "conv_kernel": values.get("conv_kernel_size", 0), "key_bias": key_bias}
    if ours["conv_kernel"]:
        ours["conv_activation"] = values.get("conv_act", "tanh")
    rest = {key: value for key, value in values.items() if key not in _UNDERSTOOD
            and key != CODE}
    if pad_id := values.get("pad_token_id", values.get("padding_idx")):
        rest["pad_token_id"] = pad_id
    return model_config(ours, place), _with_hugging_face_heads(rest)


def model_config(values: dict, place: str) -> ModelConfig:
    """Return a validated ModelConfig; UserError names `place` and the first bad key."""
    try:
        # JSON mode: strict about types, but arrays become tuples.
        return TypeAdapter(ModelConfig).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "values"
        where = (_SAME_MEANING | _PARTLY_SAME).get(where, where)
        raise UserError(f"{place}: {where}: {first['msg']}") from None


# Settings of fine-tuned heads, {microsoft: Hugging Face}; there the pooler has a dict of its own.
_HEAD_KEYS = {
    "cls_drop_out": "cls_dropout", "pooling.hidden_size": "pooler_hidden_size",
    "pooling.dropout": "pooler_dropout", "pooling.hidden_act": "pooler_hidden_act"}


def _with_hugging_face_heads(rest: dict) -> dict:
    """Return the keys of heads under their Hugging Face names."""
    pooling = rest.get("pooling")
    flat = {key: value for key, value in rest.items() if key != "pooling"} | {
        f"pooling.{key}": value
        for key, value in (pooling.items() if isinstance(pooling, dict) else ())}
    return {_HEAD_KEYS.get(key, key.removeprefix("pooling.")): value for key, value in flat.items()}


def _with_microsoft_heads(rest: dict) -> dict:
    """Return the keys of heads under their microsoft names."""
    theirs = {name: key for key, name in _HEAD_KEYS.items()}
    flat = {theirs.get(key, key): value for key, value in rest.items()}
    pooling = {key.removeprefix("pooling."): flat.pop(key)
               for key in [*flat] if key.startswith("pooling.")}
    return flat | ({"pooling": pooling} if pooling else {})


def _refuse_unsupported(values: dict, ours: dict, place: str) -> None:
    if values.get("quantization_config"):
        raise UserError(f"{place}: quantization_config: quantized weights are not read; give the "
                        "model as it was before")
    for key, kind in _TYPES.items():
        if values.get(key) is not None and not isinstance(values[key], kind):
            form = {int: "true or false", dict: "an object", list: "a list"}[kind]
            raise UserError(f"{place}: {key} = {values[key]!r} is not {form}")
    checks = dict(_FIXED)
    hidden, heads = ours["hidden_size"], ours["num_heads"]
    checks["embedding_size"] = hidden
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        checks["attention_head_size"] = hidden // heads
    for key, wanted in checks.items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"{place}: {key} = {values[key]!r} is not supported; only {wanted!r}")


_TERMS = {"c2p", "p2c"}


def _terms(values: dict, place: str) -> tuple[str, ...]:
    """Return the position terms. Without the key microsoft's code has c2p, which counts in the
    scale of attention also where none is relative (deberta/disentangled_attention.py), and
    transformers none.
    """
    is_microsoft = "model_type" not in values
    given = values.get("pos_att_type", "c2p" if is_microsoft else None) or []
    if isinstance(given, str):
        given = given.lower().split("|")
    if not isinstance(given, list) or not all(isinstance(term, str) for term in given):
        raise UserError(f"{place}: pos_att_type = {given!r} is not a list of terms")
    terms = tuple(term.strip() for term in given if term.strip() not in ("", "none"))
    if unknown := set(terms) - _TERMS:
        raise UserError(f"{place}: pos_att_type has {', '.join(sorted(unknown))}; only c2p and p2c "
                        "are defined")
    if values.get("model_type") == V1 and values.get("relative_attention") \
            and len(terms) < len(given):
        raise UserError(f"{place}: pos_att_type = {values['pos_att_type']!r}: transformers' v1 "
                        "class counts an empty term in its attention scale; only c2p and p2c are "
                        "supported")
    return terms


def to_hugging_face(config: ModelConfig, *, kind: str, rest: dict[str, Any]) -> dict:
    """Return the `config.json` values of an encoder; `kind` is its model_type."""
    config = without_unused(config)  # official code heeds it all the same
    pooler = {"pooler_dropout": 0, "pooler_hidden_act": "gelu",
              "pooler_hidden_size": config.hidden_size}
    return pooler | rest | _common(config) | {
        "model_type": kind, "pad_token_id": rest.get("pad_token_id", 0),
        "pos_att_type": list(config.position_terms), "tie_word_embeddings": True}


def to_microsoft(config: ModelConfig, rest: dict[str, Any]) -> dict:
    """Return the `model_config.json` values of an encoder."""
    config = without_unused(config)
    ours = {key: value for key, value in rest.items()
            if key not in ("architectures", "pad_token_id")}
    return _with_microsoft_heads(ours) | _common(config) | {
        "padding_idx": rest.get("pad_token_id", 0),
        "pos_att_type": "|".join(config.position_terms) or "none",
        "attention_head_size": config.head_size}


def _common(config: ModelConfig) -> dict:
    if unknown := sorted(set(config.position_terms) - _TERMS):
        raise UserError(f"model.position_terms = {', '.join(unknown)}: neither Hugging Face nor "
                        "microsoft files have a place for it; such a model stays a checkpoint")
    values = {theirs: getattr(config, ours) for ours, theirs in _SAME_MEANING.items()}
    values |= {key: _FIXED[key] for key in ("type_vocab_size", "hidden_act")}
    values |= {"relative_attention": config.relative_attention,
               "position_buckets": config.position_buckets or -1,
               "norm_rel_ebd": "layer_norm" if config.relative_norm else "none",
               "share_att_key": config.share_position_projections,
               "position_biased_input": config.absolute_input}
    if config.conv_kernel:
        values |= {"conv_kernel_size": config.conv_kernel, "conv_act": config.conv_activation}
    return values


PREFIX = "deberta."  # of the encoder inside every model with a head
V1_ONLY = ".attention.self.in_proj.weight"

_INPUT = {"words.weight": "embeddings.word_embeddings.weight",
          "words.delta": "embeddings.word_embeddings._weight",
          "positions.delta": "embeddings.position_embeddings._weight",
          "trunk.input.norm": "embeddings.LayerNorm",
          "trunk.encoder.relative": "encoder.rel_embeddings.weight",
          "trunk.encoder.relative_norm": "encoder.LayerNorm",
          "trunk.encoder.convolution.norm": "encoder.conv.LayerNorm",
          "trunk.encoder.convolution": "encoder.conv.conv"}
_POSITION_TABLE = "embeddings.position_embeddings.weight"
_LAYER = {
    "attention.query": "attention.self.query_proj", "attention.key": "attention.self.key_proj",
    "attention.value": "attention.self.value_proj",
    "attention.position_key": "attention.self.pos_key_proj",
    "attention.position_query": "attention.self.pos_query_proj",
    "attention.output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
    "ffn_in": "intermediate.dense", "ffn_out": "output.dense", "ffn_norm": "output.LayerNorm"}
_HEADS = {"mlm_head.dense": "lm_predictions.lm_head.dense",
          "mlm_head.norm": "lm_predictions.lm_head.LayerNorm",
          "mlm_head.bias": "lm_predictions.lm_head.bias",
          "rtd_head.dense": "mask_predictions.dense", "rtd_head.norm": "mask_predictions.LayerNorm",
          "rtd_head.classifier": "mask_predictions.classifier"}
# The default ("legacy") masked-LM head of transformers, equal in meaning to `lm_predictions`.
LEGACY_HEAD = {"cls.predictions.transform.dense": "lm_predictions.lm_head.dense",
                "cls.predictions.transform.LayerNorm": "lm_predictions.lm_head.LayerNorm",
                "cls.predictions.bias": "lm_predictions.lm_head.bias"}
COPIES = {  # tied duplicates in transformers' files and state: of 3 and 4, the last of 5.0 to 5.19
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_predictions.lm_head.weight": "embeddings.word_embeddings.weight",
}
# Same name in every format; "head." are those of ours that transformers has no class for.
OTHER_HEADS = ("pooler.", "classifier.", "proj.", "qa_outputs.", "head.")


def name_table(config: ModelConfig) -> dict[str, str]:
    """Return {our name or stem: their name or stem without "deberta."} of one network."""
    # Added to the input the table belongs to the encoder, otherwise to the enhanced mask decoder.
    table = _INPUT | {"trunk.input.positions.weight" if config.absolute_input else
                      "positions.weight": _POSITION_TABLE}
    for layer in range(config.num_layers):
        table |= {f"trunk.encoder.layers.{layer}.{ours}": f"encoder.layer.{layer}.{theirs}"
                  for ours, theirs in _LAYER.items()}
    return table | _HEADS


def is_encoder_name(theirs: str) -> bool:
    """Return whether a name (without prefix) belongs to the encoder, which "deberta." prefixes."""
    return theirs.startswith(("embeddings.", "encoder."))


def to_theirs(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the same tensors under the microsoft names without prefix; unknown names stay."""
    return rename(tensors, name_table(config))


def to_ours(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the same tensors under our names; unknown names stay."""
    return rename(tensors, {theirs: ours for ours, theirs in name_table(config).items()})


def rename(tensors: dict[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    """Return tensors under the names of `table`, by their whole names or all but the last part."""
    renamed = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if name in table:
            renamed[table[name]] = tensor
        elif stem in table and leaf in ("weight", "bias"):
            renamed[f"{table[stem]}.{leaf}"] = tensor
        else:
            renamed[name] = tensor
    return renamed


def pack_v1(tensors: dict[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Return microsoft names as transformers' DebertaModel wants them.

    Rows of in_proj are [head 0: q, k, v; head 1: q, k, v; ...]. Key biases have no place there: the
    caller has checked that they are absent or zero.
    """
    packed = {}
    for name, tensor in tensors.items():
        stem, _, rest = name.partition(".attention.self.")
        if not rest:
            packed[name] = tensor
        elif rest == "query_proj.weight":
            parts = [tensors[f"{stem}.attention.self.{part}_proj.weight"].unflatten(
                0, (num_heads, -1)) for part in ("query", "key", "value")]
            packed[stem + V1_ONLY] = stack(parts, 1).flatten(0, 2).contiguous()
        elif rest in _V1_NAMES:
            packed[f"{stem}.attention.self.{_V1_NAMES[rest]}"] = tensor
    return packed


def unpack_v1(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return transformers' DebertaModel names under the microsoft names (without key biases); one
    of another shape stays, and is an unknown name.
    """
    unpacked = {}
    old_names = {old: new for new, old in _V1_NAMES.items()}
    for name, tensor in tensors.items():
        stem, _, rest = name.partition(".attention.self.")
        if rest == "in_proj.weight" and tensor.shape == (3 * config.hidden_size,
                                                         config.hidden_size):
            parts = tensor.unflatten(0, (config.num_heads, 3, -1))
            for number, part in enumerate(("query", "key", "value")):
                unpacked[f"{stem}.attention.self.{part}_proj.weight"] = (
                    parts[:, number].flatten(0, 1).contiguous())
        else:
            unpacked[f"{stem}.attention.self.{old_names[rest]}" if rest in old_names else name
                     ] = tensor
    return unpacked


_V1_NAMES = {"query_proj.bias": "q_bias", "value_proj.bias": "v_bias",
             "pos_key_proj.weight": "pos_proj.weight", "pos_query_proj.weight": "pos_q_proj.weight",
             "pos_query_proj.bias": "pos_q_proj.bias"}
