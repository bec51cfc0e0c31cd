"""Every trainable parameter gets a gradient in every micro-batch, whatever is recomputed.

ZeRO-3 of DeepSpeed 0.19.8 updates a parameter that got none by its gradient of the step before
(tests/engine/test_deepspeed_traps.py re-checks that), so one missing gradient is a silent error.
"""

from dataclasses import replace

import pytest
import torch
from data_helpers import make_corpus, random_documents, tiny_tokenizer, tokenizer_path

from deberta_ds.config.objective import MaskConfig
from deberta_ds.config.run_config import SourceConfig, from_dict
from deberta_ds.data.rows import RowDataset, collate
from deberta_ds.model.backbone import init_parameters
from deberta_ds.objectives.build import build_model

V1 = {"position_buckets": 0, "share_position_projections": False, "relative_norm": False,
      "key_bias": False}
CASES = {
    "v3 mlm": ({}, {"kind": "mlm"}),
    "v1 mlm": (V1, {"kind": "mlm"}),
    "v2 mlm conv": ({"conv_kernel": 3}, {"kind": "mlm"}),
    "bert mlm": (V1 | {"key_bias": True, "relative_attention": False, "position_terms": (),
                       "absolute_input": True}, {"kind": "mlm"}),
    "v3 rtd gdes": ({}, {"kind": "rtd", "embedding_sharing": "gdes"}),
    "v3 rtd es": ({}, {"kind": "rtd", "embedding_sharing": "es"}),
    "v3 rtd nes": ({}, {"kind": "rtd", "embedding_sharing": "nes"}),
    "v2 rtd conv": ({"conv_kernel": 3}, {"kind": "rtd"}),
}
CHECKPOINTED = {"none": ("none", 1), "every layer": ("full", 1), "every second": ("full", 2),
                "selective": ("selective", 1)}


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    tokenizer, root = tiny_tokenizer(), tmp_path_factory.mktemp("rows")
    make_corpus(root, [tokenizer.encode(text) for text in random_documents(20)], tokenizer)
    dataset = RowDataset([SourceConfig(path=str(root))], tokenizer, seq_len=64, seed=0,
                         mask=MaskConfig())
    return [collate([dataset[row]]) for row in range(3)]  # one row: the smallest micro-batch


def gradients(run, batches) -> list[dict[str, torch.Tensor | None]]:
    """Return {parameter: gradient} of each micro-batch alone."""
    model = build_model(run, tiny_tokenizer().size).double()
    init_parameters(model, 0.02, seed=0)
    found = []
    for batch in batches:
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        normalizers = {"targets": torch.tensor(batch.num_targets),
                "tokens": torch.tensor(batch.num_tokens)}
        model(batch, normalizers)[0].backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_gets_its_gradient(case, batches):
    model, objective = CASES[case]
    shape = {"vocab_size": 640, "hidden_size": 32, "num_layers": 4, "num_heads": 2,
             "intermediate_size": 64, "position_buckets": 16, "max_position": 64}
    run = from_dict({
        "name": "t", "out_dir": "t", "model": shape | model, "objective": objective,
        "data": {"sources": [{"path": "t"}], "tokenizer": str(tokenizer_path()), "seq_len": 64},
        "optim": {"learning_rate": 1e-3},
        "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1}})
    expected = None
    for how, (mode, interval) in CHECKPOINTED.items():
        train = replace(run.train, activation_checkpointing=mode,
                        activation_checkpointing_interval=interval)
        found = gradients(replace(run, train=train), batches)
        for number, micro in enumerate(found):
            missing = [name for name, gradient in micro.items() if gradient is None]
            assert not missing, f"{case}, {how}, micro-batch {number}: no gradient for {missing}"
        expected = expected or found
        for micro, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(micro, reference, rtol=1e-9, atol=1e-12,
                                       msg=lambda text, how=how: f"{case}, {how}: {text}")
