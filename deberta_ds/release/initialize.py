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

With another tokenizer, of any kind, a token of both (the same text, with or without a space before
it, however the two mark that) keeps its vector; special tokens go by their role. Any other starts
at the plain mean of the vectors of what the source's tokenizer makes of its text (Fast Vocabulary
Transfer, Gee et al. 2022, arXiv 2402.09977); one of which that knows nothing, or bytes alone,
starts as in a new model. So a tokenizer with tokens added keeps all that it had.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import counted
from deberta_ds.base.splitmix import mix64
from deberta_ds.config.model import FREE, without_unused
from deberta_ds.config.run_config import ModelConfig, RunConfig
from deberta_ds.data.corpus import Corpus
from deberta_ds.files.remote import Cache
from deberta_ds.model.attention import Geometry
from deberta_ds.objectives.build import objective_of
from deberta_ds.release.networks import Network, Release, changes_beyond_reach, derive_words
from deberta_ds.release.read_back import SENTENCES
from deberta_ds.release.reader import read_release, read_tokenizer
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.words import byte_of, bytes_of_subword, character_starts_word

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


REPORT = "vocabulary.json"
CLASSES = ("shared", "composed", "random", "bytes")  # bytes: of bytes alone, so random, too
_APART = 0.1  # of a new model's deviation: noise on what is composed of the same as another token
_BY_ID = ("words.weight", "words.delta", "mlm_head.bias")
_ROWS_COUNTED = 1000  # of a corpus


def read_in_vocabulary(run: RunConfig, source: str, own: Tokenizer, report: str = REPORT
                       ) -> Release:
    """Return the release at `source` with a row for each token of the run's tokenizer, `own`; its
    notes say what was done, OUT/`report` how each token begins.
    """
    release, rows = read_release(source), run.model.vocab_size
    theirs = release.tokenizer
    if theirs is None:
        return release
    is_same, texts = has_same_tokens(own, theirs), list(SENTENCES)
    if is_same and theirs.encode_batch(texts) != own.encode_batch(texts):
        release.notes.append(f"WARNING: {run.data.tokenizer} has the tokens of the source's "
                             "tokenizer, but cuts texts otherwise: its normalizer, merges or "
                             "scores are others")
    before = release.main.config.vocab_size
    if is_same and rows == before:
        return release
    parts, kinds = starting_points(own, theirs)
    starts = list(zip(own.subwords(range(own.size)), map(theirs.subwords, parts), strict=True))
    if is_same:  # rows of no token stay too
        parts = [[number] for number in range(min(rows, before))]
    for network in release.networks().values():
        _change_vocabulary(network, parts, rows, run.train.seed)
    if release.generator and "words.delta" in release.main.tensors:
        del release.main.tensors["words.weight"]
        derive_words(release)  # to the bit the generator's + delta
    release.notes.append(f"token embedding of {source}: {before:,} rows -> {rows:,}; its tokens "
                         "stay" if is_same else _report(run, source, starts, kinds, report))
    return release


def has_other_tokens(source: str, own: Tokenizer) -> bool:
    """Return whether the model at `source` has a tokenizer of other tokens than `own`."""
    theirs = read_tokenizer(source)
    return theirs is not None and not has_same_tokens(own, theirs)


def has_same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether each id is the same token in both."""
    return first.special_ids == second.special_ids and first.size == second.size and (
        first.subwords(range(first.size)) == second.subwords(range(second.size)))


def starting_points(own: Tokenizer, theirs: Tokenizer) -> tuple[list[list[int]], np.ndarray]:
    """Return (for each id of `own` those of `theirs` at whose mean it starts, none: at random; for
    each which of CLASSES that is).
    """
    pieces, texts = theirs.subwords(range(theirs.size)), _texts(theirs)
    exact = {pair: number for number, pair in enumerate(zip(pieces, texts, strict=True))
             if number not in theirs.special_ids.values()}
    by_text: dict[str, int] = {}
    for number in np.flatnonzero(~theirs.is_special()).tolist():
        by_text.setdefault(texts[number], number)
    by_role = {number: theirs.special_ids.get(role) for role, number in own.special_ids.items()}
    parts: list[list[int]] = []
    kinds = np.zeros(own.size, np.int8)
    for number, pair in enumerate(zip(own.subwords(range(own.size)), _texts(own), strict=True)):
        found = by_role[number] if number in by_role else exact.get(pair, by_text.get(pair[1]))
        if found is not None:
            parts.append([found])
            continue
        parts.append([] if number in by_role or not pair[0].strip() else
                     _parts(theirs, pair[1], by_text))
        kinds[number] = 1 if parts[-1] else 2
        if parts[-1] and all(
                _is_broken(texts[part]) or not texts[part].strip() for part in parts[-1]):
            parts[-1], kinds[number] = [], 3
    return parts, kinds


def _texts(tokenizer: Tokenizer) -> list[str]:
    """Return the text of each id, behind a space if it begins a word; bytes of no whole character
    as lone surrogates. Marks that WordPiece sets apart have no space, as in other tokenizers.
    """
    numbers, texts = range(tokenizer.size), []
    starts = tokenizer.word_starts()
    for number, piece, text in zip(numbers, tokenizer.subwords(numbers),
                                   tokenizer.readable(numbers), strict=True):
        is_broken = tokenizer.kind == "byte_level" and "\\x" in text
        data = (bytes_of_subword if is_broken else byte_of)(piece)
        if data is not None:
            text = data.decode("utf-8", "surrogateescape")
        elif tokenizer.kind in ("wordpiece", "words") and text[1:] and character_starts_word(
                text[1]):
            text = text.removeprefix(" ")
        elif starts[number] and text[:1].isalnum() and not character_starts_word(text[0]):
            text = " " + text  # a token that was added
        texts.append(text)
    return texts


def _is_broken(text: str) -> bool:
    """Return whether a token's text has bytes of no whole character."""
    return any("\udc80" <= character <= "\udcff" for character in text)


