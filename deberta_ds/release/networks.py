"""What every format is read into and written from: networks under our names, and a summary.

A `Network` is one encoder with its token embedding and the heads of its file; a `Release` is the
network that users load (discriminator, masked LM or classifier), the generator next to it if there
is one, and the tokenizer's files. Tensors keep the dtype of the file, so a round trip is exact.

Relative position tables need a translation. With log buckets, the official code clamps a distance
to max_relative - 1 before it takes the logarithm (DeBERTa/deberta/da_utils.py,
make_log_bucket_position), so the rows outside the outermost buckets (row 0, for an even number of
buckets) are never read or trained. transformers takes the logarithm of any distance and clamps the
row, so beyond max_relative tokens it reads just those. An exported table repeats the outermost
trained row there, which makes both the same function at every length; the rows that were there are
kept next to it and come back on the way in. A model that transformers trained beyond max_relative
tokens has trained them, and is another function here. Where the buckets have a row for every
distance already (256 of them for 128 tokens), transformers divides by the logarithm of one or less,
and the official code takes none. For transformers such a table is written with a row a distance and
without buckets, which is the same function.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.model.backbone import Backbone, on_meta
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, MaskedLmHead, ReplacedTokenHead
from deberta_ds.model.precision import DTYPES
from deberta_ds.release.foreign import OTHER_HEADS
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.files import Files

_RELATIVE = "trunk.encoder.relative"
TABLE, UNREAD_ROWS = "encoder.rel_embeddings.weight", "encoder.rel_embeddings.unread_rows"
TOLERANCE = 1e-5  # relative to the largest hidden state: fp32 rounding of two summation orders
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass
class Network:
    """One encoder; `rest` are keys of the source's configuration that do not concern it, and
    `source_table` is the relative table as a Hugging Face file has it.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    rest: dict = field(default_factory=dict)
    source_table: Tensor | None = None

    def has(self, head: str) -> bool:
        """Return whether the network has any tensor whose name starts with `head`."""
        return any(name.startswith(head) for name in self.tensors)

    @property
    def has_masked_lm(self) -> bool:
        """Whether masked words can be predicted: the head, and the decoder's position table."""
        return self.has("mlm_head.") and (self.config.absolute_input or self.has("positions.w"))


@dataclass
class Release:
    """A model as it is published or continued."""

    main: Network
    generator: Network | None = None
    tokenizer_files: Files = field(default_factory=dict)  # as they were read
    notes: list[str] = field(default_factory=list)  # derived, dropped, kept aside
    tokenizer: Tokenizer | None = None  # among these files, of a release that was read,
    place: Path | None = None  # where: of a run, its checkpoint,
    identity: dict[str, str] = field(default_factory=dict)  # and digests of what was read

    def networks(self) -> dict[str, Network]:
        """Return {"main" and "generator", if there is one: network}."""
        named = {"main": self.main}
        return named | ({"generator": self.generator} if self.generator else {})

    def store_in(self, precision: str) -> None:
        """Round all weights to "fp32", "bf16" or "fp16"; UserError for one that is too large."""
        dtype = DTYPES[precision]
        for name, network in self.networks().items():
            if network.source_table is not None:
                network.source_table = network.source_table.to(dtype)
            for key, tensor in network.tensors.items():
                if not tensor.is_floating_point():
                    continue
                network.tensors[key] = rounded = tensor.to(dtype)
                if not torch.equal(rounded.isfinite(), tensor.isfinite()):
                    raise UserError(f"{name} {key} has weights that {precision} cannot hold, up to "
                                    f"{tensor.abs().max().item():.3g}; store it in bf16 or fp32")
        derive_words(self)


def check_network(network: Network, place: str, said: Callable[[str], str]) -> None:
    """Raise UserError if a tensor of the encoder is missing, unknown or of another shape.

    `said` gives the name that a tensor has in the file, as far as it has another than ours.
    """
    shapes = _expected_shapes(network)
    missing = sorted(map(said, shapes.keys() - network.tensors.keys()))
    if missing:
        raise UserError(f"{place}: {_some(missing)} missing; the file is not a whole "
                        f"{network.config.num_layers}-layer DeBERTa with these heads")
    unknown = sorted(said(name) for name in network.tensors.keys() - shapes.keys()
                     if not name.startswith(OTHER_HEADS))
    if unknown:
        raise UserError(f"{place}: unknown tensors {_some(unknown)}; the file is of another "
                        "model than its configuration says")
    for name, shape in shapes.items():
        found = tuple(network.tensors[name].shape)
        if found != shape:
            raise UserError(f"{place}: {said(name)} has shape {found}, but the configuration asks "
                            f"for {shape}")
    for name, tensor in network.tensors.items():
        if tensor.dtype not in _DTYPES and (name in shapes or tensor.is_floating_point()):
            raise UserError(f"{place}: {said(name)} holds {tensor.dtype}, not floats of 16, 32 "
                            "or 64 bits")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{place}: {said(name)} holds NaN or infinity: the model diverged, or "
                            "its file is damaged")


