"""Write tensors one at a time into a safetensors file, hashed while it is written."""

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from torch import Tensor

_SAFETENSORS_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
                      torch.float64: "F64", torch.int64: "I64", torch.int32: "I32",
                      torch.uint8: "U8", torch.bool: "BOOL"}


def write_stream(path: Path, described: list[tuple[str, torch.dtype, int]],
                 tensors: Iterable[tuple[str, Tensor]]) -> dict:
    """Write flat tensors to a safetensors file, one in memory at a time; return bytes and xxh3.

    `described`: (name, dtype, elements) of each, in the order in which `tensors` gives them. The
    file is hashed while it is written, and flushed to the disk. OSError where that fails.
    """
    header, end = {}, 0
    for name, dtype, count in described:
        start, end = end, end + count * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_TYPES[dtype], "shape": [count],
                        "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb") as file:
        def write(data) -> None:
            nonlocal size
            file.write(data)
            digest.update(data)
            size += len(data)

        write(struct.pack("<Q", len(text)) + text)
        for (name, dtype, count), (found, tensor) in zip(described, tensors, strict=True):
            assert (name, dtype, count) == (found, tensor.dtype, tensor.numel()), name
            write(memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3": digest.hexdigest()}
