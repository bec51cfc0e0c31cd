"""Checks of kernels that pass, fail and die, for processes that the tests start."""

import os
import sys


def passes(_request):
    yield 1e-6, "context"


def dies(_request):
    print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
    os.abort()
