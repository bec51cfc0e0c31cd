"""Runs, corpora, checkpoints, exports and fine-tuned models that version 0.2.0 wrote (its make.sh
lies with them in golden/version_0_2_0.tar.xz) are read and resumed.
"""

import json
import tarfile

import pytest
import rank_helpers
from launching import ROOT

from deberta_ds.tracking.log import read_metrics
from tools.fuzz.commands import Command

pytestmark = [pytest.mark.multi, pytest.mark.slow]
# Relative: fp32 on another processor, over four updates of 4-dimensional models.
CLOSE = 1e-4
PATHS = ("corpus", "heldout", "spm.model", "replaced", "replaced_heldout", "mlm", "rtd", "cached",
         "more_scores.py:recall")


@pytest.fixture
def made(tmp_path):
    root = tmp_path / "made"
    with tarfile.open(ROOT / "tests/golden/version_0_2_0.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.fixture
def script(server, made):
    """Return a function: runs a script where the files lie, and returns what it prints."""
    def run(name: str, *arguments: str) -> str:
        done = server.run(Command(name, arguments, directory=str(made), timeout_seconds=240))
        assert not done.code, done.output + done.errors
        return done.output + done.errors

    return run


# A masked LM drew random tokens among all ids, two thirds of them bytes here: other gradients.
@pytest.mark.parametrize("kind, ranks, close", [("mlm", 1, 2e-3), ("rtd", 2, CLOSE),
                                                ("cached", 1, CLOSE)])
def test_a_run_goes_on_as_it_did(made, kind, ranks, close):
    text = (made / f"{kind}.toml").read_text()
    for path in PATHS:  # it has moved
        text = text.replace(f'"{path}"', f'"{made / path}"')
    text = text.replace(f'name = "{made / kind}"', f'name = "{kind}"')
    text = text.replace(f'kind = "{made / kind}"', f'kind = "{kind}"')
    (made / f"{kind}_here.toml").write_text(text)
    log = rank_helpers.run(ranks, ["--config", str(made / f"{kind}_here.toml"),
                                   "--deepspeed_config", str(made / "zero1.json")],
                           made / f"{kind}.log")
    assert "resume at step 8 " in log
    assert (kind == "mlm") == ("whose random tokens of masks are any ids: the run goes" in log)
    found, expected = ([{key: value for key, value in record.items() if isinstance(value, float)
                         and key in ("loss", "grad_norm") or "accuracy" in key or "_loss" in key}
                        for record in read_metrics(path)
                        if record["kind"] in ("train", "eval") and record["step"] > 8]
                       for path in (made / kind / "metrics.jsonl", made / f"{kind}.expected.jsonl"))
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        if kind == "mlm":
            one |= {key: other[key] for key in other if key == "grad_norm"}
        assert one == pytest.approx(other, rel=close)


def test_a_finished_and_a_killed_fine_tuning_are_known(made, script):
    arguments = (made / "finetune.args").read_text().split()
    before = (made / "finetuned/CB/seed-1/result.json").read_bytes()
    printed = script("launch/finetune.py", *arguments, "--out", "finetuned", "--seeds", "2")
    assert "CB seed 1: already there" in printed
    assert "CB seed 2: goes on after step 9" in printed
    assert (made / "finetuned/CB/seed-1/result.json").read_bytes() == before
    result, expected = (json.loads((made / name).read_text()) for name in (
        "finetuned/CB/seed-2/result.json", "finetuned.expected.json"))
    assert result["metrics"] == expected["metrics"] and result["steps"] == expected["steps"]
    for one, other in zip(result["history"], expected["history"], strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    script("launch/predict.py", "--model", "finetuned/CB/seed-1", "--data",
           "superglue/CB/test.jsonl", "--out", "again.jsonl")
    again, expected = ([json.loads(line)["prediction"] for line in
                        (made / name).read_text().splitlines()]
                       for name in ("again.jsonl", "predictions.expected.jsonl"))
    assert again == expected


def test_a_corpus_and_its_findings_are_complete(made, script):
    before = (made / "corpus/manifest.json").read_bytes()
    script("data_prep/dedup.py", "text.jsonl", "--out", "duplicates")
    script("data_prep/tokenize_corpus.py", "text.jsonl", "--out", "corpus", "--tokenizer",
           "spm.model", "--unit_bytes", "6000", "--leave_out", "duplicates")
    script("data_prep/pack.py", "corpus", "--seq_len", "32", "--tokenizer", "spm.model")
    assert (made / "corpus/manifest.json").read_bytes() == before
    script("data_prep/verify.py", "corpus", "--verify", "full")


def test_a_run_is_scored_and_an_export_gives_a_run_its_weights(script):
    script("launch/evaluate.py", "--run", "rtd", "--data", "heldout", "--rows", "8")
    printed = script("launch/fill_mask.py", "--model", "export", "The old [MASK] runs.")
    assert printed
    script("launch/pretrain.py", "--config", "rtd.toml", "--deepspeed_config", "zero1.json",
           "--init.from=export", "--out_dir=another", "--check")
