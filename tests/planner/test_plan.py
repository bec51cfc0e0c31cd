"""The planner: its memory against the allocator, its table against arithmetic done here."""

import json
import os
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from launching import ENVIRONMENT, ROOT, make_run, python

from deberta_ds.base.errors import ConfigError, UserError
from deberta_ds.config import run_config
from deberta_ds.engine import ds_config
from deberta_ds.engine.ds_config import CompleteConfig, DeepSpeedConfig
from deberta_ds.engine.gpus import GPUS, card_of, cpu_ranks, peak_flops
from deberta_ds.engine.passes import are_summed
from deberta_ds.objectives.build import objective_of, parameter_sizes
from deberta_ds.planner import plan
from deberta_ds.planner.activations import Activations, trace
from deberta_ds.planner.speed import expected_mfu

MODELS = {
    "deep": ["--model.hidden_size=128", "--model.intermediate_size=512", "--model.num_layers=6",
             "--model.vocab_size=4000"],
    "wide": ["--model.hidden_size=192", "--model.intermediate_size=768", "--model.num_layers=4",
             "--model.vocab_size=12000", "--train.activation_checkpointing=full"],
    "conv": ["--objective.kind=mlm", "--model.hidden_size=256", "--model.intermediate_size=1024",
             "--model.num_layers=4", "--model.vocab_size=2000", "--model.conv_kernel=3",
             "--train.activation_checkpointing=selective"],
}
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("plan"), dropout=0.1, activation_checkpointing='"none"',
                    global_batch_size="16", micro_batch_size="8",
                    preset='"tiny"\nattention = "reference"')


@pytest.fixture(autouse=True, scope="module")
def traced_once():
    """Several tests plan the same run, and most of a plan's time is spent in `trace`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "trace", cache(trace))
        yield


@pytest.fixture
def weightless(monkeypatch):
    """Times do not hang on memory."""
    monkeypatch.setattr(plan, "trace", lambda *_, **__: Activations({0: 0}))


def in_bf16(stage: int = 0, **zero) -> DeepSpeedConfig:
    return DeepSpeedConfig(bf16={"enabled": True}, zero_optimization={"stage": stage} | zero)


@cache
def traced(run, precision: str) -> Activations:
    return trace(run, torch.bfloat16 if precision == "bf16" else torch.float32, fused=False)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "ranks", "micro_batches"), [  # FULL_TABLE=1: a minute more
    ([*MODELS] if "FULL_TABLE" in os.environ else ["wide"], 2, 1), (["conv"], 4, 2)])
def test_memory_is_within_ten_percent_of_what_is_allocated(run_file, names, ranks, micro_batches):
    out = run_file.parent / "memory.json"
    batch = f"--train.global_batch_size={8 * ranks * micro_batches}"
    python(ROOT / "tests/workers/memory.py", run_file, out, ranks,
           *(f"{name}:{stage}:{';'.join([*MODELS[name], batch])}" for stage in range(4)
             for name in names))
    for name, measured in json.loads(out.read_text()).items():
        run, _ = run_config.load(run_file, MODELS[name.split(",")[0]])
        ds = CompleteConfig(**measured["ds"])
        memory = plan.memory_of(sum(parameter_sizes(run).values()), ds, ranks,
                           traced(run, ds.precision), micro_batches > 1,
                           are_summed(ds, micro_batches > 1))
        print(f"{name}: held {memory.held / measured['held'] - 1:+.1%}, "
              f"peak {memory.peak / measured['peak'] - 1:+.1%}")
        assert memory.held == pytest.approx(measured["held"], rel=TOLERANCE), name
        assert memory.peak == pytest.approx(measured["peak"], rel=TOLERANCE), name


def test_a_card_by_hand():
    with pytest.raises(UserError, match="h300: not listed; one of .*cpu; .*--tflops.*--memory_gb"):
        card_of("h300", tflops=100)
    slower = card_of("h100", link_gb_s=32)
    assert slower.peaks == GPUS["h100"].peaks and slower.link == 32e9
    assert card_of("RTX 4090") == GPUS["rtx4090"]
    assert card_of("h100", tflops=100).peak("fp32") == 100e12


@pytest.mark.parametrize("name, bf16, fp32", [  # TFLOP/s of the data sheets
    ("NVIDIA H100 80GB HBM3", 989, 67), ("NVIDIA H100 PCIe", 756, 51), ("NVIDIA H200", 989, 67),
    ("NVIDIA GH200 480GB", 989, 67), ("NVIDIA B200", 2250, 75), ("NVIDIA H800", 989, 67),
    ("NVIDIA A100-SXM4-80GB", 312, 19.5), ("A100-PCIE-40GB", 312, 19.5),
    ("NVIDIA A100 80GB PCIe", 312, 19.5), ("NVIDIA L4", 121, 30.3), ("NVIDIA L40", 181, 90.5),
    ("NVIDIA L40S", 362, 91.6), ("NVIDIA A10", 125, 31.2), ("NVIDIA A10G", 70, 31.5),
    ("NVIDIA GeForce RTX 4090", 165.2, 82.6), ("NVIDIA GeForce RTX 3090", 71, 35.6),
    ("NVIDIA GeForce RTX 5090", 209.5, 104.8), ("Tesla V100-SXM2-32GB", None, 15.7),
    ("Tesla V100-SXM3-32GB", None, 15.7), ("Tesla V100-DGXS-32GB", None, 15.7),
    ("NVIDIA H100 NVL", 835, 60), ("NVIDIA H200 NVL", 835, 60), ("NVIDIA H20", 148, 44),
    ("NVIDIA B300 SXM6 AC", 2250, 75), ("NVIDIA GB300", 2500, 80), ("NVIDIA A40", 149.7, 37.4),
    ("NVIDIA A30", 165, 10.3), ("NVIDIA RTX A6000", 154.8, 38.7),
    ("NVIDIA RTX 6000 Ada Generation", 364.2, 91.1), ("NVIDIA GeForce RTX 3090 Ti", 80, 40),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 125),
    ("NVIDIA GeForce RTX 4080", 97.5, 48.7), ("NVIDIA GB200", 2500, 80),
    ("Tesla V100-PCIE-16GB", None, 14), ("Tesla T4", None, 8.1), *((name, None, None) for name in (
        "NVIDIA A1000", "NVIDIA RTX A1000", "NVIDIA H800 PCIe", "NVIDIA L40G",  # not listed: no MFU
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "Tesla V100S-PCIE-32GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"))])
def test_a_card_is_known_by_its_whole_name(monkeypatch, name, bf16, fp32):
    """GeForce cards had no MFU, an L40 had an L4's, an H100 PCIe an SXM's; fp32 had TF32's."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = [peak_flops(torch.device("cuda"), precision) for precision in ("bf16", "fp32")]
    assert found == [peak and pytest.approx(peak * 1e12) for peak in (bf16, fp32)]
    half = peak_flops(torch.device("cuda"), "fp16")
    assert half >= (bf16 or fp32) * 1e12 if fp32 else half is None