def _parts(tokenizer: Tokenizer, text: str, by_text: dict[str, int]) -> list[int]:
    """Return the known ids of a token's text, as it continues a word if it can."""
    if _is_broken(text):  # byte by byte
        return [by_text[character] for character in text if character in by_text]
    for lead in ("", " "):
        if found := [part for part in tokenizer.encode_after(lead + text)
                     if part != tokenizer.unk_id]:
            return found
    return []


def _change_vocabulary(network: Network, parts: list[list[int]], rows: int, seed: int) -> None:
    """Give all that is indexed by id `rows` rows, those of several parts no two alike."""
    sizes = torch.tensor([0, *map(len, parts)])
    flat = torch.tensor([part for one in parts for part in one], dtype=torch.long)
    at_random = [number for number in range(rows) if number >= len(parts) or not parts[number]]
    seen: set[tuple[int, ...]] = set()
    apart = [number for number, part in enumerate(map(tuple, parts)) if len(part) > 1 and (
        part in seen or seen.add(part))]  # type: ignore[func-returns-value]
    for salt, name in enumerate(_BY_ID):
        if (table := network.tensors.get(name)) is None:
            continue
        old_VC = table.float().view(len(table), -1)
        new_VC = torch.zeros(rows, old_VC.size(1))
        new_VC[:len(parts)] = F.embedding_bag(flat, old_VC, sizes.cumsum(0)[:-1],
                                                mode="mean")
        for number in (*at_random, *apart) if name == "words.weight" else ():
            generator = torch.Generator().manual_seed(mix64(mix64(seed + salt) + number) >> 1)
            new_VC[number] += (network.config.init_std * (_APART if number in apart else 1.0)
                               * torch.randn(old_VC.size(1), generator=generator))
        network.tensors[name] = new_VC.view(rows, *table.shape[1:]).to(table.dtype)
    network.config = replace(network.config, vocab_size=rows)


def _report(run: RunConfig, source: str, starts: list[tuple[str, list[str]]],
            kinds: np.ndarray, report: str) -> str:
    """Write OUT/`report` and return what it says in short."""
    path, frequencies = Path(run.out_dir) / report, _frequencies(run, len(kinds))
    counts = np.bincount(kinds, minlength=4).tolist()
    shares = (np.bincount(kinds, frequencies, 4) / max(1, frequencies.sum())).tolist()
    figures: dict[str, dict] = {name: {"tokens": count, "share_of_text": round(share, 6)}
                                for name, count, share in zip(CLASSES, counts, shares,
                                                              strict=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    figures["not_shared"] = {piece: parts for (piece, parts), kind in zip(
        starts, kinds, strict=True) if kind}
    write_atomic(path, json.dumps({"source": source, "tokenizer": run.data.tokenizer} | figures,
                                  ensure_ascii=False, indent=1) + "\n")
    said = ", ".join(f"{counted(count, 'token')} {name} ({share:.2%} of the text)"
                     for name, count, share in zip(CLASSES, counts, shares, strict=True)
                     ).replace(" bytes (", " of bytes alone, random (")
    return (f"WARNING: {run.data.tokenizer} has other tokens than the tokenizer of {source}; token "
            f"embeddings: {said}; {report} in the run's directory lists them")


def _frequencies(run: RunConfig, size: int) -> np.ndarray:
    """Return how often each id stands in sequences of the held-out corpora, else of the sources."""
    paths = list(run.data.heldout_corpora.values()) or [one.path for one in run.data.sources]
    frequencies = np.zeros(size)
    for path in paths:
        corpus = Corpus(path, seq_len=run.data.seq_len,
                        cache=Cache(run.data.cache, run.data.cache_gigabytes))
        for row in range(0, corpus.num_rows, -(-corpus.num_rows // _ROWS_COUNTED)):
            frequencies += np.bincount(np.concatenate(corpus.row(row)), minlength=size)
    return frequencies
