"""Read a model of any format into a `Release`, or load it for use (`load_backbone`).

Formats, told apart by their files:
    ours        a checkpoint or run directory (run.json, sharded), or model.json (written by export)
    foreign     config.json or model_config.json next to safetensors or `.bin` files: Hugging Face
                directories, microsoft pairs, official training output (discriminator/, generator/)

Public files mix both foreign worlds (config.json next to a `.bin` with microsoft's heads), so one
reader serves both and goes by the names of the tensors.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from deberta_ds.base.errors import UserError, looked_in
from deberta_ds.base.files import read_json
from deberta_ds.checkpoint.find import is_unsaved_run, local_copy, newest
from deberta_ds.checkpoint.saved_state import MASTER
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.backbone import Backbone
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.release import foreign, model_files
from deberta_ds.release import networks as modules
from deberta_ds.release.networks import Network, Release, check_network, derive_words
from deberta_ds.tokenizer import Tokenizer

SIDE_FILE = "pretraining_heads.safetensors"
_CONFIG_NAMES = ("config.json", "model_config.json")
_STEP_FILE = re.compile(r"pytorch\.model-(\d+)\.bin")


@dataclass
class LoadedModel:
    """A model in fp32 on the CPU, in evaluation mode.

    backbone: ids and mask -> hidden states; the discriminator of a replaced-token run.
    tokenizer: None where the source has none that is read.
    masked_lm: (token embedding, MaskedLm) of the model itself or, if it has no masked-LM head with
    a position table, of the generator next to it; None without either. Its layers are its own.
    replaced_token_head: of the backbone, where the source has it.
    identity: digests of what was read.
    """

    backbone: Backbone
    tokenizer: Tokenizer | None
    model_config: ModelConfig
    masked_lm: tuple[TokenEmbedding, MaskedLm] | None
    replaced_token_head: ReplacedTokenHead | None = None
    identity: dict[str, str] = field(default_factory=dict)

    def check_length(self, tokens: int, place: str | Path) -> None:
        """UserError if rows of `tokens` are longer than the positions of this model, of `place`."""
        if tokens > self.model_config.max_position:
            raise UserError(f"{place}: has {self.model_config.max_position} positions, but the "
                            f"sequences have up to {tokens} tokens")


def load_backbone(path: str | Path, tokenizer: str | Path | None = None, *, for_text: bool = False
                  ) -> LoadedModel:
    """Return the model at `path`: our checkpoint, run or directory, Hugging Face, or microsoft.

    `tokenizer` is the path of the one it was trained with, where there is none next to it;
    `for_text` says that one is needed. Raises UserError for a missing, damaged or foreign model.
    """
    release = read_release(path, tokenizer)
    if for_text and release.tokenizer is None:
        Tokenizer(path, release.tokenizer_files)  # says what is missing
    return loaded(release)


def loaded(release: Release) -> LoadedModel:
    """Return a release as a model for use."""
    main = release.main
    decoding = next((one for one in release.networks().values() if one.has_masked_lm), None)
    masked_lm = None
    if decoding is not None:
        masked_lm = modules.build_masked_lm(Network(decoding.config, {
            name: tensor.float().clone() for name, tensor in decoding.tensors.items()}))
    head = modules.build_replaced_token_head(main) if main.has("rtd_head.") else None
    return LoadedModel(modules.build_backbone(main), release.tokenizer, main.config, masked_lm,
                       head, release.identity)


def read_release(source: str | Path, tokenizer: str | Path | None = None, key: str = MASTER
                 ) -> Release:
    """Return the release stored at `source`; UserError if it is none, damaged or inconsistent.

    `tokenizer` is the path of the one it was trained with, where `source` has none. It, or the
    one of `source`, is the release's; None where there is none that is read. `key`: what of the
    optimizer's state of a checkpoint is taken for the weights, such as a moving average.
    """
    path = _existing(source)
    if _is_run(path):
        release = model_files.read_checkpoint(path, key)
    elif key != MASTER:
        raise UserError(f"{path}: is no checkpoint, and no other model has {key!r}; name a run or "
                        "one of its checkpoints")
    elif _is_ours(path):
        release = model_files.read_ours(path)
    else:
        return read_foreign(path, tokenizer)
    return _checked(release, path, tokenizer, str)


def read_foreign(path: Path, tokenizer: str | Path | None = None) -> Release:
    """Return the release of a Hugging Face directory or microsoft's files, as `read_release`."""
    release = _read_foreign(path)
    table = foreign.name_table(release.main.config)
    return _checked(release, path, tokenizer,
                    lambda ours: next(iter(foreign.rename({ours: None}, table))))


