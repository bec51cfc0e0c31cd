"""Compile the fused kernels for a GPU that is not there, and print what ptxas made of them.

  fused_compile.py 90                          every kernel and tile of an architecture
  fused_compile.py 90 --sizes 64 --lengths 4096 --kernels forward query key

One JSON line a kernel; exit code 1 if one breaks a rule (see `faults`). Rows of 512 tokens have no
pair beyond the band, those of 900 and 4096 have.
"""

import argparse
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

from deberta_ds.model.attention.geometry import Geometry, make_band
from deberta_ds.model.kernels.attention import (
    backward,
    blocks,
    forward,
    position_bias,
    tiles,
)

REACH = Geometry(512, 256).reach  # of every released v2 and v3 model

FLASH = {"forward": forward.forward_kernel, "query": backward.query_kernel,
         "key": backward.key_kernel}
PRODUCTS = {"bias": position_bias.bias_kernel, "rows": position_bias.row_gradient_kernel,
            "content": backward.content_kernel, "table": position_bias.table_gradient_kernel,
            "columns": position_bias.columns_kernel, "skew": position_bias.skew_kernel,
            "spread": position_bias.spread_kernel}
KERNELS = FLASH | PRODUCTS
FLOAT_POINTERS = {"LSE", "ROW_DOT", "C2P_EDGES", "P2C_EDGES", "D_C2P_EDGES", "D_P2C_EDGES"}
FLOAT_POINTERS |= {"D_TABLE"}
WHOLE = {"SEGMENT", "Q_SEGMENT", "K_SEGMENT", "POSITION", "Q_POSITION", "DROPPED"}
FLOATS = {"scale", "keep_scale"}
# bytes of shared memory that a block may have
LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10,
          103: 227 << 10, 120: 99 << 10}
FEW_SPILLS: dict = {}
# of a kernel with heads of 64 and of its first loop, in short and in long sequences
LOOP_LIMITS = {
    ("forward", 64, 90): {"instructions": 440, "barriers": 6},
    ("key", 64, 90): {"instructions": 690, "barriers": 6, "waits": 2, "registers": 230},
    ("bias", 64, 90): {"instructions": 165, "barriers": 7, "registers": 72},
    ("rows", 64, 90): {"instructions": 125, "barriers": 5, "registers": 72},
    ("content", 64, 90): {"instructions": 145, "barriers": 5, "registers": 72},
    ("table", 64, 90): {"instructions": 145, "barriers": 6, "registers": 80},
}
ALIGNED = [["tt.divisibility", 16]]
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def is_far(length: int) -> bool:
    return make_band(REACH, length).far


