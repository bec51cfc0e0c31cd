"""Parameter groups of weight decay: none for biases and LayerNorms, all other parameters decay."""

from collections.abc import Collection

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float, fixed: Collection[str] = ()
                 ) -> list[dict]:
    """Return the parameter groups: decayed weights, biases with LayerNorm weights, fixed ones.

    The parameters named by `fixed` stay in the optimizer, at a learning rate of 0: a parameter
    without gradient is a special case in every ZeRO stage and checkpoint.
    """
    still = [p for name, p in model.named_parameters() if name in fixed]
    plain, seen = [], {id(p) for p in still}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm) or name == "bias":
                plain.append(parameter)
                seen.add(id(parameter))
    decayed = [p for p in model.parameters() if id(p) not in seen]
    groups = [{"params": decayed, "weight_decay": weight_decay},
              {"params": plain, "weight_decay": 0.0},
              {"params": still, "weight_decay": 0.0, "fixed": True}]
    return [group for group in groups if group["params"]]
