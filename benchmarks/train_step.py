"""A whole training step: forward, backward, optimizer. Ours next to Hugging Face's modules.

Same random rows, all tokens real, 15 percent masked, dropout 0.1 everywhere. Ours runs the enhanced
mask decoder, predicts masked rows only and uses fused AdamW; Hugging Face's model has no decoder
and computes logits of every position, with AdamW as torch defaults it and, next to it, fused.
On a CPU where our runs let oneDNN compute fp32 matmuls (`deberta_ds.model.cpu`), fp32 is timed both
ways, and next to the steps one large matmul, which a step's FLOP/s are a share of. There the peers
run in a process of their own, with the heap as transformers leaves it; ours keep it, as our runs do
(`deberta_ds.model.cpu`), and with --peers-keep-heap so do the peers. Writes
benchmarks/results/train_step-<objective>-<model>-<device>.json (amx-cpu: a CPU with AMX).

  python -m benchmarks.train_step --objective mlm rtd               # CPU, xsmall, one thread
  python -m benchmarks.train_step --device cuda --model deberta-v3-base --shapes 64x512 16x2048
"""

import argparse
import gc
import math
import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DebertaV2Config, DebertaV2ForMaskedLM, DebertaV2Model

from benchmarks.measure import (
    as_it_is,
    as_torch_comes,
    cpu_seconds,
    interleaved_minimum,
    named_by_cpu,
    save,
)
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.config.model import MODELS
from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig
from deberta_ds.data.rows import Batch, Row, collate
from deberta_ds.engine.gpus import peak_flops
from deberta_ds.model import cpu, flops
from deberta_ds.model.backbone import init_parameters
from deberta_ds.model.heads import ReplacedTokenHead
from deberta_ds.objectives.mlm import MlmModel
from deberta_ds.objectives.rtd import RtdModel
from deberta_ds.objectives.rtd_cached import CachedRtdModel

MASK_RATE, LEARNING_RATE, RTD_WEIGHT = 0.15, 1e-4, 50.0
ONEDNN = "fp32 by oneDNN"
PEERS = ("Hugging Face", "Hugging Face + fused AdamW")
STORED = "ours with stored replacements"  # the discriminator alone
PROFILED = 15  # kernels listed by --profile
PRODUCT = "large product"
PRODUCT_SHAPE = (2048, 1536, 1536)  # rows, inner size, columns


def make_batch(config: ModelConfig, rows: int, length: int) -> Batch:
    """Return random full rows."""
    generator = np.random.default_rng(length)
    mask_id = config.vocab_size - 100
    made = []
    for number in range(rows):
        ids = generator.integers(4, mask_id, length)
        labels = np.full(length, -100)
        columns = generator.choice(length, round(MASK_RATE * length), replace=False)
        labels[columns] = ids[columns]
        ids[columns] = mask_id
        positions = np.arange(length, dtype=np.int32)
        made.append(Row(number, ids, labels, np.ones(length, np.int32), positions))
    return collate(made)


def normalizers_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Return what our models divide their sums by, where one rank has all rows."""
    return {name: torch.tensor(float(count), device=batch.rows.device)
            for name, count in (("targets", batch.num_targets), ("tokens", batch.num_tokens))}


def our_loss(config: ModelConfig, objective: str, generator_layers: int, batch: Batch):
    """Return (module, function that returns the loss)."""
    normalizers = normalizers_of(batch)
    if objective == "mlm":
        model = MlmModel(config)
    elif objective == "rtd_cached":
        model = CachedRtdModel(config, RTD_WEIGHT)
    else:
        generator = ModelConfig(**_values(config) | {"num_layers": generator_layers})
        settings = ObjectiveConfig(kind="rtd", rtd_weight=RTD_WEIGHT)
        model = RtdModel(config, generator, settings, sampling_seed=0)
    init_parameters(model, 0.02, 0)
    model.to(batch.rows.device)
    return model, lambda: model(batch, normalizers)[0]


def stored_loss(config: ModelConfig, _objective: str, generator_layers: int, batch: Batch):
    """The same where replacements were made once for all (data_prep/replace.py)."""
    return our_loss(config, "rtd_cached", generator_layers, batch)


def _values(config: ModelConfig) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def hugging_face_config(config: ModelConfig, layers: int) -> DebertaV2Config:
    """Return the same shape for transformers."""
    return DebertaV2Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=layers,
        num_attention_heads=config.num_heads, intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position, max_relative_positions=config.largest_distance,
        position_buckets=config.position_buckets, relative_attention=True,
        pos_att_type=["c2p", "p2c"], share_att_key=True, norm_rel_ebd="layer_norm",
        position_biased_input=False, type_vocab_size=0, layer_norm_eps=1e-7)


class HuggingFaceRtd(torch.nn.Module):
    """Replaced-token detection put together from Hugging Face's models."""

    def __init__(self, config: ModelConfig, generator_layers: int):
        super().__init__()
        self.generator = DebertaV2ForMaskedLM(hugging_face_config(config, generator_layers))
        self.discriminator = DebertaV2Model(hugging_face_config(config, config.num_layers))
        self.discriminator.embeddings.word_embeddings = torch.nn.Embedding(1, config.hidden_size)
        self.delta = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = ReplacedTokenHead(config)
        torch.nn.init.zeros_(self.delta.weight)

    def forward(self, batch: Batch) -> torch.Tensor:
        mask = torch.ones_like(batch.input_ids)
        logits = self.generator(input_ids=batch.input_ids, attention_mask=mask).logits
        masked = batch.labels >= 0
        generator_loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        drawn = torch.multinomial(logits[masked].detach().float().softmax(-1), 1)[:, 0]
        ids = batch.input_ids.masked_scatter(masked, drawn)
        words = self.generator.get_input_embeddings()
        vectors = words(ids).detach() + self.delta(ids)
        hidden = self.discriminator(inputs_embeds=vectors, attention_mask=mask).last_hidden_state
        replaced = masked & (ids != batch.labels)
        detection = self.head(hidden, batch.positions)
        loss = F.binary_cross_entropy_with_logits(detection, replaced.float())
        return generator_loss + RTD_WEIGHT * loss


