"""The DeepSpeed JSON: every key is known with its type or refused with the reason, at once."""

import ast
import json
from pathlib import Path

import deepspeed
import pytest
import rank_helpers
from deepspeed.runtime.config import DeepSpeedConfig

from deberta_ds import deepspeed_config
from deberta_ds.errors import UserError
from deberta_ds.toml_files import read_toml
from deberta_ds.train import deepspeed_check
from deberta_ds.validation import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deberta_ds"


def problems(values: dict, tmp_path) -> str:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        deepspeed_check.check_json(deepspeed_config.load(file), str(file))
    assert str(file) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("values", "expected"), [
    ({"zero_optimization": {"stage": 7}}, '"zero_optimization.stage" = 7: must be 0, 1, 2 or 3'),
    ({"zero_optimization": {"stage": "3"}}, "must be 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": True}}, "must be 0, 1, 2 or 3"),
    ({"zero_optimization": []}, "zero_optimization = []: input should be an object"),
    ({"zero_optimization": {"reduce_bucket_sizes": 5}}, "did you mean reduce_bucket_size?"),
    ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "reduce_bucket_size = '5e8': must be"),
    ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size"),
    ({"zero_optimization": {"reduce_bucket_size": 10**30}}, "must be a whole number up to"),
    ({"zero_optimization": {"overlap_comm": "no"}}, "overlap_comm = 'no': must be true or false"),
    ({"zero_optimization": {"overlap_comm": "auto"}}, '"auto" is for other trainers'),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
     "offload_optimizer.nvme_path: missing"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {
        "device": "nvme", "nvme_path": "/x"}}}, "needs ZeRO stage 3, not 2"),
    ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "needs ZeRO stage 3"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "stage 1 or 2 or 3, not 0"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}},
     "offload_param.device: Input should be 'none', 'cpu' or 'nvme'"),
    ({"zero_optimization": {"stage": 3, "zenflow": {}}}, "it changes what is computed"),
    ({"zero_optimization": {"mics_shard_size": 8}}, "DeepSpeed 0.19 has removed it"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "only one of them can be enabled"),
    ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "only one of them"),
    ({"bf16": {"enabled": "no"}}, '"bf16.enabled" = "no": must be true or false'),
    ({"bf16": True}, "bf16 = True: input should be an object"),
    ({"bf16": {"check_grad_overflow": False}}, "the step relies on it"),
    ({"fp16": {"enabled": True, "hysteresis": True}}, "fp16.hysteresis = True: must be a whole"),
    ({"fp16": {"enabled": True, "loss_scale": float("nan")}}, "must be a finite number"),
    ({"fp16": {"enabled": True, "initial_scale_power": 1000}}, "initial_scale_power = 1000: must"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "min_loss_scale must be > 0"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "input should be 'bfloat16'"),
    ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["os.path"]}},
     "lower_precision_safe_modules: unknown key"),
    ({"aio": {"block_size": 0}}, "aio.block_size = 0"),
    ({"communication_data_type": "int8"}, "communication_data_type = 'int8'"),
    ({"gradient_predivide_factor": float("nan")}, "gradient_predivide_factor"),
    ({"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0},
     "gradient_predivide_factor: must be 1.0 under ZeRO stage 3"),
    ({"wall_clock_breakdown": "yes"}, "wall_clock_breakdown = 'yes'"),
    ({"wandb": {"enabled": True}}, '"wandb": a DeepSpeed key that is not supported here: the run'),
    ({"tensorboard": {"enabled": True}}, '"tensorboard": a DeepSpeed key that is not supported'),
    ({"activation_checkpointing": {"partition_activations": True}}, "use train.checkpoint_layers"),
    ({"optimizer": {"type": "Adam"}}, '"optimizer": belongs to optim.name'),
    ({"gradient_clipping": 1.0}, "belongs to the run config (optim.clip_norm)"),
    ({"zero_optimisation": {}}, "did you mean zero_optimization?"),
])
def test_a_broken_json_is_one_error_that_names_the_key(values, expected, tmp_path):
    assert expected in problems(values, tmp_path)


def test_all_problems_are_said_at_once(tmp_path):
    text = problems({"wandb": {}, "zero_optimization": {"stage": 9}, "aio": {"single_submit": 1},
                     "train_batch_size": 4, "steps": 3}, tmp_path)
    assert text.startswith("5 problems in ")


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", '{"bf16": {}, "bf16": {}}', "\x00",
                                  "[" * 100_000, '{"a": 1e999999}'])
