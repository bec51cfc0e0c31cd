"""The DeBERTa encoder: disentangled self-attention, post-LayerNorm blocks, v2 convolution.

Sources: DeBERTa (arXiv 2006.03654) section 3, and where they differ the released code
(microsoft/DeBERTa bert.py, disentangled_attention.py), so that public checkpoints give the same
numbers: one index serves c2p and p2c, and the relative table has its own dropout in every layer.

What is unusual: sequences may be packed, and a document never sees another one, neither by
attention nor by the convolution; the enhanced mask decoder (section 3.2.1 of the paper) runs only
on the masked positions and replaces the last layer, whose ordinary output nothing would read.

Legend: B batch, L length, H heads, D head size, C hidden, M masked slots, S relative rows,
Q queries (L, or M in the decoder), N columns of one matmul.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from deberta_ds.config.model import TERMS, ModelConfig
from deberta_ds.model import fused_projections
from deberta_ds.model.attention import Geometry, attend, attend_cls, gathered_term
from deberta_ds.model.dropout import Dropout, LinearGelu, ResidualNorm, pass_keys
from deberta_ds.model.embeddings import InputBlock

_LINEAR_OPERATORS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
_COLUMNS = 512  # of one matmul of `gather_columns`
ACTIVATIONS = {"gelu": F.gelu, "tanh": torch.tanh}
Keys = tuple[Tensor | None, ...]  # of dropout, int64 [2] each (`dropout.pass_keys`)
# Of a layer: the relative table's, then those of a block, and of its second use by the decoder.
_BLOCK_KEYS = 3
_LAYER_KEYS = 1 + 2 * _BLOCK_KEYS


class DecoderQueries(NamedTuple):
    """What the enhanced mask decoder starts from: absolute positions at the masked columns."""

    position_vectors_BMC: Tensor
    columns_BM: Tensor  # int64; unused slots hold 0


class KeysValues(NamedTuple):
    """What every query attends to; None without that position term."""

    keys: Tensor  # [B, H, L, D]
    values: Tensor
    position_key: Tensor | None  # projected relative table [H, S, D]
    position_query: Tensor | None  # the same, or what `gathered_term` returned


class Attention(nn.Module):
    """Disentangled self-attention with its output projection; residual and norm are the layer's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.geometry = Geometry(config.largest_distance, config.position_buckets)
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size, bias=config.key_bias)
        self.value = nn.Linear(size, size)
        self.output = nn.Linear(size, size)
        if config.relative_attention and not config.share_position_projections:
            if "c2p" in config.position_terms:
                self.position_key = nn.Linear(size, size, bias=config.key_bias)
            if "p2c" in config.position_terms:
                self.position_query = nn.Linear(size, size)
        self.relative_dropout = Dropout(config.hidden_dropout)

    def project(self, hidden_BLC: Tensor, relative_SC: Tensor | None, key: Tensor | None
                ) -> tuple[Tensor, KeysValues]:
        """Return the queries of all columns, and the result of `project_keys_values`.

        `key` is of the relative table's dropout.
        """
        projections = self._position_projections(relative_SC)
        inputs, linears = [hidden_BLC], [self.query, self.key, self.value]
        if projections:
            inputs.append(relative_SC)
            linears += [x for x in projections.values() if x not in linears]
        shared = fused_projections.find(inputs, linears)
        if shared is None:
            keys_values = self.project_keys_values(hidden_BLC, relative_SC, key)
            return self.project_queries(hidden_BLC), keys_values
        if projections:
            inputs[1] = self.relative_dropout(relative_SC, key)
        pairs = [(0, 0), (0, 1), (0, 2), *((1, linears.index(x)) for x in projections.values())]
        queries, keys, values, *rows = shared(inputs, linears, pairs)
        tables = dict(zip(projections, map(self._heads, rows), strict=True))
        return self._heads(queries), KeysValues(
            self._heads(keys), self._heads(values), *map(tables.get, TERMS))

    def project_keys_values(self, hidden_BLC: Tensor, relative_SC: Tensor | None,
                            key: Tensor | None = None) -> KeysValues:
        """Return what is shared by every query."""
        projections = self._position_projections(relative_SC)
        if projections:
            relative_SC = self.relative_dropout(relative_SC, key)
        tables = {term: self._heads(x(relative_SC)) for term, x in projections.items()}
        keys, values = self._heads(self.key(hidden_BLC)), self._heads(self.value(hidden_BLC))
        return KeysValues(keys, values, *map(tables.get, TERMS))

    def project_queries(self, queries_BQC: Tensor) -> Tensor:
        """Return the queries [B, H, Q, D] of other states than those of keys and values."""
        return self._heads(self.query(queries_BQC))

    def forward(self, queries_BHQD: Tensor, keys_values: KeysValues,
                segments_BL: Tensor, columns_BQ: Tensor | None, key: Tensor | None) -> Tensor:
        """Return the attention output [B, Q, C]; query q stands at column columns_BQ (None: q).

        One query without a column stands at column 0. `key` is of dropout.
        """
        dropout = self.config.attention_dropout if self.training else 0.0
        seed = key[:1] if dropout and key is not None else None
        if columns_BQ is None and queries_BHQD.size(2) == 1:
            context_BQHD = attend_cls(queries_BHQD, *keys_values, geometry=self.geometry,
                                      segments_BL=segments_BL, dropout=dropout, seed=seed)
        else:
            context_BQHD = attend(
                queries_BHQD, *keys_values, geometry=self.geometry, segments=segments_BL,
                query_positions_BQ=columns_BQ, dropout=dropout, seed=seed,
                mode=self.config.attention, keep_terms=self.config.keep_position_terms)
        return fused_projections.project(self.output, context_BQHD.flatten(2))

    def share_gathered(self, keys_values: KeysValues, segments_BL: Tensor, columns_BQ: Tensor
                       ) -> KeysValues:
        """Return keys_values with what several `forward` with these columns have in common."""
        if keys_values.position_query is None:
            return keys_values
        keys, _, *tables = keys_values
        term = gathered_term(keys, *tables, geometry=self.geometry, segments=segments_BL,
                             query_positions_BQ=columns_BQ, mode=self.config.attention)
        return keys_values._replace(position_query=term)

    def _heads(self, rows: Tensor) -> Tensor:
        """Return [..., H, R, D] of rows [..., R, C]."""
        return rows.unflatten(-1, (self.config.num_heads, -1)).transpose(-3, -2)

    def _position_projections(self, relative_SC: Tensor | None) -> dict[str, nn.Linear]:
        """Return the projections of the relative table, by position term."""
        if relative_SC is None:
            return {}
        prefix = "" if self.config.share_position_projections else "position_"
        names = {"c2p": f"{prefix}key", "p2c": f"{prefix}query"}
        return {term: getattr(self, names[term]) for term in TERMS
                if term in self.config.position_terms}