def hugging_face_loss(config: ModelConfig, objective: str, generator_layers: int, batch: Batch):
    """Return (module, function that returns the loss)."""
    if objective == "rtd":
        model = HuggingFaceRtd(config, generator_layers).to(batch.rows.device).train()
        return model, lambda: model(batch)
    model = DebertaV2ForMaskedLM(hugging_face_config(config, config.num_layers))
    model.to(batch.rows.device).train()
    mask = torch.ones_like(batch.input_ids)

    def loss():
        return model(input_ids=batch.input_ids, attention_mask=mask, labels=batch.labels).loss

    return model, loss


def kinds_of(device: str) -> dict[str, Callable]:
    """Return the kinds of steps to time, and what decides who computes the products of each."""
    if device == "cuda":
        return {"bf16": as_torch_comes}
    kinds = {"fp32": as_torch_comes, ONEDNN: as_it_is, "bf16": as_torch_comes}
    if not cpu.use_onednn():
        del kinds[ONEDNN]
    return kinds


def make_product(half: bool):
    """Return a function that multiplies two large matrices."""
    rows, inner, columns = PRODUCT_SHAPE
    dtype = torch.bfloat16 if half else torch.float32
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    return lambda: torch.mm(left, right, out=out)


def make_step(loss, optimizer, device: str, half: bool):
    """Return a function that runs one training step, under bf16 autocast if `half`."""

    def step():
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return step


