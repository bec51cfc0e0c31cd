"""Which weights ZeRO-3 gathers in a micro-batch, by DeepSpeed's own rules on the calls of modules.

`CallRecorder` sees a forward and a backward pass as DeepSpeed's hooks do: a module fetches its own
parameters before a call, before its backward pass and before it is recomputed, and gives them up
after each; a call whose result no gradient reaches has no backward pass. `gathered` then plays
DeepSpeed 0.19.8's PartitionedParameterCoordinator on the record: what is used again within
`stage3_max_reuse_distance` stays, what comes next is fetched ahead, and small parameters are always
there. tests/test_traffic.py holds the result against the bytes of real runs.
"""

import sys
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

FETCH, RELEASE = True, False
_MAX_LIVE = _MAX_REUSE_DISTANCE = 1_000_000_000  # DeepSpeed's defaults, in elements
_PREFETCH, _PERSISTENT = 50_000_000, 100_000


@dataclass(frozen=True)
class Calls:
    """The calls of modules in one micro-batch; modules and parameters are numbers."""

    sizes: list[int]  # elements of each parameter
    own: list[list[int]]  # each module's own parameters
    events: list[tuple[bool, int]] = field(default_factory=list)  # FETCH or RELEASE, module


@dataclass(frozen=True)
class Gathered:
    """Elements that all-gathers yield, over all ranks, and how many all-gathers there are."""

    a_micro_batch: int
    a_step: int = 0  # once, after the update: what is never given up
    messages: int = 0  # of a micro-batch


