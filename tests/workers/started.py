"""What workers share: the inputs and the engine of a run under a DeepSpeed JSON."""

from deberta_ds.engine import engine
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.training.start import join_group, open_run


def build(run, values: dict) -> tuple:
    *_, ds = join_group(run, DeepSpeedConfig(**values), "test")
    *_, inputs = open_run(run, ds, "test", "never")
    return inputs, engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size)
