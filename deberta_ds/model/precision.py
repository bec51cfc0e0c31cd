"""Precisions by name: the dtype that a DeepSpeed JSON, a log line or a data sheet means by it."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
