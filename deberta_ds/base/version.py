"""The version of the package, which runs, checkpoints and exports name."""

__version__ = "0.3.0"
