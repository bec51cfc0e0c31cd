"""Ways to break a value, a tree of values, bytes and files; each is drawn from a random.Random.

A change that no reader may take for good is marked as nonsense: NaN, infinities, another type, a
key that nobody knows, a key written twice, bytes that are missing.
"""

import copy
import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

LONG = "x" * 5000
TEXTS = ["", " ", "\u0000", "\u202e\u0661", "../../etc/passwd", "nan", "-1", "true", "auto", LONG,
         "<script>alert(1)</script>", "%s{}$(id)", "\U0001f600" * 50, "/", "a\nb", "'\"", "\ud800",
         ".", "..", "~", "\\", "1e999", "\x1b[2J", "{x}", "a/b/c", "\ufeff", "\u200b", "\u2028",
         "@placeholder", "@highlight", "'s"]
NUMBERS = [0, 1, -1, 2, 3, 7, -2, 10**6, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.5, 1e-300,
           1e308, 1.5, 2.0, -0.0]
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
        return random.choice([[], {}, [1, [2]], {"a": {"b": 1}}, [None], [[]], [{}], [old]]), \
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
    # Of a long list of alike things the first levels would hardly ever be drawn.
    depth = random.randint(1, max(len(path) for path, *_ in places))
    path, parent, key = random.choice([place for place in places if len(place[0]) <= depth])
    old, name = parent[key], ".".join(map(str, path))
    kind = random.randrange(10)
    if kind == 0:
        del parent[key]
        return whole, Change(f"deleted {name}", False)
    if kind == 1 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
        return whole, Change(f"renamed {name} to {key}x", True)
    if kind == 2 and isinstance(parent, dict):
        unknown = random.choice(["unknown", "", "\u00e9", "__class__", "a.b", "-", "a\nb", "\ud800",
                                 "\u0000"])
        parent[unknown] = old
        return whole, Change(f"added {unknown!a} beside {name}", True)
    if kind == 3 and isinstance(parent, list):
        parent.append(copy.deepcopy(old))
        return whole, Change(f"doubled {name}", False)
    if kind == 4 and len(parent) > 1:
        other = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
        return whole, Change(f"exchanged {name} and {other}", False)
    if kind == 5:
        parent[key] = None
        return whole, Change(f"{name} = null", False)
    parent[key], nonsense = value(random, old)
    return whole, Change(f"{name} = {str(parent[key])[:60]!a} (was {str(old)[:40]!a})", nonsense)


def _places(node: Any, path: tuple):
    items = node.items() if isinstance(node, dict) else \
        enumerate(node) if isinstance(node, list) else ()
    for key, child in list(items):
        yield (*path, key), node, key
        yield from _places(child, (*path, key))


_HUGE = ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "9" * 5000,
         "-" + "9" * 5000, "1e400", "NaN", "-Infinity", "1.5e-9999"]


def json_text(random: Random, whole: Any) -> tuple[str, Change]:
    """Return JSON text that no tree of values gives: keys twice, nests, numbers without end."""
    text = json.dumps(whole)
    kind = random.randrange(6)
    if kind == 0 and isinstance(whole, dict) and whole:
        key = random.choice(list(whole))
        other = json.dumps(value(random, whole[key])[0])
        return f"{{{json.dumps(key)}: {other}, {text[1:]}", Change(f"{key} twice", True)
    if kind == 1:
        mark = "@here@"
        changed, change = tree(random, whole)
        places = [place for place in _places(changed, ())]
        if places:
            _, parent, key = random.choice(places)
            parent[key] = mark
            huge = random.choice(_HUGE)
            return json.dumps(changed).replace(f'"{mark}"', huge), \
                Change(f"{change.text}; {key} = {huge[:20]}...", True)
    if kind == 2:
        return random.choice(["[]", "null", "3", '"text"', "true", "{}", "[{}]", "NaN", "[" * 9000,
                              "{}{}", "", " ", "\n\n", '{"a": 1', "9" * 9000]), \
            Change("replaced as a whole", True)
    if kind == 3:
        return text + random.choice([",", "}", "// comment", "\0", text, "\n\n[]"]), \
            Change("with something behind it", True)
    if kind == 4:
        return text.replace('"', "'").replace("true", "True"), Change("as Python writes it", True)
    return random.choice([text.replace(":", ": ,", 1), text.replace("}", ",}"), text[1:]]), \
        Change("with a comma too many, or a bracket too few", True)


_ENCODINGS = ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7", "cp1252"]


def json_file(random: Random, path: Path) -> Change:
    """Break a JSON file, or what stands in its place."""
    kind = random.random()
    if kind < 0.25:
        return file(random, path)
    whole = json.loads(path.read_text())
    if kind < 0.5:
        text, change = json_text(random, whole)
    else:
        whole, change = tree(random, whole)
        text = json.dumps(whole)
    path.write_text(text)
    return Change(f"{path.name}: {change.text}", change.nonsense)


