"""The version of the package, which runs, checkpoints and exports name."""

__version__ = "0.2.0"
