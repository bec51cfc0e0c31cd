"""Bad input: one clear error that names the place and the remedy, exit code 2, no traceback."""

import shutil

import pytest
import rank_helpers
from launching import deepspeed_json, make_run

from deberta_ds.checkpoint.find import list_steps


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A run directory with a finished 5-step run in it, and a DeepSpeed config."""
    root = tmp_path_factory.mktemp("bad")
    run_file = make_run(root, steps="5", eval_every="5")
    ds = deepspeed_json(root / "ds.json", 1)
    rank_helpers.run(1, ["--config", str(run_file), "--deepspeed_config", str(ds)], root / "log")
    return root


@pytest.fixture
def fails(tmp_path):
    """Return the message with which pretrain refuses some arguments."""

    def run(*arguments) -> str:
        log = tmp_path / "log"
        codes = rank_helpers.wait(rank_helpers.start(1, [*map(str, arguments)], log))
        text = log.read_text()
        assert codes == [2] and "Traceback" not in text, text
        assert len([line for line in text.splitlines() if line.startswith("error: ")]) == 1, text
        return text[text.index("error: "):]

    return run


def test_misspelt_run_key(setting, fails):
    error = fails("--config", setting / "run.toml", "--deepspeed_config", setting / "ds.json",
                  "--train.warmup_stepz=3", "--optim.learning_rate=fast")
    assert "train.warmup_stepz: unknown key; did you mean train.batch_warmup_steps?" in error
    assert "optim.learning_rate = 'fast'" in error and "2 problems" in error


def test_misspelt_deepspeed_key(setting, fails):
    bad = setting / "bad.json"
    bad.write_text('{"zero_optimisation": {"stage": 3}, "gradient_clipping": 0.5}')
    error = fails("--config", setting / "run.toml", "--deepspeed_config", bad)
    assert "bad.json" in error and "did you mean zero_optimization?" in error
    assert '"gradient_clipping": belongs to the run config (optim.clip_norm)' in error


def test_batch_that_does_not_divide(setting, fails):
    error = fails("--config", setting / "run.toml", "--deepspeed_config", setting / "ds.json",
                  "--train.global_batch_size=7")
    assert "train.global_batch_size = 7" in error and "micro_batch_size x world size" in error


def test_missing_corpus(setting, fails):
    error = fails("--config", setting / "run.toml", "--deepspeed_config", setting / "ds.json",
                  '--data.sources=[{path = "nowhere"}]')
    assert "nowhere" in error


def test_wrong_tokenizer_for_a_corpus(setting, fails):
    import sentencepiece

    text = setting / "other.txt"
    text.write_text("a completely different text about something else entirely\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(setting / "other"), vocab_size=60, minloglevel=2,
        pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]",
        eos_piece="[SEP]", unk_piece="[UNK]", hard_vocab_limit=False)
    error = fails("--config", setting / "run.toml", "--deepspeed_config", setting / "ds.json",
                  f"--data.tokenizer={setting}/other.model")
    assert "tokenizer" in error and str(setting / "train") in error


def test_flipped_byte_in_a_shard(setting, fails):
    shards = sorted((setting / "train").rglob("*.npy"))
    shard = max(shards, key=lambda path: path.stat().st_size)
    before = shard.read_bytes()
    data = bytearray(before)
    data[-5] ^= 0x40
    shard.write_bytes(data)
    try:
        error = fails("--config", setting / "run.toml", "--deepspeed_config", setting / "ds.json",
                      "--data.verify=full", f"--out_dir={setting}/other_out")
    finally:
        shard.write_bytes(before)
    assert shard.name in error


def test_checkpoint_of_another_run(setting, fails):
    error = fails("--config", setting / "run.toml", "--deepspeed_config", setting / "ds.json",
                  "--objective.rtd_weight=10.0", "--train.steps=10")
    assert "- objective.rtd_weight = 50.0" in error and "+ objective.rtd_weight = 10.0" in error


def test_never_resume_beside_checkpoints(setting, fails):
    error = fails("--config", setting / "run.toml", "--deepspeed_config", setting / "ds.json",
                  "--resume", "never")
    assert "--resume auto" in error


def test_broken_checkpoint_is_named_and_never_loaded(setting, fails):
    shutil.copytree(setting / "out", setting / "out2")
    newest = list_steps(setting / "out2")[-1]
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    error = fails("--config", setting / "run.toml", "--deepspeed_config", setting / "ds.json",
                  f"--out_dir={setting}/out2", "--train.steps=10")
    assert newest.name in error and largest.name in error and "truncated" in error