def jsonl_file(random: Random, path: Path) -> Change:
    """Break one line of a file of JSON lines, or the file."""
    lines = path.read_text().splitlines()
    kind = random.random()
    if kind < 0.25 or not lines:
        return file(random, path)
    number = random.randrange(len(lines))
    if kind < 0.45:
        lines[number], change = json_text(random, json.loads(lines[number]))
    elif kind < 0.55:
        lines.insert(number, random.choice(["", "  ", "\0", lines[0], "null", "[]"]))
        change = Change("a line more", False)
    else:
        record, change = tree(random, json.loads(lines[number]))
        lines[number] = json.dumps(record)
    path.write_text("\n".join(lines) + random.choice(["\n", "\n", "\r\n", ""]))
    return Change(f"{path.name}:{number + 1}: {change.text}", change.nonsense)


def data(random: Random, whole: bytes) -> tuple[bytes, Change]:
    """Return other bytes than `whole`, and what was changed."""
    size = max(len(whole), 1)
    start = random.randrange(size)
    end = min(size, start + random.choice([1, 2, 16, 256, 4096]))
    kind = random.randrange(12)
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
    if kind == 8:
        encoding = random.choice(_ENCODINGS)
        text = whole.decode("utf-8", errors="replace")
        return text.encode(encoding, errors="replace"), Change(f"written in {encoding}", False)
    if kind == 9:
        return whole.replace(b"\n", b"\r\n"), Change("with ends of lines as in Windows", False)
    if kind == 10:
        return whole[:8] + b"\xff" * 8 + whole[16:], Change("0xff in bytes 8 to 16", False)
    return random.randbytes(random.randrange(1, 4000)), Change("replaced by noise", False)


def file(random: Random, path: Path) -> Change:
    """Break a file, or what stands in its place."""
    kind = random.randrange(18)
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
    if kind == 5:
        path.unlink()
        path.symlink_to("/dev/null")
        return Change(f"{name}: /dev/null", False)
    if kind == 6:
        other = random.choice(sorted(p for p in path.parent.iterdir() if p.is_file()))
        if other != path:
            shutil.copyfile(other, path)
        return Change(f"{name}: a copy of {other.name}", False)
    if kind == 7:
        path.unlink()
        path.symlink_to("..")
        return Change(f"{name}: a link to the directory above", True)
    if kind == 8:
        path.unlink()
        os.mkfifo(path)
        return Change(f"{name}: a pipe that nobody writes to", False)
    changed, change = data(random, path.read_bytes())
    path.write_bytes(changed)
    return Change(f"{name}: {change.text}", change.nonsense)


_STRAY = [b"a\nb", b"\xff\xfe", b" ", b"-rf", b".hidden", b"x" * 255, "\u202e".encode(), b"nul.tmp",
          b"*", b"00000-000.npy.bak"]


def directory(random: Random, path: Path) -> Change:
    """Break a directory, or what stands in its place."""
    kind = random.randrange(8)
    if kind == 0:
        path.chmod(0)
        return Change(f"{path.name}/: nobody may enter", False)
    if kind == 1:
        stray = os.fsencode(path) + b"/" + random.choice(_STRAY)
        if random.random() < 0.5:
            os.mkdir(stray)
        else:
            with open(stray, "wb") as new:
                new.write(b"x")
        return Change(f"{path.name}/: {os.path.basename(stray)!r} in it", False)
    if kind == 2:
        path.rename(path.with_name(f"{path.name}-away"))
        path.symlink_to(f"{path.name}-away")
        return Change(f"{path.name}/: behind a link", False)
    shutil.rmtree(path)
    if kind == 3:
        path.write_text("a file\n")
        return Change(f"{path.name}/: a file", False)
    if kind == 4:
        path.mkdir()
        return Change(f"{path.name}/: empty", False)
    if kind == 5:
        path.symlink_to(path.name)
        return Change(f"{path.name}/: a link to itself", False)
    if kind == 6:
        path.symlink_to("/dev/null")
        return Change(f"{path.name}/: /dev/null", False)
    return Change(f"{path.name}/: deleted", False)


def something_in(random: Random, root: Path) -> Change:
    """Break one file or directory of a tree; the JSON files in it more often than the others."""
    if random.random() < 0.12:
        return directory(random, random.choice(directories_under(root)))
    files = files_under(root)
    texts = [path for path in files if path.suffix in (".json", ".jsonl")]
    path = random.choice(texts if texts and random.random() < 0.5 else files)
    where = path.relative_to(root)
    breaks = {".json": json_file, ".jsonl": jsonl_file}.get(path.suffix, file)
    if path.suffix == ".json" and path.stat().st_size > 50_000:
        breaks = file
    change = breaks(random, path)
    return Change(f"{where.parent}/{change.text}", change.nonsense)


def files_under(directory: Path) -> list[Path]:
    """Return every file below `directory`, in order."""
    return sorted(Path(base) / name for base, _, names in os.walk(directory) for name in names)


def directories_under(directory: Path) -> list[Path]:
    """Return `directory` and every one below it, in order."""
    return sorted(Path(base) for base, _, _ in os.walk(directory))
