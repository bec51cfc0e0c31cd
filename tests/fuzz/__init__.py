"""Broken inputs for every command, made from a seed: `python -m tests.fuzz --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers of the other tests
