"""Checks of kernels that pass, fail and die, for processes that the tests start."""

import os
import sys

import torch

from deberta_ds.model.kernels.checks import Problem


def passes(_request):
    yield Problem("context", lambda x: x + 1e-6, lambda x: x, [torch.zeros(1)])


def dies(_request):
    print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
    os.abort()
