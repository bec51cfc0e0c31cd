"""Bad input: one clear error that names the place and the remedy, exit code 2, no traceback."""

import shutil

import pytest
import rank_helpers
from launching import deepspeed_json, make_run, options_of

from deberta_ds.checkpoint.find import list_steps


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A run directory with a finished 5-step run in it, and a DeepSpeed config."""
    root = tmp_path_factory.mktemp("bad")
    run_file = make_run(root, steps="5", eval_every="5")
    ds = deepspeed_json(root / "ds.json", 1)
    rank_helpers.run(1, options_of(run_file, ds), root / "log")
    return root


@pytest.fixture
def fails(setting, tmp_path):
    """Return the message with which pretrain refuses some arguments next to the two files."""

    def run(*arguments: str) -> str:
        log = tmp_path / "log"
        command = [*options_of(setting / "run.toml", setting / "ds.json"), *arguments]
        codes = rank_helpers.wait(rank_helpers.start(1, command, log))
        text = log.read_text()
        assert codes == [2] and "Traceback" not in text, text
        assert len([line for line in text.splitlines() if line.startswith("error: ")]) == 1, text
        return text[text.index("error: "):]

    return run


@pytest.mark.parametrize("arguments, words", [
    (["--train.warmup_stepz=3", "--optim.learning_rate=fast"],
     ["2 problems", "train.warmup_stepz: unknown key; did you mean train.batch_warmup_steps?",
      "optim.learning_rate = 'fast'"]),
    (["--train.global_batch_size=7"],
     ["train.global_batch_size = 7", "micro_batch_size x world size"]),
    (['--data.sources=[{path = "nowhere"}]'], ["nowhere"]),
    (["--objective.rtd_weight=10.0", "--train.steps=10"],  # another run than the checkpoint's
     ["- objective.rtd_weight = 50.0", "+ objective.rtd_weight = 10.0"]),
    (["--resume", "never"], ["--resume auto"])],
    ids=["misspelt key", "batch that does not divide", "missing corpus", "another run", "never"])
def test_wrong_arguments(fails, arguments, words):
    error = fails(*arguments)
    assert all(part in error for part in words), error


def test_misspelt_deepspeed_key(setting, fails):
    bad = setting / "bad.json"
    bad.write_text('{"zero_optimisation": {"stage": 3}, "gradient_clipping": 0.5}')
    error = fails("--deepspeed_config", str(bad))
    assert "bad.json" in error and "did you mean zero_optimization?" in error
    assert '"gradient_clipping": belongs to the run config (optim.clip_norm)' in error


def test_wrong_tokenizer_for_a_corpus(setting, fails):
    import sentencepiece

    text = setting / "other.txt"
    text.write_text("a completely different text about something else entirely\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(setting / "other"), vocab_size=60, minloglevel=2,
        pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]",
        eos_piece="[SEP]", unk_piece="[UNK]", hard_vocab_limit=False)
    error = fails(f"--data.tokenizer={setting}/other.model")
    assert "tokenizer" in error and str(setting / "train") in error


def test_flipped_byte_in_a_shard(setting, fails):
    shards = sorted((setting / "train").rglob("*.npy"))
    shard = max(shards, key=lambda path: path.stat().st_size)
    before = shard.read_bytes()
    data = bytearray(before)
    data[-5] ^= 0x40
    shard.write_bytes(data)
    try:
        error = fails("--data.verify=full", f"--out_dir={setting}/other_out")
    finally:
        shard.write_bytes(before)
    assert shard.name in error


def test_broken_checkpoint_is_named_and_never_loaded(setting, fails):
    shutil.copytree(setting / "out", setting / "out2")
    newest = list_steps(setting / "out2")[-1]
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    error = fails(f"--out_dir={setting}/out2", "--train.steps=10")
    assert newest.name in error and largest.name in error and "truncated" in error
