"""What launches Triton kernels: plain functions, and torch operators only for whoever traces them.

A torch operator takes 20 to 50 us of the host for each call, more than its launches. So a function
is called as it is, and as an operator with a fake kernel where operators are traced, recorded or
counted: by torch.compile, on fake tensors, under a dispatch mode.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def operator(name: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Return a decorator that makes the torch operator deberta_ds::name of a function.

    The function's first argument is a tensor: Triton launches on the current device, so that of
    this tensor is made it. fake: returns empty results from the same arguments.
    """
    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def launch(first: Tensor, *others):
            with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
                return function(first, *others)

        traced = torch.library.custom_op(f"deberta_ds::{name}", launch, mutates_args=())
        traced.register_fake(fake)

        @wraps(function)
        def call(first: Tensor, *others):
            if (torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or first.is_meta
                    or type(first) not in (Tensor, torch.nn.Parameter)):
                return traced(first, *others)
            return launch(first, *others)
        return call
    return decorate


def is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured: what is computed then belongs to the graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def ceil_div(size: int, block: int) -> int:
    """Return how many blocks hold `size`. `triton.cdiv` takes 5 us for it on the host."""
    return -(-size // block)