class Layer(nn.Module):
    """One post-LayerNorm block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.hidden_size
        self.attention = Attention(config)
        self.attention_norm = ResidualNorm(size, config.norm_eps, config.hidden_dropout)
        self.ffn_in = LinearGelu(size, config.intermediate_size)
        self.ffn_out = nn.Linear(config.intermediate_size, size)
        self.ffn_norm = ResidualNorm(size, config.norm_eps, config.hidden_dropout)

    def forward(self, hidden_BLC: Tensor, residual_BLC: Tensor | None, relative_SC: Tensor | None,
                segments_BL: Tensor, keys: Keys, decoder: DecoderQueries | None = None,
                cls_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the block's output [B, L, C]; with `decoder`, the decoded states [B, M, C].

        `residual_BLC` is the input of the residual connection: the values of `hidden_BLC`, as
        another autograd output, so that the norm's backward adds both gradients (`ResidualNorm`).
        The result is such a pair, too. With `cls_only`, only the output [B, 1, C] at column 0 is
        computed. `keys`: _LAYER_KEYS of dropout.
        """
        if decoder is not None:
            return self._decode(hidden_BLC, relative_SC, segments_BL, keys, decoder), None
        of_table, *of_blocks = keys
        residual_BLC = hidden_BLC if residual_BLC is None else residual_BLC
        if cls_only:
            keys_values = self.attention.project_keys_values(hidden_BLC, relative_SC, of_table)
            hidden_BLC, residual_BLC = hidden_BLC[:, :1], residual_BLC[:, :1]
            queries_BHQD = self.attention.project_queries(hidden_BLC)
        else:
            queries_BHQD, keys_values = self.attention.project(hidden_BLC, relative_SC, of_table)
        return self._block(residual_BLC, queries_BHQD, keys_values, segments_BL, of_blocks)

    def _decode(self, hidden_BLC: Tensor, relative_SC: Tensor | None, segments_BL: Tensor,
                keys: Keys, decoder: DecoderQueries) -> Tensor:
        """Return the states [B, M, C] of the paper's enhanced mask decoder.

        It applies this very block twice with the queries z + h, then its own output, while keys
        and values stay those of `hidden_BLC` (`emd_context_layer` of the official
        masked_language_model.py), so they are computed once.
        """
        attention, (of_table, *of_blocks) = self.attention, keys
        keys_values = attention.share_gathered(
            attention.project_keys_values(hidden_BLC, relative_SC, of_table), segments_BL,
            decoder.columns_BM)
        states_BMC = decoder.position_vectors_BMC + gather_columns(hidden_BLC, decoder.columns_BM)
        for first in (0, _BLOCK_KEYS):
            queries_BHMD = attention.project_queries(states_BMC)
            states_BMC, _ = self._block(states_BMC, queries_BHMD, keys_values, segments_BL,
                                        of_blocks[first:], decoder.columns_BM)
        return states_BMC

    def _block(self, residual_BQC: Tensor, queries_BHQD: Tensor, keys_values: KeysValues,
               segments_BL: Tensor, keys: list[Tensor | None], columns_BQ: Tensor | None = None
               ) -> tuple[Tensor, Tensor | None]:
        of_pairs, of_attention, of_ffn = keys[:_BLOCK_KEYS]
        attended_BQC = self.attention(queries_BHQD, keys_values, segments_BL, columns_BQ, of_pairs)
        hidden_BQC, copy_BQC = self.attention_norm(attended_BQC, residual_BQC, of_attention)
        residual_BQC = hidden_BQC if copy_BQC is None else copy_BQC
        update_BQC = fused_projections.project(self.ffn_out, self.ffn_in(hidden_BQC))
        return self.ffn_norm(update_BQC, residual_BQC, of_ffn)


