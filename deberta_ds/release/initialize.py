"""Start a run from a published model or another run (`[init]` of a run config).

The discriminator's token embedding is E_G + delta, and public files rarely hold the delta. Where it
comes from is decided by `objectives.rtd.parameters` and said in the log:
    taken       the file holds `_weight` with the generator it belongs to
    derived     delta = D - G, exact in fp32, when a generator is given
    two stages  without a generator a run is rejected: train a fresh generator as a masked LM over
                the frozen token embeddings (init.embeddings_only), then both
                (docs/how-to/adapt-a-public-model.md)

A row of a longer relative table begins as the row which the source read at the middle of the
distances that now read it. Absolute positions are repeated from the first one on (as in Longformer,
arXiv 2004.05150, section 5).
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import FREE, without_unused
from deberta_ds.config.run_config import ModelConfig, RunConfig
from deberta_ds.model.attention import Geometry
from deberta_ds.objectives.build import objective_of
from deberta_ds.release.networks import Network, Release
from deberta_ds.release.read_back import changes_beyond_reach
from deberta_ds.release.vocabulary import read_in_vocabulary
from deberta_ds.tokenizer import Tokenizer

# May differ from the source's.
_FREE_FIELDS = (*FREE, "conv_activation")
_LAYERS, _RELATIVE = "trunk.encoder.layers.", "trunk.encoder.relative"
_POSITIONS = ("positions.weight", "positions.delta", "trunk.input.positions.weight")
_REACH = ("max_position", "max_relative", "position_buckets")


def initial_tensors(run: RunConfig, tokenizer: Tokenizer | None = None
                    ) -> tuple[dict[str, Tensor], list[str]]:
    """Return ({parameter of the run's model: value}, notes for the log) of `run.init`, for a run
    that has read this tokenizer.

    Parameters without a value keep their random one; a note names them. Raises UserError if the
    source does not fit the run.
    """
    place, tokenizer = run.init.source or run.init.generator, tokenizer or Tokenizer(
        run.data.tokenizer)
    release = read_in_vocabulary(run, place, tokenizer)
    if not run.init.source:  # a cached run's discriminator begins with its generator's embedding
        words = _fitting_words(run, release.generator or release.main, place)
        tensors = {"discriminator.words.weight": words}
        notes = [f"token embedding of the generator of {place}; the rest is random", *release.notes]
    elif run.init.embeddings_only:
        tensors = {"words.weight": _fitting_words(run, release.main, place)}
        notes = [f"token embedding of {place}, fixed; the rest is random (first of two stages)",
                 *release.notes]
    else:
        objective, networks = objective_of(run), _networks(run, release, tokenizer)
        tensors, notes = objective.parameters(
            run, {name: network.tensors for name, network in networks.items()})
        for name, network in networks.items():
            head = objective.HEADS[name]
            missing = [head.removesuffix(".")] * (not network.has(head))
            if head == "mlm_head." and not network.config.absolute_input:
                missing += ["absolute position table"] * (not network.has("positions.weight"))
            notes += [f"WARNING: no {part} in the source; it starts at random" for part in missing]
        if run.model.max_position > release.main.config.largest_distance:
            notes += [f"WARNING: {line}" for line in changes_beyond_reach(release)]
        notes = list(dict.fromkeys([f"from {place}", *release.notes, *notes]))  # each once
    return tensors, [f"init: {note}" for note in notes]


def _fitting_words(run: RunConfig, network: Network, place: str) -> Tensor:
    words = network.tensors["words.weight"]
    wanted = (run.model.vocab_size, run.model.hidden_size)
    if tuple(words.shape) != wanted:
        raise UserError(f"{place}: token embedding {tuple(words.shape)}, but the run has {wanted}; "
                        f"set model.vocab_size = {len(words)}, model.hidden_size = {words.size(1)}")
    return words


def _networks(run: RunConfig, release: Release, tokenizer: Tokenizer) -> dict[str, Network]:
    """Return the source of every network of the run, checked to have its shape."""
    objective = objective_of(run)
    encoders, place = objective.encoders(run), run.init.source
    main, generator, generator_place = release.main, release.generator, place
    if run.init.generator:
        other = read_in_vocabulary(run, run.init.generator, tokenizer,
                                   "vocabulary-generator.json")
        release.notes += other.notes
        generator, generator_place = other.generator or other.main, run.init.generator
        # A delta belongs to the generator it was trained with.
        main = replace(main, tensors={name: tensor for name, tensor in main.tensors.items()
                                      if name != "words.delta"})
    main = reshape(main, run.model, run.init.layers, f"init.layers: {place}", release.notes)
    if "generator" not in encoders:
        if run.init.generator_layers:
            raise UserError("init.generator_layers: this run has no generator; leave it out")
        head = objective.HEADS["main"]
        if generator and not (main.has(head) or run.init.layers):
            generator = reshape(generator, run.model, (), place, release.notes)
            main = main if shape_differences(run.model, generator.config) else generator
        _check_shape("model", run.model, main.config, place)
        return {"main": main}
    if generator is None:
        raise UserError(f"{place}: has no generator, so replaced-token detection cannot go on from "
                        "it. Give one as init.generator, or make one first: a masked-LM run with "
                        "init.embeddings_only (the two stages are in "
                        "docs/how-to/adapt-a-public-model.md)")
    generator = reshape(generator, encoders["generator"], run.init.generator_layers,
                        f"init.generator_layers: {generator_place}", release.notes)
    _check_shape("model", run.model, main.config, place)
    _check_shape("generator", encoders["generator"], generator.config, generator_place)
    return {"main": main, "generator": generator}


def shape_differences(run: ModelConfig, source: ModelConfig) -> list[str]:
    """Return "key = value (source: value)" for what makes other tensors of a model."""
    ours, theirs = (asdict(without_unused(one)) for one in (run, source))
    for values in (ours, theirs):
        values["max_relative"] = max(values["max_relative"], 0) or values["max_position"]
        values["position_terms"] = sorted(values["position_terms"])
    return [f"{name} = {ours[name]} (source: {theirs[name]})" for name in ours
            if name not in _FREE_FIELDS and ours[name] != theirs[name]]


def _check_shape(part: str, run: ModelConfig, source: ModelConfig, place: str) -> None:
    """Raise UserError unless a source has the shape of the run's `part`, model or generator."""
    differences = shape_differences(run, source)
    others = {text.split()[0] for text in differences} - {"num_layers"}
    if part == "model":
        remedy = "set these as the source has them"
    elif not others:
        remedy = f"set objective.generator_layers = {source.num_layers}"
    elif others == {"vocab_size"}:
        remedy = "put the files of the tokenizer that it was trained with into its directory"
    else:
        remedy = "name one of the discriminator's shape as init.generator; only its depth is free"
    if differences:
        raise UserError(f"{place}: does not fit the run's {part}: {'; '.join(differences)}; "
                        f"{remedy}")


def reshape(network: Network, wanted: ModelConfig, layers: Sequence[int], place: str,
            notes: list[str]) -> Network:
    """Return a network with these layers (none: all) and the reach of `wanted`, if that is larger.

    `notes` gets what was done. Raises UserError, which begins with `place`, for layers that do not
    fit.
    """
    network = _with_layers(network, wanted, layers, place, notes) if layers else network
    config = network.config
    longer = replace(config, **{key: getattr(wanted, key) for key in _REACH})
    if any(getattr(longer, key) < getattr(config, key)
           for key in ("max_position", "largest_distance", "relative_span")):
        return network
    tensors = dict(network.tensors)
    old, new = (Geometry(one.largest_distance, one.position_buckets) for one in (config, longer))
    if _RELATIVE in tensors and old != new:
        rows, same = _source_rows(old, new)
        tensors[_RELATIVE] = tensors[_RELATIVE][rows]
        notes.append(f"relative table: {old.num_slots:,} rows for distances up to "
                     f"{old.max_relative:,} -> {new.num_slots:,} for {new.max_relative:,}; hidden "
                     f"states are the source's in texts of {same}")
    for name in _POSITIONS if longer.max_position > config.max_position else ():
        if name in tensors:
            repeats = -(-longer.max_position // config.max_position)
            tensors[name] = tensors[name].repeat(repeats, 1)[:longer.max_position]
            notes.append(f"{name}: rows from {config.max_position:,} on begin as copies from row 0")
    return replace(network, config=longer, tensors=tensors)


def _with_layers(network: Network, wanted: ModelConfig, layers: Sequence[int], place: str,
                 notes: list[str]) -> Network:
    config, last = network.config, network.config.num_layers - 1
    if max(layers) >= config.num_layers:
        raise UserError(f"{place} has no layer {max(layers)}; its layers are 0 to {last}")
    if len(layers) != wanted.num_layers:
        raise UserError(f"{place}: {len(layers)} layers for the {wanted.num_layers} of the run; "
                        "list as many, or set model.num_layers (of a generator "
                        f"objective.generator_layers) to {len(layers)}")
    if config.conv_kernel and layers[0]:
        raise UserError(f"{place} has a convolution next to its layer 0; begin the list with 0")
    if network.has_masked_lm and not config.absolute_input and layers[-1] != last:
        notes.append(f"WARNING: the enhanced mask decoder, trained with layer {last}, now applies "
                     f"layer {layers[-1]} twice; end the list with {last} to keep it")
    tensors = {name: tensor for name, tensor in network.tensors.items()
               if not name.startswith(_LAYERS)}
    for new, old in enumerate(layers):
        stem = f"{_LAYERS}{old}."
        tensors |= {f"{_LAYERS}{new}.{name.removeprefix(stem)}": tensor
                    for name, tensor in network.tensors.items() if name.startswith(stem)}
    notes.append(f"layers {', '.join(map(str, layers))} of the {config.num_layers} of the source")
    return replace(network, config=replace(config, num_layers=len(layers)), tensors=tensors)


def _source_rows(old: Geometry, new: Geometry) -> tuple[Tensor, str]:
    """Return (the old row of each new row, length of texts in which all distances read theirs)."""
    distances = torch.arange(-new.max_relative, new.max_relative + 1)
    before, after = old.slots(distances), new.slots(distances)  # both rise with the distance
    rows = torch.arange(new.num_slots)
    first = torch.searchsorted(after, rows)
    last = torch.searchsorted(after, rows, right=True) - 1
    middle = (first + last + (rows < new.span)) // 2  # of two, the shorter distance
    found = before[middle.clamp(0, len(distances) - 1)]  # unread rows: as the nearest read one
    others = distances[found[after] != before].abs()
    return found, f"up to {int(others.min()):,} tokens" if len(others) else "any length"
