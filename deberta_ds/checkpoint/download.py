"""Runs, checkpoints and models that lie at a URL or on the Hugging Face Hub: a copy in the cache.

The copy of a URL lies in a directory that is named by what is listed there (sizes, times, ETags),
so what has changed is fetched again. A model of the Hub is fetched by huggingface_hub, to its own
cache.
"""

import fcntl
import re
from contextlib import suppress
from pathlib import Path

import xxhash

from deberta_ds.base.errors import UserError, first_line, looked_in
from deberta_ds.base.files import cache_directory
from deberta_ds.checkpoint.run_record import BEST, DIRECTORY, MANIFEST
from deberta_ds.files import remote

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB = "hf://"
_NEVER_READ = ["*.h5", "*.ot", "*.msgpack", "*.onnx", "onnx/*", "openvino/*"]  # other frameworks'


def local_copy(source: str | Path) -> Path:
    """Return where a run, checkpoint or model lies on this machine.

    `source`: a path; a URL, of a run (its newest whole checkpoint), its best, one of its
    checkpoints or a model; hf://OWNER/NAME, also with @REVISION, or OWNER/NAME where neither that
    path nor a directory OWNER exists. Raises UserError.
    """
    name = str(source)
    if name.startswith(_HUB) or (_HUB_NAME.fullmatch(name) and not Path(name).parent.exists()):
        return _of_the_hub(name)
    return _of_a_url(name.rstrip("/")) if "://" in name else Path(source)


def _of_a_url(url: str) -> Path:
    system, root, found = remote.listed_at(url)
    if not found:
        raise UserError(f"{url}: nothing is there; check the address")
    if root in found:
        if url.rpartition("/")[2] != BEST:
            raise UserError(f"{url}: is a file; name the directory of a run or a model")
        text = remote.tried(lambda: system.cat_file(root), url, bool).decode(errors="replace")
        return _of_a_url(f"{url.rpartition('/')[0]}/{text.strip()}")
    whole = re.compile(re.escape(f"{root}/{DIRECTORY}/") + r"(step-\d{8,})/" + re.escape(MANIFEST))
    if steps := [match[1] for path in found if (match := whole.fullmatch(path))]:
        return _of_a_url(f"{url}/{DIRECTORY}/{max(steps, key=lambda step: int(step[5:]))}")
    if any(path.startswith(f"{root}/{DIRECTORY}/") for path in found):
        raise UserError(f"{url}: no whole checkpoint; the upload of the first one has not ended")
    version = xxhash.xxh3_64_hexdigest(repr(sorted(found.items())).encode())
    place = cache_directory(remote.DEFAULT_CACHE.directory) / "models" / version
    place.mkdir(parents=True, exist_ok=True)
    with open(place / ".lock", "w") as held:  # one of a node's ranks fetches, the others wait
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(held, fcntl.LOCK_EX)
        return Path(remote.fetch(url, cache=str(place)))


def _of_the_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, revision = name.removeprefix(_HUB).partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None,
                                      ignore_patterns=_NEVER_READ))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"{name}: no such file or directory{looked_in(name)}, and no model that "
                        f"can be fetched from the Hugging Face Hub ({first_line(error)}); check "
                        "the name, log in with `hf auth login`, or download it elsewhere and name "
                        "its directory") from error
