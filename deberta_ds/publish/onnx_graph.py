"""A network as an ONNX graph, node by node, for any batch and any length.

Unusual: the graph is written, not traced. Nothing in it depends on an example input, so no size or
relative position can be folded into a constant. Three things are cheaper than in PyTorch: the
position tables are projected once, here, since they do not depend on the input; a position term is
computed for the 2L distances of the text and shifted row by row into place (Dai et al. 2019,
Transformer-XL, appendix B), so nothing is gathered pair by pair; and padding hides keys only, so
what stands in the columns of padding means nothing.

Inputs are input_ids and attention_mask, int64 [batch, length]; outputs are those of transformers'
classes. Shape legend of the comments: B batch, L length, H heads, D head size, C hidden, S slots.
"""

from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.attention.reference import score_scale
from deberta_ds.model.encoder import Attention, Convolution, Encoder, Layer, Trunk
from deberta_ds.release import networks

OPSET = 20  # Gelu; onnxruntime 1.17 and later
IR_VERSION = 10
ACTIVATIONS = {"gelu": "Gelu", "tanh": "Tanh"}
Shape = list[int | str]


class Graph:
    """An ONNX graph under construction; `add` and `constant` return the name of a value."""

    def __init__(self):
        self.nodes, self.constants = [], {}
        self.inputs, self.outputs = [], []

    def add(self, operator: str, *inputs: str, **attributes) -> str:
        """Add a node of one output."""
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [f"{name}_0"], name, **attributes))
        return f"{name}_0"

    def constant(self, values: Tensor | list | int | float, name: str | None = None) -> str:
        """Return the name of a constant; of several with one name there is one."""
        name = name or f"constant_{len(self.constants)}"
        if name not in self.constants:
            if isinstance(values, Tensor):
                array = values.detach().contiguous().numpy()
            else:
                array = np.asarray(values, np.float32 if isinstance(values, float) else np.int64)
            self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def input(self, name: str, shape: Shape) -> str:
        """Declare an input of ids; return its name."""
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
        return name

    def output(self, value: str, name: str, shape: Shape) -> None:
        """Declare a value as an output in fp32."""
        self.nodes.append(helper.make_node("Identity", [value], [name], f"output_{name}"))
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def linear(self, inputs: str, weight: Tensor, bias: Tensor | None, name: str) -> str:
        """Add inputs x weight^T + bias; return the name of the result."""
        # MatMul with a constant on the right is what dynamic quantization looks for.
        product = self.add("MatMul", inputs, self.constant(weight.t(), f"{name}.weight"))
        return product if bias is None else self.add("Add", product,
                                                     self.constant(bias, f"{name}.bias"))

    def module(self, inputs: str, module: nn.Module, name: str) -> str:
        """Add a Linear or a LayerNorm."""
        if isinstance(module, nn.Linear):
            return self.linear(inputs, module.weight, module.bias, name)
        assert isinstance(module, nn.LayerNorm)
        weight, bias = (self.constant(tensor, f"{name}.{part}") for tensor, part in (
            (module.weight, "weight"), (module.bias, "bias")))
        return self.add("LayerNormalization", inputs, weight, bias, epsilon=module.eps, axis=-1)

    def model(self, name: str, facts: dict[str, str]) -> onnx.ModelProto:
        """Return the whole model; `facts` are its metadata."""
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs,
                                  list(self.constants.values()))
        model = helper.make_model(graph, producer_name="deberta_ds", ir_version=IR_VERSION,
                                  opset_imports=[helper.make_opsetid("", OPSET)])
        helper.set_model_props(model, facts)
        return model


@dataclass(frozen=True)
class Text:
    """Values that every layer reads."""

    ids: str  # [B, L]
    real: str  # [B, L, 1], 1.0 at tokens
    hidden_keys: str  # [B, 1, 1, L], 0 at tokens, very negative at padding
    columns: str  # [L]
    distances: str  # [2L], L-1 ... -L
    distances_back: str  # [2L], -(L-1) ... L
    skew_start: str  # [1], L-1
    skew_end: str  # [1], L-1 + L(2L-1)
    skewed: str  # the shape [B, H, L, 2L-1], B and H as they are
    length: str  # [1]


