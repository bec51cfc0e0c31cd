"""Look at what was written as a stranger would: load it again and compare.

A directory is reported as written only if every tensor reads back bit for bit, and, for Hugging
Face, if transformers loads it offline without a missing or unexpected key and computes our hidden
states.
"""

from pathlib import Path

import torch

from deberta_ds.base.errors import UserError, first_line
from deberta_ds.base.files import read_json
from deberta_ds.release.model_files import find_tokenizer_files, open_tokenizer
from deberta_ds.release.networks import (
    TOLERANCE,
    Network,
    Release,
    as_transformers_reads,
    build_backbone,
    sample_batches,
)
from deberta_ds.release.reader import read_release

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "def load(path): return json.loads(path.read_text())  # 3.14 & more",
    "  Two  spaces,\ta tab\nand a line break; naive cafe becomes na\u00efve caf\u00e9.",
    "\u65e5\u672c\u8a9e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f600 \ufb01 e\u0301",
    "",
)


def check_tensors(release: Release, out: Path) -> int:
    """Return the number of tensors that read back bit for bit; UserError if one does not."""
    again = read_release(out)
    count = 0
    for name, network in release.networks().items():
        found = again.networks().get(name)
        if found is None:
            raise UserError(f"{out}: the {name} network did not read back")
        # A format that always has key biases gives a model without them zero ones, and v1 is read
        # without them.
        lost, extra = (sorted(key for key in one.tensors.keys() - other.tensors.keys()
                              if one.tensors[key].any() or not key.endswith("key.bias"))
                       for one, other in ((network, found), (found, network)))
        if lost or extra:
            raise UserError(f"{out}: {name} read back with {lost[:3]} lost and {extra[:3]} new")
        for key, tensor in network.tensors.items():
            if key not in found.tensors:
                continue
            if tensor.dtype != found.tensors[key].dtype or not torch.equal(tensor,
                                                                           found.tensors[key]):
                raise UserError(f"{out}: {name} {key} read back with other values")
            count += 1
    return count


def check_hugging_face(release: Release, out: Path) -> list[str]:
    """Return a line on every network compared with transformers; UserError if one differs."""
    lines = []
    for name, network in release.networks().items():
        directory = out / "generator" if name == "generator" else out
        model, loaded_as = _load_with_transformers(directory)
        error = hidden_state_error(model, network)
        if not error <= TOLERANCE:
            raise UserError(f"{directory}: transformers computes other hidden states "
                            f"(relative difference {error:.1e}, allowed {TOLERANCE:.0e})")
        lines.append(f"{name}: {loaded_as}: no missing, no unexpected keys; hidden states differ "
                     f"by {error:.1e} relative")
    return lines


def _load_with_transformers(directory: Path):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    architecture = read_json(directory / "config.json")["architectures"][0]
    is_bare = architecture.endswith("Model")
    cls = transformers.AutoModel if is_bare else getattr(transformers, architecture)
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # what it would report is said below
    try:
        model, info = cls.from_pretrained(directory, local_files_only=True, dtype=torch.float32,
                                          output_loading_info=True, ignore_mismatched_sizes=True)
    finally:
        transformers.utils.logging.set_verbosity(before)
    if keys := info["mismatched_keys"]:
        name, found, wanted = min(keys)
        raise UserError(f"{directory}: {name} has shape {tuple(found)}, but {architecture} asks "
                        f"for {tuple(wanted)}; fix id2label of the source's config.json, or the "
                        "file is of another model")
    for kind in ("missing_keys", "unexpected_keys"):
        if keys := sorted(map(str, info[kind])):
            raise UserError(f"{directory}: transformers reports {kind}: {', '.join(keys[:5])}")
    if type(model).__name__ != architecture:
        raise UserError(f"{directory}: loaded as {type(model).__name__}, not {architecture}")
    return model.eval(), f"AutoModel -> {architecture}" if is_bare else architecture


@torch.no_grad()
def hidden_state_error(theirs, network: Network, of_source: bool = False) -> float:
    """Return the largest difference of hidden states from those of transformers' model `theirs`,
    relative to its largest; computed in the dtype of `theirs`.

    of_source: `theirs` was read from the source, of whose relative table it reads other rows in
    long texts (`changes_beyond_reach`); these are compared as it reads them.
    """
    gaps = []
    for ids_BL, mask_BL in sample_batches(network.config):
        is_other = of_source and network.source_table is not None and bool(
            network.config.position_buckets) and ids_BL.size(1) > network.config.largest_distance
        ours = build_backbone(as_transformers_reads(network, ids_BL.size(1)) if is_other
                              else network).to(theirs.dtype)
        expected = theirs.base_model(ids_BL, attention_mask=mask_BL).last_hidden_state
        hidden, real = ours(ids_BL, mask_BL), mask_BL.bool()
        gaps.append((hidden[real] - expected[real]).abs().max() / expected[real].abs().max())
    return torch.stack(gaps).max().item()  # NaN if one is


def check_tokenizer(out: Path, sentences=SENTENCES) -> list[str]:
    """Return one line for each sentence to which AutoTokenizer gives other ids than ours, of a
    directory that has a tokenizer. UserError if the special ids differ.
    """
    import transformers

    ours = open_tokenizer(find_tokenizer_files(out))
    assert ours is not None
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    except Exception as error:  # whatever its many readers raise: the files came with the model
        raise UserError(f"{out}: AutoTokenizer cannot read the tokenizer files that came with the "
                        f"model ({first_line(error)}); delete tokenizer_config.json "
                        "and the like from the source, keep spm.model or tokenizer.json") from error
    for name, wanted in ours.special_ids.items():
        found = getattr(theirs, f"{name}_token_id")
        if found != wanted:
            raise UserError(f"{out}: AutoTokenizer's {name} id is {found}, ours is {wanted}")
    differing = []
    for sentence in sentences:
        ids = [ours.cls_id, *ours.encode(sentence), ours.sep_id]
        found = theirs(sentence)["input_ids"]
        if found != ids:
            differing.append(f"{sentence!r}: ours {ids}, AutoTokenizer {found}")
    return differing
