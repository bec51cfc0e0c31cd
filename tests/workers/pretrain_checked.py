"""Worker: pretrain.py on a rank that is a node of its own, with a stand-in for a Triton kernel.

    pretrain_checked.py CHECK DIRECTORY ARGUMENTS...: CHECK is a function of stand_in_checks
"""

import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path

from deberta_ds.model import choose

check = f"stand_in_checks:{sys.argv.pop(1)}"
node = Path(sys.argv.pop(1), f"node{os.environ['RANK']}")
node.mkdir()
os.environ["LOCAL_RANK"], tempfile.tempdir, socket.gethostname = "0", str(node), lambda: node.name
problem = choose._problem
choose._problem = lambda kernel, asked: "" if kernel.check else problem(kernel, asked)
choose.KERNELS = (
    choose.Kernel("attention", "fused", ".attention.reference:reference_attention", "cpu",
                  check=check),
    *(kernel for kernel in choose.KERNELS[1:] if not kernel.check))
runpy.run_path(str(Path(__file__).parents[2] / "launch/pretrain.py"), run_name="__main__")
