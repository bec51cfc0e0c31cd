"""Make Triton's interpreter right in bf16, whose values it keeps as raw 16-bit words, and faster.

As it comes (Triton 3.6 and 3.9) it multiplies the words themselves in `tl.dot`, truncates where the
hardware rounds to nearest even, converts integers to words, and has no constants. Each call of a
device function replaces all of triton.language: a third of the time, where once a launch will do.
Each value makes its type, its shape and a table of NumPy's types anew: another third.
To import this switches the interpreter on: Triton is imported anew, as it asks at its import.
"""
# ruff: noqa: E402

import math
import os
import sys
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch

os.environ["TRITON_INTERPRET"] = "1"
for name in [name for name in sys.modules if name.startswith("triton")]:
    if not name.startswith("triton._C"):
        del sys.modules[name]

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
    interpreter_builder,
)


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    words = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.int16))
    return TensorHandle(words.view(torch.bfloat16).float().numpy(), tl.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    narrow = torch.from_numpy(np.ascontiguousarray(values)).float().bfloat16()
    return narrow.view(torch.int16).numpy().view(np.uint16)


create_dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
create_sum = InterpreterBuilder.create_fadd


def right_dot(self, a, b, d, *rest):
    return create_dot(self, _widened(a), _widened(b), d, *rest)


def right_cast(self, src, dst_type):
    target = dst_type.scalar
    if target == tl.bfloat16 and src.dtype.scalar != tl.bfloat16:
        return TensorHandle(_rounded(src.data), tl.bfloat16)
    return cast(self, _widened(src), dst_type) if target != tl.bfloat16 else src


def right_sum(self, a, b):
    total = create_sum(self, _widened(a), _widened(b))
    is_bf16 = a.dtype.scalar == tl.bfloat16
    return TensorHandle(_rounded(total.data), tl.bfloat16) if is_bf16 else total


@cache
def sizes_of(block) -> tuple:
    """Return the shape and the number of elements of a tensor of this type."""
    shape = block.shape if block.is_block() else ()
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def quick_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = sizes_of(type)


@cache
def one_block(kind, element, *sizes):
    make_block(block := object.__new__(kind), element, list(sizes))
    return block


make_block, tl.block_type.__init__ = tl.block_type.__init__, lambda *_: None
tl.block_type.__new__ = lambda kind, element, shape: one_block(
    kind, element, *(getattr(size, "value", size) for size in shape))
tl.block_type.__hash__ = tl.pointer_type.__hash__ = tl.dtype.__hash__
tl.tensor.__init__ = quick_tensor
interpreter._get_np_dtype = cache(interpreter._get_np_dtype)

both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
patch_lang = interpreter._patch_lang
interpreter._patch_lang = lambda _function: patch_lang(both)
InterpretedFunction.__call__ = lambda self, *given, **named: self.rewrite()(*given, **named)
# Half of the time would go to checks of integers.
interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = right_dot, right_cast
InterpreterBuilder.create_fadd = right_sum
InterpreterBuilder.get_bf16 = lambda self, value: TensorHandle(
    _rounded(np.array([value], np.float32)), tl.bfloat16)