def build(network: networks.Network, head: str, tied: bool = True) -> onnx.ModelProto:
    """Return the graph of a network in fp32.

    head: the end of the transformers class. Of "Model" the detection logits are a second output,
    where the network has that head; "ForMaskedLM" runs the enhanced mask decoder.
    tied: store the token embedding once for both its uses, which quantization cannot do.
    """
    graph = Graph()
    with torch.no_grad():
        if head == "ForMaskedLM":
            _add_masked_lm(graph, network, tied)
        else:
            _add_encoder_and_head(graph, network, head)
    facts = {"architecture": head, "max_position": str(network.config.max_position)}
    return graph.model("deberta", facts)


def _read_inputs(graph: Graph, choices: bool = False) -> Text:
    shape: Shape = ["batch", "choices", "length"] if choices else ["batch", "length"]
    ids, mask = (graph.input(name, shape) for name in ("input_ids", "attention_mask"))
    length = graph.add("Shape", ids, start=len(shape) - 1)
    if choices:  # every choice is a text of its own
        flat = graph.add("Concat", graph.constant([-1]), length, axis=0)
        ids, mask = graph.add("Reshape", ids, flat), graph.add("Reshape", mask, flat)
    zero, one = graph.constant(0), graph.constant(1)
    real_BL = graph.add("Cast", graph.add("Greater", mask, zero), to=TensorProto.FLOAT)
    hidden_BL = graph.add("Mul", graph.add("Sub", real_BL, graph.constant(1.0)),
                          graph.constant(float(np.finfo(np.float32).max / 2)))
    scalar = graph.add("Squeeze", length)
    distances = graph.add("Range", graph.add("Sub", scalar, one),
                          graph.add("Sub", graph.add("Neg", scalar), one), graph.constant(-1))
    skew_start = graph.add("Sub", length, graph.constant([1]))
    width = graph.add("Add", length, skew_start)
    skew_end = graph.add("Add", skew_start, graph.add("Mul", length, width))
    return Text(
        ids, graph.add("Unsqueeze", real_BL, graph.constant([2])),
        graph.add("Unsqueeze", hidden_BL, graph.constant([1, 2])),
        graph.add("Range", zero, scalar, one), distances, graph.add("Neg", distances),
        skew_start, skew_end,
        graph.add("Concat", graph.constant([0, 0]), length, width, axis=0), length)


def _add_encoder_and_head(graph: Graph, network: networks.Network, head: str) -> None:
    text = _read_inputs(graph, choices=head == "ForMultipleChoice")
    backbone = networks.build_backbone(network)
    words = graph.constant(backbone.words.weight, "words")
    hidden = _add_trunk(graph, text, words, backbone.trunk, network.config)
    if head == "Model":
        size = network.config.hidden_size
        graph.output(hidden, "last_hidden_state", ["batch", "length", size])
        if network.has("rtd_head."):
            _add_replaced_token_head(graph, hidden, network)
        return
    get = {name: tensor.float() for name, tensor in network.tensors.items()}.__getitem__
    if head in ("ForSequenceClassification", "ForMultipleChoice"):
        name = network.rest.get("pooler_hidden_act", "gelu")
        if name not in ACTIVATIONS:
            raise UserError(f"pooler_hidden_act = {name!r}: ONNX files are written for "
                            f"{' and '.join(ACTIVATIONS)} only")
        first = graph.add("Gather", hidden, graph.constant(0), axis=1)
        pooled = graph.linear(first, get("pooler.dense.weight"), get("pooler.dense.bias"),
                              "pooler.dense")
        hidden = graph.add(ACTIVATIONS[name], pooled)
    layer = "qa_outputs" if head == "ForQuestionAnswering" else "classifier"
    logits = graph.linear(hidden, get(f"{layer}.weight"), get(f"{layer}.bias"), layer)
    classes = get(f"{layer}.weight").size(0)
    if head == "ForQuestionAnswering":
        for part, name in enumerate(("start_logits", "end_logits")):
            graph.output(graph.add("Gather", logits, graph.constant(part), axis=-1), name,
                         ["batch", "length"])
    elif head == "ForTokenClassification":
        graph.output(logits, "logits", ["batch", "length", classes])
    elif head == "ForMultipleChoice":
        shape = graph.add("Shape", "input_ids", end=2)
        graph.output(graph.add("Reshape", logits, shape), "logits", ["batch", "choices"])
    else:
        graph.output(logits, "logits", ["batch", classes])


