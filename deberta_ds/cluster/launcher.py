"""Who am I: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT under every launcher.

torchrun and the deepspeed launcher (pdsh, none) set them. mpirun and srun do not; their own
variables are translated here, so that neither MPI nor PMIx is needed inside the job:

    mpirun (Open MPI)   OMPI_COMM_WORLD_*; on several nodes also MASTER_ADDR (-x), or mpi4py
    srun                SLURM_*; the first node of the step leads
    none                a job of one rank
"""

import ipaddress
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from deberta_ds.base.errors import UserError, first_line

# What a launcher's processes are called above its ranks; their end is noticed (signals.py).
PROGRAMS = {"deepspeed", "ds", "torchrun", "torchrun_elastic.py", "mpirun", "mpiexec", "orterun",
            "orted", "prterun", "prted", "mpiexec.hydra", "hydra_pmi_proxy", "slurmstepd"}
MODULES = {"deepspeed.launcher.runner", "deepspeed.launcher.launch", "torch.distributed.run",
           "torch.distributed.launch"}
# What a launcher or a shell says in environment variables: read strictly, before anything waits.
#
# A wrong value would otherwise be a traceback of torch, a wait of half an hour for ranks that do
# not exist, or a run on the CPU of a machine full of GPUs.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_ACCELERATORS = ("cuda", "cpu")  # what this project is tested on
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
_NO_GPU = ("", "-1", "NoDevFiles", "none", "void")


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise UserError with every variable that cannot be what was meant; absent ones are fine."""
    problems = [*_rank_problems(environ), *_address_problems(environ), *_machine_problems(environ)]
    if problems:
        raise UserError("the environment of this process is not usable: " + "; ".join(problems))


def _rank_problems(environ: Mapping[str, str]) -> list[str]:
    lowest = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    given = {name: environ[name] for name in lowest if name in environ}
    numbers = {name: int(text) for name, text in given.items() if _whole(text, lowest[name])}
    problems = [f"{name} = {text!r} must be a whole number from {lowest[name]}"
                for name, text in given.items() if name not in numbers]
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
                       ("LOCAL_WORLD_SIZE", "WORLD_SIZE")):
        limit = numbers.get(size, 1 << 62) + (name == "LOCAL_WORLD_SIZE")
        if numbers.get(name, 0) >= limit:
            problems.append(f"{name} = {numbers[name]} does not fit {size} = {numbers[size]}")
    missing = [name for name in RANK_VARIABLES if name not in environ]
    if "RANK" in environ and missing:
        problems.append(f"RANK is set but {', '.join(missing)} {'are' if missing[1:] else 'is'} "
                        "not; set all five, unset RANK, or use a launcher")
    return problems


def _address_problems(environ: Mapping[str, str]) -> list[str]:
    problems, port, host = [], environ.get("MASTER_PORT"), environ.get("MASTER_ADDR")
    alone = environ.get("WORLD_SIZE", "1") == "1"
    if port is not None and not (_whole(port, 0 if alone else 1) and int(port) < 1 << 16):
        problems.append(f"MASTER_PORT = {port!r} must be a port from 1 to 65535")
    if host is not None and not _is_known_host(host):
        problems.append(f"MASTER_ADDR = {host!r}: no node of this name is known here; give the "
                        "address of the node of rank 0")
    return problems


def _machine_problems(environ: Mapping[str, str]) -> list[str]:
    problems = []
    threads = environ.get("OMP_NUM_THREADS")
    if threads is not None and not all(_whole(part, 1) and int(part) <= 1 << 16
                                       for part in threads.split(",")):
        problems.append(f"OMP_NUM_THREADS = {threads!r} must be a whole number from 1")
    accelerator = environ.get("DS_ACCELERATOR")
    if accelerator is not None and accelerator not in _ACCELERATORS:
        problems.append(f"DS_ACCELERATOR = {accelerator!r} must be {' or '.join(_ACCELERATORS)}, "
                        "or not be set")
    gpus = environ.get("CUDA_VISIBLE_DEVICES")
    if gpus is not None and gpus not in _NO_GPU:
        names = [name.strip() for name in gpus.split(",")]
        if not all(_GPU.fullmatch(name) for name in names) or len(set(names)) < len(names):
            problems.append(f"CUDA_VISIBLE_DEVICES = {gpus!r} must be numbers such as 0,1 or UUIDs "
                            "of GPUs, each once")
    return problems


def _whole(text: str, least: int) -> bool:
    # isascii: int() also reads digits of other scripts, which C programs do not.
    text = text.strip()
    return text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= least


def _is_known_host(name: str) -> bool:
    # C reads 0x10 and 16 as 0.0.0.16, a host that never answers.
    if re.fullmatch(r"(0x[0-9a-f]*|\d+)(\.(0x[0-9a-f]*|\d+)){0,3}", name, re.IGNORECASE):
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
    try:
        return bool(name) and bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


_ALONE = dict(zip(RANK_VARIABLES, ("0", "1", "0", "127.0.0.1", "0"), strict=True))


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the rank variables that `environ` lacks; raises UserError if they cannot be found."""
    if "RANK" in environ:
        found = _ALONE if environ.get("WORLD_SIZE") == "1" else {}
    elif "OMPI_COMM_WORLD_RANK" in environ:
        found = _agreeing(environ, _open_mpi(environ))
    elif "SLURM_STEP_NUM_TASKS" in environ:  # a task of srun; the batch script itself has no step
        found = _agreeing(environ, _slurm(environ))
    elif "PMI_RANK" in environ:  # an MPI launcher that is not Open MPI: see `meet_mpi`
        found = {}
    elif environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(f"WORLD_SIZE = {environ['WORLD_SIZE']!r} is set, but RANK is not and no "
                        "launcher has started this process; unset it, or use a launcher")
    else:
        found = _ALONE
    return {name: value for name, value in found.items() if name not in environ}


