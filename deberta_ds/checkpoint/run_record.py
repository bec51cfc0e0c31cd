"""run.json of a checkpoint: where a run was when it was saved, and of what run it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from deberta_ds.base.errors import UserError, naming
from deberta_ds.base.json_files import parse_json, typed
from deberta_ds.config.run_config import RunConfig, from_dict
from deberta_ds.engine.ds_config import precision, zero_stage
from deberta_ds.engine.layout import CheckpointError

DIRECTORY, BEST = "checkpoints", "best"  # in a run's out_dir
RUN_FILE, MANIFEST = "run.json", "manifest.json"  # in a checkpoint's directory
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class RunRecord:
    """The state of a run next to its tensors."""

    step: _Count
    sequences_seen: _Count
    tokens_seen: _Count
    seconds: float  # of training, over all starts
    world_size: Annotated[int, Field(ge=1)]
    config: dict[str, Any]  # the run file, complete
    deepspeed: dict[str, Any]
    content_hashes: dict[str, str]  # {path of a corpus, or FILE.py:NAME: checksum of its content}
    tokenizer_sha256: str
    versions: dict[str, str]
    recent_losses: list[float]  # for the spike rule
    since_line: dict[str, float]  # sums since the last logged line
    time_use: dict[str, float]  # seconds of saves and evaluations
    best: dict[str, Any]  # training/best.py
    begun_from: str  # the PATH of --resume from which the run began

    def run(self, place: str | Path) -> RunConfig:
        """Return the run's config; `place` is named in errors."""
        return from_dict(self.config, str(place))


def read_run_record(path: str | Path) -> RunRecord:
    """Return run.json of a checkpoint directory. Raises CheckpointError."""
    file = Path(path) / RUN_FILE
    if not file.exists():
        raise CheckpointError(f"{file}: missing; {path} is not a checkpoint directory "
                              "(those are named OUT/checkpoints/step-NNNNNNNN)")
    try:
        with naming(file):
            data = file.read_bytes()
        record = typed(RunRecord, parse_json(data))
        zero_stage(record.deepspeed), precision(record.deepspeed)
    except UserError as error:
        raise CheckpointError(f"{error}; use an older checkpoint") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: damaged: {error}; use an older checkpoint") from None
    return record
