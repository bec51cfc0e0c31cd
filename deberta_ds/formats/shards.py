"""Read the state of a sharded DeepSpeed checkpoint as if it were one tensor per parameter.

DeepSpeed writes flat buffers, cut by rank; where a parameter lies in them depends on the world size
and on the ZeRO stage. `ShardedState` maps each parameter to its pieces and reads any slice of it
through memory maps, so a job of another shape reads just the bytes that it will own, and nothing is
converted on disk. (DeepSpeed's own converter, `ds_to_universal`, is the oracle in the tests.)

No deepspeed here: the few classes inside its files are read as plain values.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deberta_ds.errors import UserError

MASTER = "fp32"  # the key of the fp32 weights beside the optimizer's own keys
SWAP_FILE = "swapped.json"  # {"group": "name of its swap files"}, written for NVMe offload
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_(?:optim|model)_states\.pt")


class CheckpointError(UserError):
    """A checkpoint is missing, broken, or of another run."""

    on_every_rank = True


class _Fields:
    """Stands for a DeepSpeed object of a checkpoint: its fields, without its class."""


_SAFE = [(_Fields, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
         (_Fields, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
         (_Fields, "deepspeed.utils.tensor_fragment.fragment_address"),
         (int, "deepspeed.runtime.zero.config.ZeroStageEnum")]


@dataclass(frozen=True)
class Piece:
    """`count` elements from `start` of a flattened parameter: where one rank's file has them."""

    rank: int
    group: int
    offset: int
    start: int
    count: int


def read_file(path: Path) -> dict:
    """Return a DeepSpeed file's values; tensors are memory-mapped, classes are not imported."""
    with torch.serialization.safe_globals(_SAFE):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class ShardedState:
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
        model = read_file(self._model_file())
        model["module"] = self._names_now(model["module"] or {})
        model["buffer_names"] = list(self._names_now(dict.fromkeys(model["buffer_names"])))
        self.counters = {name: model[name]
                         for name in ("global_steps", "global_samples", "skipped_steps")}
        self.buffers = {name: model["module"][name] for name in model["buffer_names"]}
        self.shared = {name: self._name_now(owner) for name, owner in
                       self._names_now(model["shared_params"] or {}).items()}
        if stage == 0:
            self._plain = model
            self.shapes = {name: tuple(model["module"][name].shape) for name in self._plain_order}
            self.pieces = {name: [Piece(0, index, 0, 0, math.prod(self.shapes[name]))]
                           for index, name in enumerate(self._plain_order)}
        else:
            groups = [self._names_now(group) for group in model["param_shapes"]]
            self.shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
            self.pieces = (self._pieces_of_stage3(groups) if stage == 3
                           else self._pieces_of_stage12())
        self._check_whole()

    def state_keys(self, name: str) -> list[str]:
        """Return the optimizer's per-element tensors of a parameter, such as exp_avg."""
        return [key for key, value in self._state_of(name).items() if _per_element(value)]

    def scalars(self, name: str) -> dict:
        """Return the optimizer's other values of a parameter, such as step."""
        return {key: value for key, value in self._state_of(name).items()
                if not _per_element(value)}

    def loss_scaler(self) -> dict:
        """Return the fields of the fp16 loss scaler; empty where there is none."""
        if self.stage == 0:
            return {}
        file = read_file(self._optimizer_files[0])
        return vars(file["optimizer_state_dict"]["loss_scaler"])

    def read(self, name: str, key: str, start: int = 0, count: int | None = None) -> Tensor:
        """Return `count` elements from `start` of a flattened parameter's `key` (a copy, 1-D)."""
        count = math.prod(self.shapes[name]) - start if count is None else count
        values = torch.empty(count)
        for piece in self.pieces[name]:
            low, high = max(start, piece.start), min(start + count, piece.start + piece.count)
            if low < high:
                flat = self._flat(piece, key)
                begin = piece.offset + low - piece.start
                values[low - start:high - start] = flat[begin:begin + high - low]
        return values

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

    def _pieces_of_stage3(self, groups: list[dict]) -> dict[str, list[Piece]]:
        """Every rank has an equal share of every parameter, the last ones padded."""
        world_size = len(self._optimizer_files)
        pieces = {}
        for group, shapes in enumerate(groups):
            offset = 0
            for name, shape in shapes.items():
                total = math.prod(shape)
                share = math.ceil(total / world_size)
                pieces[name] = [Piece(rank, group, offset, rank * share,
                                      min(share, total - rank * share))
                                for rank in range(world_size) if rank * share < total]
                offset += share
        return pieces

    def _pieces_of_stage12(self) -> dict[str, list[Piece]]:
        """Every rank has a stretch of the parameters laid end to end; its file says which."""
        pieces: dict[str, list[Piece]] = {}
        for rank, path in enumerate(self._optimizer_files):
            mappings = read_file(path)["optimizer_state_dict"]["param_slice_mappings"]
            for group, mapping in enumerate(mappings):
                for name, fragment in self._names_now(mapping).items():
                    before = pieces.setdefault(name, [])
                    start = before[-1].start + before[-1].count if before else 0
                    before.append(Piece(rank, group, fragment.start, start, fragment.numel))
        return pieces

    def _check_whole(self) -> None:
        for name, shape in self.shapes.items():
            found = sum(piece.count for piece in self.pieces.get(name, ()))
            if found != math.prod(shape):
                raise CheckpointError(f"{self.directory}: {found} of the {math.prod(shape)} "
                                      f"elements of {name} are in its files")

    def _state_of(self, name: str) -> dict:
        piece = self.pieces[name][0]
        return self._open(piece.rank)[1].get(piece.group, {})

    def _flat(self, piece: Piece, key: str) -> Tensor:
        masters, states = self._open(piece.rank)
        flat = masters[piece.group] if key == MASTER else states[piece.group][key]
        if flat.numel() == 0:  # DeepSpeed had it on NVMe
            return self._swapped(piece, key)
        return flat.flatten()

    def _swapped(self, piece: Piece, key: str) -> Tensor:
        directory = self.directory / "offloaded_tensors" / f"rank{piece.rank:02d}"
        name = json.loads((directory / SWAP_FILE).read_text(encoding="utf-8"))[str(piece.group)]
        path = directory / (f"{name}.tensor.swp" if key == MASTER else f"{key}-{name}.tensor.swp")
        return torch.from_file(str(path), shared=False, size=path.stat().st_size // 4)

    def _open(self, rank: int) -> tuple[list[Tensor], dict]:
        """Return (fp32 flat tensors by group, optimizer state by group) of a rank's file."""
        if rank not in self._opened:
            self._opened[rank] = self._open_file(rank)
        return self._opened[rank]

    def _open_file(self, rank: int) -> tuple[list[Tensor], dict]:
        if self.stage == 0:
            module = self._plain["module"]
            return ([module[name] for name in self._plain_order], self._plain["optimizer"]["state"])
        values = read_file(self._optimizer_files[rank])["optimizer_state_dict"]
        if self.stage == 3:
            return values["fp32_flat_groups"], values["optimizer_state_dict"]["state"]
        return values["single_partition_of_fp32_groups"], values["base_optimizer_state"]["state"]


def _per_element(value) -> bool:
    return torch.is_tensor(value) and value.dim() > 0
