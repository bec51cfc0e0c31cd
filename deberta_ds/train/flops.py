"""Model FLOPs per token of a training step, from the run config."""

from deberta_ds.config import ModelConfig, RunConfig


def per_token(run: RunConfig) -> float:
    """Return forward + backward FLOPs per token (multiply-add = 2, backward = 2 x forward)."""
    mask_rate = run.objective.mask.rate
    length = run.data.seq_len
    if run.objective.kind == "mlm":
        return 3 * _masked_lm(run.model, length, mask_rate)
    detector = _layers(run.model, length, run.model.num_layers) + 2 * run.model.hidden_size**2
    return 3 * (_masked_lm(run.generator_model, length, mask_rate) + detector)


def _layers(model: ModelConfig, length: int, count: float) -> float:
    linear = 2 * (4 * model.hidden_size**2 + 2 * model.hidden_size * model.intermediate_size)
    positions = min(length, 2 * model.relative_span) * len(model.position_terms)
    attention = 2 * model.hidden_size * (2 * length + positions)
    return count * (linear + attention)


def _masked_lm(model: ModelConfig, length: int, mask_rate: float) -> float:
    head = 2 * mask_rate * model.hidden_size * (model.vocab_size + model.hidden_size)
    decoder = 2 * mask_rate
    return _layers(model, length, model.num_layers - 1 + decoder) + head