def _checked(release: Release, path: Path, tokenizer: str | Path | None,
             said: Callable[[str], str]) -> Release:
    """Return a release with its tokenizer and digests; `said` gives the names in its files."""
    networks = release.networks().items()
    for name, network in networks:
        check_network(network, f"{path} ({name})" if release.generator else str(path), said)
    rows = {name: network.config.vocab_size for name, network in networks}
    if len(set(rows.values())) > 1:
        raise UserError(f"{path}: the token embedding has {rows['main']} rows, the generator's "
                        f"{rows['generator']}; they must be of one model: put the generator that "
                        "was trained with it in that one's place")
    weights = model_files.tensors_digest({f"{name} {key}": tensor for name, network in networks
                                          for key, tensor in network.tensors.items()})
    release.tokenizer = model_files.open_tokenizer(release.tokenizer_files)
    if tokenizer is not None:
        given = Tokenizer(tokenizer)
        if release.tokenizer:
            check_same(given, release.tokenizer, path)
        release.tokenizer, release.tokenizer_files = given, given.files
    if (found := release.tokenizer) and found.size > rows["main"]:
        raise UserError(f"{path}: the tokenizer {found.path} has {found.size} ids, but the token "
                        f"embedding only {rows['main']} rows; put the one that it was trained with "
                        "there. To add tokens, give the longer one to a run with [init] from")
    release.place = release.place or path
    release.identity = {
        "weights": weights,
        "shape": xxhash.xxh3_128_hexdigest(repr([(name, network.config, network.rest)
                                                 for name, network in networks]).encode()),
        "tokenizer": found.sha256 if found else ""}
    return release


def check_same(given: Tokenizer, own: Tokenizer, place: str | Path) -> None:
    """Raise UserError if `given` is not the tokenizer that the model at `place` has."""
    if own.sha256 != given.sha256:
        raise UserError(f"{given.path}: {place} has a tokenizer of its own, and this is another "
                        "one; leave --tokenizer out")


def read_shapes(source: str | Path) -> dict[str, ModelConfig]:
    """Return the shapes of the networks at `source`, "main" and where there is one "generator".

    Of weights only a v1 model's are read: whether its keys have biases stands nowhere else.
    """
    path = _existing(source)
    if _is_run(path):
        return model_files.shapes_of_checkpoint(path)
    if _is_ours(path):
        return {name: config for name, (config, _) in model_files.describe_ours(path).items()}
    shapes = {}
    for name, (weights, values, place) in _find_foreign(path).items():
        shape, _ = foreign.from_theirs(values, place, key_bias=True)
        if foreign.is_v1_shape(shape):
            shape = _read_network(weights, values, place, []).config
        shapes[name] = shape
    return shapes


def checkpoint_of(source: str | Path) -> str:
    """Return the newest checkpoint of a run, and any other model as it is named."""
    path = _existing(source)
    return str(newest(path)) if _is_run(path) else str(source)


def read_tokenizer(source: str | Path) -> Tokenizer | None:
    """Return the tokenizer of the model at `source`, None where it has none that is read."""
    directory = _existing(source)
    if _is_run(directory):
        directory = newest(directory)
    elif not _is_ours(directory):
        directory = _find_foreign(directory)["main"][0].parent
    return model_files.open_tokenizer(model_files.find_tokenizer_files(directory))


def _existing(source: str | Path) -> Path:
    path = Path(source)
    if not path.exists():
        path = local_copy(source)
    if not path.exists():
        raise UserError(f"{path}: no such file or directory{looked_in(path)}")
    if not (path.is_dir() or path.is_file()):
        raise UserError(f"{path}: neither a directory nor a file")
    return path


def _is_run(path: Path) -> bool:
    """Return whether a directory is a checkpoint, or a run's, be it one that has none yet."""
    return (path / "run.json").exists() or (path / "checkpoints").is_dir() or (
        model_files.weight_file(path) is None and not _is_ours(path) and is_unsaved_run(path))


def _is_ours(directory: Path) -> bool:
    """Return whether a directory was written by `model_files.write_ours`."""
    return (directory / model_files.MODEL_FILE).is_file()


# Of one network: its weights, its configuration as it is written, and the place of that.
_Files = tuple[Path, dict, str]


def _find_foreign(path: Path) -> dict[str, _Files]:
    """Return the files of a foreign model's networks, "main" and perhaps "generator"."""
    if path.is_file() and not any((path.parent / name).is_file() for name in _CONFIG_NAMES):
        raise UserError(f"{path}: a file without {' or '.join(_CONFIG_NAMES)} next to it; name a "
                        "model directory, or the weight file in one")
    if path.is_file() and not path.name.endswith(
            (".bin", ".safetensors", ".pt", ".pth", ".index.json")):
        raise UserError(f"{path}: no weight file (.safetensors or .bin); name the directory of a "
                        "model or a run")
    if path.is_dir() and not any((path / name).exists() for name in _CONFIG_NAMES):
        path = _newest_official_step(path)
    directory = path if path.is_dir() else path.parent
    weights = model_files.weight_file(directory) if path.is_dir() else path
    if weights is None:
        raise UserError(f"{directory}: no weight file; model.safetensors or pytorch_model.bin is "
                        "expected")
    config = _config_of(directory)
    values = read_json(config)
    # rtd_*.json nests both networks
    found = {"main": (weights, values.get("discriminator", values), str(config))}
    if place := _find_generator(directory, weights):
        values = read_json(place[0])
        found["generator"] = place[1], values.get("generator", values), str(place[0])
    return found


