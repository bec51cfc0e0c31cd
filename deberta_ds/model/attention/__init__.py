"""Disentangled attention: one function, `attend`, over interchangeable implementations."""

from deberta_ds.model.attention.dense import attend_cls
from deberta_ds.model.attention.dispatch import attend, gathered_term
from deberta_ds.model.attention.geometry import Geometry

__all__ = ["Geometry", "attend", "attend_cls", "gathered_term"]
