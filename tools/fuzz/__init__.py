"""Broken inputs for every command, made from a seed: `python -m tools.fuzz --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