def _read_foreign(path: Path) -> Release:
    files = _find_foreign(path)
    notes: list[str] = []
    networks = {name: _read_network(*one, notes) for name, one in files.items()}
    release = Release(networks["main"], networks.get("generator"), notes=notes)
    try:
        derive_words(release)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    release.tokenizer_files = model_files.find_tokenizer_files(files["main"][0].parent)
    return release


def _config_of(directory: Path) -> Path:
    for name in _CONFIG_NAMES:
        if (directory / name).is_file():
            return directory / name
    raise UserError(f"{directory}: neither {' nor '.join(_CONFIG_NAMES)}; not a model directory")


def _newest_official_step(directory: Path) -> Path:
    """Return the newest discriminator file of the official training's output directory."""
    by_step = {int(found[1]): file
               for file in (directory / "discriminator").glob("pytorch.model-*.bin")
               if (found := _STEP_FILE.fullmatch(file.name))
               and (directory / "generator" / file.name).is_file()}
    if not by_step:
        raise UserError(f"{directory}: not a model: no {', '.join(_CONFIG_NAMES)}, model.json or "
                        "run.json, and no discriminator/ and generator/ with a common step")
    return by_step[max(by_step)]


def _find_generator(directory: Path, weights: Path) -> tuple[Path, Path] | None:
    """Return (configuration, weights) of the generator next to a model, or None."""
    inside = directory / "generator"
    if inside.is_dir() and (own := model_files.weight_file(inside)):
        return _config_of(inside), own
    hub = directory / "pytorch_model.generator.bin"
    if hub.is_file():
        return directory / "generator_config.json", hub
    sibling = directory.parent / "generator" / weights.name
    if directory.name == "discriminator" and sibling.is_file():
        return _config_of(sibling.parent), sibling
    return None


def _read_network(weights: Path, values: dict, place: str, notes: list[str]) -> Network:
    tensors, others = model_files.read_tensors(weights)
    side = weights.parent / SIDE_FILE
    notes += [f"dropped: {weights.name} entry {name!r}, which is no tensor" for name in others]
    if side.is_file():
        tensors |= model_files.read_tensors(side)[0]
    tensors = _drop_copies(_without_prefix(tensors, weights), weights, notes)
    tensors = foreign.rename(tensors, foreign.LEGACY_HEAD)
    is_v1 = any(name.endswith(foreign.V1_ONLY) for name in tensors)
    config, rest = foreign.from_theirs(values, place, key_bias=not is_v1)
    if is_v1:
        tensors = foreign.unpack_v1(tensors, config)
    elif values.get("model_type") != foreign.V2 and foreign.is_v1_shape(config):
        tensors, key_bias = _without_zero_key_biases(tensors, notes)
        config, rest = foreign.from_theirs(values, place, key_bias=key_bias)
    table = tensors.get(modules.TABLE) if "model_type" in values else None
    tensors = modules.with_unread_rows(tensors, config, str(weights))
    tensors = foreign.to_ours(tensors, config)
    return Network(config, tensors, rest, table)


def _without_prefix(tensors: dict[str, Tensor], place: Path) -> dict[str, Tensor]:
    """Return tensors without "deberta." (or "bert.", in old official files) before their names."""
    bare = {}
    for name, tensor in tensors.items():
        short = name
        for prefix in (foreign.PREFIX, "bert."):
            short = short.removeprefix(prefix)
        if short in bare:
            raise UserError(f"{place}: {short} occurs twice, with and without a prefix")
        bare[short] = tensor
    return bare


def _drop_copies(tensors: dict[str, Tensor], place: Path, notes: list[str]) -> dict[str, Tensor]:
    kept = dict(tensors)
    if kept.pop("embeddings.position_ids", None) is not None:
        notes.append("dropped: embeddings.position_ids, a constant buffer")
    for copy, original in foreign.COPIES.items():
        if copy not in kept:
            continue
        if original in kept and not torch.equal(kept[copy], kept[original]):
            raise UserError(f"{place}: {copy} differs from {original}, but DeBERTa ties them")
        kept.setdefault(original, kept[copy])
        del kept[copy]
        notes.append(f"dropped: {copy}, a copy of {original}")
    return kept


def _without_zero_key_biases(tensors: dict[str, Tensor], notes: list[str]
                             ) -> tuple[dict[str, Tensor], bool]:
    """Return (tensors, whether there are key biases): the official code adds zero ones to v1."""
    biases = [name for name in tensors if name.endswith(("key_proj.bias", "pos_key_proj.bias"))]
    if any(tensors[name].any() for name in biases):
        return tensors, True
    if biases:
        notes.append(f"dropped: {len(biases)} key biases, all zero (v1 has none)")
    return {name: tensor for name, tensor in tensors.items() if name not in biases}, False
