"""What a launcher or a shell says in environment variables: read strictly, before anything waits.

A wrong value would otherwise be a traceback of torch, a wait of half an hour for ranks that do not
exist, or a run on the CPU of a machine full of GPUs.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping

from deberta_ds.errors import UserError

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
    problems, numbers = [], {}
    for name, least in lowest.items():
        text = environ.get(name)
        if text is None:
            continue
        if _whole(text, least):
            numbers[name] = int(text)
        else:
            problems.append(f"{name} = {text!r} must be a whole number from {least}")
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
        problems.append(f"MASTER_ADDR = {host!r}: no host of this name is known here; give the "
                        "address of the first rank's host")
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
