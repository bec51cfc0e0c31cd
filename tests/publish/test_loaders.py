"""Other libraries' loaders take an exported directory as it is: same states, same tokens.

Each is skipped where its library is not installed; docs/evidence/models.md names versions tried.
"""

import numpy as np
import pytest
import torch
from data_helpers import SENTENCES, tiny_tokenizer
from export_cases import make_release
from superglue_helpers import saved_model

from deberta_ds.publish.hf import write_hugging_face
from deberta_ds.release.reader import load_backbone


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    directory = tmp_path_factory.mktemp("loaders") / "deberta"
    write_hugging_face(make_release("v3"), directory)
    return directory


def mean_states(directory, texts):
    """Return the mean of our hidden states over each text's tokens."""
    tokenizer, backbone = tiny_tokenizer(), load_backbone(directory).backbone
    means = []
    for text in texts:
        ids = torch.tensor([[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]])
        with torch.no_grad():
            means.append(backbone(ids, torch.ones_like(ids))[0].mean(0).numpy())
    return np.array(means)


def test_sentence_transformers_embeds_with_our_states(exported):
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(exported), device="cpu", local_files_only=True)
    texts = SENTENCES[:4]
    np.testing.assert_allclose(model.encode(texts), mean_states(exported, texts), atol=1e-5)


def test_sentence_transformers_scores_pairs_with_our_logits(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    examples, _, scores = saved_model(tmp_path, "CB")
    model = library.CrossEncoder(str(tmp_path), device="cpu", local_files_only=True)
    found = model.predict([example.sequences[0] for example in examples])
    np.testing.assert_allclose(found, scores, atol=1e-5)


def test_mteb_encodes_with_our_states(exported):
    mteb = pytest.importorskip("mteb")
    library = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from torch.utils.data import DataLoader

    model = library.SentenceTransformer(str(exported), device="cpu", local_files_only=True)
    wrapped = mteb.models.SentenceTransformerEncoderWrapper(model)
    texts = SENTENCES[:4]
    inputs = DataLoader(Dataset.from_dict({"text": texts}), batch_size=2)
    found = wrapped.encode(inputs, task_metadata=mteb.get_task("STS12").metadata,
                           hf_split="test", hf_subset="default")
    np.testing.assert_allclose(found, mean_states(exported, texts), atol=1e-5)


def test_gliner_builds_its_encoder_from_it(exported):
    gliner = pytest.importorskip("gliner")
    config = gliner.GLiNERConfig(model_name=str(exported), hidden_size=32, max_width=4)
    model = gliner.GLiNER.from_config(config)
    words = model.model.token_rep_layer.bert_layer.model.embeddings.word_embeddings.weight
    # It adds marks of its own behind the tokenizer's pieces.
    pieces = tiny_tokenizer().size
    assert torch.equal(words[:pieces], load_backbone(exported).backbone.words.weight[:pieces])
    found = model.predict_entities("The quick brown fox jumps over the lazy dog.", ["animal"],
                                   threshold=0.0)
    assert found and all(entity["label"] == "animal" for entity in found)