def _add_replaced_token_head(graph: Graph, hidden: str, network: networks.Network) -> None:
    head = networks.build_replaced_token_head(network)
    first = graph.add("Slice", hidden, *(graph.constant([at]) for at in (0, 1, 1)))
    normed = graph.module(graph.add("Add", first, hidden), head.norm, "rtd_head.norm")
    dense = graph.add("Gelu", graph.module(normed, head.dense, "rtd_head.dense"))
    logits = graph.module(dense, head.classifier, "rtd_head.classifier")
    graph.output(graph.add("Squeeze", logits, graph.constant([-1])), "replaced_logits",
                 ["batch", "length"])


def _add_masked_lm(graph: Graph, network: networks.Network, tied: bool) -> None:
    """Every column is decoded: whoever fills masks reads theirs."""
    words, masked_lm = networks.build_masked_lm(network)
    config = network.config
    text = _read_inputs(graph)
    table = graph.constant(words.weight, "words")
    decoder = masked_lm.positions.weight if masked_lm.positions else None
    hidden = _add_trunk(graph, text, table, masked_lm.trunk, config, decoder)
    head = masked_lm.head
    hidden = graph.add("Gelu", graph.module(hidden, head.dense, "mlm_head.dense"))
    hidden = graph.module(hidden, head.norm, "mlm_head.norm")
    if tied:  # Gemm reads the table as it lies
        rows = graph.add("Reshape", hidden, graph.constant([-1, config.hidden_size]))
        logits = graph.add("Gemm", rows, table, graph.constant(head.bias), transB=1)
    else:
        logits = graph.linear(hidden, words.weight, head.bias, "mlm_head.words")
    shape = graph.add("Concat", graph.add("Shape", text.ids), graph.constant([config.vocab_size]),
                      axis=0)
    graph.output(graph.add("Reshape", logits, shape), "logits",
                 ["batch", "length", config.vocab_size])


def _add_trunk(graph: Graph, text: Text, words: str, trunk: Trunk, config: ModelConfig,
               decoder_positions: Tensor | None = None) -> str:
    """Return hidden states [B, L, C]; with `decoder_positions` those of the mask decoder."""
    sums = graph.add("Gather", words, text.ids)
    if config.absolute_input:
        sums = graph.add("Add", sums, _add_positions(graph, text, trunk.input.positions.weight))
    embedded = graph.add("Mul", graph.module(sums, trunk.input.norm, "input.norm"), text.real)
    encoder = trunk.encoder
    slots = _add_slots(graph, text, encoder) if config.relative_attention else ("", "")
    relative_SC = encoder.relative_table()
    hidden, last = embedded, len(encoder.layers) - 1
    for number, layer in enumerate(encoder.layers):
        block = _Block(graph, text, layer, relative_SC, slots, f"layers.{number}")
        keys_values = block.project_keys_values(hidden)
        if number == last and decoder_positions is not None:
            # The last layer twice, keys and values from the states below it (heads.MaskedLm).
            queries = graph.add("Add", _add_positions(graph, text, decoder_positions), hidden)
            return block.add(block.add(queries, keys_values), keys_values)
        hidden = block.add(hidden, keys_values)
        if number == 0 and encoder.convolution is not None:
            hidden = _add_convolution(graph, text, embedded, hidden, encoder.convolution, config)
    return hidden


def _add_positions(graph: Graph, text: Text, table: Tensor) -> str:
    # Gather, not Slice: a text that is too long must fail.
    return graph.add("Gather", graph.constant(table, "positions"), text.columns)


def _add_slots(graph: Graph, text: Text, encoder: Encoder) -> tuple[str, str]:
    """Return the rows of the relative table [2L] for content to position and back."""
    geometry = encoder.layers[0].attention.geometry
    limit = geometry.max_relative
    table = graph.constant(geometry.slots(torch.arange(-limit, limit + 1)), "slots")

    def rows(distances: str) -> str:
        near = graph.add("Clip", distances, graph.constant(-limit), graph.constant(limit))
        return graph.add("Gather", table, graph.add("Add", near, graph.constant(limit)))

    return rows(text.distances), rows(text.distances_back)


