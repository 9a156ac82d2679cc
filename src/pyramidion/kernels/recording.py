"""What is done with tensors of one shape, recorded once and then replayed: the host hands over one thing."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Key = tuple[tuple[str, torch.Size], ...]


@dataclass(frozen=True)
class Recording(Generic[Result]):
    """A captured graph, the tensors it reads, and what it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, Tensor]
    result: Result

    def replay(self, inputs: Mapping[str, Tensor]) -> Result:
        """Do the same again with other numbers."""
        for name, place in self.inputs.items():
            place.copy_(inputs[name], non_blocking=True)
        self.graph.replay()
        return self.result


class Recorder(Generic[Result]):
    """Do something as a CUDA graph: at the pace of the kernels, and not of whoever starts them.

    The first call of each shape is done as it stands, which also compiles what there is to compile; the second is
    recorded, and from then on a call of that shape is a replay. Beyond `most` shapes none is recorded any more, nor
    where a call turns out to wait for the device, which is told. All recordings share their memory, as only one is
    played at a time: what a call gives is there until the next one. Other devices than GPUs do all as it stands.

    do    what is done with a dict of tensors on the device; it must not wait for the device
    name  what is told of where it is not recorded
    """

    def __init__(
        self, do: Callable[[dict[str, Tensor]], Result], device: torch.device, *, most: int, name: str
    ) -> None:  # fmt: skip
        self.do, self.most, self.name = do, most, name
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.seen: set[Key] = set()
        self.recordings: dict[Key, Recording[Result]] = {}
        self.pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.refused = device.type != "cuda"

    def __call__(self, inputs: dict[str, Tensor]) -> Result:
        """Do it once."""
        key = tuple((name, value.shape) for name, value in sorted(inputs.items()))
        if key in self.seen and key not in self.recordings and len(self.recordings) < self.most:
            self._try(key, inputs)
        self.seen.add(key)
        recording = self.recordings.get(key)
        return self.plainly(inputs) if recording is None else recording.replay(inputs)

    def plainly(self, inputs: dict[str, Tensor]) -> Result:
        """Do it as it stands."""
        return self.do(dict(inputs))

    def _try(self, key: Key, inputs: dict[str, Tensor]) -> None:
        """Record a call; one that cannot be recorded is told of, and no other is tried."""
        if self.refused:
            return
        current = torch.cuda.current_stream(self.stream.device)
        try:
            self.recordings[key] = self._record(inputs)
        except RuntimeError as error:
            self._give_up(current)
            self.refused = True
            reason = str(error).strip().partition("\n")[0]
            logger.warning("%s are not recorded any more, but done as they stand: %s", self.name, reason)

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

    def _record(self, inputs: dict[str, Tensor]) -> Recording[Result]:
        places = {name: value.clone() for name, value in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        with self._capture(graph, pool=self.pool):
            result = self.do(dict(places))
        return Recording(graph, places, result)


__all__ = ["Recorder", "Recording"]
