"""ONNX files next to a Hugging Face directory, compared with PyTorch before they count as written.

    DIR/onnx/model.onnx             fp32; model.onnx.data next to it holds the weights above 1.5 GB
    DIR/onnx/model_quantized.onnx   int8 by dynamic quantization
    DIR/generator/onnx/...          the generator, with its enhanced mask decoder

The names are those that optimum and transformers.js look for.
"""

import logging
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.base.errors import UserError, of_extra
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.encoder import DecoderQueries
from deberta_ds.publish.hf import GENERATOR_DIRECTORY, head_class
from deberta_ds.release import networks
from deberta_ds.release.networks import Network, Release

TOLERANCE = 1e-4  # of the largest output, or of 1: two orders of summation in fp32
MODEL, QUANTIZED = "model.onnx", "model_quantized.onnx"
_OF_TEXTS = ("ForSequenceClassification", "ForMultipleChoice")  # others: for each token
_INLINE_BYTES = 1_500_000_000  # protobuf ends at 2 GiB


def require_onnx() -> None:
    """Raise UserError if the optional packages are missing."""
    with of_extra("onnx", "--onnx"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401


def write_onnx(release: Release, out: Path, precision: str) -> list[str]:
    """Write the graphs of a release below `out`; return lines on what was checked.

    precision: "fp32", or "int8", which writes both. UserError if a graph does not compute what
    PyTorch does.
    """
    checks = []
    for name, network in release.networks().items():
        directory = (out / GENERATOR_DIRECTORY if name == "generator" else out) / "onnx"
        directory.mkdir(parents=True, exist_ok=True)
        checks += [f"{name}: {line}" for line in write_network(network, directory, precision)]
    return checks


def write_network(network: Network, directory: Path, precision: str) -> list[str]:
    """Write the graphs of one network into `directory`; return lines on what was checked."""
    from deberta_ds.publish.onnx_graph import build

    head = graph_head(network)
    _save(build(network, head), directory / MODEL)
    batches = sample_batches(network.config, head)
    largest, _, _ = compare(network, head, directory / MODEL, batches)
    if not largest <= TOLERANCE:
        raise UserError(f"{directory / MODEL}: onnxruntime computes other values than PyTorch "
                        f"(difference {largest:.1e}, allowed {TOLERANCE:.0e})")
    lengths = ", ".join(str(ids.size(-1)) for ids, _ in batches)
    lines = [f"onnx/{MODEL} ({head}): {largest:.1e} from PyTorch at lengths {lengths}, padded"]
    if precision == "int8":
        quantize(build(network, head, tied=False), directory / QUANTIZED)
        _, mean_square, same = compare(network, head, directory / QUANTIZED, batches)
        if not np.isfinite(mean_square):
            raise UserError(f"{directory / QUANTIZED}: gives values that are no numbers")
        lines.append(f"onnx/{QUANTIZED}: int8, {mean_square:.1%} from PyTorch (root mean "
                     f"square); {same:.1%} of the choices the same, on random tokens")
    return lines


def graph_head(network: Network) -> str:
    """Return what is exported: the transformers class, but no masked LM without its decoder."""
    head = head_class(network)
    return "Model" if head == "ForMaskedLM" and not network.has_masked_lm else head


def _save(model, path: Path) -> None:
    import onnx

    outside = _weight_bytes(model) > _INLINE_BYTES
    onnx.save_model(model, path, save_as_external_data=outside, location=f"{path.name}.data")
    onnx.checker.check_model(str(path))


def _weight_bytes(model) -> int:
    """Return the bytes of a graph's weights; its own ByteSize() fails above 2 GiB."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def quantize(model, out: Path) -> None:
    """Write a graph with int8 weights of products and of the token embedding.

    Seven of the eight bits are used: processors without VNNI add two products in 16 bits. The
    position tables are read by distance and stay fp32, as does v2's convolution.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    kept = [node.name for node in model.graph.node if node.op_type == "Gather"
            and node.input[0] != "words"]
    outside = _weight_bytes(model) > _INLINE_BYTES
    logging.getLogger().addFilter(_no_advice)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            source = Path(scratch) / MODEL
            _save(model, source)
            quantize_dynamic(source, out, op_types_to_quantize=["MatMul", "Gather"],
                             per_channel=True, reduce_range=True, weight_type=QuantType.QInt8,
                             nodes_to_exclude=kept, use_external_data_format=outside)
    finally:
        logging.getLogger().removeFilter(_no_advice)


