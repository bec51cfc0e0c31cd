"""Broken inputs for every command, made from a seed: `python -m tests.fuzz --help`."""