def compile_kernel(name: str, architecture: int, size: int, length: int, gathered: bool,
                   keep: bool, dtype: str = "bf16"):
    """Return (tile, compiled kernel) for both terms, dropout on.

    keep: the forward kernel keeps the sum of both terms, as it always does of gathered queries.
    """
    capability, far = (architecture // 10, architecture % 10), is_far(length)
    tile = tiles.COLUMN_TILES.get("far " * far + name, tiles.COLUMN_TILES.get(name))
    tile = tile or tiles.choose_tile(capability, size, name, length, gathered, far)
    constants = dict(HAS_C2P=True, HAS_P2C=name == "forward" or not gathered, HAS_BIAS=True)
    constants |= dict(KEEP=keep or gathered, ONLY_SUMS=False, DROPOUT=True, PRECISION="tf32")
    constants |= dict(GATHERED=gathered, FAR=far and not (gathered and name in FLASH), D=size)
    constants |= dict(BM=tile.block_m, BN=tile.block_n, BR=tile.block_m, BC=tile.block_n)
    signature, attributes, used = {}, {}, {}
    for place, parameter in enumerate(inspect.signature(KERNELS[name].fn).parameters):
        kind = _kind(name, parameter, constants, dtype)
        signature[parameter] = kind
        if kind == "constexpr":
            used[parameter] = constants[parameter]
        elif isinstance(kind, tuple):  # all pointers and strides are
            attributes |= {(place, one): ALIGNED for one in range(len(kind))}
        elif kind.startswith("*"):
            attributes[(place,)] = ALIGNED
    source = ASTSource(fn=KERNELS[name], signature=signature, constexprs=used, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    return tile, triton.compile(source, target=target, options=options)


def _kind(kernel: str, parameter: str, constants: dict, dtype: str) -> str | tuple:
    half = "*" + dtype
    if parameter in constants:
        return "constexpr"
    if parameter in FLOATS:
        return "fp32"
    if parameter in FLOAT_POINTERS:
        return "*fp32"
    if parameter in WHOLE:
        return "*i32"
    if parameter in ("SEEN", "COVER", "RUN"):
        return blocks.Bounds("*i32", "*i32")
    if parameter in ("Q", "K", "V", "X"):
        return blocks.Vectors(half, "i32", "i32", "i32")
    of_term = {"TERM", "D_TERM"} | {"forward": {"C2P", "P2C"}, "key": {"D_P2C"}}.get(kernel, set())
    if parameter in of_term:
        return blocks.Term(half, "*fp32")
    return "i32" if parameter in ("NQ", "NK", "N", "B", "H", "SPAN") else half


def inspect_machine_code(cubin: bytes) -> dict:
    """Return registers, spilled bytes and how often some instructions occur."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    patterns = {"tensor_core": r"HGMMA|HMMA|UTCHMMA", "hgmma": "HGMMA", "spills": r"\b(?:STL|LDL)",
                "two_byte_loads": r"LDG\.E\.U16", "two_byte_stores": r"STG\.E\.U16",
                "vector_loads": r"LDG\.E\.128|LDGSTS\.E\.BYPASS\.128|LDGSTS\.E\.128",
                "vector_stores": r"STG\.E\.128", "exponentials": r"MUFU\.EX2",
                "instructions": r"^\s+/\*[0-9a-f]{4,}\*/"}
    counts = {name: len(re.findall(p, code, re.MULTILINE)) for name, p in patterns.items()}
    return {"registers": registers, "stack": stack, **counts, "loops": _loops(code)}


def _loops(code: str) -> list[dict]:
    """Return the loops with matmuls, innermost first: instructions, barriers and waits for HGMMA.

    Waits are few where the products of a tile run while others are prepared, and not one by one.
    """
    instructions, labels, found = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        if instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            back = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction[1])
            if back and labels.get(back[1], len(instructions)) < len(instructions):
                body = "\n".join(instructions[labels[back[1]]:])
                if re.search("HGMMA|HMMA|UTCHMMA", body):
                    found.append({"instructions": body.count("\n") + 1,
                                  "barriers": len(re.findall(r"BAR\.", body)),
                                  "waits": len(re.findall(r"WARPGROUP\.DEPBAR", body)),
                                  "two_byte": len(re.findall(r"(?:LDG|STG)\.E\.U16", body))})
    return found


def _run(tool: str, *arguments: str) -> str:
    command = [BIN / tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overruns(line: dict, architecture: int) -> list[str]:
    """Return what of a kernel does not fit into a processor."""
    few = FEW_SPILLS.get((line.get("kernel"), line.get("size"), architecture), 0)
    found = ["spills registers"] if line["spills"] > few or (line["stack"] and not few) else []
    if line["shared"] > LIMITS[architecture]:
        found.append("more shared memory than there is")
    return found


def faults(line: dict, architecture: int) -> list[str]:
    """Return what is wrong with a kernel."""
    found = overruns(line, architecture)
    products = line["kernel"] not in tiles.COLUMN_TILES
    if products and not line["hgmma" if architecture == 90 else "tensor_core"]:
        found.append("no product on the tensor cores")
    if any(loop["two_byte"] for loop in line["loops"]) and not line["gathered"]:
        found.append("two-byte accesses in a loop")
    # Of gathered queries terms are read pair by pair; without a sum ptxas serializes the products.
    other = line["kernel"] == "forward" and (line["gathered"] or not line["kept"])
    limits = {} if other else LOOP_LIMITS.get((line["kernel"], line["size"], architecture), {})
    of_loop = line | line["loops"][0] if limits else {}
    found += [f"over {limit} {what}" for what, limit in limits.items() if of_loop[what] > limit]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architecture", type=int, choices=LIMITS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 900, 4096])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--gathered", action="store_true", help="queries at explicit columns")
    parser.add_argument("--recomputed", action="store_true", help="terms that are not kept")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    options = parser.parse_args()
    right = True
    for size in options.sizes:
        for length in options.lengths:
            for name in options.kernels:
                if name == "query" and (options.gathered or not is_far(length)):
                    continue  # never asked for: five products do without it
                keep = not options.recomputed
                shape = (options.architecture, size, length, options.gathered, keep, options.dtype)
                tile, compiled = compile_kernel(name, *shape)
                line = {"kernel": name, "size": size, "length": length, "tile": list(tile)}
                line |= {"gathered": options.gathered, "kept": keep, "dtype": options.dtype}
                line["shared"] = compiled.metadata.shared
                line |= inspect_machine_code(compiled.asm["cubin"])
                line["faults"] = faults(line, options.architecture)
                right = right and not line["faults"]
                print(json.dumps(line), flush=True)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
