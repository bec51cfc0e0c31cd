"""Vocabulary loss in bf16 on a CPU with AMX, in C: `deberta_ds/native/vocabulary.c`.

torch casts each chunk of the table three times a step, and passes over its logits a dozen times;
here a block of logits stays in the nearest cache from its product to its sums or gradients. Where
products take longer, without AMX, torch's are as fast or faster.

Shape legend: T target rows, C hidden size, V vocabulary, K number of chunks.
"""

import ctypes

import torch
from torch import Tensor

from deberta_ds import kept_memory, native

_MOST_UNITS, _UNIT_BYTES = 16, 1 << 26  # of sums of the hidden states' gradient, in all


class _Vocabulary(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("hidden_right", "turned_right", "weight",
                                                     "bias", "labels")]
    _fields_ += [(name, ctypes.c_int64) for name in ("targets", "ids", "size", "chunk")]
    _fields_ += [("half", ctypes.c_int32), ("colder", ctypes.c_float)]


def fits(hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor) -> bool:
    """Return whether the kernels can work on these."""
    half = len(hidden_TC) > 0 and hidden_TC.dtype == torch.bfloat16
    return half and native.takes(hidden_TC, weight_VC, bias_V) and native.has("amx")


class _Call:
    """One call's arguments as C takes them, and the tensors that they point into."""

    def __init__(self, hidden_TC, weight_VC, bias_V, labels_T, size: int, chunk: int,
                 temperature: float = 1.0):
        rows, self.width = len(hidden_TC), native.padded(hidden_TC.shape[1])
        padded_TC = hidden_TC.new_zeros(native.padded(rows), self.width)
        padded_TC[:rows, : hidden_TC.shape[1]] = hidden_TC
        self.rows, self.chunks = len(padded_TC), -(-size // chunk)
        self._alive = [_pairs(padded_TC), _pairs(padded_TC.t()), weight_VC.detach().contiguous(),
                       bias_V.detach().float().contiguous(), labels_T.long().contiguous()]
        self.vocabulary = _Vocabulary(*(x.data_ptr() for x in self._alive), rows, size,
                                      hidden_TC.shape[1], chunk, weight_VC.dtype != torch.float32,
                                      1 / temperature)

    def run(self, name: str, units: int, *arguments) -> None:
        """Call a kernel for all units of work, in as many threads as torch has."""
        places = [native.address(x) if isinstance(x, Tensor) else x for x in arguments]
        native.run_units(f"{name}_bf16", units, ctypes.byref(self.vocabulary), *places)


def chunk_sums(hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor, labels_T: Tensor, size: int,
               chunk: int, temperature: float) -> tuple[Tensor, ...]:
    """Return (largest logit, its id, log of the sum of exponentials, the same at the temperature)
    of each chunk, [K,T], and the logit of each label [T].
    """
    call = _Call(hidden_TC, weight_VC, bias_V, labels_T, size, chunk, temperature)
    shape = (call.chunks, len(hidden_TC))
    top_KT, mass_KT = torch.empty(shape), torch.empty(shape)
    cold_KT = torch.empty(shape) if temperature != 1.0 else None
    top_id_KT, label_logit_T = torch.empty(shape, dtype=torch.int32), torch.zeros(shape[1])
    call.run("vocabulary_sums", call.chunks, top_KT, top_id_KT, mass_KT, cold_KT, label_logit_T)
    log_mass_KT = top_KT + mass_KT.log_()
    cold_KT = log_mass_KT if cold_KT is None else top_KT / temperature + cold_KT.log_()
    return top_KT, top_id_KT.long(), log_mass_KT, cold_KT, label_logit_T


def gradients(hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor, labels_T: Tensor, size: int,
              chunk: int, log_norm_T: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `scale` times the loss: hidden [T,C], weight [V,C], bias [V]."""
    call = _Call(hidden_TC, weight_VC, bias_V, labels_T, size, chunk)
    most = max(1, min(_MOST_UNITS, _UNIT_BYTES // (call.rows * call.width * 4)))
    of_unit = -(-call.chunks // most)  # by shapes alone: threads change no bit
    units = -(-call.chunks // of_unit)
    weight_grad_VC = kept_memory.empty_like(weight_VC, torch.float32)
    weight_grad_VC[size:] = 0
    bias_grad_V = torch.zeros(bias_V.shape)
    hidden_grad_UTC = torch.zeros(units, call.rows, call.width)
    call.run("vocabulary_gradients", units, ctypes.c_long(of_unit), log_norm_T.contiguous(),
             ctypes.c_float(scale), weight_grad_VC, bias_grad_V, hidden_grad_UTC)
    hidden_grad_TC = hidden_grad_UTC.sum(0)[: len(hidden_TC), : hidden_TC.shape[1]]
    return (hidden_grad_TC.to(hidden_TC.dtype), weight_grad_VC.to(weight_VC.dtype),
            bias_grad_V.to(bias_V.dtype))


def _pairs(left_RC: Tensor) -> Tensor:
    """Return a matrix as products want it on the right: [R / 2, C, 2]."""
    return left_RC.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()
