"""Random attention problems, shared by the tests of every implementation.

Shape legend: B batch, H heads, L length, D head size.
"""

import math
from dataclasses import dataclass

import torch

from deberta_ds.model.attention import Geometry, attend

V3 = Geometry(512, 256)
SMALL_BUCKETS = Geometry(40, 8)
V1 = Geometry(64, 0)

# Pieces with padding behind; short pieces and one long one; only padding.
PACKED = torch.tensor(
    [[1] * 60 + [2] * 130 + [3] * 3 + [4] * 2 + [0] * 5, [1] * 20 + [2] * 30 + [3] * 150, [0] * 200]
)
# A plain attention mask that leaves out a token in the middle.
HOLES = PACKED.clamp(max=1)
HOLES[1, 25] = 0


@dataclass(frozen=True)
class Case:
    geometry: Geometry
    segments_BL: torch.Tensor
    num_queries: int | None = None  # at random columns; None: one for every key
    dropout: float = 0.0
    heads: int = 3
    size: int = 16
    terms: str = "both"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.segments_BL.shape))
        geometry = f"{self.geometry.max_relative}-{self.geometry.position_buckets}"
        return f"{shape}-of-{geometry}-q{self.num_queries}-drop{self.dropout}-{self.terms}"

    def tensors(self) -> list[torch.Tensor | None]:
        """Return fp64 q, k, v, pos_key, pos_query and the gradient of the context."""
        generator = torch.Generator().manual_seed(17)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        batch, length = self.segments_BL.shape
        queries = self.num_queries or length
        plane = (batch, self.heads, length, self.size)
        q, k, v = draw(batch, self.heads, queries, self.size), draw(*plane), draw(*plane)
        tables = [draw(self.heads, self.geometry.num_slots, self.size) for _ in range(2)]
        pos_key = tables[0] if self.terms in ("both", "key") else None
        pos_query = tables[1] if self.terms in ("both", "query") else None
        return [q, k, v, pos_key, pos_query, draw(batch, queries, self.heads, self.size)]

    def columns(self) -> torch.Tensor | None:
        """Return the queries' columns [B,Q]; some repeat, as unused decoder slots do."""
        if self.num_queries is None:
            return None
        batch, length = self.segments_BL.shape
        generator = torch.Generator().manual_seed(19)
        columns = torch.randint(0, length, (batch, self.num_queries), generator=generator)
        columns[:, -3:] = 0
        return columns


def run(case: Case, mode: str, dtype: torch.dtype, device: str = "cpu", keep_terms: bool = False
        ) -> list[torch.Tensor]:
    """Return the context and the gradients of all inputs."""
    *inputs, grad = [None if x is None else x.to(device, dtype) for x in case.tensors()]
    leaves = [None if x is None else x.requires_grad_() for x in inputs]
    columns = case.columns()
    context = attend(*leaves, geometry=case.geometry, segments=case.segments_BL.to(device),
                     query_positions_BQ=None if columns is None else columns.to(device),
                     dropout=case.dropout, mode=mode,
                     seed=torch.tensor([5], device=device), keep_terms=keep_terms)
    return [context, *torch.autograd.grad(context, [x for x in leaves if x is not None], grad)]


def relative_errors(results: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """Return norm(result - truth) / norm(truth) of each tensor (norm of a zero truth: 1).

    NaN is inf here: Python's max() passes over a NaN that does not come first.
    """
    pairs = zip(results, truth, strict=True)
    errors = [((a.cpu().double() - b).norm() / (b.norm().item() or 1)).item() for a, b in pairs]
    return [math.inf if math.isnan(error) else error for error in errors]
