"""What the rank server loads before it forks: everything a run imports late, once for all ranks."""
# ruff: noqa: E402

import gc

gc.disable()

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import setuptools  # noqa: F401
import sklearn.metrics  # noqa: F401
import torch
import torch.utils.tensorboard  # noqa: F401

import deberta_ds.training.loop  # noqa: F401
from deberta_ds.model.backbone import on_meta

layer = on_meta(torch.nn.Linear, 4, 4)
layer(torch.zeros(2, 4, device="meta"))
weight = torch.nn.Parameter(torch.zeros(4))
torch.utils.checkpoint.checkpoint(lambda x: x * 2, weight, use_reentrant=False).sum().backward()
torch.optim.AdamW([weight], fused=True).step()
gc.freeze()  # or each collection in a rank looks at all of it, 0.6 s, and copies its pages
gc.enable()