def test_a_card_without_bf16_is_not_planned_in_bf16(run_file, weightless):
    run, _ = run_config.load(run_file, ["--train.global_batch_size=64"])
    with pytest.raises(UserError, match="no bf16.*zero1_fp16"):
        plan.make_plan(run, in_bf16(), gpu=GPUS["v100"], gpus=4, nodes=1, mfu=0.5)
    ds = DeepSpeedConfig(fp16={"enabled": True})
    assert plan.make_plan(run, ds, gpu=GPUS["v100"], gpus=4, nodes=1, mfu=0.5)


def test_states_of_the_published_sizes():
    """ZeRO's own arithmetic: 16 bytes a parameter in bf16 with fp32 Adam, gradients included."""
    ds, nothing = in_bf16(3, reduce_bucket_size=1), Activations({0: 0})
    assert plan.memory_of(1_000_000, ds, 1, nothing, False, False).held == 16_000_000 + 2
    assert plan.memory_of(1_000_000, ds, 8, nothing, False, False).held == 2_000_000 + 2


def test_table(run_file):
    run, _ = run_config.load(run_file, ["--train.global_batch_size=64"])
    ds = in_bf16(1, reduce_bucket_size=1000)
    choices = plan.make_plan(run, ds, gpu=GPUS["h100"], gpus=4, nodes=1, mfu=0.5)
    assert [(c.stage, c.checkpointing) for c in choices] == [
        (stage, how) for how in ("none", "selective", "full") for stage in (1, 2, 3)]
    assert plan.recommended(choices).checkpointing == "none"
    plain = choices[0]
    seconds = 64 * 64 * objective_of(run).flops_per_token(run) / (4 * 989e12 * 0.5)
    assert plain.compute_seconds == pytest.approx(seconds)
    parameters = sum(parameter_sizes(run).values())
    # all-reduce of gradients, gather of weights, in a ring of four
    sending = 3 * 3 / 4 * 2 * parameters / (450e9 * 0.95)
    assert plain.communication_seconds == pytest.approx(sending)
    assert plain.step_seconds == pytest.approx(seconds + sending)  # nothing overlaps
    kept = {c.checkpointing: c.memory.work for c in choices if c.stage == 1}
    assert kept["none"] > kept["selective"] > kept["full"]
    by_hand = card_of("mine", tflops=989, memory_gb=80, link_gb_s=450, network_gb_s=50)
    assert plan.make_plan(run, ds, gpu=by_hand, gpus=4, nodes=1, mfu=0.5) == choices


