"""The public DeBERTa models by name: values for ModelConfig.

Sources: the released configuration files and microsoft/DeBERTa experiments/. A
generator has its discriminator's width and half its depth. tests/test_presets.py holds the exact
parameter count of each.
"""

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
