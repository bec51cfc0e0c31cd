"""From a recipe to packed shards: what the single commands do, one after another.

    OUT/tokenizer  OUT/duplicates  OUT/contaminated/NAME  OUT/train/NAME  OUT/heldout/NAME
    OUT/corpus.json    written last: [data] of a run file, with paths from OUT

Each directory is a job (units.py): it goes on after an interruption, takes changed inputs, and is
rejected if another recipe has made it. The jobs of an array share out the units of each stage, and
whichever is free when no other is at work completes it, with the units of jobs that never came.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import counted, format_duration
from deberta_ds.config.toml_files import BUILT, Built
from deberta_ds.corpus.contamination import find_contamination
from deberta_ds.corpus.damage import describe_few, plan_whole
from deberta_ds.corpus.dedup import find_duplicates
from deberta_ds.corpus.documents import Extent, ReadOptions, check_named_once, plan_units
from deberta_ds.corpus.encode import CleanOptions, left_out
from deberta_ds.corpus.filter_rules import read_rules
from deberta_ds.corpus.outputs import fetch
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.recipe import CorpusRecipe, Recipe
from deberta_ds.corpus.tokenize import tokenize_corpus
from deberta_ds.corpus.train_tokenizer import read_symbols, train_tokenizer
from deberta_ds.corpus.units import AtWorkError, Part, extents_of, identified, inputs_of, job
from deberta_ds.data.mixture import temperature_weights
from deberta_ds.data.shards import MANIFEST, Manifest, read_manifest, rows_directory
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.files import SPM
from deberta_ds.tokenizer.segmented import words_function
from deberta_ds.tokenizer.text import TEXT_RULES_VERSION

_FINISHED = "sha256"  # written last to OUT/tokenizer


class Build:
    """One build of a recipe, or a part of an array's. Attribute: out."""

    def __init__(self, recipe: Recipe, workers: int = 1, part: Part = None):
        """UserError for what is wrong with inputs, filters or a given tokenizer, before any work.
        """
        self.out, self._recipe, self._workers, self._part = Path(recipe.out), recipe, workers, part
        self._units = {corpus.name: [[replace(extent, read=corpus.read) for extent in unit]
                                     for unit in plan_whole(
            list(corpus.inputs), corpus.read, recipe.unit_bytes, recipe.out, workers=workers,
            skip_bad_files=recipe.skip_bad_files, max_bad=recipe.max_bad,
            is_divided=bool(corpus.documents))] for corpus in recipe.corpora}
        check_named_once(list(map(extents_of, self._units.values())))
        self._filters = {corpus.name: read_rules(corpus.filters)
                         for corpus in recipe.corpora if corpus.filters}
        for corpus in recipe.corpora:
            if corpus.words:
                words_function(corpus.words)
        path = recipe.tokenizer.path
        self._tokenizer = Tokenizer(fetch(path)) if path else None
        if recipe.against:
            plan_units(list(recipe.against), ReadOptions())

    def run(self) -> None:
        """Do what is not done, and write OUT/corpus.json, by which a run finds all of it."""
        recipe = self._recipe
        self.out.mkdir(parents=True, exist_ok=True)
        units = identified(list(chain.from_iterable(self._units.values())), self.out)  # hashed once
        write_atomic(self.out / ".inputs.json", json.dumps(inputs_of(units), indent=0))
        everything = list(units.values())
        named = iter(everything)
        self._units = {name: [next(named) for _ in units] for name, units in self._units.items()}
        tokenizer = self._made("tokenizer", self._make_tokenizer, everything)
        if recipe.dedup:
            self._made("duplicates", find_duplicates, everything, self.out / "duplicates",
                       read=ReadOptions(), near_threshold=recipe.near, workers=self._workers)
        for corpus in recipe.corpora:
            if recipe.against:
                self._made(f"contaminated in {corpus.name}", find_contamination,
                           self._units[corpus.name], list(recipe.against), self.out
                           / "contaminated" / corpus.name, read=corpus.read, words=recipe.words,
                           workers=self._workers)
            self._made(f"tokens of {corpus.name}", self._tokenize, corpus, tokenizer)
        for target in self.manifests():
            for seq_len in recipe.seq_len:
                self._made(f"{target}, sequences of {seq_len}", pack_corpus, target, tokenizer,
                           seq_len, workers=self._workers)
        corpora, manifests = recipe.corpora, self.manifests()
        tokens = [float(manifests[self.targets(corpus)[0]].tokens) for corpus in corpora]
        weights = [corpus.weight for corpus in corpora] if corpora[0].weight else \
            temperature_weights(tokens, recipe.mixture_temperature)
        heldout = {corpus.name: f"heldout/{corpus.name}" for corpus in corpora
                   if self.targets(corpus)[1:]}
        sources = {f"train/{corpus.name}": weight
                   for corpus, weight in zip(corpora, weights, strict=True)}
        write_atomic(self.out / BUILT, json.dumps(asdict(Built(sources, heldout, "tokenizer")),
                                                  indent=1) + "\n")

    def _made(self, what: str, make: Callable, *args, **options) -> Any:
        """Return what `make` returns, and say how long it took."""
        begun = time.monotonic()
        if self._part and what != "tokenizer":  # which is one piece of work
            self._completed(make, *args, **options, part=self._part)
        result = self._completed(make, *args, **options)
        print(f"{what}: {format_duration(time.monotonic() - begun)}", flush=True)
        return result

    def _completed(self, make: Callable, *args, **options) -> Any:
        """Return what `make` returns; a part of an array waits until no other is in its way."""
        while True:
            try:
                return make(*args, **options)
            except AtWorkError:
                if not self._part:
                    raise
                time.sleep(0.2)

    def _make_tokenizer(self, planned: list[list[Extent]]) -> Tokenizer:
        out, wanted, given = self.out / "tokenizer", self._recipe.tokenizer, self._tokenizer
        symbols = read_symbols(wanted.add_tokens)
        description = {"tokenizer": given.sha256 if given else asdict(wanted),
                       "symbols": symbols, "text_rules": TEXT_RULES_VERSION}
        units = None if given else identified(planned, out)
        with job(out, description, finished=_FINISHED, units=units) as is_done:
            for name, file in given.files.items() if given and not is_done else ():
                write_atomic(out / name, file.data)
            if not given and not is_done:
                train_tokenizer(planned, out / SPM if wanted.kind == "unigram" else out, wanted,
                                read=ReadOptions(), workers=self._workers,
                                max_bad=self._recipe.max_bad, symbols=symbols)
            write_atomic(out / _FINISHED, f"{Tokenizer(out).sha256}\n")
        return Tokenizer(out)

    def targets(self, corpus: CorpusRecipe) -> list[Path]:
        """Return the directories of a corpus: for training, and held out if there is such a part.
        """
        parts = ("train", "heldout")[:2 if corpus.heldout and self._recipe.heldout_share else 1]
        return [self.out / part / corpus.name for part in parts]

    def _tokenize(self, corpus: CorpusRecipe, tokenizer: Tokenizer, part: Part = None) -> None:
        recipe, targets = self._recipe, self.targets(corpus)
        made = tokenize_corpus(
            self._units[corpus.name], targets[0], tokenizer, read=corpus.read, clean=CleanOptions(
                corpus.min_characters, corpus.min_letter_share, recipe.max_bad),
            heldout_out=targets[1] if targets[1:] else None, heldout_share=recipe.heldout_share,
            drop_heldout=bool(recipe.heldout_share and not corpus.heldout),
            leave_out=[str(self.out / "duplicates")] * recipe.dedup + [
                str(self.out / "contaminated" / corpus.name)] * bool(recipe.against),
            filters=self._filters.get(corpus.name), words=corpus.words, workers=self._workers,
            part=part)
        for target, manifest in made.items():
            few = "" if corpus.documents else describe_few(self._units[corpus.name])
            if not manifest.documents and few:
                raise UserError(f"{target}: no document of {corpus.name} fell to it: {few}; set "
                                f"one of them, or give more files, and remove {self.out}")
            if not manifest.documents:
                raise UserError(
                    f"{target}: no document of {corpus.name} is left for it ("
                    f"{left_out(manifest.counts)}; data_prep/filter.py shows what filters drop); "
                    f"give more text, or remove {self.out / 'train'} and {self.out / 'heldout'} "
                    "and take other filters, another --heldout_share=X, or heldout = false in its "
                    "[[corpora]]: it needs no held-out part then")

    def manifests(self) -> dict[Path, Manifest]:
        """Return what was made: the manifest of each directory."""
        return {target: read_manifest(target)[0] for corpus in self._recipe.corpora
                for target in self.targets(corpus)}

    def plan(self) -> list[str]:
        """Return what a build would do: inputs and stages."""
        recipe, lines = self._recipe, []
        stages = [self.out / "tokenizer" / _FINISHED]
        stages += [self.out / "duplicates" / MANIFEST] * recipe.dedup
        for corpus in recipe.corpora:
            units = self._units[corpus.name]
            paths = {extent.path for extent in extents_of(units)}
            lines.append(f"{corpus.name}: {counted(len(paths), 'file')}, "
                         f"{counted(len(units), 'work unit')}")
            stages += [self.out / "contaminated" / corpus.name / MANIFEST] * bool(recipe.against)
            for target in self.targets(corpus):
                stages += [target / MANIFEST, *(rows_directory(target, seq_len) / MANIFEST
                                                for seq_len in recipe.seq_len)]
        for path in stages:
            state = "there" if path.exists() else "begun" if path.parent.exists() else "to do"
            lines.append(f"  {state:6} {path.parent}")
        return lines
