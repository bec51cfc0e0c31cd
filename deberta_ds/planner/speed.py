"""The share of a card's peak that a run is expected to reach, where nobody has measured it.

GPUs: a micro-batch takes as long as its kernels or as the host, whichever is more. Kernels: the
price of a step of 16,384 tokens on an H100, operator by operator (benchmarks/step_cost.py; `python
-m benchmarks.studies.mfu_table`), times what a run on one reached of it. The host: as measured
(benchmarks/host_time.py), or a fixed time where a CUDA graph takes its work (not measured yet).
What a step takes beyond its matmuls is taken to grow with a card's peak by the bandwidth of its
memory: from 256 wide on 1 to 13 % below the same prices for an A100. CPU: docs/evidence/
performance.md.
"""

import numpy as np

from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.engine.gpus import GPUS, Gpu
from deberta_ds.engine.passes import graph_obstacle
from deberta_ds.objectives.build import objective_of

_MATMULS = 0.65  # of the peak, step_cost's PRODUCT_SHARE: what no step exceeds
_WIDTHS, _LENGTHS = (128, 256, 384, 768, 1024, 1536), (128, 512, 2048)
_H100 = ((.078, .074, .069), (.166, .131, .092), (.230, .196, .119), (.343, .292, .179),
         (.382, .316, .187), (.424, .363, .227))  # by width, then length
# Of the price: kernels of RTD v3-base, 64 x 512, took 168 of a micro-batch's 218 ms (docs/evidence/
# performance.md, from benchmarks/results/first_contact-h100.txt).
_REACHED = 0.67
# Of the host: for a layer's operators and launches, for a replay, and for an update.
LAYER_SECONDS, _REPLAY_SECONDS, _UPDATE_SECONDS = 8e-3, 3e-3, 17e-3
_CPU = {"fp32": (.45, .73), "bf16": (.25, .64)}  # 128 and 384 wide


def expected_mfu(run: RunConfig, gpu: Gpu, ds: DeepSpeedConfig) -> float:
    """Return the expected share of the peak; between the tables' widths and lengths on a straight
    line of their logarithms, beyond them as at their edges.
    """
    products = ds.matmul_precision
    if gpu.is_cpu:
        width = np.log(run.model.hidden_size)
        return float(np.interp(width, np.log((128, 384)), _CPU.get(products, _CPU["bf16"])))
    peak = gpu.peak(products)
    if peak is None:
        return priced_mfu(run, gpu, products)  # nobody runs that; the plan says what to do
    objective = objective_of(run)
    layers = sum(one.num_layers for one in objective.encoders(run).values())
    flops = run.train.micro_batch_size * run.data.seq_len * objective.flops_per_token(run)
    kernels = flops / (peak * _REACHED * priced_mfu(run, gpu, products))
    host = layers * LAYER_SECONDS if graph_obstacle(run, ds, "cuda") else _REPLAY_SECONDS
    updates = run.train.micro_batch_size / run.train.global_batch_size  # for each, on one rank
    return flops / peak / (max(kernels, host) + updates * _UPDATE_SECONDS)


def priced_mfu(run: RunConfig, gpu: Gpu, products: str) -> float:
    """Return the share that a step has by its price alone; `products`: the precision of matmuls."""
    width, peak = np.log(run.model.hidden_size), gpu.peak(products)
    of_widths = [np.interp(np.log(run.data.seq_len), np.log(_LENGTHS), row) for row in _H100]
    priced = float(np.interp(width, np.log(_WIDTHS), of_widths))
    if peak is None:
        return priced
    h100 = GPUS["h100"]
    starved = (peak / gpu.memory_rate) / (h100.peaks["bf16"] / h100.memory_rate) \
        if gpu.memory_rate else 1.0
    return 1 / (1 / _MATMULS + (1 / priced - 1 / _MATMULS) * starved)
