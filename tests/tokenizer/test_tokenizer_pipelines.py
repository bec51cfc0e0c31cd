"""A tokenizer that is not SentencePiece from end to end: DeBERTa v1's, from the public files on.

tools/faults/tokenizer_pipelines.py does it for every kind: docs/evidence/tokenizers.md.
"""

import os

import pytest
import tokenizers
from data_helpers import random_documents
from tokenizer_cases import sentencepiece_bpe

from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json
from tools.faults import tokenizer_kills as kills
from tools.faults import tokenizer_pipelines as pipelines


@pytest.mark.multi
@pytest.mark.skipif("FULL_TABLE" not in os.environ, reason="set FULL_TABLE=1 (ten minutes)")
@pytest.mark.parametrize("kind", pipelines.KINDS, ids=lambda kind: kind.name)
def test_every_kind_goes_from_text_to_predictions(kind, tmp_path):
    found = pipelines.take(kind, tmp_path / "work")
    problems = {name: result["problem"] for name, result in found.items() if "problem" in result}
    assert not problems and len(found) == len(pipelines.STAGES)


@pytest.mark.multi
@pytest.mark.skipif("FULL_TABLE" not in os.environ, reason="set FULL_TABLE=1 (five minutes)")
@pytest.mark.parametrize("name", [*kills.TRAINED, *kills.IMPORTED])
def test_kill_9_while_training_and_while_tokenizing_changes_nothing(name, tmp_path):
    kills.write_text(None, 1, tmp_path / "all.jsonl")
    row = kills.take(name, tmp_path / "all.jsonl", tmp_path / "work", 400, [0.4, 0.7, 0.9])
    assert row["tokenize"]["killed"] >= 2, row


@pytest.mark.multi
def test_v1_goes_from_public_files_to_an_exported_model(tmp_path):
    kind = next(kind for kind in pipelines.KINDS if kind.is_public_v1)
    costly = (pipelines.resume, pipelines.fine_tune, pipelines.predict)  # a process of seconds each
    steps = [step for step in pipelines.STAGES if step not in costly]
    found = pipelines.take(kind, tmp_path / "v1", steps)
    print({name: result.get("seconds") for name, result in found.items()})
    problems = {name: result["problem"] for name, result in found.items() if "problem" in result}
    assert not problems and len(found) == len(steps)


def test_a_sentencepiece_bpe_model_is_published_with_its_ids(tmp_path):
    """`tokenizers` has no such model: the merges are read off the pieces and their scores."""
    sentencepiece_bpe(tmp_path / "spm.model")
    ours = Tokenizer(tmp_path / "spm.model")
    published = tokenizers.Tokenizer.from_str(build_tokenizer_json(ours))
    assert published.token_to_id("[MASK]") == ours.mask_id
    for text in (*pipelines.TEXTS, *random_documents(50, seed=7)):
        assert published.encode(text).ids[1:-1] == ours.encode(text), text
