"""A training step recorded once for each shape and then replayed: the host hands over one thing, not thousands."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from pyramidion.attention.layout import counted_on_device
from pyramidion.kernels.recording import Recorder

Step = Callable[[dict[str, Tensor]], Tensor]
MOST = 64  # recordings: a graph of thousands of launches takes tens of MB


class CapturedStep(Recorder[Tensor]):
    """Do forward and backward as a CUDA graph.

    Gradients are added to `.grad`, which may be None or hold those of another part of a batch. Random numbers go on
    from replay to replay as they would from step to step.

    step     forward and backward of a dict of tensors on the device, to a loss; it must not wait for the device
    weights  what learns; others are not looked at
    """

    def __init__(self, step: Step, weights: Iterable[nn.Parameter]) -> None:
        self.weights = [weight for weight in weights if weight.requires_grad]
        self.gradients = [torch.zeros_like(weight) for weight in self.weights]  # where every recording adds to
        super().__init__(self._step, self.weights[0].device, most=MOST, name="Steps")
        self.step = step

    def _step(self, inputs: dict[str, Tensor]) -> Tensor:
        with counted_on_device():
            return self.step(inputs).detach()

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        """Do one step: give the loss, and leave the gradients with the weights."""
        self._provide()
        return super().__call__(inputs).clone()

    def _provide(self) -> None:
        """Give weights without a gradient the one that recordings know, with zeros."""
        bare = [place for weight, place in zip(self.weights, self.gradients, strict=True) if weight.grad is None]
        if bare:
            torch._foreach_zero_(bare)
        for weight, place in zip(self.weights, self.gradients, strict=True):
            if weight.grad is not None and weight.grad is not place:  # whoever put it there, its numbers count
                place.copy_(weight.grad)
            weight.grad = place

    def plainly(self, inputs: dict[str, Tensor]) -> Tensor:
        """Do the step on the stream of recordings: what autograd keeps there must not belong to another."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss = super().plainly(inputs)
        current.wait_stream(self.stream)
        for tensor in inputs.values():  # who uses what another stream has made: it is not to be taken back too soon
            tensor.record_stream(self.stream)
        loss.record_stream(current)
        return loss
