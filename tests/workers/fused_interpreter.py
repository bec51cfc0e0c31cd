"""Run the fused kernels in Triton's interpreter, and print one JSON line a case."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import interpret_bf16  # noqa: F401
import torch
from attention_cases import SMALL_BUCKETS, V1, V3, relative_errors, run
from attention_cases import Case as ContiguousCase

from deberta_ds.model.attention import attend
from deberta_ds.model.attention.dropout import keep_pairs
from deberta_ds.model.attention.geometry import make_band
from deberta_ds.model.kernels.attention import ops

ops._PROGRAMS = 4  # a program of the tables' gradients takes several sequences
torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN

PIECES = torch.tensor([[1] * 20 + [2] * 66 + [3] * 9 + [0] * 5])
HOLES = PIECES.clamp(max=1)
HOLES[0, 30] = 0

# A hole as long as a block of keys, and a piece that goes on behind another one.
TORN = torch.tensor([[1] * 60 + [2] * 50 + [1] * 10 + [0] * 138 + [1] * 4])

HOLED = torch.tensor([[1] * 200 + [0] * 3 + [1] * 70])

NEGATIVE = torch.where(PIECES == 2, -1, PIECES)  # a piece may have any number but 0

BANDS = torch.tensor([[1] * 30 + [2] * 265])

LONG = torch.tensor([[1] * 700 + [2] * 63 + [3] * 64 + [0] * 73])


class Case(ContiguousCase):
    """The same tensors, laid out as a linear projection leaves them: heads innermost but one."""

    def tensors(self):
        *qkv, pos_key, pos_query, grad = super().tensors()
        qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
        return [*qkv, pos_key, pos_query, grad]


def ones(length, rows=1):
    return torch.ones(rows, length, dtype=torch.int32)


SHORT = {
    "v3": (Case(V3, ones(71), heads=1), "float32"),
    "v3 half": (Case(V3, ones(100), heads=1, dropout=0.1), "float16"),
    "beyond the band": (Case(SMALL_BUCKETS, ones(300), heads=1, dropout=0.1), "bfloat16"),
    "packed": (Case(SMALL_BUCKETS, PIECES, heads=1, dropout=0.1), "float32"),
    "v1 with a hole": (Case(V1, HOLES, heads=1, dropout=0.1), "float32"),
    "torn": (Case(SMALL_BUCKETS, TORN, heads=1), "float32"),
    "gathered": (Case(SMALL_BUCKETS, PIECES, num_queries=21, heads=1, dropout=0.1), "float32"),
    "key term": (Case(SMALL_BUCKETS, ones(33, rows=2), heads=2, terms="key"), "float32"),
    "contiguous query term": (ContiguousCase(SMALL_BUCKETS, ones(33), heads=2, terms="query"),
                              "float16"),
    "gathered beyond the band": (Case(SMALL_BUCKETS, BANDS, num_queries=35, heads=1), "float32"),
    "gathered key term": (Case(V1, PIECES, num_queries=9, heads=1, terms="key"), "float32"),
    "no term": (Case(V3, ones(33), heads=1, terms="none"), "float32"),
    "heads of 48": (Case(SMALL_BUCKETS, PIECES, heads=2, size=48, dropout=0.1), "bfloat16"),
    "padding everywhere": (Case(SMALL_BUCKETS, ones(40) * 0, heads=1, dropout=0.1), "bfloat16"),
}
MORE = {
    "beyond the reach": (Case(SMALL_BUCKETS, ones(131), heads=1), "float32"),
    "beyond the band in fp32": (Case(SMALL_BUCKETS, ones(300), heads=1, dropout=0.1), "float32"),
    "whole tiles and a hole": (Case(SMALL_BUCKETS, HOLED, heads=1, dropout=0.1), "float32"),
    "negative segments": (Case(V1, NEGATIVE, heads=1), "float32"),
    "one token": (Case(V3, ones(1), heads=1), "float32"),
    "packed in bf16": (Case(SMALL_BUCKETS, PIECES, heads=1, size=32), "bfloat16"),
    "gathered in bf16": (Case(SMALL_BUCKETS, PIECES, num_queries=21, heads=1), "bfloat16"),
    "gathered without terms": (Case(V1, PIECES, num_queries=9, heads=1, terms="none"), "float32"),
    "gathered query term": (Case(V1, PIECES, num_queries=9, heads=1, terms="query"), "float16"),
    "heads of 80": (Case(SMALL_BUCKETS, PIECES, heads=1, size=80), "float16"),
    "heads of 12": (Case(SMALL_BUCKETS, PIECES, num_queries=7, heads=1, size=12), "float32"),
    "512 tokens": (Case(V3, ones(512), heads=1, size=64, dropout=0.1), "bfloat16"),
    "900 packed tokens": (Case(V3, LONG, heads=1, size=64, dropout=0.1), "bfloat16"),
    "gathered of 900 tokens": (Case(V3, LONG, num_queries=135, heads=1, size=64), "bfloat16"),
}


def random_cases(count: int, longest: int) -> dict:
    generator = torch.Generator().manual_seed(23)
    cases = {}
    for number in range(count):
        length = int(torch.randint(1, longest, (), generator=generator))
        cuts = torch.rand(2, length, generator=generator) < 3 / length
        segments = cuts.cumsum(1) + 1
        segments[1, length - length // 5 :] = 0
        geometry = (V3, V1, SMALL_BUCKETS)[number % 3]
        queries = length // 4 if number % 4 == 2 else None
        case = Case(geometry, segments, num_queries=queries or None, heads=1, dropout=0.1)
        dtype = ("float32", "bfloat16", "float32", "float16", "bfloat16")[number % 5]
        cases[f"random {number} of {length}"] = (case, dtype)
    return cases


def read_mask_back() -> list[float]:
    """Return how many pairs the forward kernel dropped that it should not have, or kept.

    With one-hot values the context is the probabilities, and a dropped one is exactly zero.
    """
    length, rate, seed = 64, 0.25, torch.tensor([5])
    generator = torch.Generator().manual_seed(31)
    q, k = (torch.randn(1, 2, length, 64, generator=generator) for _ in range(2))
    v = torch.eye(length).expand(1, 2, length, length)
    context = attend(q, k, v, None, None, geometry=V3, segments=ones(length), dropout=rate,
                     seed=seed, mode="fused")
    kept = keep_pairs(seed, 1, 2, length, length, rate)
    return [(context.transpose(1, 2).ne(0) ^ kept).sum().item()]


def check_operator() -> None:
    """Ask torch about the operator: its schema and its fake kernel."""
    generator = torch.Generator().manual_seed(29)
    qkv = [torch.randn(1, 9, 2, 16, generator=generator).transpose(1, 2) for _ in range(3)]
    qkv[1] = qkv[1].contiguous()  # the fake kernel must know the gradient's layout
    rows = 2 * make_band(16, 9).radius(9)
    tables = [torch.randn(rows, 2, 16, generator=generator) for _ in range(2)]
    columns = torch.arange(9, dtype=torch.int32)[None]
    one, nine = torch.ones_like(columns), torch.full_like(columns, 9)
    zero = one - 1
    facts = torch.stack([one, columns, zero, nine]), torch.stack([one, *(zero, nine) * 3])
    operators, tests = torch.ops.deberta_ds, ("test_schema", "test_faketensor")
    seed, p2c = torch.tensor([5]), ops.gathered_bias(qkv[1], tables[1], *facts, 16, 0.1)
    for arguments in ((*tables, None, *facts, seed, 16, 0.1, 0.1, False),
                      (*tables, None, *facts, seed, 16, 0.1, 0.1, True),
                      (tables[0], None, p2c, *facts, seed, 16, 0.1, 0.1, False)):
        torch.library.opcheck(operators.fused_attention.default, (*qkv, *arguments),
                              test_utils=tests)
    torch.library.opcheck(operators.gathered_bias.default, (qkv[1], tables[1], *facts, 16, 0.1),
                          test_utils=tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=0, help="this many random cases instead")
    parser.add_argument("--more", action="store_true", help="more sizes, tokens and dtypes")
    options = parser.parse_args()
    count, cases = options.random, SHORT | MORE if options.more else SHORT
    if not count:
        check_operator()  # raises what is wrong
        print(json.dumps({"name": "mask", "dtype": "float32", "errors": read_mask_back()}))
    if count:
        cases = random_cases(count, 300 if options.more else 130)
    for name, (case, dtype) in cases.items():
        truth = run(case, "reference", torch.float64)
        result = run(case, "fused", getattr(torch, dtype))
        line = {"name": name, "dtype": dtype, "errors": relative_errors(result, truth)}
        if name in ("packed", "gathered", "beyond the band"):  # and with terms kept
            again = run(case, "fused", getattr(torch, dtype), keep_terms=True)
            line["repeats"] = all(torch.equal(a, b) for a, b in zip(result, again, strict=True))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
