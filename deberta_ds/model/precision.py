"""Precisions by name: the dtype that a DeepSpeed JSON, a log line or a data sheet means by it."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matmul_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of matmuls of x: that of autocast, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
