"""One table of GPUs: what a plan and an MFU figure need to know of a card.

Dense figures of the vendors' data sheets (no sparsity), a card in its usual 8-GPU node. Products of
fp32 are computed in fp32, as torch does by default; a run in TF32 has no MFU.
"""

import re
from dataclasses import dataclass, replace

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.model.precision import DTYPES

# Words of a device's name that do not tell cards of different speed apart.
_UNTOLD = re.compile(r"nvidia|tesla|geforce|sxm\d?|dgxs|ls|hbm\w+|\d+gb")


@dataclass(frozen=True)
class Gpu:
    """Peaks in FLOP/s by weight type, memory in bytes, links in bytes/s."""

    peaks: dict[str, float]
    memory: float
    link: float  # per GPU and direction inside a node
    network: float  # per GPU and direction between nodes

    def peak(self, precision: str) -> float | None:
        """Return the peak for "bf16", "fp16" or "fp32"; None for a card without bf16."""
        if precision == "fp16" and "fp16" not in self.peaks:
            return self.peaks["bf16"]  # equally fast
        return self.peaks.get(precision)


_HOPPER = {"bf16": 989e12, "fp32": 67e12}
_HOPPER_PCIE = {"bf16": 756e12, "fp32": 51e12}
_A100 = {"bf16": 312e12, "fp32": 19.5e12}
GPUS = {
    "h200": Gpu(_HOPPER, 141e9, 450e9, 50e9),
    "h100": Gpu(_HOPPER, 80e9, 450e9, 50e9),
    "h100pcie": Gpu(_HOPPER_PCIE, 80e9, 64e9, 12.5e9),
    "h800": Gpu(_HOPPER, 80e9, 200e9, 50e9),
    "gh200": Gpu(_HOPPER, 96e9, 450e9, 50e9),
    "b200": Gpu({"bf16": 2250e12, "fp32": 75e12}, 180e9, 900e9, 50e9),
    "gb200": Gpu({"bf16": 2500e12, "fp32": 80e12}, 186e9, 900e9, 50e9),
    "a100": Gpu(_A100, 80e9, 300e9, 25e9),
    "a100pcie": Gpu(_A100, 80e9, 32e9, 12.5e9),
    "a800": Gpu(_A100, 80e9, 200e9, 25e9),
    "a800pcie": Gpu(_A100, 80e9, 32e9, 12.5e9),
    "l40s": Gpu({"bf16": 362e12, "fp32": 91.6e12}, 48e9, 32e9, 12.5e9),
    "l40": Gpu({"bf16": 181e12, "fp32": 90.5e12}, 48e9, 32e9, 12.5e9),
    "l4": Gpu({"bf16": 121e12, "fp32": 30.3e12}, 24e9, 32e9, 12.5e9),
    "a10": Gpu({"bf16": 125e12, "fp32": 31.2e12}, 24e9, 32e9, 12.5e9),
    "a10g": Gpu({"bf16": 70e12, "fp32": 31.5e12}, 24e9, 32e9, 12.5e9),
    "v100": Gpu({"fp16": 125e12, "fp32": 15.7e12}, 32e9, 150e9, 12.5e9),
    "v100pcie": Gpu({"fp16": 112e12, "fp32": 14e12}, 32e9, 16e9, 12.5e9),
    "t4": Gpu({"fp16": 65e12, "fp32": 8.1e12}, 16e9, 16e9, 12.5e9),
    # Consumer cards, which have no NVLink: PCIe 4.0 x16 (RTX 5090: 5.0).
    "rtx5090": Gpu({"bf16": 209.5e12, "fp32": 104.8e12}, 32e9, 64e9, 12.5e9),
    "rtx4090": Gpu({"bf16": 165.2e12, "fp32": 82.6e12}, 24e9, 32e9, 12.5e9),
    "rtx3090": Gpu({"bf16": 71e12, "fp32": 35.6e12}, 24e9, 32e9, 12.5e9),
}


def card_of(name: str, tflops: float | None = None, memory_gb: float | None = None,
            link_gb_s: float | None = None, network_gb_s: float | None = None) -> Gpu:
    """Return the card called `name`, with the figures that are given in place of the table's.

    `tflops` is for the precision of the run. A card that is not listed needs `tflops` and
    `memory_gb`; its links are those of PCIe 4.0 x16 and a 100 Gbit/s network.
    """
    known = GPUS.get(name)
    if known is None and not (tflops and memory_gb):
        raise UserError(f"--gpu {name}: not listed; one of {', '.join(GPUS)}, or give its data "
                        "sheet's figures: --tflops (dense, of the run's precision) and --memory_gb")
    card = known or Gpu({}, 0.0, 32e9, 12.5e9)
    peaks = dict.fromkeys(DTYPES, tflops * 1e12) if tflops else card.peaks
    given = {"memory": memory_gb, "link": link_gb_s, "network": network_gb_s}
    return replace(card, peaks=peaks, **{key: value * 1e9 for key, value in given.items() if value})


def known_as(device_name: str) -> str:
    """Return what "NVIDIA A100 80GB PCIe" would be called in the table: "a100pcie".

    Any word that is not known to mean nothing stays: Ti, D, Laptop, NVL and MIG have other speeds.
    """
    words = re.findall(r"\w+", device_name.lower())
    return "".join(word for word in words if not _UNTOLD.fullmatch(word))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of `device` for "bf16", "fp16" or "fp32"; None if not listed."""
    if device.type != "cuda":
        return None
    card = GPUS.get(known_as(torch.cuda.get_device_name(device)))
    return card.peak(precision) if card else None