def _agreeing(environ: Mapping[str, str], found: dict[str, str]) -> dict[str, str]:
    """Return what a launcher says; UserError if WORLD_SIZE is there and says otherwise."""
    size = environ.get("WORLD_SIZE")
    if size is not None and found.get("WORLD_SIZE", size) != size:
        raise UserError(f"the launcher of this process says otherwise: WORLD_SIZE = {size}, not "
                        f"{found['WORLD_SIZE']}; it is left over from another job: unset it")
    return found


def _need(environ: Mapping[str, str], launcher: str, *names: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserError(f"{launcher} has set some of its variables, but not {', '.join(missing)}: "
                        "they are left over from another job or were cut; start the ranks with "
                        f"{launcher}, or unset those that are there")


def _open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    _need(environ, "mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
          "OMPI_COMM_WORLD_LOCAL_SIZE")
    size = environ["OMPI_COMM_WORLD_SIZE"]
    found = {"LOCAL_RANK": environ["OMPI_COMM_WORLD_LOCAL_RANK"]}
    one_host = environ["OMPI_COMM_WORLD_LOCAL_SIZE"] == size
    if not one_host and "MASTER_ADDR" not in environ:
        return found  # DeepSpeed asks MPI for the rest
    return found | {"RANK": environ["OMPI_COMM_WORLD_RANK"], "WORLD_SIZE": size,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": _port(environ.get("PMIX_NAMESPACE", "0"))}


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    _need(environ, "srun", "SLURM_PROCID", "SLURM_LOCALID",
          *["SLURM_STEP_NODELIST"] * ("MASTER_ADDR" not in environ))
    job = environ.get("SLURM_JOB_ID", "0")
    found = {"RANK": environ["SLURM_PROCID"], "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
             "LOCAL_RANK": environ["SLURM_LOCALID"], "MASTER_PORT": _port(job)}
    if "MASTER_ADDR" not in environ:
        found["MASTER_ADDR"] = _first_host(environ["SLURM_STEP_NODELIST"])
    return found


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm list, such as "gpu[03-05,11]"."""
    if "[" not in nodes:
        return nodes.split(",")[0]
    if shutil.which("scontrol") is None:
        raise UserError(f"srun: cannot take SLURM_STEP_NODELIST = {nodes} apart, because scontrol "
                        "is not on PATH; set MASTER_ADDR to the first node")
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"srun: scontrol show hostnames {nodes}: {done.stderr.strip()}; set "
                        "MASTER_ADDR to the first node")
    return done.stdout.split()[0]


def _port(job: str) -> str:
    """Return a port that ranks of one job agree on and that other jobs rarely have."""
    digits = "".join(character for character in job if character.isdigit())
    return str(20_000 + int(digits or 0) % 20_000)


def meet_mpi() -> None:
    """Import mpi4py, which DeepSpeed asks for the ranks; UserError without it or its MPI."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise UserError("an MPI launcher that is not Open MPI, or has not passed MASTER_ADDR to "
                        "several nodes, needs mpi4py to find the ranks, and mpi4py cannot be used "
                        f"({first_line(error)}); build one for the MPI that starts them (pip "
                        'install --no-binary=mpi4py "deberta_ds[mpi]"), pass MASTER_ADDR and '
                        "MASTER_PORT (mpirun -x MASTER_ADDR=...), or start the ranks with "
                        "deepspeed, torchrun or srun") from error


# Does torch see the GPUs of this machine?
_VERSION = Path("/proc/driver/nvidia/version")
# Wheels of torch 2.12 to 2.14 and the oldest driver of each (NVIDIA, "Minor Version Compatibility")
_WHEELS = ((580, "cu130"), (525, "cu126"))


def count_gpus() -> int:
    """Return how many GPUs torch can use; 0 under DS_ACCELERATOR=cpu.

    Raises UserError where the machine has some that torch cannot use. `device_count` alone does not
    tell: it asks the driver, not CUDA.
    """
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    found = torch.cuda.device_count()
    if torch.cuda.is_available() or not (found or Path("/dev/nvidiactl").exists()):
        return found
    text = _VERSION.read_text() if _VERSION.exists() else ""
    driver = re.search(r"\b(\d{3})\.\d+(\.\d+)?\b", text)
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    raise UserError(f"this machine has an NVIDIA driver{f' {driver[0]}' if driver else ''}, but "
                    f"torch {torch.__version__}, built {built}, can use no GPU. "
                    f"{_remedy(int(driver[1]) if driver else 0, torch.version.cuda)}, or set "
                    "DS_ACCELERATOR=cpu to use the CPU")


def _remedy(driver: int, cuda: str | None) -> str:
    """Return what to do, by the version of the driver (0: unknown) and that of the wheel's CUDA."""
    import torch

    wheel = next((name for oldest, name in _WHEELS if driver >= oldest), "")
    install = (f" (pip install torch=={torch.__version__.partition('+')[0]}+{wheel} --index-url "
               f"https://download.pytorch.org/whl/{wheel})") if wheel else ""
    needed = 580 if cuda and cuda >= "13" else 525
    if not cuda:
        return f"Install a wheel with CUDA{install}"
    if not driver or driver >= needed:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        return f"Look at CUDA_VISIBLE_DEVICES ({shown}) and at what nvidia-smi says"
    update = f"CUDA {cuda} needs driver {needed} or newer: update the driver"
    return f"{update}, or install a wheel for this one{install}" if wheel else update
