"""JSON of others: what is no JSON, or may be read in two ways, is refused by name."""

import os
from dataclasses import dataclass

import pytest

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import parse_json, read_json, typed, write_atomic


@pytest.mark.parametrize(("text", "words"), [
    ('{"a": 1, "a": 2}', '"a" is written twice'),
    ('{"b": {"a": 1, "a": 1}}', '"a" is written twice'), ('{"a": NaN}', "NaN is no number of JSON"),
    ('{"a": [-Infinity]}', "-Infinity is no number"), ('{"a": 1e999}', "1e999 is too large"),
    ('{"a": ' + "9" * 5000 + "}", "too large a number"),
    ('{"a": ' + "9" * 60 + "}", "too large a number"), ("[" * 200_000, "nested too deep"),
    ('{"a": ' * 200_000, "nested too deep"), ('{"a": "\\ud83d"}', "half a character"),
    ('{"\\uDE00": 1}', "half a character"), ('{"a": 1}{"a": 1}', "Extra data"),
    ('{"a": "\udc80"}'.encode("utf-8", "surrogatepass"), "decode"), (b'{"a": "\xff"}', "decode"),
    ("", "Expecting value")])
def test_what_is_refused(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        parse_json(text)
    (tmp_path / "file").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=f"file: not valid JSON: .*{words}"):
        read_json(tmp_path / "file")


def test_what_is_read(tmp_path):
    assert parse_json('{"a": [1, 1.5, null, "\\ud83d\\ude00", 1000000000000000019884624838656]}'
                      ) == {"a": [1, 1.5, None, "\U0001f600", 1000000000000000019884624838656]}
    (tmp_path / "marked").write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')
    assert read_json(tmp_path / "marked") == {"a": "\u00e9"}
    for text in ("[]", "3", "null"):
        (tmp_path / "other").write_text(text)
        with pytest.raises(UserError, match="other: not a JSON object"):
            read_json(tmp_path / "other")


def test_what_is_no_file_is_said_at_once(tmp_path):
    """A pipe would be waited for, and a device lost when a finished file is renamed over it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (("pipe", "is a pipe"), ("loop", "Too many levels"), ("none", "No such"),
                        (".", "Is a directory")):
        with pytest.raises(UserError, match=words):
            read_json(tmp_path / name)
    with pytest.raises(UserError, match="pipe: is a device or a pipe"):
        write_atomic(tmp_path / "pipe", "text")
    assert not (tmp_path / "pipe").is_file()


@dataclass(frozen=True)
class _Form:
    count: int
    shares: dict[str, float]
    files: tuple[tuple[int, str], ...] = ()


def test_types_are_held_to(tmp_path):
    good = {"count": 3, "shares": {"a": 1}, "files": [[1, "x"]], "unknown": 0}
    assert typed(_Form, good) == _Form(3, {"a": 1.0}, ((1, "x"),))
    for change, place in (({"count": "3"}, "count"), ({"count": True}, "count"),
                          ({"count": 3.0}, "count"), ({"shares": {"a": "1"}}, "shares.a"),
                          ({"files": [[1]]}, "files.0.1"), ({"files": {}}, "files")):
        with pytest.raises(ValueError, match=f"^{place}: "):
            typed(_Form, good | change)
    with pytest.raises(ValueError, match="^shares: "):
        typed(_Form, {"count": 1})
