"""Compile the kernels that fused_compile.py leaves out for a GPU that is not there: outside of
attention, and between its large ones.

  kernel_compile.py 90          one JSON line a kernel; exit code 1 if one breaks a rule
"""

import argparse
import json
import sys

import triton
from fused_compile import ALIGNED, LIMITS, inspect_machine_code, overruns
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deberta_ds.model.kernels import fused_cross_entropy as loss
from deberta_ds.model.kernels import fused_norm as norm
from deberta_ds.model.kernels.attention import backward, blocks, ops

WIDTH = 768
SINGLE = {"LSE", "SAMPLE_LSE", "MAX_LOGIT", "LABEL_LOGIT", "LOG_NORM", "SCALE", "INSIDE"}
SINGLE |= {"MEAN", "INVERSE", "PARTS", "SUMS", "ROW_DOT", "INVERSE_TEMPERATURE"}
WHOLE = {"LABELS": "*i64", "SAMPLED": "*i64", "ARGMAX": "*i32", "TILE": "*i32"}
WHOLE |= {"WORDS": "*i32", "SEEN": blocks.Bounds("*i32", "*i32"), "SEED": "*i64", "KEY": "*i64"}
NUMBERS = {"keep_scale": "fp32", "epsilon": "fp32"}
_LOSS = dict(C=WIDTH, BK=loss._DEPTH, BT=loss._ROWS, PRECISION="tf32")
_NORM = dict(C=WIDTH, BLOCK=1024, DROPOUT=True)
_GELU = dict(C=4 * WIDTH, BR=norm._GELU_ROWS, BC=norm._GELU_COLUMNS)
# kernel, compile-time constants, warps (None: by architecture), stages, tensor cores
KERNELS = {
    "loss": (loss._forward_kernel, _LOSS | dict(BN=loss._IDS, SEPARATE=False), None, 3, True),
    "loss at a temperature": (loss._forward_kernel, _LOSS | dict(BN=loss._IDS, SEPARATE=True),
                              8, 3, True),
    "loss gradient": (loss._gradient_kernel, _LOSS | dict(BN=loss._GRADIENT_IDS), None, 3, True),
    "sample": (loss._sample_kernel, dict(C=WIDTH, BK=loss._DEPTH, BN=loss._IDS, SEPARATE=True),
               4, 3, False),
    "norm": (norm._norm_kernel, _NORM, 4, 3, False),
    "norm gradient": (norm._norm_gradient_kernel, _NORM | dict(TWO=True), 1, 3, False),
    "dropout": (norm._dropout_kernel, _NORM, 4, 3, False),
    "gelu": (norm._gelu_kernel, _GELU, 4, 3, False),
    "gelu gradient": (norm._gelu_gradient_kernel, _GELU | dict(BR=norm._GELU_GRADIENT_ROWS),
                      4, 3, False),
    "column sums": (norm._column_sum_kernel, dict(C=WIDTH, BR=norm._SUM_ROWS,
                                                  BC=norm._GELU_COLUMNS), 4, 3, False),
    "dropped pairs": (blocks.dropped_kernel, dict(DIGITS=16, BR=64, BW=16), 4, 3, False),
    "row_dot": (backward.row_dot_kernel, dict(D=64, BM=ops._ROW_DOT_ROWS), 4, 3, False),
}


def compile_kernel(name: str, architecture: int):
    """Return the compiled kernel for bf16."""
    kernel, constants, warps, stages, _ = KERNELS[name]
    warps = warps or (loss._FEW_WARPS if architecture // 10 == 9 else loss._WARPS)
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.arg_names):
        if parameter in constants:
            signature[parameter] = "constexpr"
        elif parameter in SINGLE:
            signature[parameter] = "*fp32"
        elif parameter in WHOLE | NUMBERS:
            signature[parameter] = (WHOLE | NUMBERS)[parameter]
        else:
            pointer = parameter.isupper() and parameter not in ("T", "VALID", "R", "NQ", "NK", "H")
            signature[parameter] = "*bf16" if pointer else "i32"
        if isinstance(signature[parameter], tuple):
            attributes |= {(place, one): ALIGNED for one in range(len(signature[parameter]))}
        elif signature[parameter].startswith("*"):
            attributes[(place,)] = ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=dict(num_warps=warps, num_stages=stages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architecture", type=int, choices=LIMITS)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    options = parser.parse_args()
    right = True
    for name in options.kernels:
        compiled = compile_kernel(name, options.architecture)
        line = {"kernel": name, "shared": compiled.metadata.shared}
        line |= inspect_machine_code(compiled.asm["cubin"])
        line["faults"] = overruns(line, options.architecture)
        if KERNELS[name][4] and not line["tensor_core"]:
            line["faults"].append("no product on the tensor cores")
        if line["two_byte_stores"] > 2:  # a bias gradient is one element a thread
            line["faults"].append("two-byte stores")
        if line["two_byte_loads"] and name.startswith(("norm", "gelu", "dropout")):
            line["faults"].append("two-byte loads")
        right = right and not line["faults"]
        print(json.dumps(line), flush=True)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
