"""Web archives: texts of .wet files, pages of .warc files, and what is damaged in them."""

import gzip

import pytest
from data_helpers import documents_of

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.documents import ReadOptions

PAGE = (b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=iso-8859-1\r\n\r\n<html><body>"
        b"<nav>menu</nav><p>Gr\xfc\xdfe an alle, in a paragraph that is long enough.</p>"
        b"</body></html>")
MISSING = PAGE.replace(b"200 OK", b"404 Not Found")
IMAGE = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n\x89PNG"


def record(kind: str, body: bytes, number: int = 0, extra: str = "") -> bytes:
    content = "application/http; msgtype=response" if kind == "response" else "text/plain"
    head = (f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://example.org/{number}\r\n"
            f"WARC-Record-ID: <urn:uuid:{number}>\r\nContent-Type: {content}\r\n{extra}"
            f"Content-Length: {len(body)}\r\n\r\n")
    return head.encode() + body + b"\r\n\r\n"


INFO = record("warcinfo", b"software: x\r\n")
TEXTS = [record("conversion", "Grüße\nan alle".encode(), 1,
                "WARC-Identified-Content-Language: deu,eng\r\n"),
         record("conversion", b"second", 2, "WARC-Identified-Content-Language: eng\r\n")]
PAGES = [record("request", b"GET / HTTP/1.1\r\n\r\n"), record("response", PAGE, 3),
         record("response", MISSING, 4), record("response", IMAGE, 5)]


def read(path, data: bytes, **options):
    pytest.importorskip("fastwarc")
    path.write_bytes(data)
    return documents_of(path, **options)


@pytest.mark.parametrize("name", ["a.wet", "a.warc.wet.gz", "a.warc.gz"])
def test_texts_of_an_archive_with_language_and_address(tmp_path, name):
    parts = [INFO, *TEXTS]
    data = b"".join(map(gzip.compress if name.endswith(".gz") else bytes, parts))
    found = read(tmp_path / name, data, label_key="language", id_key="url")
    assert [(d.text, d.label, d.id, d.problem) for d in found] == [
        ("Grüße\nan alle", "deu", "http://example.org/1", ""),
        ("second", "eng", "http://example.org/2", "")]
    assert found[1].place() == f"{tmp_path / name}:row 3"


def test_pages_become_their_main_text_only_if_asked(tmp_path):
    pytest.importorskip("resiliparse")
    path = tmp_path / "a.warc"
    with pytest.raises(UserError, match="holds 3 pages and no text; give --extract_html"):
        read(path, b"".join([INFO, *PAGES]))
    found = read(path, b"".join([INFO, *PAGES, *TEXTS]), extract_html=True)
    assert [d.text for d in found] == [
        "Grüße an alle, in a paragraph that is long enough.", "Grüße\nan alle", "second"]
    assert not ReadOptions().extract_html


@pytest.mark.parametrize("data, message", [
    (b"".join(TEXTS)[:-9], "record 2 has no end"),
    (b"".join(TEXTS)[:-1], "the last record has no end"),
    (TEXTS[0] + TEXTS[1][:40], "no end"),
    (TEXTS[0].replace(b"Length: 15", b"Length: 999") + TEXTS[1], "record 1 has no end"),
    (TEXTS[0].replace(b"Length: 15", b"Length: x") + TEXTS[1], "damaged or cut short"),
    (TEXTS[0].replace(b"Length: 15", b"Length: 4") + TEXTS[1], "damaged or cut short"),
    (b"hello\n" * 30, "damaged or cut short")])
def test_damaged_archives_are_named(tmp_path, data, message):
    with pytest.raises(UserError, match=f"a.wet: .*{message}"):
        read(tmp_path / "a.wet", data)


def test_one_bad_record_is_a_bad_document(tmp_path):
    bad = record("conversion", b"bad \xff", 6)
    found = read(tmp_path / "a.wet", TEXTS[0] + bad + TEXTS[1], max_document_bytes=14)
    assert [d.problem[:20] for d in found] == ["a record longer than", "invalid UTF-8 (inval", ""]
