"""Every run file loads, and fits every DeepSpeed config that ships."""

import itertools
from pathlib import Path

import pytest

from deberta_ds.base.errors import ConfigError
from deberta_ds.config import run_config
from deberta_ds.engine import ds_config
from deberta_ds.objectives.build import objective_of, parameter_sizes
from deberta_ds.training.start import check_run

ROOT = Path(__file__).parents[2]
RUNS = sorted(path for path in (ROOT / "launch/runs").rglob("*.toml")
              if not {"superglue", "glue", "tasks"} & set(path.parts))
DEEPSPEED = sorted((ROOT / "ds_configs").glob("*.json"))
WORLD_SIZES = (1, 2)


def test_there_are_run_files_and_deepspeed_configs():
    assert len(RUNS) >= 26 and len(DEEPSPEED) >= 4


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_run_file_is_valid_with_every_deepspeed_config(path, tmp_path):
    text = path.read_text()
    assert text.startswith("# ")  # where its numbers come from
    assert path.parent.name != "official" or "arXiv" in text or "microsoft/DeBERTa" in text
    run, _ = run_config.load(path)
    assert run.name == path.stem and sum(parameter_sizes(run).values()) > 1e6
    assert run_config.from_dict(run_config.to_dict(run)) == run
    # A step of one row is for one rank.
    world_sizes = WORLD_SIZES if run.train.global_batch_size > 1 else (1,)
    for file, world_size in itertools.product(DEEPSPEED, world_sizes):
        values = ds_config.load(file).as_dict()
        for section in values["zero_optimization"].values():  # a disk that this machine has
            if isinstance(section, dict) and "nvme_path" in section:
                section["nvme_path"] = str(tmp_path)
        ds = ds_config.check(values, str(file))
        if run.optim.name == "muon" and "offload" in file.stem:
            with pytest.raises(ConfigError, match="offload_optimizer out, or use adamw"):
                check_run(run, ds, world_size, "")
            continue
        check_run(run, ds, world_size, f"{path} with {file}")


@pytest.mark.parametrize("path", [p for p in RUNS if p.parent.name == "official"],
                         ids=lambda path: path.stem)
def test_official_recipe_is_the_released_one(path):
    run, _ = run_config.load(path)
    assert run.optim.name == "adam_uncorrected" and run.optim.schedule == "deberta_linear"
    assert run.objective.mask.selection == "deberta_window" and run.data.attend_across_documents
    assert run.data.seq_len == 512 and run.optim.clip_norm == 1.0 and run.optim.eps == 1e-6
    assert run.optim.weight_decay == 0.01
    if run.objective.kind == "rtd":
        assert run.objective.rtd_weight == (10.0 if "rtd_sh" in path.stem else 50.0)
        assert run.objective.mask.mask_share == 1.0 and run.objective.mask.max_ngram == 1
        assert objective_of(run).encoders(run)["generator"].num_layers == run.model.num_layers // 2
    else:
        assert run.objective.mask.mask_share == 0.8 and run.objective.mask.random_share == 0.1


@pytest.mark.parametrize("path", [p for p in RUNS if p.parent.name == "lab"],
                         ids=lambda path: path.stem)
def test_recipe_of_a_laboratory_has_its_time_and_memory_beside_it(path):
    """docs/make_recipes.py writes the page; a batch fits one to four ranks."""
    assert f"| `{path.stem}` |" in (ROOT / "docs/reference/recipes.md").read_text()
    run, _ = run_config.load(path)
    for ranks in (1, 2, 4):
        assert run.train.global_batch_size % (ranks * run.train.micro_batch_size) == 0
