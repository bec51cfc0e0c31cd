"""ONNX files against PyTorch: differences at several lengths, size, and time, by family and head.

    python -m benchmarks.onnx_parity                      # benchmarks/results/onnx_parity.json
    python -m benchmarks.onnx_parity --classifier DIR --texts FILE.jsonl ...

The first uses random weights of the published widths (fewer layers and words, which change neither
shapes nor rounding); the second an own fine-tuned classifier and lines {"label": ..., texts}, for what
int8 costs in accuracy.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import RESULTS, environment, interleaved_minimum
