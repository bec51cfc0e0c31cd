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
from deberta_ds.model.kernels.attention import backward, forward, ops, position_bias

REACH = Geometry(512, 256).reach  # of every released v2 and v3 model

FLASH = {
    "forward": forward.forward_kernel,
    "query": backward.query_kernel,
    "key": backward.key_kernel,
}
PRODUCTS = {
    "bias": position_bias.bias_kernel,
    "rows": position_bias.row_gradient_kernel,
    "table": position_bias.table_gradient_kernel,
    "spread": position_bias.spread_kernel,
}
KERNELS = FLASH | PRODUCTS
FLOAT_POINTERS = {"LSE", "ROW_DOT", "C2P_EDGES", "P2C_EDGES", "D_C2P_EDGES", "D_P2C_EDGES"}
FLOAT_POINTERS |= {"EDGES", "D_EDGES", "D_TABLE"}
FACTS = {"POSITION", "START", "STOP"}
FLOATS = {"scale", "keep_scale"}
# bytes of shared memory that a block may have
LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10,
          103: 227 << 10, 120: 99 << 10}
FEW_SPILLS = {("key", 64, 90): 64}  # an H100 ran tiles with 30 and 62 loads and stores fastest
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def is_far(length: int) -> bool:
    return make_band(REACH, length).far


def compile_kernel(name: str, architecture: int, size: int, length: int, gathered: bool,
                   summed: bool):
    """Return (tile, compiled kernel) for bf16, both terms, dropout on.

    summed: keep the sum of both terms, which is never done for gathered queries.
    """
    capability, far = (architecture // 10, architecture % 10), is_far(length)
    if name in FLASH:
        tile = ops.choose_tile(capability, size, length, name, gathered, far)
    else:
        tile = ops.choose_product_tile(capability, size, name)
    constants = dict(HAS_C2P=True, HAS_P2C=True, DROPOUT=True, PRECISION="tf32")
    constants |= dict(GATHERED=gathered, FAR=far, D=size, CHUNK=512)
    constants |= dict(WHOLE=not gathered, SUMMED=summed, CONTENT=not gathered, TERM=True)
    constants |= dict(BM=tile.block_m, BN=tile.block_n, BR=tile.block_m, BC=tile.block_n)
    signature, attributes, used = {}, {}, {}
    for place, parameter in enumerate(inspect.signature(KERNELS[name].fn).parameters):
        kind = _kind(parameter, constants)
        signature[parameter] = kind
        if kind == "constexpr":
            used[parameter] = constants[parameter]
        elif kind.startswith("*") or re.fullmatch("[qkvxo]_[bhn]", parameter):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=KERNELS[name], signature=signature, constexprs=used, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    return tile, triton.compile(source, target=target, options=options)


def _kind(parameter: str, constants: dict) -> str:
    if parameter in constants:
        return "constexpr"
    if parameter in FLOATS:
        return "fp32"
    if parameter in FLOAT_POINTERS:
        return "*fp32"
    last = parameter.rpartition("_")[2]
    if last in FACTS | {"SEGMENT", "DROPPED"}:
        return "*i32"
    if not parameter.isupper() or parameter in ("NQ", "NK", "N", "B", "H", "SPAN"):
        return "i32"
    return "*bf16"


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
    return {"registers": registers, "stack": stack, **counts}


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
    if not line["hgmma" if architecture == 90 else "tensor_core"]:
        found.append("no product on the tensor cores")
    if line["two_byte_loads"] and line["kernel"] in FLASH and not line["gathered"]:
        found.append("two-byte loads in a flash kernel")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architecture", type=int, choices=LIMITS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 900, 4096])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--gathered", action="store_true", help="queries at explicit columns")
    parser.add_argument("--recomputed", action="store_true", help="terms that are not kept")
    options = parser.parse_args()
    right = True
    for size in options.sizes:
        for length in options.lengths:
            for name in options.kernels:
                if name == "query" and not is_far(length) and not options.gathered:
                    continue  # never asked for: five products do without it
                summed = not (options.gathered or options.recomputed)
                shape = (options.architecture, size, length, options.gathered, summed)
                tile, compiled = compile_kernel(name, *shape)
                line = {"kernel": name, "size": size, "length": length, "tile": list(tile)}
                line |= {"gathered": options.gathered, "kept": summed}
                line["shared"] = compiled.metadata.shared
                line |= inspect_machine_code(compiled.asm["cubin"])
                line["faults"] = faults(line, options.architecture)
                right = right and not line["faults"]
                print(json.dumps(line), flush=True)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
