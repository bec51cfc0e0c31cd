"""One table of GPUs: what a plan and an MFU figure need to know of a card.

Dense figures of the vendors' data sheets (no sparsity), a card in its usual 8-GPU node.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    """Peaks in FLOP/s by weight type, memory in bytes, links in bytes/s."""

    peaks: dict[str, float]  # "fp32" is TF32 where the card has it
    memory: float
    link: float  # per GPU and direction inside a node
    network: float  # per GPU and direction between nodes

    def peak(self, precision: str) -> float:
        """Return the peak for "bf16", "fp16" or "fp32"; bf16 and fp16 are equally fast."""
        other = {"bf16": "fp16", "fp16": "bf16"}.get(precision)
        return self.peaks.get(precision) or self.peaks[other]


_HOPPER = {"bf16": 989e12, "fp32": 494e12}
GPUS = {
    "h200": Gpu(_HOPPER, 141e9, 450e9, 50e9),
    "h100": Gpu(_HOPPER, 80e9, 450e9, 50e9),
    "h800": Gpu(_HOPPER, 80e9, 200e9, 50e9),
    "b200": Gpu({"bf16": 2250e12, "fp32": 1125e12}, 180e9, 900e9, 50e9),
    "a100": Gpu({"bf16": 312e12, "fp32": 156e12}, 80e9, 300e9, 25e9),
    "a800": Gpu({"bf16": 312e12, "fp32": 156e12}, 80e9, 200e9, 25e9),
    "l40s": Gpu({"bf16": 362e12, "fp32": 183e12}, 48e9, 32e9, 12.5e9),
    "v100": Gpu({"fp16": 125e12, "fp32": 15.7e12}, 32e9, 150e9, 12.5e9),
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of `device` for "bf16", "fp16" or "fp32"; None if not listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((gpu.peak(precision) for known, gpu in GPUS.items() if known in name), None)