def test_what_is_no_json_object_is_named(text, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="ds.json"):
        deepspeed_config.load(file)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    """As Windows' editors write it, here and in TOML files."""
    file = tmp_path / "ds.json"
    file.write_text('\ufeff{"bf16": {"enabled": true}}')
    assert deepspeed_config.load(file)["bf16"] == {"enabled": True}
    file.write_text('\ufeff[train]\nsteps = 3\n')
    assert read_toml(file, "run file", "x.toml") == {"train": {"steps": 3}}
    file.write_bytes("[train]\nname = 'é'\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="ds.json: not UTF-8 text .*at byte 16.; save the file"):
        read_toml(file, "run file", "x.toml")


class Asked(dict):
    """A DeepSpeed dict that notes which keys were asked for."""

    keys_asked: set = set()

    def __contains__(self, key) -> bool:
        self.keys_asked.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.keys_asked.add(key)
        return super().get(key, default)

    def keys(self):
        return Asked(self)


def test_every_key_that_deepspeed_reads_is_taken_or_refused_with_a_reason():
    DeepSpeedConfig(Asked(train_batch_size=1))
    known = deepspeed_config.JSON_KEYS | deepspeed_config.RUN_KEYS.keys() \
        | deepspeed_config.CODE_KEYS.keys() | deepspeed_config.REFUSED.keys()
    assert {"bf16", "zero_optimization", "steps_per_print", "tensorboard"} <= Asked.keys_asked
    assert Asked.keys_asked <= known, Asked.keys_asked - known


def test_every_removed_key_is_refused_as_removed():
    from deepspeed.runtime import config

    removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert removed <= deepspeed_config.REFUSED.keys()
    assert {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS} \
        <= deepspeed_config.REFUSED_INSIDE.keys()


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")),
                         ids=lambda path: path.stem)
def test_every_shipped_json_passes(path):
    deepspeed_check.check_json(deepspeed_config.load(path), str(path))


@pytest.mark.parametrize("name", deepspeed_check.MODULE_PARTS)
def test_a_deepspeed_without_a_part_is_refused_before_anything_starts(name, monkeypatch):
    owner, _, last = f"deepspeed.{name}".rpartition(".")
    thing = deepspeed
    for part in owner.split(".")[1:]:
        thing = getattr(thing, part)
    monkeypatch.delattr(thing, last)
    with pytest.raises(UserError, match=f"{name}, which this program relies on; install deepspeed"):
        deepspeed_check.check_json({}, "ds.json")


def test_a_deepspeed_whose_operators_cannot_be_switched_off_is_refused(monkeypatch):
    monkeypatch.delattr(deepspeed.ops, "__getattr__")
    monkeypatch.delattr(deepspeed.ops, "__compatible_ops__", raising=False)
    with pytest.raises(UserError, match="has no ops.__compatible_ops__, which this program"):
        deepspeed_check.check_parts("deepspeed", deepspeed, deepspeed_check.CPU_PARTS)


@pytest.mark.multi
def test_an_engine_without_a_part_is_refused_by_name(tmp_path):
    rank_helpers.run(1, [str(tmp_path / "out.json")], tmp_path / "log",
                     ROOT / "tests/workers/deepspeed_parts.py")
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found) > 80
    for case, message in found.items():
        name = case.split()[-1]
        assert f"has no {name}, which this program relies on" in message, (case, message)


def test_every_private_part_that_the_code_uses_is_on_the_list():
    """Names with an underscore, or of DeepSpeed's flat buffers, in the files that reach inside."""
    listed = {part.split(".")[-1] for parts in (
        deepspeed_check.MODULE_PARTS, deepspeed_check.ENGINE_PARTS,
        *deepspeed_check.OPTIMIZER_PARTS.values(), deepspeed_check.ZERO3_PARAMETER_PARTS)
        for part in parts}
    owners = {"engine", "zero", "model_engine", "parameter", "writer"}
    used = set()
    for path in (*(PACKAGE / "train").glob("*.py"), PACKAGE / "formats/checkpoint.py",
                 PACKAGE / "formats/engine_state.py", PACKAGE / "formats/restore.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) \
                    and node.value.id in owners:
                used.add(node.attr)
    own = {"train", "eval", "build_pretraining_engine", "init_distributed", "set_learning_rate",
           "numel", "shape", "data", "grad", "copy_", "requires_grad", "detach", "parameters",
           "gathered", "load_checkpoint", "destroy", "build_engine", "dtype", "optimizer_swapper",
           "Init", "bfloat16_enabled", "get", "local_device"}
    listed |= {"checkpoint_engine"}  # of which `save` is listed
    assert used - own <= listed, used - own - listed
