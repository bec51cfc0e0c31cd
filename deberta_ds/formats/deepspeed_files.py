"""Read checkpoints of version 0.1.0: DeepSpeed's own files, as if one tensor per parameter.

DeepSpeed writes flat buffers, cut by rank; where a parameter lies in them depends on the world size
and on the ZeRO stage. `DeepSpeedState` maps each parameter to its pieces and reads any slice of it
through memory maps, so a job of another shape reads just the bytes that it will own, and nothing is
converted on disk. (DeepSpeed's own converter, `ds_to_universal`, is the oracle in the tests.)

The files are pickles. No deepspeed here: the few classes inside are read as plain values, and
anything else is refused without being run.
"""

import math
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from deberta_ds.errors import first_line
from deberta_ds.formats.engine_state import MASTER
from deberta_ds.formats.layout import CheckpointError, Group, Layout, Piece
from deberta_ds.formats.saved_state import per_element
from deberta_ds.json_files import read_json

SWAP_FILE = "swapped.json"  # {"group": "name of its swap files"}, written for NVMe offload
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_(?:optim|model)_states\.pt")


class _Fields:
    """Stands for a DeepSpeed object of a checkpoint: its fields, without its class."""


_SAFE = [(_Fields, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
         (_Fields, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
         (_Fields, "deepspeed.utils.tensor_fragment.fragment_address"),
         (int, "deepspeed.runtime.zero.config.ZeroStageEnum")]


def read_file(path: Path) -> dict:
    """Return a DeepSpeed file's values; tensors are memory-mapped, classes are not imported."""
    try:
        with torch.serialization.safe_globals(_SAFE):
            values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{path}: refused: the pickle holds more than DeepSpeed writes; code "
                              "in it was not run. Use an older checkpoint") from None
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError,
            AssertionError) as error:  # what the safe unpickler raises on bytes that are no pickle
        raise CheckpointError(f"{path}: cannot be read ({first_line(error)}); use an older "
                              "checkpoint") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}, not a checkpoint's values")
    return values


_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError,
           RuntimeError)