class CallRecorder:
    """Records into `calls` while the model runs forward and backward."""

    def __init__(self, model: nn.Module):
        modules, parameters = list(model.modules()), list(model.parameters())
        number = {id(parameter): n for n, parameter in enumerate(parameters)}
        self.calls = Calls([parameter.numel() for parameter in parameters],
                           [sorted({number[id(p)] for p in module.parameters(recurse=False)})
                            for module in modules])
        self._called = [0] * len(modules)  # calls whose backward pass may still come
        self._awaited = [0] * len(modules)  # inputs of the last call that wait for a gradient
        for n, module in enumerate(modules):
            module.register_forward_pre_hook(lambda _module, inputs, n=n: self._enter(n, inputs))
            module.register_forward_hook(
                lambda _module, _inputs, output, n=n: self._leave(n, output))

    def _enter(self, module: int, inputs):
        self.calls.events.append((FETCH, module))
        self._awaited[module] = 0

        def mark(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            self._awaited[module] += 1
            return _Mark.apply(tensor, lambda: self._end_backward(module))

        return _map_tensors(mark, inputs)

    def _leave(self, module: int, output):
        self.calls.events.append((RELEASE, module))

        def mark(tensor: Tensor) -> Tensor:
            self._called[module] += 1
            return _Mark.apply(tensor, lambda: self._begin_backward(module))

        return _map_tensors(mark, output)

    def _begin_backward(self, module: int) -> None:
        if self._called[module]:
            self._called[module] -= 1
            self.calls.events.append((FETCH, module))

    def _end_backward(self, module: int) -> None:
        self._awaited[module] -= 1
        if self._awaited[module] == 0:
            self.calls.events.append((RELEASE, module))


class _Mark(torch.autograd.Function):
    """Nothing, but `on_backward` is called when a gradient comes by."""

    @staticmethod
    def forward(ctx, tensor, on_backward):
        ctx.on_backward = on_backward
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.on_backward()
        return grad, None


def _map_tensors(function, value):
    """Apply `function` to the tensors in tuples, lists and dicts; the rest stays."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        parts = [_map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _map_tensors(function, part) for key, part in value.items()}
    return value


def gathered(calls: Calls, zero: dict, ranks: int) -> Gathered:
    """Return what is gathered under a DeepSpeed `zero_optimization` of stage 3."""
    coordinator = _Coordinator(calls, zero)
    # In its first micro-batch it only learns the order, and gives up everything. In the second one
    # it decides, once and for all, which module gives up what.
    coordinator.play(there=set())
    coordinator.play(there=coordinator.persistent)

    def whole(parameters: Iterable[int]) -> int:
        """Every rank sends as much: parts are padded."""
        return sum(-(-calls.sizes[p] // ranks) * ranks for p in parameters)

    return Gathered(whole(p for message in coordinator.messages for p in message),
                    whole(coordinator.persistent), len(coordinator.messages))


class _Coordinator:
    """DeepSpeed's, when it knows the order of the calls."""

    def __init__(self, calls: Calls, zero: dict):
        self.events, self.own, self.sizes = calls.events, calls.own, calls.sizes
        self.reuse_distance = int(zero.get("stage3_max_reuse_distance", _MAX_REUSE_DISTANCE))
        self.max_live = int(zero.get("stage3_max_live_parameters", _MAX_LIVE))
        self.prefetch_size = int(zero.get("stage3_prefetch_bucket_size", _PREFETCH))
        self.persistent = _persistent(calls.sizes, zero)
        order = [module for event, module in calls.events if event is FETCH]
        self.needed = [(parameter, step) for step, module in enumerate(order)
                       for parameter in calls.own[module]]
        self.uses: dict[int, list[int]] = defaultdict(list)  # the steps that need a parameter
        for parameter, step in self.needed:
            self.uses[parameter].append(step)
        sums = (sum(calls.sizes[p] for p in calls.own[module]) for module in order)
        self.before = [0, *accumulate(sums)]  # elements of all modules before a step
        self.given_up: dict[tuple[int, int], set[int]] = {}  # by (module, step)

    def play(self, there: set[int]) -> None:
        """Go through a micro-batch that begins with some parameters whole."""
        self.queue = deque(self.needed)
        self.there, self.users = set(there), defaultdict(set)
        self.seen_until: dict[int, int] = defaultdict(lambda: -1)
        self.step = self.live = 0
        self.messages: list[set[int]] = []
        for event, module in self.events:
            (self.fetch if event is FETCH else self.release)(module)

    def fetch(self, module: int) -> None:
        own = set(self.own[module])
        self._gather(own - self.there)
        for parameter in own:
            self.users[parameter].add(module)
        new = {parameter for parameter in own if self.seen_until[parameter] < self.step}
        taken: set[int] = set()
        while self.queue and len(taken) < len(new):
            parameter, step = self.queue.popleft()
            self.seen_until[parameter] = step
            taken.add(parameter)
        self._prefetch()
        self.step += 1

    def _prefetch(self) -> None:
        room, ahead, size = min(self.max_live - self.live, self.prefetch_size), set(), 0
        while self.queue and size < room:
            parameter, step = self.queue.popleft()
            self.seen_until[parameter] = max(self.seen_until[parameter], step)
            if parameter not in self.there and parameter not in ahead:
                ahead.add(parameter)
                size += self.sizes[parameter]
        self._gather(ahead)

    def _gather(self, parameters: set[int]) -> None:
        if parameters:
            self.messages.append(parameters)
            self.there |= parameters
            self.live += sum(self.sizes[parameter] for parameter in parameters)

    def release(self, module: int) -> None:
        key = module, self.step
        if key not in self.given_up:
            self.given_up[key] = {p for p in self.own[module] if not self._stays(p)}
        for parameter in self.own[module]:
            self.users[parameter].discard(module)
            if parameter in self.given_up[key] & self.there and not self.users[parameter]:
                self.there.remove(parameter)
                self.live -= self.sizes[parameter]

    def _stays(self, parameter: int) -> bool:
        """Return whether it is never given up, fetched ahead, or used again soon."""
        if parameter in self.persistent or self.seen_until[parameter] > self.step:
            return True
        uses = self.uses[parameter]
        following = bisect_left(uses, self.step)
        return following < len(uses) and \
            self.before[uses[following]] - self.before[self.step] < self.reuse_distance


def _persistent(sizes: list[int], zero: dict) -> set[int]:
    """Return the small parameters, which every rank keeps whole."""
    small = int(zero.get("stage3_param_persistence_threshold", _PERSISTENT))
    room = int(zero.get("stage3_model_persistence_threshold", sys.maxsize))
    found = set()
    for parameter, size in enumerate(sizes):
        if size <= min(small, room):
            found.add(parameter)
            room -= size
    return found
