"""What the rank server loads before it forks: everything a run imports late, once for all ranks."""
# ruff: noqa: E402

import gc

gc.disable()

import deepspeed.module_inject.auto_ep_layer  # noqa: F401
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import sentencepiece.sentencepiece_model_pb2  # noqa: F401
import setuptools  # noqa: F401
import sklearn.metrics  # noqa: F401
import torch
import torch.utils.tensorboard  # noqa: F401
from deepspeed.utils import nvtx

import deberta_ds.training.loop  # noqa: F401
from deberta_ds.model.backbone import on_meta
from deberta_ds.tokenizer.words import bytes_start_word

nvtx.enable_nvtx = False  # 300,000 ranges for a GPU's profiler in 100 steps under ZeRO-3
deepspeed.ops.__compatible_ops__  # noqa: B018  a compiler runs for it
for byte in range(256):  # 0.4 s in each process that opens a vocabulary with single bytes
    bytes_start_word(bytes([byte]))
layer = on_meta(torch.nn.Linear, 4, 4)
layer(torch.zeros(2, 4, device="meta"))
weight = torch.nn.Parameter(torch.zeros(4))
torch.utils.checkpoint.checkpoint(lambda x: x * 2, weight, use_reentrant=False).sum().backward()
torch.optim.AdamW([weight], fused=True).step()
gc.freeze()  # or each collection in a rank looks at all of it, 0.6 s, and copies its pages
gc.enable()
