"""A file of a web server, which may break its connections: read to its end, or one error."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from urllib.request import Request, urlopen

import pytest
from data_helpers import TEXTS

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.documents import Extent, ReadOptions, split
from deberta_ds.corpus.readers import read_unit
from deberta_ds.files import inputs, remote


@contextmanager
def web_server(content: bytes, cut: int, *, ranges: bool, tag: str = ""):
    """Yield (URL, ranges asked for) of a file whose server breaks off after `cut` bytes of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Range"])
            begin = int(self.headers["Range"][6:-1]) if ranges else 0
            self.send_response(206 if ranges else 200)
            self.send_header("Content-Length", len(content) - begin)
            self.send_header("ETag", tag and f"{tag}{len(asked)}")
            self.end_headers()
            self.wfile.write(content[begin : begin + cut + 20 * (not ranges) * len(asked)])
            self.close_connection = True

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/a.jsonl", asked
        finally:
            server.shutdown()


class WebSystem:
    """What aiohttp gives fsspec, as far as files are read from the front, without that package."""

    def __init__(self, size: int):
        self._size = size

    def info(self, path):
        return {"size": self._size}

    def open(self, path, mode, block_size, size, headers):
        assert block_size == 0 and size == self._size
        response = urlopen(Request(path, headers=headers))
        return SimpleNamespace(r=response, read=response.read1, close=response.close)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_server_that_breaks_connections_is_asked_again(ranges, monkeypatch):
    """A broken connection ended the command; a server that ends a file early was believed."""
    content = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n"
                      for text in TEXTS).encode()
    monkeypatch.setattr(inputs, "file_system", lambda url: (WebSystem(len(content)), url))
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)

    def texts(url):
        extent = Extent(url, "json", 0, 1 << 30)
        (whole, _), = split(extent, 1 << 30, 1 << 20, ReadOptions())
        return [document.text for document in read_unit([whole], ReadOptions())]

    with web_server(content, 20, ranges=ranges) as (url, asked):
        assert texts(url) == TEXTS
        assert len(asked) > 3 and asked[:2] == ["bytes=0-", f"bytes={20 if ranges else 40}-"]
    with web_server(content, 0, ranges=True) as (url, _):
        with pytest.raises(UserError, match=rf"{url}, byte 0: cannot be read in 8 tries \(EOFE"):
            texts(url)
    with web_server(content, 20, ranges=ranges, tag="state") as (url, _):
        with pytest.raises(UserError, match=f"{url}: changed while"):
            texts(url)
