"""One table of parameter names: ours <-> microsoft/DeBERTa and Hugging Face.

Both use the same names for v2/v3 (transformers modeling_deberta_v2.py, microsoft/DeBERTa
deberta/bert.py), so one table serves both; Hugging Face's v1 class alone packs query, key and value
of each head into one `in_proj`, which `pack_v1` and `unpack_v1` translate to and from the microsoft
form.

Our names here are those of one network: a token embedding, a trunk and whatever heads it has
(`words.weight`, `trunk.*`, `positions.weight`, `mlm_head.*`, `rtd_head.*`, `words.delta`). Heads of
fine-tuned models (`pooler.*`, `classifier.*`, ...) keep their names everywhere.
"""

from torch import Tensor, stack

from deberta_ds.config.run_config import ModelConfig

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