@contextmanager
def as_written_by_deepspeed(place: Path) -> Iterator[None]:
    """Context that takes the values of a file apart: what does not fit is a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(f"{place}: its files do not hold what DeepSpeed writes "
                              f"({type(error).__name__}: {first_line(error)}); use an older "
                              "checkpoint") from None


class DeepSpeedState:
    """The parameters, optimizer state, buffers and counters of one verified checkpoint."""

    def __init__(self, directory: str | Path, stage: int, plain_order: list[str] = (),
                 renamed: dict[str, str] | None = None):
        """`directory` holds DeepSpeed's files of ZeRO stage `stage`.

        Stage 0 saves its optimizer state by number, not by name: `plain_order` gives the names in
        the optimizer's order. `renamed` gives the names of older versions, {prefix in the files:
        prefix now}. Raises CheckpointError for files of a layout that is not known.
        """
        self.directory, self.stage = Path(directory), stage
        self._plain_order, self._renamed = list(plain_order), renamed or {}
        self._opened: dict[int, tuple[list[Tensor], dict]] = {}
        self._optimizer_files = self._by_rank("*zero_pp_rank_*_optim_states.pt")
        with as_written_by_deepspeed(self.directory):
            self._take_apart(read_file(self._model_file()))

    def _take_apart(self, model: dict) -> None:
        model["module"] = self._names_now(model["module"] or {})
        model["buffer_names"] = list(self._names_now(dict.fromkeys(model["buffer_names"])))
        self.counters = {name: int(model[name])
                         for name in ("global_steps", "global_samples", "skipped_steps")}
        self.buffers = {name: model["module"][name] for name in model["buffer_names"]}
        self.aliases = {name: self._name_now(owner) for name, owner in
                        self._names_now(model["shared_params"] or {}).items()}
        self._plain = model if self.stage == 0 else {}
        self.layout = self._layout_of(model)
        self.shapes = self.layout.shapes
        if not all(torch.is_tensor(buffer) for buffer in self.buffers.values()):
            raise ValueError("a buffer is no tensor")

    def state_keys(self, name: str) -> list[str]:
        """Return the optimizer's per-element tensors of a parameter, such as exp_avg."""
        return [key for key, value in self._state_of(name).items() if per_element(value)]

    def scalars(self, name: str) -> dict:
        """Return the optimizer's other values of a parameter, such as step."""
        return {key: value for key, value in self._state_of(name).items()
                if not per_element(value)}

    def loss_scale(self) -> dict:
        """Return the fields of the fp16 loss scale; empty where there is none."""
        with as_written_by_deepspeed(self.directory):
            if self.stage == 0:
                saved = self._plain["optimizer"]
                return saved | {"dynamic": saved["dynamic_loss_scale"]} if "cur_scale" in saved \
                    else {}
            scaler = read_file(self._optimizer_files[0])["optimizer_state_dict"].get("loss_scaler")
            return vars(scaler) if scaler is not None else {}  # BF16_Optimizer has none

    def read(self, name: str, key: str, start: int = 0, count: int | None = None) -> Tensor:
        """Return `count` elements from `start` of a flattened parameter's `key` (a copy, 1-D)."""
        count = math.prod(self.shapes[name]) - start if count is None else count
        values = torch.empty(count)
        with as_written_by_deepspeed(self.directory):
            self._read_into(values, name, key, start, count)
        return values

    def _read_into(self, values: Tensor, name: str, key: str, start: int, count: int) -> None:
        for piece in self.layout.pieces(name, start, count):
            flat = self._flat(piece, key)[piece.offset:piece.offset + piece.count]
            if flat.numel() != piece.count:
                raise CheckpointError(f"{self.directory}: the file of rank {piece.rank} is too "
                                      f"short for {name}; use an older checkpoint")
            values[piece.start - start:piece.start - start + piece.count] = flat

    def read_whole(self, name: str) -> Tensor:
        """Return a parameter's fp32 weights in its own shape."""
        return self.read(name, MASTER).reshape(self.shapes[name])

    def _names_now(self, by_name: dict) -> dict:
        return {self._name_now(name): value for name, value in by_name.items()}

    def _name_now(self, name: str) -> str:
        for then, now in self._renamed.items():
            if name.startswith(then):
                return now + name.removeprefix(then)
        return name

    def _model_file(self) -> Path:
        if self.stage < 3:
            return self.directory / "mp_rank_00_model_states.pt"
        return self._by_rank("*zero_pp_rank_*_model_states.pt")[0]

    def _by_rank(self, pattern: str) -> list[Path]:
        files = {int(match[1]): path for path in self.directory.glob(pattern)
                 if (match := _RANK.search(path.name))}
        if sorted(files) != list(range(len(files))):
            raise CheckpointError(f"{self.directory}: has the files of ranks {sorted(files)} only")
        return [files[rank] for rank in range(len(files))]

    def _layout_of(self, model: dict) -> Layout:
        """Return how DeepSpeed has cut the parameters, from the order and shapes that it saved.

        Its own `param_slice_mappings` are not asked: under round_robin_gradients they give the
        parameters of 0.19.8 each other's places.
        """
        if self.stage == 0:  # one buffer for each parameter
            shapes = {name: tuple(model["module"][name].shape) for name in self._plain_order}
            groups = tuple(Group((name,), (0,), math.prod(shape)) for name, shape in shapes.items())
            return Layout(1, "line", shapes, groups)
        world_size = len(self._optimizer_files)
        by_group = [{name: tuple(shape) for name, shape in self._names_now(group).items()}
                    for group in model["param_shapes"]]
        groups, cut = [], "parameter" if self.stage == 3 else "line"
        paddings, masters = [], []
        if cut == "line":
            values = read_file(self._optimizer_files[0])["optimizer_state_dict"]
            paddings = values.get("param_alignment_paddings") or []
            masters = values["single_partition_of_fp32_groups"]
        for number, shapes in enumerate(by_group):
            sizes = [math.prod(shape) for shape in shapes.values()]
            if cut == "parameter":
                sizes = [math.ceil(size / world_size) for size in sizes]
            elif paddings:
                sizes = [a + b for a, b in zip(sizes, paddings[number], strict=True)]
            ends = list(accumulate(sizes))
            size = ends[-1] if cut == "parameter" else masters[number].numel()
            groups.append(Group(tuple(shapes), (0, *ends[:-1]), size))
            if cut == "line" and size * world_size < ends[-1]:
                raise CheckpointError(f"{self.directory}: the files of {world_size} ranks are not "
                                      "all of them; use an older checkpoint")
        shapes = {name: shape for group in by_group for name, shape in group.items()}
        return Layout(world_size, cut, shapes, tuple(groups))

    def _state_of(self, name: str) -> dict:
        with as_written_by_deepspeed(self.directory):
            piece = next(self.layout.pieces(name))
            return dict(self.open(piece.rank)[1].get(piece.group, {}))

    def _flat(self, piece: Piece, key: str) -> Tensor:
        masters, states = self.open(piece.rank)
        flat = masters[piece.group] if key == MASTER else states[piece.group][key]
        if flat.numel() == 0:  # DeepSpeed had it on NVMe
            return self._swapped(piece, key)
        return flat.flatten()

    def _swapped(self, piece: Piece, key: str) -> Tensor:
        directory = self.directory / "offloaded_tensors" / f"rank{piece.rank:02d}"
        name = read_json(directory / SWAP_FILE)[str(piece.group)]
        path = directory / (f"{name}.tensor.swp" if key == MASTER else f"{key}-{name}.tensor.swp")
        return torch.from_file(str(path), shared=False, size=path.stat().st_size // 4)

    def open(self, rank: int) -> tuple[list[Tensor], dict]:
        """Return (fp32 flat tensors by group, optimizer state by group) of a rank's file."""
        if rank not in self._opened:
            with as_written_by_deepspeed(self.directory):
                self._opened[rank] = self._open_file(rank)
        return self._opened[rank]

    def _open_file(self, rank: int) -> tuple[list[Tensor], dict]:
        if self.stage == 0:
            optimizer = self._plain["optimizer"]
            if "fp32_groups" in optimizer:  # bf16 or fp16: the module has the rounded weights
                masters = [master for group in optimizer["fp32_groups"] for master in group]
                return masters, optimizer["optimizer_state_dict"]["state"]
            module = self._plain["module"]
            return [module[name] for name in self._plain_order], optimizer["state"]
        values = read_file(self._optimizer_files[rank])["optimizer_state_dict"]
        if self.stage == 3:
            return values["fp32_flat_groups"], values["optimizer_state_dict"]["state"]
        return values["single_partition_of_fp32_groups"], values["base_optimizer_state"]["state"]
