"""Documents of web archives: .warc and .wet files (package fastwarc).

A record of type `conversion` is text, as Common Crawl's .wet files hold it. Pages as they were
fetched (`response` records: HTTP 200, HTML) become documents if `extract_html` asks for it: their
main text, by resiliparse. All other records are no text, and are skipped.
"""

from collections.abc import Iterator

from deberta_ds.base.errors import UserError, of_extra
from deberta_ds.corpus.documents import Extent, ReadOptions
from deberta_ds.files.inputs import open_bytes

_HTML = ("text/html", "application/xhtml+xml")
_END = b"\r\n\r\n"  # of every record


def read_records(extent: Extent, options: ReadOptions) -> Iterator[tuple[int, dict, str]]:
    """Yield (number of the record, its fields, problem): text, url, id, language and date.

    UserError for a file that is cut short, and for one that holds pages where texts are wanted.
    """
    with of_extra("archives", extent.path):
        from fastwarc.warc import ArchiveIterator, WarcRecordType
    pages, texts = 0, 0
    with open_bytes(extent.path) as file:
        stream = _Stream(file)
        for number, record in enumerate(ArchiveIterator(stream, parse_http=False)):
            is_page = record.record_type == WarcRecordType.response
            pages += is_page
            try:
                if record.record_type != WarcRecordType.conversion and not (
                        is_page and options.extract_html and _is_html(record)):
                    continue
            except OSError as error:
                yield number, {}, f"damaged HTTP headers ({error})"
                continue
            texts += 1
            data = record.reader.read(options.max_document_bytes + 1)
            length = record.headers.get("Content-Length", "")
            if not is_page and (not length.isdecimal() or len(data) < min(
                    int(length), options.max_document_bytes)):
                raise EOFError(f"record {number + 1} has no end")
            yield number, *_fields(record, data, is_page, options)
    if stream.last and not stream.last.endswith(_END):
        raise EOFError("the last record has no end")
    if pages and not texts and not options.extract_html:
        raise UserError(f"{extent.path}: holds {pages} pages and no text; give --extract_html, or "
                        "the .wet file of these pages")


def _fields(record, data: bytes, is_page: bool, options: ReadOptions) -> tuple[dict, str]:
    headers = record.headers
    fields = {"url": headers.get("WARC-Target-URI", ""), "id": headers.get("WARC-Record-ID", ""),
              "language": headers.get("WARC-Identified-Content-Language", "").partition(",")[0],
              "date": headers.get("WARC-Date", ""), "text": ""}
    if len(data) > options.max_document_bytes:
        return fields, (f"a record longer than {options.max_document_bytes} bytes; raise "
                        "--max_document_bytes")
    if is_page:
        return fields | {"text": _main_text(data, record.http_charset)}, ""
    try:
        return fields | {"text": data.decode("utf-8")}, ""
    except UnicodeDecodeError as error:
        return fields, f"invalid UTF-8 ({error.reason}) at byte {error.start} of the record"


def _is_html(record) -> bool:
    record.parse_http(auto_decode="all")
    return (record.is_http_parsed and record.http_headers.status_code == 200
            and record.http_content_type in _HTML)


def _main_text(data: bytes, charset: str | None) -> str:
    with of_extra("archives", "--extract_html"):
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    text = bytes_to_str(data, charset or detect_encoding(data))
    return extract_plain_text(text, main_content=True, alt_texts=False)


class _Stream:
    """A file whose last bytes are remembered: fastwarc ends in silence where a header is cut."""

    def __init__(self, file):
        self._file, self.last = file, b""

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.last = (self.last + data)[-len(_END):]
        return data

    def tell(self) -> int:
        return self._file.tell()
