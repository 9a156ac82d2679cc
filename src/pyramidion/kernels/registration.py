"""Make one operator of a function and its gradient, cheap in eager mode and one node in a compiled graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Operator:
    """Hold `run` twice: as a plain autograd function, and registered with torch's dispatcher under `name`.

    Dispatching a Python custom operator costs the host several times what an autograd function does (about 100 µs a
    forward and backward, measured), which is more than our kernels take; a compiled graph needs the registration.

    run   the computation; tensors in, a tensor or a tuple of new tensors out
    fake  the same for shapes alone
    save  `save(ctx, inputs, output)` keeps what backward needs
    grad  `grad(ctx, backward, *grads)` returns a gradient for every input; `backward` is the Operator given, callable
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        save: Callable[..., None] | None = None,
        grad: Callable[..., Any] | None = None,
        backward: "Operator | None" = None,
    ) -> None:
        self.run = run
        self.registered = torch.library.custom_op(f"pyramidion::{name}", run, mutates_args=())
        self.registered.register_fake(fake)
        if save is not None and grad is not None and backward is not None:
            self._learn(save, grad, backward)

    def _learn(self, save: Callable[..., None], grad: Callable[..., Any], backward: "Operator") -> None:
        run = self.run
        self.registered.register_autograd(
            lambda ctx, *grads: grad(ctx, backward.registered, *grads), setup_context=save
        )

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                # In one piece: with a separate setup_context, torch binds the signature anew at every call.
                output = run(*inputs)
                save(ctx, inputs, output)
                return output

            @staticmethod
            @once_differentiable  # a second derivative is refused, not silently zero
            def backward(ctx: Any, *grads: Any) -> Any:
                return grad(ctx, backward.run, *grads)

        self.apply = Function.apply

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.registered(*inputs)
        learns = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return self.apply(*inputs) if learns else self.run(*inputs)
