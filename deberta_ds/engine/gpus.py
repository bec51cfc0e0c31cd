"""What a plan and an MFU figure need to know of a card, in one table.

Dense figures of the vendors' data sheets (no sparsity), a card in its usual 8-GPU node. Products of
fp32 are computed in fp32, as torch does by default; a run in TF32 has no MFU.
"cpu" is one processor core.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.model.precision import DTYPES

# Words of a device's name that do not tell cards of different speed apart.
_UNTOLD = re.compile(r"nvidia|tesla|geforce|sxm\d?|ac|dgxs|ls|hbm\w+|\d+gb"
                     r"|generation|blackwell|workstation|edition")


@dataclass(frozen=True)
class Gpu:
    """Peaks in FLOP/s by weight type, memory in bytes, links in bytes/s."""

    peaks: dict[str, float]
    memory: float
    link: float  # per GPU and direction inside a node
    network: float  # per GPU and direction between nodes
    memory_rate: float = 0.0  # bytes/s of its own memory; 0: unknown
    is_cpu: bool = False

    def peak(self, precision: str) -> float | None:
        """Return the peak for "bf16", "fp16" or "fp32"; None for a card without bf16."""
        other = self.peaks.get("bf16") if precision == "fp16" else None  # equally fast
        return self.peaks.get(precision, other)


_HOPPER = {"bf16": 989e12, "fp32": 67e12}
_HOPPER_PCIE = {"bf16": 756e12, "fp32": 51e12}
_HOPPER_NVL = {"bf16": 835e12, "fp32": 60e12}
_A100 = {"bf16": 312e12, "fp32": 19.5e12}
GPUS = {
    "h200": Gpu(_HOPPER, 141e9, 450e9, 50e9, 4.8e12),
    "h200nvl": Gpu(_HOPPER_NVL, 141e9, 64e9, 12.5e9, 4.8e12),
    "h100": Gpu(_HOPPER, 80e9, 450e9, 50e9, 3.35e12),
    "h100pcie": Gpu(_HOPPER_PCIE, 80e9, 64e9, 12.5e9, 2e12),
    "h100nvl": Gpu(_HOPPER_NVL, 94e9, 64e9, 12.5e9, 3.9e12),
    "h800": Gpu(_HOPPER, 80e9, 200e9, 50e9, 3.35e12),
    "h20": Gpu({"bf16": 148e12, "fp32": 44e12}, 96e9, 450e9, 50e9, 4e12),
    "gh200": Gpu(_HOPPER, 96e9, 450e9, 50e9, 4e12),
    "b200": Gpu({"bf16": 2250e12, "fp32": 75e12}, 180e9, 900e9, 50e9, 8e12),
    "gb200": Gpu({"bf16": 2500e12, "fp32": 80e12}, 186e9, 900e9, 50e9, 8e12),
    "b300": Gpu({"bf16": 2250e12, "fp32": 75e12}, 288e9, 900e9, 100e9, 8e12),
    "gb300": Gpu({"bf16": 2500e12, "fp32": 80e12}, 279e9, 900e9, 100e9, 8e12),
    "a100": Gpu(_A100, 80e9, 300e9, 25e9, 2.04e12),
    "a100pcie": Gpu(_A100, 80e9, 32e9, 12.5e9, 1.94e12),
    "a800": Gpu(_A100, 80e9, 200e9, 25e9, 2.04e12),
    "a800pcie": Gpu(_A100, 80e9, 32e9, 12.5e9, 1.94e12),
    "a40": Gpu({"bf16": 149.7e12, "fp32": 37.4e12}, 48e9, 32e9, 12.5e9, 0.7e12),
    "a30": Gpu({"bf16": 165e12, "fp32": 10.3e12}, 24e9, 32e9, 12.5e9, 0.93e12),
    "l40s": Gpu({"bf16": 362e12, "fp32": 91.6e12}, 48e9, 32e9, 12.5e9, 0.86e12),
    "l40": Gpu({"bf16": 181e12, "fp32": 90.5e12}, 48e9, 32e9, 12.5e9, 0.86e12),
    "l4": Gpu({"bf16": 121e12, "fp32": 30.3e12}, 24e9, 32e9, 12.5e9, 0.3e12),
    "a10": Gpu({"bf16": 125e12, "fp32": 31.2e12}, 24e9, 32e9, 12.5e9, 0.6e12),
    "a10g": Gpu({"bf16": 70e12, "fp32": 31.5e12}, 24e9, 32e9, 12.5e9, 0.6e12),
    "v100": Gpu({"fp16": 125e12, "fp32": 15.7e12}, 32e9, 150e9, 12.5e9, 0.9e12),
    "v100pcie": Gpu({"fp16": 112e12, "fp32": 14e12}, 32e9, 16e9, 12.5e9, 0.9e12),
    "t4": Gpu({"fp16": 65e12, "fp32": 8.1e12}, 16e9, 16e9, 12.5e9, 0.32e12),
    "rtxpro6000": Gpu({"bf16": 503.8e12, "fp32": 125e12}, 96e9, 64e9, 12.5e9, 1.79e12),
    "rtx6000ada": Gpu({"bf16": 364.2e12, "fp32": 91.1e12}, 48e9, 32e9, 12.5e9, 0.96e12),
    "rtxa6000": Gpu({"bf16": 154.8e12, "fp32": 38.7e12}, 48e9, 32e9, 12.5e9, 0.77e12),
    # Consumer cards, which have no NVLink: PCIe 4.0 x16 (RTX 5090: 5.0).
    "rtx5090": Gpu({"bf16": 209.5e12, "fp32": 104.8e12}, 32e9, 64e9, 12.5e9, 1.79e12),
    "rtx4090": Gpu({"bf16": 165.2e12, "fp32": 82.6e12}, 24e9, 32e9, 12.5e9, 1.01e12),
    "rtx4080": Gpu({"bf16": 97.5e12, "fp32": 48.7e12}, 16e9, 32e9, 12.5e9, 0.72e12),
    "rtx3090ti": Gpu({"bf16": 80e12, "fp32": 40e12}, 24e9, 32e9, 12.5e9, 1.01e12),
    "rtx3090": Gpu({"bf16": 71e12, "fp32": 35.6e12}, 24e9, 32e9, 12.5e9, 0.94e12),
    # One core of a Zen 4: matmuls as measured (docs/evidence/performance.md), 8 GB, gloo.
    "cpu": Gpu({"bf16": 200e9, "fp32": 95e9}, 8e9, 10e9, 1e9, is_cpu=True),
}


def cpu_ranks(core: Gpu, cores: int) -> tuple[Gpu, int, int]:
    """Return (a rank's card, ranks, threads of each): a rank per core, or of many per four."""
    threads = 1 if cores <= 4 else 4
    card = replace(core, peaks={name: peak * threads for name, peak in core.peaks.items()},
                   memory=core.memory * threads)
    return card, cores // threads, threads


def card_of(name: str, tflops: float | None = None, memory_gb: float | None = None,
            link_gb_s: float | None = None, network_gb_s: float | None = None) -> Gpu:
    """Return the card called `name`, with the figures that are given in place of the table's.

    `tflops` is for the precision of the run. A card that is not listed needs `tflops` and
    `memory_gb`; its links are those of PCIe 4.0 x16 and a 100 Gbit/s network.
    """
    known = GPUS.get(known_as(name))
    if known is None and not (tflops and memory_gb):
        raise UserError(f"{name}: not listed; one of {', '.join(GPUS)}; for another, take the "
                        "nearest, or give plan.py its data sheet's figures: --devices NAME "
                        "--tflops (dense, of the run's precision) and --memory_gb")
    card = known or Gpu({}, 0.0, 32e9, 12.5e9)
    peaks = dict.fromkeys(DTYPES, tflops * 1e12) if tflops else card.peaks
    given = {"memory": memory_gb, "link": link_gb_s, "network": network_gb_s}
    sizes: dict[str, Any] = {key: value * 1e9 for key, value in given.items() if value}
    return replace(card, peaks=peaks, **sizes)


def known_as(device_name: str) -> str:
    """Return what "NVIDIA A100 80GB PCIe" would be called in the table: "a100pcie".

    Any word that is not known to mean nothing stays: Ti, D, Laptop, NVL and MIG have other speeds.
    """
    words = re.findall(r"\w+", device_name.lower())
    return "".join(word for word in words if not _UNTOLD.fullmatch(word))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU for "bf16", "fp16" or "fp32"; None if it is not listed."""
    card = GPUS.get(known_as(torch.cuda.get_device_name(device)))
    return card.peak(precision) if card else None