@pytest.mark.parametrize("name, stages", [("zero2_bf16_offload_cpu", {1, 2, 3}),
                                          ("zero3_bf16_offload_cpu", {3}),
                                          ("zero3_bf16_offload_nvme", {3})])
def test_a_stage_that_a_run_refuses_is_not_offered(run_file, name, stages):
    """Weights were taken out of the GPU at every stage, and the fastest of them recommended."""
    run, _ = run_config.load(run_file, ["--train.global_batch_size=64"])
    ds = ds_config.load(ROOT / f"ds_configs/{name}.json")
    choices = plan.make_plan(run, ds, gpu=GPUS["h100"], gpus=4, nodes=1, mfu=0.5)
    assert {choice.stage for choice in choices} == stages
    parameters = sum(parameter_sizes(run).values())
    width = 2 * (ds.offload("offload_param").device != "none")
    [line] = plan.offloaded(choices, 4)
    assert f"offload: {(16 + width) * parameters / 1e9:,.1f} GB of each node's memory" in line
    assert "not in the times" in line and plan.offloaded([replace(choices[0], memory=replace(
        choices[0].memory, offloaded=0))], 4) == []


@pytest.mark.parametrize("stage, micro_batches, elements", [
    (0, 4, 2 * 2000), (1, 4, 3 * 2000), (2, 4, (2 * 4 + 1) * 2000),
    (3, 4, 4 * (2000 + 4 * 2000 + 2 * 1000))])  # scattered; gathered for every use
def test_bytes_sent(stage, micro_batches, elements):
    ds, sizes = in_bf16(stage), [1000, 600, 400]
    assert plan.most_sent(sizes, ds, 4, micro_batches) == 2 * elements * 3 / 4
    in_fp32 = ds.model_copy(update={"communication_data_type": "fp32"})
    wide = plan.most_sent(sizes, in_fp32, 4, micro_batches)
    gradients = 2000 * (micro_batches if stage > 1 else 1) * (1 if stage == 3 else 2)
    assert wide == (2 * elements + 2 * gradients) * 3 / 4
    assert plan.most_sent(sizes, ds, 1, micro_batches) == 0


@pytest.mark.parametrize("days, stage", [((1.0, 0.98, 0.975), 1), ((1.0, 0.9, 0.9), 2),
                                         ((None, 1.0, 0.98), 2), ((None, None, None), None)])
def test_the_lowest_stage_that_is_about_as_fast_is_recommended(days, stage):
    """ZeRO-3 was called the fastest for 0.2 % of a step."""
    choices = [plan.Choice(number, "none", None, day is not None, 0, 0, 0, 0, day or 0.1)
               for number, day in enumerate(days, 1)]
    assert getattr(plan.recommended(choices), "stage", None) == stage


def test_cores_of_a_cpu_are_planned_as_they_were_measured(monkeypatch, weightless):
    """docs/evidence/performance.md: xsmall at 16 x 128, 401 tokens/s in fp32 and 738 in bf16."""
    monkeypatch.chdir(ROOT)
    run, _ = run_config.load("launch/runs/v3_xsmall.toml", [
        "--objective.kind=mlm", "--data.seq_len=128", "--train.micro_batch_size=16",
        "--train.global_batch_size=128"])
    for name, rate in (("zero1_fp32", 401), ("zero1_autocast_cpu", 738)):
        ds = ds_config.load(f"ds_configs/{name}.json")
        card, ranks, threads = cpu_ranks(card_of("cpu"), 8)
        assert (ranks, threads) == (2, 4)
        found = plan.make_plan(run, ds, gpu=card, gpus=ranks, nodes=1,
                               mfu=expected_mfu(run, card, ds))
        seconds = found[0].compute_seconds * 8  # of 128 sequences on one core
        assert 128 * 128 / seconds == pytest.approx(rate, rel=0.05)


def test_expected_mfu_follows_the_price_of_a_step(monkeypatch):
    """It was 40 % for every model; of v3-base at 64 x 512 an H100's kernels took 168 ms, and with a
    host that takes longer that is the step.
    """
    monkeypatch.chdir(ROOT)
    run, _ = run_config.load("launch/runs/v3_base.toml", ["--train.micro_batch_size=64"])
    result = ROOT / "benchmarks/results/step_cost-v3_base-64x512-h100.json"
    priced = json.loads(result.read_text())
    found = expected_mfu(run, GPUS["h100"], ds := in_bf16())
    assert found == pytest.approx(0.152 * 218 / 168, rel=0.05)
    assert found == pytest.approx(0.67 * priced["total"]["mfu"], rel=0.15)
    few = replace(run, train=replace(run.train, micro_batch_size=16))
    eager = replace(few, train=replace(few.train, cuda_graph="off"))
    assert expected_mfu(few, GPUS["h100"], ds) > 3 * expected_mfu(eager, GPUS["h100"], ds)
    assert expected_mfu(run, GPUS["a100"], ds) > found > expected_mfu(run, GPUS["l40s"], ds)
    narrow = replace(run, model=replace(run.model, hidden_size=192))
    assert expected_mfu(narrow, GPUS["h100"], ds) < found / 2


