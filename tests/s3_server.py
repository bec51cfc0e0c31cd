"""A real S3 server on this machine, with one empty bucket."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from launching import wait_for_server
from rank_helpers import free_port


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield the server's port; s3://shop is an empty bucket. Skips where there is no server."""
    if not (command := shutil.which("moto_server")):
        pytest.skip("no moto_server in the PATH (pipx install 'moto[server]')")
    port = free_port()
    server = subprocess.Popen([command, "-p", str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_server(port)
        for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                            "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
                            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
            monkeypatch.setenv(name, value)
        from pyarrow.fs import S3FileSystem

        S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http",
                     allow_bucket_creation=True).create_dir("shop")
        yield port
    finally:
        server.kill()
        server.wait()