def with_zero_key_biases(network: Network) -> dict[str, Tensor]:
    """Return the tensors of a model without key biases for a format that always has them."""
    tensors = dict(network.tensors)
    for name, tensor in network.tensors.items():
        if name.endswith(("attention.key.weight", "attention.position_key.weight")):
            tensors[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.size(0))
    return tensors


def _expected_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the encoder and of every head that the network has a part of."""
    config = network.config
    kinds: dict[str, type[nn.Module]] = {
        "": Backbone, "mlm_head.": MaskedLmHead, "rtd_head.": ReplacedTokenHead}
    shapes = {prefix + name: tuple(p.shape)
              for prefix, kind in kinds.items() if not prefix or network.has(prefix)
              for name, p in on_meta(kind, config).named_parameters()}
    tables = {"words.delta": (config.vocab_size, config.hidden_size),
              "positions.weight": (config.max_position, config.hidden_size),
              "positions.delta": (config.max_position, config.hidden_size)}
    return shapes | {name: shape for name, shape in tables.items() if name in network.tensors}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def build_backbone(network: Network) -> Backbone:
    """Return the encoder in fp32, in evaluation mode."""
    return _filled(on_meta(Backbone, network.config), network).requires_grad_(True)


def build_masked_lm(network: Network) -> tuple[TokenEmbedding, MaskedLm]:
    """Return (token embedding, masked LM) in fp32, in evaluation mode; needs `has_masked_lm`."""
    assert network.has_masked_lm
    config = network.config
    words = on_meta(TokenEmbedding, config.vocab_size, config.hidden_size)
    masked_lm = on_meta(MaskedLm, config)
    for name, part in masked_lm.named_children():
        _filled(part, network, "mlm_head." if name == "head" else f"{name}.")
    return _filled(words, network, "words."), masked_lm.eval()


def build_replaced_token_head(network: Network) -> ReplacedTokenHead:
    """Return the discriminator's head in fp32, in evaluation mode."""
    return _filled(on_meta(ReplacedTokenHead, network.config), network, "rtd_head.")


def _filled(module: nn.Module, network: Network, prefix: str = "") -> Any:
    """Return a module of meta tensors with those of a network below `prefix`."""
    module.load_state_dict({name: network.tensors[prefix + name].float()
                            for name, _ in module.named_parameters()}, assign=True)
    return module.eval()


def derive_words(release: Release) -> None:
    """Make the discriminator's token embedding whole: E_G + delta, wherever both are known.

    Files of the official training hold `weight` one optimizer step behind `_weight`, or before the
    first step none at all (microsoft/DeBERTa apps/tasks/rtd_task.py), so the sum is computed again,
    in fp32.
    """
    main, generator = release.main, release.generator
    for table, place in (("words", "token embedding"), ("positions", "position table")):
        delta = main.tensors.get(f"{table}.delta")
        name = f"{table}.weight"
        added = f"trunk.input.{name}"  # positions, where they are added to the input
        if any(added in network.tensors for network in release.networks().values()):
            name = added
        whole = main.tensors.get(name)
        base = generator.tensors.get(name) if generator else None
        if delta is None:
            continue
        if base is None:
            if whole is None:
                raise UserError(
                    f"the {place} is stored only as a difference to the generator's (`_weight`); "
                    "give the generator's file next to it, or the embeddings would be random")
            continue
        parts = [tensor for tensor in (base, delta, whole) if tensor is not None]
        if len({tensor.shape for tensor in parts}) > 1:
            raise UserError(f"the {place}, the generator's and their difference (`_weight`) have "
                            f"the shapes {', '.join(str(list(t.shape)) for t in parts)}; they must "
                            "be of one model: put the generator there that was trained with it")
        merged = (base.float() + delta.float()).to(delta.dtype)
        if whole is None:
            release.notes.append(f"derived: {place} = generator's + delta")
        elif not torch.equal(whole, merged):
            gap = (whole.float() - merged.float()).abs().max().item()
            release.notes.append(f"derived: {place} = generator's + delta (the stored sum differs "
                                 f"by up to {gap:.1e}; it is one step old or rounded)")
        main.tensors[name] = merged


def a_row_a_distance(config: ModelConfig) -> ModelConfig:
    """Return a configuration without buckets where transformers would misread them."""
    limit = config.largest_distance
    if not config.relative_attention or config.position_buckets // 2 < limit - 1:
        return config
    return replace(config, position_buckets=0, max_relative=limit)


def with_a_row_a_distance(network: Network, name: str = "main") -> tuple[Network, list[str]]:
    """Return the network of `a_row_a_distance`, and a note on it."""
    config, plain = network.config, a_row_a_distance(network.config)
    if plain == config:
        return network, []
    limit = config.largest_distance
    rows = Geometry(limit, config.position_buckets).slots(torch.arange(-limit, limit))
    note = (f"mapped: {name}: relative table of {config.position_buckets} buckets a side for "
            f"distances up to {limit}: written with a row a distance, as transformers cannot read "
            "it")
    return replace(network, config=plain,
                   tensors=network.tensors | {_RELATIVE: network.tensors[_RELATIVE][rows]}), [note]