class Convolution(nn.Module):
    """The v2 convolution next to the first layer (`ConvLayer`), confined to each document segment.

    Equal to Conv1d over each segment alone; a tap that would cross into another one reads zero.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, self.kernel = config.hidden_size, config.conv_kernel
        self.weight = nn.Parameter(torch.empty(size, size, self.kernel))
        self.bias = nn.Parameter(torch.empty(size))
        self.norm = nn.LayerNorm(size, eps=config.norm_eps)
        self.dropout = Dropout(config.hidden_dropout)
        self.activation = ACTIVATIONS[config.conv_activation]

    def forward(self, embedded_BLC: Tensor, first_layer_BLC: Tensor, segments_BL: Tensor,
                key: Tensor | None) -> Tensor:
        """Return the first layer's output [B, L, C] plus the embeddings' convolution, normed."""
        real_BL1 = (segments_BL > 0).unsqueeze(-1)
        taps = torch.cat([self._shift(embedded_BLC, segments_BL, tap - self.kernel // 2)
                          for tap in range(self.kernel)], dim=-1)
        weight = self.weight.permute(0, 2, 1).flatten(1)
        convolved = F.linear(taps, weight, self.bias) * real_BL1
        mixed = first_layer_BLC + self.activation(self.dropout(convolved, key))
        return self.norm(mixed) * real_BL1

    @staticmethod
    def _shift(hidden_BLC: Tensor, segments_BL: Tensor, offset: int) -> Tensor:
        """Return the row `offset` columns to the right, zero where the segment has none."""
        if offset == 0:
            return hidden_BLC
        before, after = max(0, -offset), max(0, offset)
        length = hidden_BLC.size(1)
        padded = F.pad(hidden_BLC, (0, 0, before, after))[:, after:after + length]
        neighbor = F.pad(segments_BL, (before, after))[:, after:after + length]
        return padded * (neighbor == segments_BL).unsqueeze(-1)


class Encoder(nn.Module):
    """The stack of layers, the relative position table they share, and the v2 convolution."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        # Set by build_model: how a run is run, which no other user of a model has.
        self.checkpointing = "none"  # of activations; "full", or "selective": keep linear outputs
        self.checkpointing_interval = 1  # every n-th layer
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.convolution = Convolution(config) if config.conv_kernel else None
        self.relative_norm = None
        if config.relative_attention:
            self.relative = nn.Parameter(torch.empty(2 * config.relative_span, config.hidden_size))
            if config.relative_norm:
                self.relative_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        else:
            self.relative = None

    def forward(self, embedded_BLC: Tensor, segments_BL: Tensor, keys: Keys,
                decoder: DecoderQueries | None = None, cls_only: bool = False) -> Tensor:
        """Return the last hidden states [B, L, C], or with `decoder` the decoded ones [B, M, C].

        With `cls_only`, those of column 0 [B, 1, C]: the last layer computes no other. `keys` of
        dropout: the convolution's, then _LAYER_KEYS for each layer.
        """
        relative_SC = self.relative_table()
        hidden_BLC, residual_BLC = embedded_BLC, None
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            asked = (decoder, cls_only and last > 0) if number == last else ()
            own = keys[1 + number * _LAYER_KEYS:][:_LAYER_KEYS]
            hidden_BLC, residual_BLC = self._run(number, layer, hidden_BLC, residual_BLC,
                                                 relative_SC, segments_BL, own, *asked)
            if number == 0 and self.convolution is not None:
                hidden_BLC = self.convolution(embedded_BLC, hidden_BLC, segments_BL, keys[0])
                residual_BLC = None
        return hidden_BLC[:, :1] if cls_only else hidden_BLC

    def relative_table(self) -> Tensor | None:
        """Return the rows [S, C] that every layer projects; None without relative attention."""
        return self.relative if self.relative_norm is None else self.relative_norm(self.relative)

    def _run(self, number: int, layer: Layer, *inputs) -> tuple[Tensor, Tensor | None]:
        checkpoints = self.checkpointing != "none" and number % self.checkpointing_interval == 0
        if self.training and checkpoints:
            # Reentrant checkpointing fails under ZeRO-3 when a block is applied more than once.
            context = save_linear_outputs if self.checkpointing == "selective" else noop_context_fn
            # Without torch's random state, which nothing in a layer asks and a graph cannot read.
            return checkpoint(layer, *inputs, use_reentrant=False, context_fn=context,
                              preserve_rng_state=False)
        return layer(*inputs)


