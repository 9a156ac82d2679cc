"""Muon: momentum with all its directions made equally strong, for the matrices of a model; AdamW for the rest of it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

QUINTIC = (3.4445, -4.7750, 2.0315)  # a x + b x³ + c x⁵ lifts small singular values fast, and keeps them in 0.7 … 1.2
ROUNDS = 5
ADAM_RMS = 0.2  # how large AdamW's updates are beside the rate: with it one rate and one decay serve both


class Muon(torch.optim.AdamW):
    """Learn matrices by their orthogonalised momentum, everything else by AdamW, with one rate for both.

    A gradient of a matrix has few strong directions, and Adam, which sees entries, leaves it so. Here the singular
    values of the momentum are brought near 1 by a few products of matrices before it is taken as the step, so that
    directions seldom seen are learnt as fast as the rest (https://kellerjordan.github.io/posts/muon). Its size is
    scaled to that of AdamW's steps (https://arxiv.org/abs/2502.16982). Matrices of one shape are done at once: a model
    has dozens of them, but three shapes.

    matrices  learnt this way, with `weight_decay`; one-dimensional weights, tables of vectors and the like are `others`
    others    groups of parameters for AdamW, as it takes them
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Sequence[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        **adam: Any,
    ) -> None:
        weights = list(matrices)
        for weight in weights:
            if weight.ndim != 2 or min(weight.shape) < 2:
                raise ValueError(f"Muon's matrices must have two dimensions of at least 2, got {tuple(weight.shape)}.")
        super().__init__([{"params": weights, "weight_decay": weight_decay, "momentum": momentum}, *others], lr, **adam)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all weights that have a gradient."""
        weights = self.param_groups[0]["params"]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None  # what has no gradient AdamW leaves alone
        super().step()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        self._turn(self.param_groups[0])
        return loss

    def _turn(self, group: dict[str, Any]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for weight in group["params"]:
            if weight.grad is not None:
                shapes[weight.shape].append(weight)
        for shape, weights in shapes.items():
            gradients: list[Tensor] = [weight.grad for weight in weights if weight.grad is not None]
            held = [self._momentum(weight) for weight in weights]
            torch._foreach_lerp_(held, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, held, group["momentum"])  # Nesterov's look ahead
            turned = orthogonal(torch.stack(ahead)).to(weights[0].dtype)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, list(turned), alpha=-group["lr"] * ADAM_RMS * max(shape) ** 0.5)

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["momentum"], state["step"] = torch.zeros_like(weight), torch.zeros(())  # AdamW asks all for a step
        held: Tensor = state["momentum"]
        return held


def orthogonal(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices [b m n] near 1 and keep their singular vectors, by Newton and Schulz.

    In bf16, in which a GPU is fastest; a step of learning does not notice.
    """
    found = matrices.bfloat16()
    tall = found.shape[-2] > found.shape[-1]
    if tall:
        found = found.mT
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = QUINTIC
    for _ in range(ROUNDS):
        square = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(square, square, square, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


def split(model: nn.Module) -> tuple[list[nn.Parameter], set[nn.Parameter]]:
    """Tell the matrices that layers multiply by, tables of vectors and single rows left out, from all other weights."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    every = {weight: None for weight in model.parameters() if weight.requires_grad}  # each once, in order
    matrices = [weight for weight in every if weight.ndim == 2 and min(weight.shape) > 1 and weight not in tables]
    return matrices, set(every) - set(matrices)
