"""The shape of one encoder: section [model] of a run file."""

from dataclasses import fields, replace
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from deberta_ds.config.options import STRICT, option

# Keys that say how a model is computed, not what.
Term = Literal["c2p", "p2c"]  # of the attention scores
TERMS: tuple[Term, ...] = get_args(Term)
HOW_COMPUTED = ("attention", "keep_position_terms", "cross_entropy")
# In which models of one shape may differ: these, and how it is begun and regularized.
RANDOM = "random:"  # before a model of which the shape alone is taken
FREE = (*HOW_COMPUTED, "hidden_dropout", "attention_dropout", "init_std")
ROW_MULTIPLE = 64  # token embeddings of such a height are fast, and divide evenly among GPUs


def padded_rows(num_ids: int) -> int:
    """Return the rows of a token embedding for a tokenizer of `num_ids` ids."""
    return -(-num_ids // ROW_MULTIPLE) * ROW_MULTIPLE


# -1 is what Hugging Face and microsoft write for none.
_Buckets = Annotated[int, BeforeValidator(lambda value: 0 if value == -1 else value)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one DeBERTa encoder (microsoft/DeBERTa config.py and the released files)."""

    vocab_size: int = option("number of token embeddings", ge=1, le=1 << 24)
    hidden_size: int = option("hidden size of the encoder", ge=1, le=1 << 16)
    num_layers: int = option("number of encoder layers", ge=1, le=1000)
    num_heads: int = option("number of attention heads; must divide hidden_size", ge=1, le=1 << 12)
    intermediate_size: int = option("hidden size of the feed-forward network", ge=1, le=1 << 20)
    max_position: int = option("number of absolute position embeddings: the longest sequence in "
                               "tokens", 512, ge=1, le=1 << 20)
    max_relative: int = option("largest relative distance that is distinguished; -1: max_position",
                               -1, ge=-1, le=1 << 20)
    position_buckets: _Buckets = option("number of logarithmic position buckets per direction; 0 "
                                        "or -1: one embedding per distance (v1)", 256, ge=0,
                                        le=1 << 16)
    relative_attention: bool = option("true: disentangled attention; false: attention of BERT",
                                      True)
    position_terms: tuple[Term, ...] = option(
        "position terms of the attention scores: content to position, position to content",
        ("c2p", "p2c"))
    share_position_projections: bool = option("project relative position embeddings with the query "
                                              "and key weights of the content", True)
    relative_norm: bool = option("apply LayerNorm to the relative position embeddings", True)
    absolute_input: bool = option("add absolute positions to the input as in BERT; there is no "
                                  "enhanced mask decoder then", False)
    conv_kernel: int = option("kernel size of v2's convolution next to the first layer, odd; 0: no "
                              "convolution", 0, ge=0, le=1001)
    conv_activation: Literal["gelu", "tanh"] = option("activation function of the convolution",
                                                      "gelu")
    key_bias: bool = option("key projections have a bias; false: none, as in v1", True)
    hidden_dropout: float = option("dropout of hidden states", 0.1, ge=0, lt=1)
    attention_dropout: float = option("dropout of attention probabilities", 0.1, ge=0, lt=1)
    norm_eps: float = option("epsilon of every LayerNorm", 1e-7, ge=1e-20, le=1)
    init_std: float = option("standard deviation of the initial weights", 0.02, gt=0, le=10)
    attention: Literal["auto", "fused", "tiled", "reference", "dense"] = option(
        "implementation of attention; all give the same result (docs/explanation/attention.md)",
        "auto")
    keep_position_terms: bool = option("fused attention keeps its position terms for the backward "
                                       "pass: about 5 % faster, for 2 bytes x heads x min(seq_len, "
                                       "1152) per token and layer", False)
    cross_entropy: Literal["auto", "chunked", "fused"] = option(
        "implementation of the masked LM loss; fused: Triton kernels, on a GPU", "auto")

    def __post_init__(self):
        problems = []
        if self.hidden_size % self.num_heads:
            problems.append(f"hidden_size = {self.hidden_size} is not divisible by num_heads = "
                            f"{self.num_heads}")
        if self.conv_kernel and self.conv_kernel % 2 == 0:
            problems.append(f"conv_kernel = {self.conv_kernel} must be odd, or 0 for none")
        if len(set(self.position_terms)) != len(self.position_terms):
            problems.append("position_terms names a term twice")
        if self.position_buckets == 1:
            problems.append("position_buckets = 1 must be at least 2, or 0 for none")
        if self.relative_attention and self.largest_distance < 2:
            name = "max_position" if self.max_relative < 1 else "max_relative"
            problems.append(f"{name} = {self.largest_distance} must be at least 2 with "
                            "relative_attention")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head_size(self) -> int:
        """Columns of a head."""
        return self.hidden_size // self.num_heads

    @property
    def relative_span(self) -> int:
        """Half the rows of the relative table: buckets, or the largest distance without them."""
        return self.position_buckets or self.largest_distance

    @property
    def largest_distance(self) -> int:
        """Largest relative distance with a row of its own, in tokens."""
        return self.max_position if self.max_relative < 1 else self.max_relative


def decoder_problems(layers: int, config: ModelConfig, key: str) -> list[str]:
    """Return what is wrong with a masked LM of `layers` too few for the enhanced mask decoder."""
    if layers >= 2 or config.absolute_input:
        return []
    return [f"{key} gives {layers} layer; the enhanced mask decoder needs at least 2: write {key} "
            "= 2"]


def without_unused(config: ModelConfig) -> ModelConfig:
    """Return a configuration without position terms and norm where nothing is relative."""
    if config.relative_attention:
        return config
    return replace(config, position_terms=(), relative_norm=False)


def computed_anywhere(config: ModelConfig) -> ModelConfig:
    """Return the same model, computed as any machine can: a run's own choice is for its own."""
    return ModelConfig(**{field.name: getattr(config, field.name) for field in fields(config)
                          if field.name not in HOW_COMPUTED})


# The public DeBERTa models by name: values for ModelConfig.
#
# Sources: the released configuration files and microsoft/DeBERTa experiments/. A generator has its
# discriminator's width and half its depth. tests/config/test_config.py holds the exact parameter
# count of each.
_V1 = {"vocab_size": 50265, "position_buckets": 0, "share_position_projections": False,
       "relative_norm": False, "key_bias": False}
_V3 = {"vocab_size": 128100}
_V2 = _V3 | {"conv_kernel": 3}


def _shape(hidden_size: int, num_layers: int, num_heads: int) -> dict:
    return {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads,
            "intermediate_size": 4 * hidden_size}


MODELS: dict[str, dict] = {
    "deberta-base": _V1 | _shape(768, 12, 12),
    "deberta-large": _V1 | _shape(1024, 24, 16),
    "deberta-xlarge": _V1 | _shape(1024, 48, 16),
    "deberta-v2-xlarge": _V2 | _shape(1536, 24, 24),
    "deberta-v2-xxlarge": _V2 | _shape(1536, 48, 24),  # the 1.5B model
    "deberta-v3-xsmall": _V3 | _shape(384, 12, 6),
    "deberta-v3-small": _V3 | _shape(768, 6, 12),
    "deberta-v3-base": _V3 | _shape(768, 12, 12),
    "deberta-v3-large": _V3 | _shape(1024, 24, 16),
    "mdeberta-v3-base": _V3 | {"vocab_size": 251000} | _shape(768, 12, 12),
    # mlm.sh's BERT baseline: absolute positions in the input, no relative attention.
    "bert-base": _V3 | _shape(768, 12, 12) | {
        "relative_attention": False, "position_terms": (), "absolute_input": True,
        "relative_norm": False, "share_position_projections": False, "position_buckets": 0},
    "tiny": {"vocab_size": 512, "position_buckets": 16, "max_position": 64} | _shape(64, 4, 4)
    | {"intermediate_size": 128},
}