def _no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing" not in record.getMessage()


def sample_batches(config: ModelConfig, head: str) -> list[tuple[Tensor, Tensor]]:
    """Return ids and masks: a padded batch, its first tokens, and one row beyond the table.

    None has more tokens than there are absolute positions, where the network reads some.
    """
    batches = networks.sample_batches(config)
    batches = [(ids_BL[:, :5], mask_BL[:, :5]) for ids_BL, mask_BL in batches[:1]] + batches
    if config.absolute_input or head == "ForMaskedLM":
        most = config.max_position
        batches = [(ids_BL[:, :most], mask_BL[:, :most]) for ids_BL, mask_BL in batches]
    if head == "ForMultipleChoice":
        batches = [(torch.stack([ids, ids.flip(0)], 1), torch.stack([mask, mask.flip(0)], 1))
                   for ids, mask in batches]
    return batches


def compare(network: Network, head: str, path: Path, batches: list[tuple[Tensor, Tensor]]
            ) -> tuple[float, float, float]:
    """Return how far the outputs of the file at `path` are from `expected`'s, at the worst: the
    largest difference, in parts of the largest output or of 1; the root of its mean square, in
    parts of the outputs'; the share of logits whose largest class, or whose sign, is the same.
    """
    session = open_session(path)
    gaps = []
    for ids, mask in batches:
        found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        for ours, theirs in zip(expected(network, head, ids, mask), found, strict=True):
            gaps.append(_gap(ours, torch.from_numpy(theirs), None if head in _OF_TEXTS else mask))
    largest, mean_square, same = zip(*gaps, strict=True)
    return max(largest), max(mean_square), min(same)


def open_session(path: Path):
    """Return an onnxruntime session on as many CPU threads as torch has; it prints no warnings."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised, too
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _gap(ours: Tensor, theirs: Tensor, mask: Tensor | None) -> tuple[float, float, float]:
    if mask is not None:  # what stands in the columns of padding means nothing
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    difference = (ours - theirs).double()
    largest = difference.abs().max() / max(1.0, ours.abs().max().item())
    mean_square = difference.square().mean().sqrt() / ours.double().square().mean().sqrt()
    same = ours.argmax(-1) == theirs.argmax(-1) if ours.ndim > 1 else (ours > 0) == (theirs > 0)
    largest, mean_square = (value.nan_to_num(np.inf, np.inf).item()
                            for value in (largest, mean_square))
    return largest, mean_square, same.double().mean().item()


@torch.no_grad()
def expected(network: Network, head: str, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Return the graph's outputs, computed by PyTorch."""
    if head == "ForMaskedLM":
        return (_masked_lm_logits(network, ids, mask),)
    hidden_BLC = networks.build_backbone(network)(ids.flatten(0, -2), mask.flatten(0, -2))
    if head == "Model":
        if not network.has("rtd_head."):
            return (hidden_BLC,)
        positions_BL = torch.arange(ids.size(1)).expand(ids.shape)
        return hidden_BLC, networks.build_replaced_token_head(network)(hidden_BLC, positions_BL)
    get = network.tensors
    if head in ("ForSequenceClassification", "ForMultipleChoice"):
        activation = getattr(F, network.rest.get("pooler_hidden_act", "gelu"))
        hidden_BLC = activation(F.linear(hidden_BLC[:, 0], get["pooler.dense.weight"].float(),
                                         get["pooler.dense.bias"].float()))
    layer = "qa_outputs" if head == "ForQuestionAnswering" else "classifier"
    logits = F.linear(hidden_BLC, get[f"{layer}.weight"].float(), get[f"{layer}.bias"].float())
    if head == "ForQuestionAnswering":
        return logits.unbind(-1)
    return (logits.view(ids.shape[:2]) if head == "ForMultipleChoice" else logits,)


def _masked_lm_logits(network: Network, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return logits [B, L, V] of the enhanced mask decoder in every column."""
    words, masked_lm = networks.build_masked_lm(network)
    columns_BL = torch.arange(ids_BL.size(1)).expand(ids_BL.shape)
    decoder = masked_lm.positions and DecoderQueries(masked_lm.positions(columns_BL), columns_BL)
    return masked_lm.head.logits(masked_lm.trunk(words(ids_BL), mask_BL, None, decoder), words)
