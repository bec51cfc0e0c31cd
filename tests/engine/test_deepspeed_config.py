"""The DeepSpeed JSON: keys that were tried, each with its type; every other one is refused."""

import ast
import json

import deepspeed
import pytest
import rank_helpers
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from launching import ROOT, make_run

from deberta_ds.base.errors import ConfigError, UserError
from deberta_ds.config import run_config
from deberta_ds.config.toml_files import read_toml
from deberta_ds.engine import ds_config, engine


def problems(values: dict, tmp_path) -> str:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        ds_config.load(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("values", "expected"), [
    ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage = 7: must be at most 3"),
    ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage = '3': input should be"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage = True: input should be"),
    ({"zero_optimization": []}, "zero_optimization = []: input should be an object"),
    ({"zero_optimization": {"reduce_bucket_sizes": 5}}, "did you mean zero_optimization.reduce_b"),
    ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "reduce_bucket_size = '5e8': input"),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size = 0: must be at least"),
    ({"zero_optimization": {"allgather_bucket_size": 5}}, "should be a multiple of 2"),
    ({"zero_optimization": {"reduce_bucket_size": 10**30}}, "reduce_bucket_size = 1"),
    ({"zero_optimization": {"overlap_comm": "no"}}, "overlap_comm = 'no': input should be a valid"),
    ({"zero_optimization": {"overlap_comm": "auto"}}, "overlap_comm = 'auto': input should be"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
     "offload_optimizer.nvme_path: missing"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {
        "device": "nvme", "nvme_path": "/x"}}}, "needs ZeRO stage 3, not 2"),
    ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "needs ZeRO stage 3"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "stage 1 or 2 or 3, not 0"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}},
     "offload_param.device = 'disk': input should be 'none', 'cpu' or 'nvme'"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "only one of them can be enabled"),
    ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "only one of them"),
    ({"bf16": {"enabled": True}}, "stage = 0 with bf16: use stage 1, it computes the same"),
    ({"fp16": {"enabled": True}, "zero_optimization": {}}, "stage = 0 with fp16: use stage 1"),
    ({"bf16": {"enabled": "no"}}, "bf16.enabled = 'no': input should be a valid boolean"),
    ({"bf16": True}, "bf16 = True: input should be an object"),
    ({"fp16": {"enabled": True, "hysteresis": True}}, "fp16.hysteresis = True: input should be"),
    ({"fp16": {"enabled": True, "loss_scale": float("nan")}}, "fp16.loss_scale = nan: input"),
    ({"fp16": {"enabled": True, "initial_scale_power": 1000}}, "initial_scale_power = 1000: must"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale = 0: must be above 0"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "input should be 'bfloat16'"),
    ({"aio": {"block_size": 0}}, "aio.block_size = 0"),
    ({"communication_data_type": "int8"}, "communication_data_type = 'int8'"),
    ({"activation_checkpointing": {}}, "belongs to the run config (train.activation_checkpointing"),
    ({"optimizer": {"type": "Adam"}}, '"optimizer": belongs to the run config (optim.name'),
    ({"gradient_clipping": 1.0}, "belongs to the run config (optim.clip_norm)"),
    ({"zero_optimisation": {}}, "did you mean zero_optimization?"),
    ({"train_batch_size": 8}, "train.global_batch_size"),
])
def test_a_broken_json_is_one_error_that_names_the_key(values, expected, tmp_path):
    assert expected in problems(values, tmp_path)


@pytest.mark.parametrize("key", [
    "wandb", "tensorboard", "comms_logger", "gradient_predivide_factor", "nonsense",
    "zero_optimization.zero_hpz_partition_size", "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients", "zero_optimization.mics_shard_size",
    "zero_optimization.zenflow", "zero_optimization.offload_optimizer.ratio",
    "bf16.check_grad_overflow", "torch_autocast.lower_precision_safe_modules", "aio.use_gds"])
def test_a_key_that_was_not_tried_is_refused(key, tmp_path):
    *sections, last = key.split(".")
    values = {last: 1}
    for section in reversed(sections):
        values = {section: values}
    assert f"{key}: not tried with this project; remove it" in problems(values, tmp_path)


def test_numbers_as_deepspeed_writes_them_are_taken(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 2, '
                    '"reduce_bucket_size": 5e8, "offload_optimizer": null}}')
    assert ds_config.load(file).as_dict() == {"zero_optimization": {
        "stage": 2, "reduce_bucket_size": 500_000_000, "offload_optimizer": None}}


def test_all_problems_are_said_at_once(tmp_path):
    text = problems({"wandb": {}, "zero_optimization": {"stage": 9}, "aio": {"single_submit": 1},
                     "train_batch_size": 4, "steps": 3}, tmp_path)
    assert text.startswith("5 problems in ")


