"""A training step recorded once for each shape and then replayed: the host hands over one thing, not thousands."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyramidion.attention.layout import counted_on_device

logger = logging.getLogger(__name__)

Step = Callable[[dict[str, Tensor]], Tensor]
Key = tuple[tuple[str, torch.Size], ...]
MOST = 64  # recordings: a graph of thousands of launches takes tens of MB


@dataclass(frozen=True)
class Recording:
    """A captured graph, the tensors it reads, and the loss it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, Tensor]
    loss: Tensor

    def replay(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Do the step again with other numbers."""
        for name, place in self.inputs.items():
            place.copy_(inputs[name], non_blocking=True)
        self.graph.replay()
        return self.loss.clone()


class CapturedStep:
    """Do forward and backward as a CUDA graph: at the pace of the kernels, and not of whoever starts them.

    The first step of each shape is done as it stands, which also compiles what there is to compile; the second is
    recorded, and from then on a step of that shape is a replay. Beyond `MOST` shapes none is recorded any more, nor
    where a step turns out to wait for the device, which is told. All recordings share their memory, as only one is
    played at a time. Gradients are added to `.grad`, which may be None or hold those of another part of a batch. Random
    numbers go on from replay to replay as they would from step to step.

    step     forward and backward of a dict of tensors on the device, to a loss; it must not wait for the device
    weights  what learns; others are not looked at
    """

    def __init__(self, step: Step, weights: Iterable[nn.Parameter]) -> None:
        self.step = step
        self.weights = [weight for weight in weights if weight.requires_grad]
        self.stream = torch.cuda.Stream(self.weights[0].device)
        self.gradients = [torch.zeros_like(weight) for weight in self.weights]  # where every recording adds to
        self.seen: set[Key] = set()
        self.recordings: dict[Key, Recording] = {}
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.refused = False

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        """Do one step: give the loss, and leave the gradients with the weights."""
        self._provide()
        key = tuple((name, value.shape) for name, value in sorted(inputs.items()))
        if key in self.seen and key not in self.recordings and len(self.recordings) < MOST:
            self._try(key, inputs)
        self.seen.add(key)
        recording = self.recordings.get(key)
        return self._beside(inputs) if recording is None else recording.replay(inputs)

    def _try(self, key: Key, inputs: dict[str, Tensor]) -> None:
        """Record a step; one that cannot be recorded is told of, and no other is tried."""
        if self.refused:
            return
        current = torch.cuda.current_stream(self.stream.device)
        try:
            self.recordings[key] = self._record(inputs)
        except RuntimeError as error:
            self._give_up(current)
            self.refused = True
            reason = str(error).strip().partition("\n")[0]
            logger.warning("Steps are not recorded any more, but done as they stand: %s", reason)

    def _give_up(self, current: torch.cuda.Stream) -> None:
        """Put back what a recording takes and gives back only if it ends well: stream, memory and random numbers."""
        torch.cuda.set_stream(current)
        torch.cuda.synchronize(current.device)
        with suppress(RuntimeError):  # it was given back after all
            torch._C._cuda_endAllocateToPool(current.device.index, self.pool)
        with self._capture(torch.cuda.CUDAGraph()):  # at its end, chance is let go
            torch.zeros(1, device=current.device)

    def _capture(self, graph: torch.cuda.CUDAGraph, **options: Any) -> torch.cuda.graph:
        """Capture what this thread launches; others, which lay out batches, may go on."""
        return torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local", **options)

    def _provide(self) -> None:
        """Give weights without a gradient the one that recordings know, with zeros."""
        bare = [place for weight, place in zip(self.weights, self.gradients, strict=True) if weight.grad is None]
        if bare:
            torch._foreach_zero_(bare)
        for weight, place in zip(self.weights, self.gradients, strict=True):
            if weight.grad is not None and weight.grad is not place:  # whoever put it there, its numbers count
                place.copy_(weight.grad)
            weight.grad = place

    def _beside(self, inputs: dict[str, Tensor]) -> Tensor:
        """Do the step on the stream of recordings: what autograd keeps there must not belong to another."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), counted_on_device():
            loss = self.step(dict(inputs)).detach()
        current.wait_stream(self.stream)
        for tensor in inputs.values():  # who uses what another stream has made: it is not to be taken back too soon
            tensor.record_stream(self.stream)
        loss.record_stream(current)
        return loss

    def _record(self, inputs: dict[str, Tensor]) -> Recording:
        places = {name: value.clone() for name, value in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        with self._capture(graph, pool=self.pool), counted_on_device():
            loss = self.step(dict(places)).detach()
        return Recording(graph, places, loss)
