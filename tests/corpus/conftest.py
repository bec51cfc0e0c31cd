"""A text that several files of this folder make a corpus of."""

import pytest
from data_helpers import random_documents, write_json_lines


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.jsonl"
    write_json_lines(path, random_documents(300))
    return path
