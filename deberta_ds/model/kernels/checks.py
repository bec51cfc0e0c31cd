"""Check Triton kernels against torch on this GPU, once per node, GPU, torch, Triton and shape.

A kernel that was compiled by another Triton, or for a card that nobody has tried, may be wrong
without a word. So before it is taken, small problems go forward and backward through it and through
torch's operators on the card itself, in a process of its own (this file as a program): a fault of
the GPU (an illegal address) leaves nothing that this process could go on with. A pass is kept in a
file on this node, next to what Triton has compiled, and not asked again.
"""

import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from itertools import compress, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.base import splitmix
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import temporary_directory, write_atomic
from deberta_ds.config.model import TERMS
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.attention.reference import reference_attention
from deberta_ds.model.choose import Request, load
from deberta_ds.model.dropout import DropoutMask
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

# Relative, of every result: three times what rounding the input dtype costs.
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
# The files that a kernel and its truth are made of: a change of any asks again.
SOURCES = (Path(__file__).parents[1], Path(splitmix.__file__))
GEOMETRY = Geometry(512, 256)  # of every released v2 and v3 model
# Length, batch and heads of rows: within the relative table's reach, at it, and beyond, which other
# loops take; so many that the loop of `table_gradient_kernel` runs twice.
ROWS = ((300, 2, 2), (600, 2, 2), (1100, 2, 2), (100, 24, 32))
_MOST_OTHER_IDS = 0.01  # they lie at an edge between two
_STATES = 1100  # so that programs of the weights' gradients take several turns
_MOST_SECONDS = 600  # of a check; compiling takes about one minute
_MOST_CHARACTERS = 8000  # of the error of a compiler, which may print a whole program


@cache
def check(request: Request, problems: str) -> str:
    """Return how a kernel was found to agree with torch's operators; UserError if it does not.

    problems: the place of a function that solves them for a request and yields their errors.
    """
    c_compiler()
    keep_on_this_node()
    card = torch.cuda.get_device_name(request.device) if request.device.type == "cuda" else "cpu"
    key = (card, torch.__version__, metadata.version("triton"), problems, request[1:])
    digest = hashlib.sha256(repr(key).encode())
    for path in sorted(path for source in SOURCES for path in (source, *source.rglob("*"))
                       if path.suffix in (".py", ".json")):
        digest.update(path.read_bytes())
    kept = temporary_directory() / "kernels" / f"{digest.hexdigest()[:16]}.txt"
    if kept.is_file():
        return f"{kept.read_text().strip()}, kept in {kept}"
    try:
        done = subprocess.run([sys.executable, "-m", __name__], capture_output=True,
                              env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                              input=pickle.dumps((request, problems)), timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"it does not end in {_MOST_SECONDS} s") from None
    if code := done.returncode:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = done.stderr.decode(errors="replace").strip()[-_MOST_CHARACTERS:]
        raise UserError(f"its process ends with {how}\n{said}")
    error, where = json.loads(done.stdout.splitlines()[-1])
    if not error <= (allowed := TOLERANCES[request.dtypes[0]]):  # NaN is no pass
        raise UserError(f"{where} off by {error:.1e} where {allowed:.1e} is allowed")
    text = f"checked against torch's operators, largest error {error:.1e}"
    with suppress(OSError):  # a disk that is full: the next process checks again
        kept.parent.mkdir(exist_ok=True)
        write_atomic(kept, text + "\n")
    return text


