"""What a run file leaves open of the model follows tokenizer, source or checkpoint."""

import dataclasses
import json

import pytest
from data_helpers import RUN_RECORD, tiny_tokenizer
from export_cases import FAMILIES, make_release
from launching import make_run

from deberta_ds.base.errors import ConfigError, UserError
from deberta_ds.config import run_config
from deberta_ds.config.model import padded_rows
from deberta_ds.publish.convert import WRITERS
from deberta_ds.release.model_files import write_ours
from deberta_ds.release.reader import read_release, read_shapes
from deberta_ds.release.shape import complete
from deberta_ds.training.start import first_weights


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """A run file with a preset and no vocabulary of its own."""
    return make_run(tmp_path_factory.mktemp("shape"), vocab_size=None)


@pytest.fixture(scope="module")
def open_file(tmp_path_factory):
    """One without a preset: all of the shape is open."""
    return make_run(tmp_path_factory.mktemp("open"), vocab_size=None, preset=None)


def load(path, *overrides, resume="auto"):
    return run_config.load(path, list(overrides),
                       lambda values, origins: complete(values, origins, resume))


def test_the_vocabulary_follows_the_tokenizer_and_not_the_preset(run_file):
    size = tiny_tokenizer().size
    run, origins = load(run_file)
    assert run.model.vocab_size == padded_rows(size) != 512  # the preset's
    assert size <= run.model.vocab_size < size + 64 and run.model.vocab_size % 64 == 0
    assert origins["model.vocab_size"].startswith(f"the {size} ids of ")
    run, origins = load(run_file, "--model.vocab_size=1000")
    assert run.model.vocab_size == 1000 and origins["model.vocab_size"] == "command line"


def test_a_plan_without_the_tokenizer_has_the_vocabulary_of_the_preset(run_file):
    assert load(run_file, "--data.tokenizer=nowhere")[0].model.vocab_size == 512


def test_a_run_file_without_a_vocabulary_and_with_no_such_tokenizer_names_the_tokenizer(tmp_path):
    """It used to say that model.vocab_size is missing, which nobody has to give."""
    path = tmp_path / "run.toml"
    path.write_text('name = "run"\n[model]\nhidden_size = 32\n[data]\ntokenizer = "nowhere"\n')
    with pytest.raises(UserError, match="nowhere: cannot read the tokenizer"):
        load(path)


def test_an_unknown_key_is_named_before_a_checkpoint_is_looked_for(run_file):
    """With a checkpoint it took the 2.7 seconds that torch takes to be imported."""
    with pytest.raises(UserError, match="1 problem in .*\n  train.step: unknown key; did you mean"):
        run_config.load(run_file, ["--train.step=3"], lambda *_: pytest.fail("looked"))


@pytest.fixture(scope="module")
def saved_run(run_file):
    """A checkpoint's run.json, of the time when a preset's vocabulary was taken as it is."""
    run, _ = load(run_file)
    values = run_config.to_dict(run)
    values["model"] |= {"vocab_size": 2048, "num_layers": 3}
    values["objective"]["generator_layers"] = 0
    directory = run_file.parent / "out/checkpoints/step-00000010"
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps(
        RUN_RECORD | {"step": 10, "config": values}))
    (directory / "manifest.json").write_text("{}")
    return directory


def test_a_run_goes_on_with_the_vocabulary_of_its_checkpoint(run_file, saved_run):
    run, origins = load(run_file)
    assert run.model.vocab_size == 2048 and str(saved_run) in origins["model.vocab_size"]
    assert run.model.num_layers == 4  # said by the preset: the check of identity will name it
    assert load(run_file, resume="never")[0].model.vocab_size == padded_rows(tiny_tokenizer().size)
    assert load(run_file, "--out_dir=elsewhere", resume=str(saved_run))[0].model.vocab_size == 2048


def test_a_run_whose_source_is_gone_goes_on_with_the_shape_of_its_checkpoint(open_file, saved_run):
    options = ["--init.from=models/gone", f"--out_dir={saved_run.parents[1]}"]
    run, _ = load(open_file, *options)
    assert (run.model.vocab_size, run.model.num_layers) == (2048, 3)
    assert run.objective.generator_layers == 0
    with pytest.raises(UserError, match="models/gone: no such file"):
        load(open_file, *options, resume="never")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", WRITERS)
def test_a_run_takes_the_shape_of_its_source(tmp_path, open_file, family, to):
    """As it is read from the configuration files, and as the whole model is read."""
    release = make_release(family, generator_layers=3)
    WRITERS[to](release, tmp_path / "source")
    whole = read_release(tmp_path / "source").networks()
    assert {name: network.config for name, network in whole.items()} == read_shapes(
        tmp_path / "source")
    source = f"--init.from={tmp_path / 'source'}"
    run, origins = load(open_file, source, "--model.norm_eps=1e-5")
    wanted = dataclasses.replace(release.main.config, hidden_dropout=0.0, attention_dropout=0.0,
                                 norm_eps=1e-5)  # said by the file and the command line
    assert run.model == wanted and run.objective.generator_layers == 3
    assert origins["model.num_layers"] == f"[init] {tmp_path / 'source'}"
    assert load(open_file, source, "--objective.kind=mlm")[0].objective.generator_layers == 0


def test_a_baseline_has_the_shape_of_a_model_and_random_weights(tmp_path, run_file):
    write_ours(make_release("v3"), tmp_path / "source")
    of_model = load(run_file, f"--init.from={tmp_path / 'source'}")[0]
    run = load(run_file, f"--init.from=random:{tmp_path / 'source'}")[0]
    assert run.model == of_model.model
    tensors, notes = first_weights(run, tiny_tokenizer())
    assert not tensors and "its shape, and random weights" in notes[0]


def test_an_own_objective_with_a_generator_follows_that_of_its_source(tmp_path, run_file):
    """Only the kind "rtd" did."""
    write_ours(make_release("v3", generator_layers=3), tmp_path / "source")
    (tmp_path / "own.py").write_text("from deberta_ds.objectives.rtd import *\n")
    run, _ = load(run_file, f"--out_dir={tmp_path}/out", f'--init.from={tmp_path / "source"}',
                  f"--objective.kind={tmp_path}/own.py")
    assert run.objective.generator_layers == 3 and run.objective.mask.max_ngram == 1


def test_a_generator_beside_says_its_depth(tmp_path, open_file):
    for name, family, layers in (("source", "v3", 2), ("other", "v3", 3)):
        write_ours(make_release(family, generator_layers=layers), tmp_path / name)
    run, _ = load(open_file, f"--init.from={tmp_path / 'source'}",
                  f"--init.generator={tmp_path / 'other'}")
    assert run.objective.generator_layers == 3


@pytest.mark.parametrize("broken", ["model = 3", "data = 3", "init = 3", "objective = 3",
                                    "[init]\nfrom = 3", "[data]\ntokenizer = 3", "out_dir = 3"])
def test_a_file_of_wrong_kinds_is_left_to_its_own_error(tmp_path, broken):
    path = tmp_path / "run.toml"
    path.write_text(broken)
    with pytest.raises(ConfigError, match="problems in"):
        load(path)
