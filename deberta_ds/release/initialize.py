"""Start a run from a published model or another run (`[init]` of a run config).

The discriminator's token embedding is E_G + delta, and public files rarely hold the delta. Where it
comes from is decided by `objectives.rtd.parameters` and said in the log:
    taken       the file holds `_weight` with the generator it belongs to
    derived     delta = D - G, exact in fp32, when a generator is given
    two stages  without a generator a run is rejected: train a fresh generator as a masked LM over
                the frozen token embeddings (init.embeddings_only), then both
                (docs/how-to/adapt-a-public-model.md)
"""

import dataclasses

from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.config.model import FREE, without_unused
from deberta_ds.config.run_config import ModelConfig, RunConfig
from deberta_ds.objectives.build import objective_of
from deberta_ds.release.read_back import changes_beyond_reach
from deberta_ds.release.release import Network, Release
from deberta_ds.release.reshape import reshape
from deberta_ds.release.vocabulary import read_in_vocabulary

# May differ from the source's.
_FREE_FIELDS = (*FREE, "conv_activation")


def initial_tensors(run: RunConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Return ({parameter of the run's model: value}, notes for the log) of `run.init`.

    Parameters without a value keep their random one; a note names them. Raises UserError if the
    source does not fit the run.
    """
    if not run.init.source:
        return _generator_words(run)
    release = read_in_vocabulary(run, run.init.source)
    place = run.init.source
    if run.init.embeddings_only:
        words = _fitting_words(run, release.main, place)
        notes = [f"token embedding of {place}, fixed; the rest is random (first of two stages)",
                 *release.notes]
        return {"words.weight": words}, [f"init: {note}" for note in notes]
    objective = objective_of(run)
    networks = _networks(run, release)
    tensors, notes = objective.parameters(
        run, {name: network.tensors for name, network in networks.items()})
    for name, network in networks.items():
        notes += _random_parts(network, objective.HEADS[name])
    if run.model.max_position > release.main.config.largest_distance:
        notes += [f"WARNING: {line}" for line in changes_beyond_reach(release)]
    lines = dict.fromkeys([f"from {place}", *release.notes, *notes])  # both networks': once
    return tensors, [f"init: {line}" for line in lines]


def _generator_words(run: RunConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Return a cached run's frozen generator's token embedding as the discriminator's first one."""
    place = run.init.generator
    release = read_in_vocabulary(run, place)
    words = _fitting_words(run, release.generator or release.main, place)
    return {"discriminator.words.weight": words}, [
        f"init: {note}" for note in [
            f"token embedding of the generator of {place}; the rest is random", *release.notes]]


def _fitting_words(run: RunConfig, network: Network, place: str) -> Tensor:
    words = network.tensors["words.weight"]
    wanted = (run.model.vocab_size, run.model.hidden_size)
    if tuple(words.shape) != wanted:
        raise UserError(f"{place}: token embedding {tuple(words.shape)}, but the run has {wanted}")
    return words


def _networks(run: RunConfig, release: Release) -> dict[str, Network]:
    """Return the source of every network of the run, checked to have its shape."""
    objective = objective_of(run)
    encoders, place = objective.encoders(run), run.init.source
    main, generator, generator_place = release.main, release.generator, place
    if run.init.generator:
        other = read_in_vocabulary(run, run.init.generator)
        release.notes += other.notes
        generator, generator_place = other.generator or other.main, run.init.generator
        # A delta belongs to the generator it was trained with.
        main = dataclasses.replace(main, tensors={name: tensor for name, tensor in
                                                  main.tensors.items() if name != "words.delta"})
    main = reshape(main, run.model, run.init.layers, f"init.layers: {place}", release.notes)
    if "generator" not in encoders:
        if run.init.generator_layers:
            raise UserError("init.generator_layers: this run has no generator; leave it out")
        head = objective.HEADS["main"]
        if generator and not (main.has(head) or run.init.layers):
            generator = reshape(generator, run.model, (), place, release.notes)
            main = main if _differences(run.model, generator.config) else generator
        _check_fit(run.model, main.config, place, "model")
        return {"main": main}
    if generator is None:
        raise UserError(f"{place}: has no generator, so replaced-token detection cannot go on from "
                        "it. Give one as init.generator, or make one first: a masked-LM run with "
                        "init.embeddings_only (the two stages are in "
                        "docs/how-to/adapt-a-public-model.md)")
    generator = reshape(generator, encoders["generator"], run.init.generator_layers,
                        f"init.generator_layers: {generator_place}", release.notes)
    _check_fit(run.model, main.config, place, "model")
    _check_fit(encoders["generator"], generator.config, generator_place, "generator")
    return {"main": main, "generator": generator}


def _random_parts(network: Network, head: str) -> list[str]:
    """Return a warning for each part that a head needs and the source does not have."""
    missing = [] if network.has(head) else [head.removesuffix(".")]
    if head == "mlm_head." and not network.config.absolute_input:
        missing += [] if network.has("positions.weight") else ["absolute position table"]
    return [f"WARNING: no {part} in the source; it starts at random" for part in missing]


def _differences(run: ModelConfig, source: ModelConfig) -> list[str]:
    ours, theirs = (dataclasses.asdict(without_unused(one)) for one in (run, source))
    for values in (ours, theirs):
        values["max_relative"] = max(values["max_relative"], 0) or values["max_position"]
        values["position_terms"] = sorted(values["position_terms"])
    return [f"{name} = {ours[name]} (source: {theirs[name]})" for name in ours
            if name not in _FREE_FIELDS and ours[name] != theirs[name]]


def _check_fit(run: ModelConfig, source: ModelConfig, place: str, part: str) -> None:
    if differences := _differences(run, source):
        raise UserError(f"{place}: does not fit the run's {part}: {'; '.join(differences)}; set "
                        "these as the source has them")