def c_compiler() -> str:
    """Return the compiler that Triton takes; UserError for what it needs and does not find."""
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton is not installed (pip install triton)")
    if not (found := os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UserError("Triton finds no C compiler (apt install gcc, or set CC)")
    if not header.is_file():
        raise UserError(f"Triton finds no {header} (apt install python3-dev)")
    return found


def keep_on_this_node() -> str:
    """Return where Triton keeps what it compiles: on this node, unless the user says where.

    Ranks that compile at once in a home on a network file system disturb each other.
    """
    return os.environ.setdefault("TRITON_CACHE_DIR", str(temporary_directory() / "triton"))


def worst(errors: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest error, NaN above all, and of what."""
    return max(errors, key=lambda item: float("inf") if item[0] != item[0] else item[0])


def compare(results: str, of: str, kernel: Callable, right: Callable,
            values: dict[str, Tensor | None]) -> Iterator[tuple[float, str]]:
    """Yield the relative errors of a kernel's results and gradients, and what each is.

    results: their names. values: the arguments of both functions; `right` takes them in fp32.
    Of whole numbers the error is 1 where too many are others, or 0.
    """
    both = []
    for function, dtype in ((kernel, None), (right, torch.float32)):
        leaves = {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_()
                  for name, x in values.items() if x is not None}
        found = function(*map(leaves.get, values))
        found = found if isinstance(found, tuple) else (found,)
        generator = torch.Generator().manual_seed(0)  # of gradients that every dtype holds
        losses = [(x * torch.randn(x.shape, generator=generator).bfloat16().to(x)).sum()
                  for x in found if x.requires_grad]
        both.append([*found, *torch.autograd.grad(losses, [*leaves.values()])])
    names = [*results.split(), *(f"gradient of {name}" for name in leaves)]
    for name, one, wanted in zip(names, *both, strict=True):
        assert one.shape == wanted.shape, name
        if one.is_floating_point():
            error = (one.double() - wanted).norm() / (wanted.double().norm().item() or 1.0)
        else:
            error = (one != wanted).double().mean() > _MOST_OTHER_IDS
        yield error.item(), f"{name} of {of}"


def _random(generator: torch.Generator, device: torch.device, **tensors: tuple) -> dict[str, Any]:
    """Return random tensors of (dtype, *shape) each, the same numbers on every device."""
    return {name: torch.randn(shape, generator=generator).to(device, dtype)
            for name, (dtype, *shape) in tensors.items()}


def attention(request: Request) -> Iterator[tuple[float, str]]:
    """Packed rows, all but the first with padding."""
    fused, (device, (dtype,), size) = load(".kernels.attention:fused_path"), request[:3]
    for (length, batch, heads), gathered, dropout, keep in product(
            ROWS, (None, 40), (0.1, 0.0), (False, True)):
        generator, queries = torch.Generator().manual_seed(length), gathered or length
        values = {name: x.transpose(1, 2) for name, x in _random(
            generator, device, queries=(dtype, batch, queries, heads, size),
            keys=(dtype, batch, length, heads, size),
            values=(dtype, batch, length, heads, size)).items()}
        tables = dict.fromkeys(compress(TERMS, request.terms),
                               (dtype, heads, GEOMETRY.num_slots, size))
        values |= dict.fromkeys(TERMS) | _random(generator, device, **tables)
        segments = torch.ones(batch, length, dtype=torch.int32)
        segments[1:, length // 3 :] = 2
        segments[1:, length - 20 :] = 0
        columns = torch.randint(0, length, (batch, queries), generator=generator).to(device)
        options = dict(
            geometry=GEOMETRY, segments_BL=segments.to(device), dropout=dropout,
            query_positions_BQ=columns if gathered else None,
            seed=torch.ones(1, dtype=torch.int64, device=device))
        yield from compare(
            "context", f"attention in {batch} rows of {queries} of {length} tokens",
            partial(fused, **options, keep_terms=keep), partial(reference_attention, **options),
            values)


def cross_entropy(request: Request) -> Iterator[tuple[float, str]]:
    """The vocabulary loss, the number of right predictions, and the ids that are sampled."""
    fused = load(".kernels.fused_cross_entropy:fused_linear_cross_entropy")
    device, (dtype,), size = request[:3]
    generator, (rows, ids) = torch.Generator().manual_seed(size), (300, 1000)
    values = _random(generator, device, states=(dtype, rows, size), table=(dtype, ids, size),
                     bias=(torch.float32, ids))
    values["table"] *= size**-0.5
    labels = torch.randint(0, 990, (rows,), generator=generator).to(device)
    uniforms = torch.rand(rows, generator=generator).to(device)
    # Under autocast the bias is in fp32, of which Triton compiles another binary.
    for temperature, valid, of_bias in ((1.0, 990, dtype), (0.7, 992, torch.float32)):
        options = dict(labels_T=labels, uniforms_T=uniforms, temperature=temperature,
                       valid_vocab=valid)
        yield from compare(
            "sum count samples", f"the loss at temperature {temperature}",
            partial(fused, **options), partial(linear_cross_entropy, **options),
            values | {"bias": values["bias"].to(of_bias)})


def norm(request: Request) -> Iterator[tuple[float, str]]:
    """LayerNorm of which both results are used or one, dropout, GELU and sums of columns."""
    from deberta_ds.model.kernels import fused_norm as fused

    device, (update, state), size = request[:3]
    generator = torch.Generator().manual_seed(size)
    values = _random(generator, device, update=(update, _STATES, size),
                     state=(state, _STATES, size), weight=(state, size), bias=(state, size))
    wide = _random(generator, device, state=(update, _STATES, 4 * size), bias=(state, 4 * size))
    mask = DropoutMask(torch.tensor([123_456_789, 4_000_000_000], device=device),
                       round(0.1 * 2**32))

    def plain(update: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(update + state, (size,), weight, bias, 1e-7)

    both = partial(fused.residual_norm, epsilon=1e-7)
    yield from compare("result copy", "LayerNorm", partial(both, mask=mask),
                       lambda x, *rest: (plain(mask.apply(x), *rest),) * 2, values)
    yield from compare("result", "LayerNorm without dropout", lambda *x: both(*x)[0], plain, values)
    yield from compare("result", "dropout", partial(fused.dropout, mask=mask), mask.apply,
                       {"state": values["update"]})
    yield from compare(
        "result sums", "GELU",
        lambda x, bias: (fused.biased_gelu(x, bias), fused.column_sums(x.detach())),
        lambda x, bias: (F.gelu(x + bias), x.detach().sum(0)), wide)


if __name__ == "__main__":
    asked, problems = pickle.load(sys.stdin.buffer)
    with torch.accelerator.device_index(asked.device.index):
        print(json.dumps(worst(load(problems)(asked))))
