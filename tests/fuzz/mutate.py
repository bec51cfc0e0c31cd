"""Ways to break a value, a tree of values, bytes and files; each is drawn from a random.Random.

A change that no reader may take for good is marked as nonsense: NaN, infinities, another type, a
key that nobody knows, bytes that are missing.
"""

import copy
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

LONG = "x" * 5000
TEXTS = ["", " ", "\u0000", "\u202e\u0661", "../../etc/passwd", "nan", "-1", "true", "auto", LONG,
         "<script>alert(1)</script>", "%s{}$(id)", "\U0001f600" * 50, "/", "a\nb", "'\""]
NUMBERS = [0, 1, -1, 2, 3, 7, -2, 10**6, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e-300, 1e308]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


class Change(NamedTuple):
    """What was done, and whether it must be refused."""

    text: str
    nonsense: bool


def value(random: Random, old: Any) -> tuple[Any, bool]:
    """Return (another value, whether it is nonsense in the place of `old`)."""
    kind = random.randrange(6)
    if kind == 0:
        return random.choice(NOT_FINITE), True
    if kind == 1:
        wrong = [text for text in TEXTS if not isinstance(old, str)] or [17, True, 2.5]
        return random.choice(wrong), True
    if kind == 2:
        return random.choice([[], {}, [1, [2]], {"a": {"b": 1}}, [None]]), \
            not isinstance(old, list | dict)
    if kind == 3 and isinstance(old, str):
        return random.choice(TEXTS), False
    if isinstance(old, bool):
        return (not old, False) if kind < 5 else (random.choice([0, 1, 2]), True)
    return random.choice(NUMBERS), isinstance(old, str | list | dict)


def tree(random: Random, whole: Any) -> tuple[Any, Change]:
    """Return a copy of nested dicts and lists with one node changed, and what was changed."""
    whole = copy.deepcopy(whole)
    places = list(_places(whole, ()))
    if not places:
        return [], Change("replaced all by []", True)
    path, parent, key = random.choice(places)
    old, name = parent[key], ".".join(map(str, path))
    kind = random.randrange(8)
    if kind == 0:
        del parent[key]
        return whole, Change(f"deleted {name}", False)
    if kind == 1 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
        return whole, Change(f"renamed {name} to {key}x", True)
    if kind == 2 and isinstance(parent, dict):
        unknown = random.choice(["unknown", "", "\u00e9", "__class__", "a.b", "-"])
        parent[unknown] = old
        return whole, Change(f"added {unknown!r} beside {name}", True)
    if kind == 3 and isinstance(parent, list):
        parent.append(copy.deepcopy(old))
        return whole, Change(f"doubled {name}", False)
    parent[key], nonsense = value(random, old)
    return whole, Change(f"{name} = {str(parent[key])[:60]!r} (was {str(old)[:40]!r})", nonsense)


def _places(node: Any, path: tuple):
    items = node.items() if isinstance(node, dict) else \
        enumerate(node) if isinstance(node, list) else ()
    for key, child in list(items):
        yield (*path, key), node, key
        yield from _places(child, (*path, key))


def data(random: Random, whole: bytes) -> tuple[bytes, Change]:
    """Return other bytes than `whole`, and what was changed."""
    size = max(len(whole), 1)
    start = random.randrange(size)
    end = min(size, start + random.choice([1, 2, 16, 256, 4096]))
    kind = random.randrange(9)
    if kind == 0:
        return whole[:start], Change(f"cut at {start}", False)
    if kind == 1:
        return b"", Change("emptied", False)
    if kind == 2:
        return whole[:start] + whole[end:], Change(f"deleted {start}:{end}", False)
    if kind == 3:
        return whole[:end] + whole[start:], Change(f"doubled {start}:{end}", False)
    if kind == 4:
        return whole[:start] + bytes(end - start) + whole[end:], Change(f"zeroed {start}", False)
    if kind == 5:
        noise = random.randbytes(end - start)
        return whole[:start] + noise + whole[end:], Change(f"noise at {start}:{end}", False)
    if kind == 6:
        bit = 1 << random.randrange(8)
        return whole[:start] + bytes([whole[start] ^ bit if whole else bit]) + whole[start + 1:], \
            Change(f"flipped bit {bit} of byte {start}", False)
    if kind == 7:
        return b"\xff\xfe" + whole, Change("put a UTF-16 mark in front", False)
    return random.randbytes(random.randrange(1, 4000)), Change("replaced by noise", False)


def file(random: Random, path: Path) -> Change:
    """Break a file, or what stands in its place."""
    kind = random.randrange(14)
    name = path.name
    if kind == 0:
        path.unlink()
        return Change(f"{name}: deleted", False)
    if kind == 1:
        path.chmod(0)
        return Change(f"{name}: nobody may read it", True)
    if kind == 2:
        path.unlink()
        path.mkdir()
        return Change(f"{name}: a directory", True)
    if kind == 3:
        path.unlink()
        path.symlink_to(path.name)
        return Change(f"{name}: a link to itself", True)
    if kind == 4:
        path.unlink()
        path.symlink_to("/nonexistent/target")
        return Change(f"{name}: a dangling link", False)
    if kind == 5 and path.with_suffix(".fifo") is not None:
        path.unlink()
        path.symlink_to("/dev/null")
        return Change(f"{name}: /dev/null", False)
    if kind == 6:
        other = random.choice(sorted(p for p in path.parent.iterdir() if p.is_file()))
        if other != path:
            shutil.copyfile(other, path)
        return Change(f"{name}: a copy of {other.name}", False)
    changed, change = data(random, path.read_bytes())
    path.write_bytes(changed)
    return Change(f"{name}: {change.text}", change.nonsense)


def files_under(directory: Path) -> list[Path]:
    """Return every file below `directory`, in order."""
    return sorted(Path(base) / name for base, _, names in os.walk(directory) for name in names)
