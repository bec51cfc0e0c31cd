"""Whether a model is read right here: its hidden states and tokens next to transformers', a mask
filled. `doctor.py --model`.
"""

from collections.abc import Iterator

import torch

from deberta_ds.base.errors import UserError, first_line
from deberta_ds.base.numbers import format_count
from deberta_ds.checkpoint.find import local_copy
from deberta_ds.evaluate.fill_mask import check_fills_masks, fill_mask
from deberta_ds.release import networks, read_back
from deberta_ds.release.reader import loaded, read_release

_TEXT = "Paris is the [MASK] of France."


def examine_model(source: str) -> Iterator[str]:
    """Yield lines on the model at `source` (a directory, a URL, OWNER/NAME of the Hub); those that
    say that something is wrong begin with "PROBLEM: ". UserError if it cannot be read at all.
    """
    import transformers

    path = local_copy(source)
    release = read_release(path)
    network, model = release.main, loaded(release)
    size = sum(tensor.numel() for tensor in network.tensors.values())
    yield (f"{source}: {network.config.num_layers} layers of {network.config.hidden_size}, "
           f"{format_count(size)} parameters" + (", and a generator" if release.generator else ""))
    yield from (f"  {note}" for note in release.notes)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        theirs = transformers.AutoModel.from_pretrained(path, local_files_only=True,
                                                        dtype=torch.float64).eval()
    except Exception as error:  # of its many readers
        yield (f"not compared: transformers cannot load it ({first_line(error)}); "
               "launch/convert.py --to hf writes a directory that it reads, and compares")
    else:
        # In fp64: rounding hides nothing.
        gap = read_back.hidden_state_error(theirs, network, of_source=True)
        yield (f"{'' if gap <= networks.TOLERANCE else 'PROBLEM: '}hidden states differ from "
               f"transformers' by {gap:.1e} of the largest one, allowed: {networks.TOLERANCE:.0e}")
        yield from networks.changes_beyond_reach(release)
    if model.tokenizer is None:
        yield "no tokenizer that is read; nothing was tokenized"
        return
    try:
        other = read_back.check_tokenizer(path)
        count = len(read_back.SENTENCES)
        yield f"tokens: {count - len(other)} of {count} texts as AutoTokenizer"
        yield from (f"  {line}" for line in other)
    except UserError as error:
        yield f"tokens: not compared: {error}"
    try:
        check_fills_masks(model, source)
    except UserError as error:
        yield f"no mask filled: {error}"
        return
    found = fill_mask(model, _TEXT)[0]
    yield f"{_TEXT}  " + ", ".join(f"{one.text} {one.probability:.0%}" for one in found)
