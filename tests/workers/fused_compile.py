"""Compile the fused kernels for a GPU that is not there, and print what ptxas made of them.

Usage: fused_compile.py <architecture: 80 or 90> <head sizes...>; one JSON line a kernel.
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deberta_ds.model.attention.fused import kernels, tiles

KERNELS = {
    "forward": kernels.forward_kernel,
    "query": kernels.backward_query_kernel,
    "key": kernels.backward_key_kernel,
}
HALF = {"Q", "K", "V", "KEY_TERM", "QUERY_TERM", "OUT", "GRAD", "DQ", "DK", "DV"}
HALF |= {"D_KEY_TERM", "D_QUERY_TERM"}
FLOAT_POINTERS = {"LSE", "DELTA"}
FLOATS = {"scale", "keep_scale"}
UNALIGNED = {"NQ", "NK", "H", "REACH", "threshold"}
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_kernel(direction: str, architecture: int, size: int, length: int):
    """Return the compiled kernel for bf16, both terms, dropout on."""
    tile = tiles.choose((architecture // 10, 0), size, length, direction)
    constants = dict(HAS_KEY_TERM=True, HAS_QUERY_TERM=True, DROPOUT=True, PRECISION="tf32")
    constants |= dict(D=size, BM=tile.block_m, BN=tile.block_n)
    if direction == "key":
        constants["PICKED"] = False
    signature, attributes = {}, {}
    for place, name in enumerate(inspect.signature(KERNELS[direction].fn).parameters):
        if name in constants:
            signature[name] = "constexpr"
        elif name in HALF:
            signature[name] = "*bf16"
        elif name in FLOAT_POINTERS:
            signature[name] = "*fp32"
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = "*i32" if name.isupper() and len(name) > 5 else "i32"
        if name not in constants and name not in UNALIGNED | FLOATS:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=KERNELS[direction], signature=signature, constexprs=constants, attrs=attributes
    )
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    return tile, triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options=options
    )


def inspect_machine_code(cubin: bytes) -> dict:
    """Return registers, spilled bytes and how often some instructions occur."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    patterns = {"tensor_core": r"HGMMA|HMMA", "hgmma": "HGMMA", "spills": r"\b(?:STL|LDL)",
                "two_byte_loads": r"LDG\.E\.U16", "two_byte_stores": r"STG\.E\.U16"}  # fmt: skip
    counts = {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}
    return {"registers": registers, "stack": stack, **counts}


def _run(tool: str, *arguments: str) -> str:
    command = [BIN / tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    architecture, *sizes = map(int, sys.argv[1:])
    for size in sizes:
        for length in (512, 4096):
            for direction in KERNELS:
                tile, compiled = compile_kernel(direction, architecture, size, length)
                line = {"kernel": direction, "size": size, "length": length, "tile": list(tile)}
                line |= {"shared": compiled.metadata.shared}
                line |= inspect_machine_code(compiled.asm["cubin"])
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