def test_python_of_zero3_is_as_measured_and_a_node_of_eight_network_cards_has_their_sum():
    for ranks, seconds in ((8, 1.2), (64, 2.1), (256, 6.3), (1024, 15.5)):
        assert plan.host_seconds(1184, ranks) == pytest.approx(seconds, rel=0.3)
    h100 = GPUS["h100"]
    assert plan.bandwidth(h100, 8, 1) == pytest.approx(450e9 * 0.95)
    assert plan.bandwidth(h100, 8, 4) == pytest.approx(380e9)
    assert plan.bandwidth(h100, 1, 4) == pytest.approx(50e9 * 0.95)


def test_advice_gives_its_reasons(run_file, weightless):
    run, _ = run_config.load(
        run_file, ["--train.global_batch_size=2048", "--train.micro_batch_size=2"])
    ds = in_bf16(1)
    choices = plan.make_plan(run, ds, gpu=GPUS["h100"], gpus=8, nodes=32, mfu=0.5)
    parameters = sum(parameter_sizes(run).values())
    best = plan.recommended(choices)
    text = "\n".join(plan.advise(run, ds, best, parameters, gpu=GPUS["h100"], ranks=256))
    for part in ("one in 195 h", "micro_batch_size = 8 would", "reduce_bucket_size",
                 "communication_data_type"):
        assert part in text, part


@pytest.mark.parametrize("rows, micro, ranks, hint", [
    (96, 8, 5, "80 or 120 sequences would be, or 4 ranks"),
    (64, 16, 8, "128 sequences would be, or micro_batch_size = 8, or 4 ranks"),
    (30, 4, 3, "24 or 36 sequences would be, or micro_batch_size = 2")])
def test_what_divides_is_said(run_file, rows, micro, ranks, hint):
    run, _ = run_config.load(run_file, [f"--train.global_batch_size={rows}",
                                    f"--train.micro_batch_size={micro}"])
    with pytest.raises(ConfigError, match=hint):
        ds_config.accumulation_steps(run, ranks)


@pytest.mark.slow
def test_command(run_file, monkeypatch):
    monkeypatch.delitem(ENVIRONMENT, "DS_ACCELERATOR")  # as a user without a GPU has it
    monkeypatch.setitem(ENVIRONMENT, "COLUMNS", "80")
    done = python(ROOT / "launch/plan.py", "--config", run_file, "--devices", "4 x a100",
                  "--train.global_batch_size=64", "--train.steps=2000", "--price_per_hour=1000")
    assert "recommended: ZeRO-1, activation checkpointing none" in done.stdout
    assert done.stdout.startswith("epochs: ") and "WARNING: over 40 epochs" in done.stdout
    assert all(len(line) <= 79 for line in done.stdout.splitlines() if "/" not in line)
    hours, cost = re.search(r"([\d,.]+) GPU-hours, cost ([\d,.]+)", " ".join(
        done.stdout.split())).groups()
    assert float(cost) == pytest.approx(1000 * float(hours), abs=51)
    assert "vocabulary of 640 (" in " ".join(done.stdout.split())
    assert "accelerator" not in done.stdout + done.stderr  # DeepSpeed's warning, of no concern here


def test_planes_of_attention_are_counted_while_it_works_and_where_they_are_kept(monkeypatch):
    monkeypatch.chdir(ROOT)
    heads, rows, length, layers = 4, 2, 512, 4

    def peak(*overrides):
        run, _ = run_config.load("launch/runs/v3_base.toml", [
            f"--model.num_layers={layers}", "--model.hidden_size=64", f"--model.num_heads={heads}",
            "--model.intermediate_size=64", "--model.vocab_size=512",
            "--objective.generator_layers=2", f"--train.micro_batch_size={rows}", *overrides])
        return trace(run, torch.bfloat16, fused=True).peak(0.0)

    plane = 2 * rows * heads * length * length  # bytes; of two terms, and gradients twice as wide
    recomputed, kept = peak("--model.keep_position_terms=false"), peak()
    assert recomputed > 2 * plane + 4 * plane
    assert kept > plane * layers + 4 * plane  # the sums of the discriminator, at its last
