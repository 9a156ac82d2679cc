"""The cross-entropy over a large vocabulary, without ever holding its logits: a chunk of rows at a time.

All that a loss keeps of a row of logits is one number, and the gradient of the row is its softmax less its label. So
each chunk becomes its own gradient in place, and that at once the gradients of the two factors. The loss is a single
number, therefore backward has nothing left to do but to scale. Those gradients wait unscaled, as of a sum: divided by
a count of tokens, small probabilities would vanish in float16.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyramidion.kernels.launching import served
from pyramidion.kernels.registration import Operator

ROOM = 512 << 20  # bytes of the logits of a chunk: each chunk reads and writes the whole gradient of the weight
CPU_ROOM = 32 << 20
ALIGNED = 64  # logits; rows start at multiples of it, else the products with an odd vocabulary are slow


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    count: Tensor | int | None = None,
    smoothing: float = 0.0,
    ignored: int = -100,
    chunk: int | None = None,
    written: Tensor | None = None,
    copied: Tensor | None = None,
) -> Tensor:
    """Sum the cross-entropies of the logits x @ weight.T at their labels, and divide by `count`: a scalar.

    x          [t d] floating point; the products are computed in its dtype, or in that of autocast
    weight     [v d] in any precision; its gradient is summed in float32
    labels     [t] int64; those equal to `ignored` are left out
    count      a number or a tensor of one number; by default how many labels are not left out, but at least 1, so
               that the loss of none is 0 and not NaN
    smoothing  the part of each label that is spread over all v classes, as F.cross_entropy's `label_smoothing`
    chunk      rows at a time; by default as many as fit the room for logits
    written, copied  [t] for a label that may also come from elsewhere: the logarithms of the probability that it comes
               from the logits at all, and that it comes from elsewhere and is this one. The loss of a row is then
               -log(exp(written - loss) + exp(copied)), where `loss` is that of its logits, smoothed or not

    Returns float32 (float64 for float64). Nothing waits for the device. With gradients enabled, what x and weight ask
    for is computed on the way forward. A label outside the vocabulary is refused where looking costs nothing: on the
    CPU, outside torch.compile; the kernels make NaN of its row.
    """
    _check(x, weight, labels, smoothing, ignored, chunk)
    _check_mixed(labels, written, copied)
    learns = torch.is_grad_enabled()
    wants = learns and x.requires_grad, learns and weight.requires_grad
    given = (float(smoothing), ignored, chunk, _precision(x), served(x), *wants)
    total: Tensor = _sum(x, weight, labels, written, copied, *given)[0]
    if count is None:
        count = (labels != ignored).sum().clamp(min=1)
    return total / (count.to(total.dtype) if isinstance(count, Tensor) else count)


# ------------------------------------------------------------------------------------------------- the sum, in chunks


def _forward(
    x: Tensor, weight: Tensor, labels: Tensor, written: Tensor | None, copied: Tensor | None,
    smoothing: float, ignored: int, chunk: int | None, dtype: torch.dtype, fused: bool, of_x: bool, of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum the losses -> the sum, its gradient of x [t d], weight [v d], `written` and `copied` [t]; [0] if unwanted."""
    total, grad_x, grad_weight, grad_written, grad_copied = _forward_fake(
        x, weight, labels, written, copied, smoothing, ignored, chunk, dtype, fused, of_x, of_weight
    )
    (t, _), v = x.shape, weight.shape[0]
    size = chunk or _fit(t, v, dtype if fused else total.dtype, x.device)
    score_rows = _kernel() if fused else _score
    losses, factor = total.new_empty(t), weight.to(dtype)
    room = x.new_empty(min(size, t), -(-v // ALIGNED) * ALIGNED, dtype=dtype)[:, :v]  # the one chunk of logits
    grad_weight.zero_()
    for start in range(0, t, size):
        rows = slice(start, min(start + size, t))
        some = x[rows].to(dtype)
        logits = torch.mm(some, factor.T, out=room[: rows.stop - start])
        score_rows(logits, labels[rows], losses[rows], smoothing, ignored, of_x or of_weight)
        if written is not None and copied is not None:
            ways = _mix(losses[rows], labels[rows] == ignored, written[rows], copied[rows])
            grad_written[rows], grad_copied[rows] = -ways[0], -ways[1]
            if of_x or of_weight:
                logits.mul_(ways[0].unsqueeze(1))
        if of_x:  # the logits are gradients from here on
            torch.mm(logits, factor, out=grad_x[rows])
        if of_weight:
            _add_product(grad_weight, logits.T, some)
    return losses.sum(), grad_x, grad_weight, grad_written, grad_copied


def _mix(losses: Tensor, hole: Tensor, written: Tensor, copied: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the losses [c] of logits into those of both ways to a label, and give the shares of both, 0 in a hole."""
    first = written - losses
    either = torch.logaddexp(first, copied)
    losses.copy_(-either).masked_fill_(hole, 0)
    return (first - either).exp().masked_fill_(hole, 0), (copied - either).exp().masked_fill_(hole, 0)


def _forward_fake(
    x: Tensor, weight: Tensor, labels: Tensor, written: Tensor | None, copied: Tensor | None,
    smoothing: float, ignored: int, chunk: int | None, dtype: torch.dtype, fused: bool, of_x: bool, of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(dtype, torch.float32)
    grad_x = x.new_empty(x.shape if of_x else (0,), dtype=dtype)
    grad_weight = x.new_empty(weight.shape if of_weight else (0,), dtype=wide)
    mixed = (0,) if written is None else labels.shape
    return (
        x.new_empty((), dtype=wide), grad_x, grad_weight,
        x.new_empty(mixed, dtype=wide), x.new_empty(mixed, dtype=wide),
    )  # fmt: skip


def _fit(t: int, v: int, dtype: torch.dtype, device: torch.device) -> int:
    """Choose the rows of a chunk: as few chunks as the room allows, of one size."""
    most = max(1, (CPU_ROOM if device.type == "cpu" else ROOM) // (v * dtype.itemsize))
    return max(1, -(-t // max(1, -(-t // most))))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a total that is in float32 at least, on a GPU without rounding on the way."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and torch.version.cuda is not None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _backward(
    grad: Tensor, grad_x: Tensor, grad_weight: Tensor, grad_written: Tensor, grad_copied: Tensor,
    of_x: torch.dtype, of_weight: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Scale all gradients, in float32 at least: `grad`, which holds 1 / count, is not rounded first."""
    wide = grad_x.to(grad_weight.dtype)
    return (wide * grad).to(of_x), (grad_weight * grad).to(of_weight), grad_written * grad, grad_copied * grad


def _backward_fake(
    grad: Tensor, grad_x: Tensor, grad_weight: Tensor, grad_written: Tensor, grad_copied: Tensor,
    of_x: torch.dtype, of_weight: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scaled = torch.empty_like(grad_x, dtype=of_x), torch.empty_like(grad_weight, dtype=of_weight)
    return *scaled, torch.empty_like(grad_written), torch.empty_like(grad_copied)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # else backward gets zeros of the size of the gradients
    ctx.dtypes, ctx.wants = (inputs[0].dtype, inputs[1].dtype), (*inputs[-2:], *(x is not None for x in inputs[3:5]))
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _grad(ctx: Any, backward: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 12
    scaled = backward(grad, *ctx.saved_tensors, *ctx.dtypes)
    of_x, of_weight, *of_mixed = (given if wanted else None for given, wanted in zip(scaled, ctx.wants, strict=True))
    return of_x, of_weight, None, *of_mixed, *[None] * 7


_sum = Operator(
    "linear_cross_entropy", _forward, _forward_fake, save=_save, grad=_grad,
    backward=Operator("linear_cross_entropy_backward", _backward, _backward_fake),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ rows of logits


def _kernel() -> Callable[..., None]:
    from pyramidion.kernels.cross_entropy import score_rows  # late: it imports Triton

    return score_rows


def _score(logits: Tensor, labels: Tensor, losses: Tensor, smoothing: float, ignored: int, learns: bool) -> None:
    """Write the losses [c] of logits [c v]; if `learns`, turn the logits into their gradients."""
    hole = labels == ignored
    target = labels.masked_fill(hole, 0).unsqueeze(1)
    row = F.log_softmax(logits, 1, dtype=losses.dtype)
    loss = row.gather(1, target).squeeze(1) * (smoothing - 1)
    if smoothing:
        loss -= smoothing * row.mean(1)
    losses.copy_(loss.masked_fill_(hole, 0))
    if learns:
        row.exp_()
        row.scatter_(1, target, row.gather(1, target) - (1 - smoothing))
        if smoothing:
            row -= smoothing / logits.shape[1]
        logits.copy_(row.masked_fill_(hole.unsqueeze(1), 0))


# ------------------------------------------------------------------------------------------------------------ the door


def _precision(x: Tensor) -> torch.dtype:
    """Say in which dtype products with x are computed; autocast leaves float64 alone."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def _check(x: Tensor, weight: Tensor, labels: Tensor, smoothing: float, ignored: int, chunk: int | None) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"`x` must be floating point [t d], got {x.dtype} of shape {list(x.shape)}.")
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or weight.shape[0] < 1:
        raise ValueError(f"`weight` must have shape [v d] with d = {x.shape[1]}, got {list(weight.shape)}.")
    if labels.shape != x.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"`labels` must be int64, one for each of the {x.shape[0]} rows of `x`, "
            f"got {labels.dtype} of shape {list(labels.shape)}."
        )
    if not x.device == weight.device == labels.device:
        raise ValueError(
            f"`x`, `weight` and `labels` must be on one device, got {x.device}, {weight.device} and {labels.device}."
        )
    if not 0 <= smoothing <= 1:
        raise ValueError(f"`smoothing` must be from 0 to 1, got {smoothing}.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"`chunk` must be at least 1, got {chunk}.")
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        bad = labels[(labels != ignored) & ((labels < 0) | (labels >= weight.shape[0]))]
        if bad.numel():
            raise ValueError(
                f"`labels` must be from 0 to {weight.shape[0] - 1}, or {ignored} to be left out, got {int(bad[0])}."
            )


def _check_mixed(labels: Tensor, written: Tensor | None, copied: Tensor | None) -> None:
    if (written is None) != (copied is None):
        raise ValueError(f"`{'written' if written is None else 'copied'}` must be given where the other one is.")
    for name, given in (("written", written), ("copied", copied)):
        if given is not None and (given.shape != labels.shape or given.dtype not in (torch.float32, torch.float64)):
            raise ValueError(
                f"`{name}` must be float32 or float64 and one for each of the {len(labels)} labels, "
                f"got {given.dtype} of shape {list(given.shape)}."
            )