@pytest.mark.parametrize("text, said", [
    ("", ""), ("[]", "one JSON object"), ("{", "not valid JSON"), ("nul", ""), ("\x00", ""),
    ('{"bf16": {}, "bf16": {}}', "written twice"), ("[" * 100_000, ""), ('{"a": 1e999999}', "")])
def test_what_is_no_json_object_is_named(text, said, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s)ds.json.*{said}"):
        ds_config.load(file)


def test_a_byte_order_mark_is_skipped(tmp_path):
    """As Windows' editors write it, here and in TOML files."""
    file = tmp_path / "ds.json"
    file.write_text('\ufeff{"bf16": {"enabled": false}}')
    assert ds_config.load(file).as_dict() == {"bf16": {"enabled": False}}
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


def test_every_key_that_is_taken_is_one_that_deepspeed_reads():
    DeepSpeedConfig(Asked(train_batch_size=1))
    keys = ds_config.DeepSpeedConfig.model_fields.keys()
    assert keys <= Asked.keys_asked, keys - Asked.keys_asked
    for ours, theirs in ((ds_config.Zero, DeepSpeedZeroConfig),
                         (ds_config.Bf16, DeepSpeedBF16Config),
                         (ds_config.Fp16, DeepSpeedFP16Config),
                         (ds_config.Offload, DeepSpeedZeroOffloadOptimizerConfig),
                         (ds_config.Offload, DeepSpeedZeroOffloadParamConfig)):
        known = {field.alias or name for name, field in theirs.model_fields.items()}
        assert ours.model_fields.keys() <= known, ours


@pytest.mark.parametrize("name", engine.MODULE_PARTS)
def test_a_deepspeed_without_a_part_is_refused_before_anything_starts(name, monkeypatch):
    owner, _, last = f"deepspeed.{name}".rpartition(".")
    thing = deepspeed
    for part in owner.split(".")[1:]:
        thing = getattr(thing, part)
    monkeypatch.delattr(thing, last)
    with pytest.raises(UserError, match=f"{name}, which this program relies on; install deepspeed"):
        engine.init_distributed()


def test_a_deepspeed_whose_operators_cannot_be_switched_off_is_refused(monkeypatch):
    monkeypatch.delattr(deepspeed.ops, "__getattr__")
    monkeypatch.delattr(deepspeed.ops, "__compatible_ops__", raising=False)
    with pytest.raises(UserError, match="has no ops.__compatible_ops__, which this program"):
        engine.check_parts("deepspeed", deepspeed, engine.CPU_PARTS)


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
        engine.MODULE_PARTS, engine.ENGINE_PARTS,
        *engine.OPTIMIZER_PARTS.values(), engine.ZERO3_PARAMETER_PARTS)
        for part in parts}
    owners = {"engine", "zero", "model_engine", "parameter", "writer"}
    used = set()
    for path in (ROOT / "deberta_ds/checkpoint/saved_state.py",
                 *(ROOT / "deberta_ds/engine").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) \
                    and node.value.id in owners:
                used.add(node.attr)
    own = {"train", "eval", "build_pretraining_engine", "init_distributed", "prepare_rank",
           "set_learning_rate", "numel", "shape", "data", "grad", "copy_", "requires_grad",
           "detach", "parameters", "gathered", "load_checkpoint", "destroy", "build_engine",
           "dtype", "optimizer_swapper", "Init", "bfloat16_enabled", "get", "local_device",
           "device_type", "passes", "holds", "register_hook", "requires_grad_"}
    listed |= {"checkpoint_engine"}  # of which `save` is listed
    assert used - own <= listed, used - own - listed


def test_what_deepspeed_is_given_is_the_run_s(tmp_path):
    run, _ = run_config.load(make_run(tmp_path, global_batch_size="24", micro_batch_size="3"),
                             ["--optim.clip_norm=0"])
    zero = {"stage": 3, "overlap_comm": None}
    given = ds_config.check({"gradient_clipping": "auto", "zero_optimization": zero}, "ds.json")
    assert given.as_dict() == {"zero_optimization": zero}
    found = ds_config.resolve(run, given, 2)
    assert found.as_dict() == {
        "zero_optimization": zero, "train_batch_size": 24, "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4, "gradient_clipping": 0,  # its own default clips at 1.0
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None}
    for section, matmuls in (("torch_autocast", "bf16"), ("fp16", "fp16")):
        given = ds_config.DeepSpeedConfig(**{section: {"enabled": True}})
        assert given.matmul_precision == matmuls
    assert engine.dict_for_deepspeed(found)["zero_optimization"] == zero | {
        "stage3_param_persistence_threshold": 0}