class Trunk(nn.Module):
    """Token vectors -> hidden states: all of DeBERTa except the token embedding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input = InputBlock(config)
        self.encoder = Encoder(config)
        self.has_dropout = max(config.hidden_dropout, config.attention_dropout) > 0

    def forward(self, token_vectors_BLC: Tensor, segments_BL: Tensor,
                positions_BL: Tensor | None = None, decoder: DecoderQueries | None = None
                ) -> Tensor:
        """Return hidden states [B, L, C] (with `decoder`: [B, M, C]).

        Tokens see each other where `segments_BL` is equal and above 0; for a padded batch it is
        the attention mask. `positions_BL` (default 0..L-1) matters only to absolute positions.
        """
        if positions_BL is None:
            length = token_vectors_BLC.size(1)
            positions_BL = torch.arange(length, device=token_vectors_BLC.device).expand(
                token_vectors_BLC.shape[:2])
        sums_BLC = self.input.add_positions(token_vectors_BLC, positions_BL)
        return self.encode(sums_BLC, segments_BL, decoder)

    def encode(self, sums_BLC: Tensor, segments_BL: Tensor, decoder: DecoderQueries | None = None,
               cls_only: bool = False) -> Tensor:
        """Return hidden states from the result of `input.add_positions`; see `Encoder`."""
        count = 2 + _LAYER_KEYS * len(self.encoder.layers)
        keys: Keys = (None,) * count
        if self.training and self.has_dropout:
            keys = pass_keys(count, sums_BLC.device)
        embedded_BLC = self.input(sums_BLC, segments_BL, keys[0])
        return self.encoder(embedded_BLC, segments_BL, keys[1:], decoder, cls_only)


def save_linear_outputs() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's forward pass and of its recomputation, for `checkpoint`:
    outputs of linear layers are saved, the rest is recomputed.

    torch's own selective checkpointing compares every operator of the two passes. Under ZeRO-3
    those that gather weights run inside of a layer and differ: after a resume, small weights are
    there in the first forward pass and gathered in the second.
    """
    saved: deque[Tensor] = deque()
    return _LinearOutputs(saved, reuse=False), _LinearOutputs(saved, reuse=True)


class _LinearOutputs(TorchDispatchMode):
    """Saves the outputs of linear layers, or takes the saved ones in place of computing them."""

    def __init__(self, saved: deque[Tensor], reuse: bool):
        super().__init__()
        self._saved, self._reuse = saved, reuse

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        is_linear = operator in _LINEAR_OPERATORS
        if is_linear and self._reuse:
            return self._saved.popleft()
        out = operator(*args, **(kwargs or {}))
        if is_linear:
            self._saved.append(out.detach())  # `out` itself will refer to the graph, and that to it
        return out


def gather_columns(hidden_BLC: Tensor, columns_BM: Tensor) -> Tensor:
    """Return [B, M, C]: row m is the state at column columns_BM[b, m]; columns may repeat.

    The gradient of `gather` adds with atomics on a GPU: in any order, and in the tensor's own
    dtype, so that the states of many tokens which share one [CLS] lose two digits in bf16. Here it
    is a matmul with a one-hot matrix, some columns at a time: a fixed order, summed in fp32.
    """
    return _GatherColumns.apply(hidden_BLC, columns_BM)


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_BLC: Tensor, columns_BM: Tensor) -> Tensor:
        ctx.save_for_backward(columns_BM)
        ctx.length = hidden_BLC.size(1)
        return hidden_BLC.gather(1, columns_BM.unsqueeze(-1).expand(-1, -1, hidden_BLC.size(-1)))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BMC: Tensor) -> tuple[Tensor, None]:
        (columns_BM,) = ctx.saved_tensors
        parts = []
        for columns_N in torch.arange(ctx.length, device=columns_BM.device).split(_COLUMNS):
            one_hot_BNM = columns_N[:, None] == columns_BM[:, None, :]
            parts.append(torch.bmm(one_hot_BNM.to(grad_BMC.dtype), grad_BMC))
        return torch.cat(parts, 1), None