def without_unread_rows(tensors: dict[str, Tensor], config: ModelConfig
                        ) -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors whose table transformers reads as we do at every length, and a note on it."""
    unread, stand_ins = _unread_rows(config)
    if not unread or TABLE not in tensors:
        return tensors, []
    table = tensors[TABLE].clone()
    table[unread] = table[stand_ins]
    note = (f"mapped: relative rows {unread}, which only transformers reads (beyond "
            f"{config.largest_distance} tokens), repeat the outermost trained ones")
    return tensors | {TABLE: table, UNREAD_ROWS: tensors[TABLE][unread]}, [note]


def with_unread_rows(tensors: dict[str, Tensor], config: ModelConfig, place: str
                     ) -> dict[str, Tensor]:
    """Return tensors with the rows that `without_unread_rows` kept next to the table put back."""
    if UNREAD_ROWS not in tensors:
        return tensors
    tensors = dict(tensors)
    rows, table = tensors.pop(UNREAD_ROWS), tensors.get(TABLE)
    unread, _ = _unread_rows(config)
    if table is None or table.ndim != 2:
        return tensors  # which is said of every table
    if tuple(rows.shape) != (len(unread), table.size(1)) or not rows.is_floating_point():
        raise UserError(f"{place}: {UNREAD_ROWS} has shape {tuple(rows.shape)} and type "
                        f"{rows.dtype}, but the configuration asks for numbers of "
                        f"{(len(unread), table.size(1))}")
    # transformers saves the table in another precision, and leaves these rows as they are.
    table = table.to(torch.promote_types(table.dtype, rows.dtype), copy=True)
    table[unread] = rows.to(table.dtype)
    return tensors | {TABLE: table}


def as_transformers_reads(network: Network, length: int) -> Network:
    """Return what transformers computes from the file's table in texts of up to `length` tokens,
    as a network with a row a distance (`build_relative_position` there).
    """
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    config, span, table = network.config, network.config.position_buckets, network.source_table
    assert table is not None and span
    rows = make_log_bucket_position(torch.arange(-length, length), span, config.largest_distance)
    table = table[(rows + span).clamp(0, 2 * span - 1).long()]
    return replace(network, config=replace(config, position_buckets=0, max_relative=length),
                   tensors=network.tensors | {_RELATIVE: table})


def _unread_rows(config: ModelConfig) -> tuple[list[int], list[int]]:
    """Return (rows outside the outermost buckets, the row that serves instead of each)."""
    if not config.relative_attention:
        return [], []
    geometry = Geometry(config.largest_distance, config.position_buckets)
    first, last = geometry.slots(torch.tensor([-geometry.max_relative, geometry.max_relative])
                                 ).tolist()
    below, above = list(range(first)), list(range(last + 1, geometry.num_slots))
    return below + above, [first] * len(below) + [last] * len(above)


@torch.no_grad()
def changes_beyond_reach(release: Release) -> list[str]:
    """Return a line, with figures, for each network that is another function than its Hugging Face
    source in texts longer than the relative table.
    """
    lines = []
    for name, network in release.networks().items():
        long = sample_batches(network.config)[1:] if network.config.position_buckets else []
        for ids_BL, mask_BL in long if network.source_table is not None else []:
            length, reach = ids_BL.size(1), network.config.largest_distance
            theirs = as_transformers_reads(network, length)
            expected = build_backbone(theirs)(ids_BL, mask_BL)
            gap = (build_backbone(network)(ids_BL, mask_BL) - expected).abs().max()
            if (error := (gap / expected.abs().max()).item()) > TOLERANCE:
                lines.append(f"{name}: beyond {reach} tokens transformers reads other rows of the "
                             f"source's relative table: at {length} tokens hidden states differ by "
                             f"{error:.1e} relative; if the source was trained on such texts, keep "
                             f"to {reach} tokens, or train it on longer ones again")
    return lines


def sample_batches(config: ModelConfig) -> list[tuple[Tensor, Tensor]]:
    """Return ids and masks: three rows with padding, and one row longer than the relative table.

    The second is there for models that take it: any without absolute positions in the input.
    """
    length = min(64, config.max_position)
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(4, config.vocab_size, (3, length), generator=generator)
    mask_BL = torch.ones_like(ids_BL)
    mask_BL[1, length // 2:] = 0
    mask_BL[2, 3:] = 0
    batches = [(ids_BL * mask_BL, mask_BL)]
    longest = config.largest_distance + config.largest_distance // 2
    if config.relative_attention and not (config.absolute_input and longest > config.max_position):
        ids_BL = torch.randint(4, config.vocab_size, (1, longest), generator=generator)
        batches.append((ids_BL, torch.ones_like(ids_BL)))
    return batches