def measure(options, objective: str, rows: int, length: int) -> dict:
    """Return the seconds of every variant at one shape, and why some have none."""
    config = ModelConfig(**MODELS[options.model])
    generator_layers = options.generator_layers or max(1, config.num_layers // 2)
    batch = make_batch(config, rows, length).to(options.device)
    arguments = (config, objective, generator_layers, batch)
    names = ("ours", STORED) if options.stored and objective == "rtd" else ("ours",)
    names += () if options.ours_only else PEERS
    forward = flops.masked_lm(config, length, MASK_RATE)
    if objective == "rtd":
        generator = ModelConfig(**_values(config) | {"num_layers": generator_layers})
        forward = flops.masked_lm(generator, length, MASK_RATE) + flops.detector(config, length)
    result = {"model": options.model, "objective": objective, "rows": rows}
    result |= {"length": length, "flops_per_token": 3 * forward, "seconds": {}, "absent": {}}
    on_gpu = options.device == "cuda"  # whose memory holds one variant at a time
    for group in [[name] for name in names] if on_gpu else [names]:
        try:
            _measure_group(options, group, arguments, result)
        except Exception as reason:  # no memory, or a kernel that finds no room, ends one variant
            if not on_gpu:
                raise
            said = f"{type(reason).__name__}: {reason}".splitlines()[0][:160]
            result["absent"] |= dict.fromkeys(group, said)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return result


def _measure_group(options, group, arguments: tuple, result: dict) -> None:
    """Build and time some variants, interleaved; what was built is freed when this returns."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    apart = [name for name in group if name in PEERS and options.device == "cpu"]
    steps = _build_steps(options, [name for name in group if name not in apart], arguments)
    with ExitStack() as stack:
        if apart:
            steps |= _steps_apart(options, apart, arguments, stack)
        result["seconds"] |= interleaved_minimum(steps, options.rounds, options.device)
    if options.device == "cuda":
        result.setdefault("peak_bytes", {})[group[0]] = torch.cuda.max_memory_allocated()
    if options.profile and "ours" in group:
        ways = {"": options.device} | ({", on the host": "cpu"} if options.device == "cuda" else {})
        result["profile"] = {kind + suffix: profile(steps[f"ours, {kind}"], way)
                             for kind in kinds_of(options.device) for suffix, way in ways.items()}


def _build_steps(options, group: list[str], arguments: tuple) -> dict[str, Callable]:
    steps = {}
    for name in group:
        torch.manual_seed(0)
        make = {"ours": our_loss, STORED: stored_loss}.get(name, hugging_face_loss)
        model, loss = make(*arguments)
        fused = {} if name == PEERS[0] else {"fused": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **fused)
        for kind, way in kinds_of(options.device).items():
            step = make_step(loss, optimizer, options.device, kind == "bf16")
            steps[f"{name}, {kind}"] = way(step)
            if options.device == "cpu":
                steps[f"{PRODUCT}, {kind}"] = way(make_product(kind == "bf16"))
    return steps


def _steps_apart(options, names: list[str], arguments: tuple, stack: ExitStack
                 ) -> dict[str, Callable]:
    """Return steps that run in a process of their own and return the seconds they took."""
    start = (options, names, arguments)
    pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(1, _begin_apart, start))
    return {f"{name}, {kind}": partial(pool.apply, _seconds_apart, (f"{name}, {kind}",))
            for name in names for kind in kinds_of(options.device)}


_APART: dict[str, Callable] = {}


def _begin_apart(options, names: list[str], arguments: tuple) -> None:
    torch.set_num_threads(1)
    if options.peers_keep_heap:
        cpu.keep_heap()
    _APART.update(_build_steps(options, names, arguments))


def _seconds_apart(name: str) -> float:
    return cpu_seconds(_APART[name])


def profile(step, device: str) -> list[dict]:
    """Return the kernels (on the CPU, or a GPU's host: operators) that take most of one step."""
    activity = torch.profiler.ProfilerActivity
    chosen = activity.CUDA if device == "cuda" else activity.CPU
    with torch.profiler.profile(activities=[chosen]) as profiler:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    which = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = [e for e in profiler.key_averages() if not getattr(e, "is_user_annotation", False)]
    times = {event.key: getattr(event, which) for event in events}
    total = sum(times.values())
    largest = sorted(times, key=times.get, reverse=True)[:PROFILED]
    return [{"name": name, "ms": times[name] / 1e3, "share": times[name] / total}
            for name in largest]


def peak(result: dict, kind: str, device: str) -> float | None:
    """Return FLOP/s: the card's, if known, or on a CPU those of the large matmul."""
    if device == "cuda":
        return peak_flops(torch.device(device), kind)
    return 2 * math.prod(PRODUCT_SHAPE) / result["seconds"][f"{PRODUCT}, {kind}"]


def show(result: dict, device: str) -> None:
    """Print one table: speed, ratios to the peer at fp32 and at equal precision, and MFU."""
    seconds, tokens = result["seconds"], result["rows"] * result["length"]
    shape = f"{result['rows']} x {result['length']} tokens"
    print(f"\n{result['model']} {result['objective']}, {shape}")
    print(f"  {'':44}{'ms':>9}{'tokens/s':>11}{'x HF':>7}{'x HF fp32':>11}{'MFU':>7}")
    for name, value in seconds.items():
        what, _, kind = name.rpartition(", ")
        if what == PRODUCT:
            continue
        equal, single = (seconds.get(f"Hugging Face, {x}") for x in (kind, "fp32"))
        ratios = [f"{x / value:.2f}" if x else "-" for x in (equal, single)]
        rate = tokens / value
        most = peak(result, kind, device)
        share = f"{rate * result['flops_per_token'] / most:.1%}" if most and what != STORED else "-"
        print(f"  {name:44}{value * 1e3:9.1f}{rate:11.0f}{ratios[0]:>7}{ratios[1]:>11}{share:>7}")
    for name, size in result.get("peak_bytes", {}).items():
        print(f"  {name:44}{size / 2**30:9.1f} GiB at most")
    for name, reason in result["absent"].items():
        print(f"  {name:44}{reason}")
    for kind, rows in result.get("profile", {}).items():
        print(f"  ours, {kind}, by operator:")
        for row in rows:
            print(f"  {row['share']:6.1%}{row['ms']:9.2f} ms  {row['name'][:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=MODELS, default="deberta-v3-xsmall")
    parser.add_argument("--objective", choices=("mlm", "rtd"), nargs="+", default=["mlm"])
    parser.add_argument("--shapes", nargs="+", default=["16x128", "4x512"], metavar="ROWSxLENGTH")
    parser.add_argument("--generator-layers", type=int, default=0, help="0: half the layers")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ours-only", action="store_true", help="without the peer")
    parser.add_argument("--peers-keep-heap", action="store_true",
                        help="on a CPU: give the peers our setting of malloc")
    parser.add_argument("--stored", action="store_true",
                        help="rtd: also the discriminator alone, with stored replacements")
    parser.add_argument("--profile", action="store_true",
                        help="list the slowest kernels of ours, and what the host does longest")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
        cpu.keep_heap()  # as our runs do
    for objective in options.objective:
        results = []
        for shape in options.shapes:
            rows, length = map(int, shape.split("x"))
            results.append(measure(options, objective, rows, length))
            show(results[-1], options.device)
            name = named_by_cpu(f"train_step-{objective}-{options.model}", options.device)
            path = save(name, options.device, results)
        print(f"\nwrote {path}")


if __name__ == "__main__":
    exit_cleanly(main)