def _add_convolution(graph: Graph, text: Text, embedded: str, first_layer: str,
                     module: Convolution, config: ModelConfig) -> str:
    # Padding is zero in `embedded`, so the taps need no mask of their own.
    columns_last = graph.add("Transpose", embedded, perm=[0, 2, 1])
    convolved = graph.add("Conv", columns_last, graph.constant(module.weight, "conv.weight"),
                          graph.constant(module.bias, "conv.bias"), kernel_shape=[module.kernel],
                          pads=[module.kernel // 2] * 2)
    convolved = graph.add("Mul", graph.add("Transpose", convolved, perm=[0, 2, 1]), text.real)
    mixed = graph.add("Add", first_layer, graph.add(ACTIVATIONS[config.conv_activation], convolved))
    return graph.add("Mul", graph.module(mixed, module.norm, "conv.norm"), text.real)


class _Block:
    """One layer of the encoder, to be added once or twice over the same keys and values."""

    def __init__(self, graph: Graph, text: Text, layer: Layer, relative_SC: Tensor | None,
                 slots: tuple[str, str], name: str):
        self.graph, self.text, self.layer, self.name = graph, text, layer, name
        attention: Attention = layer.attention
        self.config, self.slots = attention.config, slots
        nothing_BLC = torch.zeros(1, 1, self.config.hidden_size)
        _, _, self.key_HSD, self.query_HSD = attention.project_keys_values(nothing_BLC, relative_SC)
        self.scale = score_scale(self.config.head_size, self.key_HSD, self.query_HSD)

    def add(self, queries: str, keys_values: tuple[str, str, str | None]) -> str:
        graph, layer, name = self.graph, self.layer, self.name
        attended = graph.module(self._attend(queries, *keys_values), layer.attention.output,
                                f"{name}.output")
        normed = graph.module(graph.add("Add", attended, queries), layer.attention_norm,
                              f"{name}.attention_norm")
        expanded = graph.add("Gelu", graph.module(normed, layer.ffn_in, f"{name}.ffn_in"))
        sums = graph.add("Add", graph.module(expanded, layer.ffn_out, f"{name}.ffn_out"), normed)
        return graph.module(sums, layer.ffn_norm, f"{name}.ffn_norm")

    def _attend(self, queries: str, keys: str, values: str, from_positions: str | None) -> str:
        graph, query = self.graph, self.layer.attention.query
        scaled = graph.linear(queries, query.weight * self.scale, query.bias * self.scale,
                              f"{self.name}.query")
        heads = self._heads(scaled)
        scores = graph.add("MatMul", heads, graph.add("Transpose", keys, perm=[0, 1, 3, 2]))
        if self.key_HSD is not None:
            term = self._position_term(heads, self.key_HSD, self.slots[0], "position_key")
            scores = graph.add("Add", scores, term)
        if from_positions is not None:
            scores = graph.add("Add", scores, from_positions)
        scores = graph.add("Add", scores, self.text.hidden_keys)
        context = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), values)
        rows = graph.add("Transpose", context, perm=[0, 2, 1, 3])
        return graph.add("Reshape", rows, graph.constant([0, 0, self.config.hidden_size]))

    def project_keys_values(self, hidden: str) -> tuple[str, str, str | None]:
        """Return keys and values [B, H, L, D] and the position-to-content term [B, H, L, L]."""
        graph, attention, term = self.graph, self.layer.attention, None
        keys, values = (self._heads(graph.module(hidden, module, f"{self.name}.{name}"))
                        for module, name in ((attention.key, "key"), (attention.value, "value")))
        if self.query_HSD is not None:
            by_key = self._position_term(keys, self.query_HSD * self.scale, self.slots[1],
                                         "position_query")
            term = graph.add("Transpose", by_key, perm=[0, 1, 3, 2])
        return keys, values, term

    def _heads(self, rows: str) -> str:
        graph, config = self.graph, self.config
        split = graph.constant([0, 0, config.num_heads, config.head_size])
        return graph.add("Transpose", graph.add("Reshape", rows, split), perm=[0, 2, 1, 3])

    def _position_term(self, rows: str, table_HSD: Tensor, slots: str, name: str) -> str:
        """Return [B, H, L, L]: row i times the table's rows of the distances from column i on."""
        graph, text = self.graph, self.text
        table = graph.constant(table_HSD.transpose(1, 2), f"{self.name}.{name}")
        expanded = graph.add("Gather", table, slots, axis=2)  # [H, D, 2L]
        product = graph.add("MatMul", rows, expanded)  # [B, H, L, 2L]
        # Row i starts L-1-i columns in: cut L-1 off the front, and let rows be 2L-1 long.
        flat = graph.add("Reshape", product, graph.constant([0, 0, -1]))
        cut = graph.add("Slice", flat, text.skew_start, text.skew_end, graph.constant([2]))
        skewed = graph.add("Reshape", cut, text.skewed)
        return graph.add("Slice", skewed, graph.constant([0]), text.length, graph.constant([3]))
