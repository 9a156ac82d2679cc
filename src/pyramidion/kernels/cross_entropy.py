"""The cross-entropy of a row of logits, and its gradient in the same place: a program a row."""

import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.launching import launch

BLOCK = 4096  # logits a program holds at a time


def score_rows(logits: Tensor, labels: Tensor, losses: Tensor, smoothing: float, ignored: int, learns: bool) -> None:
    """Write the losses [c] of logits [c v]; if `learns`, turn the logits into their gradients."""
    c, v = logits.shape
    block = min(BLOCK, triton.next_power_of_2(v))
    launch(
        score, (c,), logits, labels.contiguous(), losses, logits.stride(0), v, smoothing, ignored,
        SMOOTHS=smoothing > 0, LEARNS=learns, BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip


@triton.jit
def load_block(logits, start, stride, v, BLOCK: tl.constexpr):
    """Load a block of a row in full lines: up to the next row, although only v places of it count."""
    column = start + tl.arange(0, BLOCK)
    logit = tl.load(logits + column, mask=column < stride, other=0.0).to(tl.float32)
    return column, tl.where(column < v, logit, -float("inf"))


@triton.jit
def measure(logits, stride, v, origin, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr):
    """Read a row once -> its maximum, the sum of exp(logit - maximum), and that of logit - origin."""
    top, total, level = -float("inf"), 0.0, 0.0
    for start in range(0, v, BLOCK):
        column, logit = load_block(logits, start, stride, v, BLOCK)
        higher = tl.maximum(top, tl.max(logit, 0))
        pivot = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: no difference of two
        total = total * tl.exp(top - pivot) + tl.sum(tl.exp(logit - pivot), 0)
        top = higher
        if SMOOTHS:
            level += tl.sum(tl.where(column < v, logit - origin, 0.0), 0)
    return top, total, level


@triton.jit
def overwrite(logits, stride, v, label, top, share, smoothing, BLOCK: tl.constexpr):
    """Put the gradient of a row where its logits were: the softmax less the smoothed label."""
    for start in range(0, v, BLOCK):
        column, logit = load_block(logits, start, stride, v, BLOCK)
        due = tl.where(column == label, 1.0 - smoothing, 0.0) + smoothing / v
        grad = (tl.exp(logit - top) * share - due).to(logits.dtype.element_ty)
        tl.store(logits + column, grad, mask=column < stride)


@triton.jit
def clear(logits, stride, v, BLOCK: tl.constexpr):
    """Put zeros where the logits of a row were."""
    for start in range(0, v, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(logits + column, tl.zeros([BLOCK], logits.dtype.element_ty), mask=column < stride)


@triton.jit
def score(
    logits, labels, losses, stride, v, smoothing, ignored,
    SMOOTHS: tl.constexpr, LEARNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the loss of a row by differences alone, so that large logits cost no digits, and its gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    if label == ignored:
        tl.store(losses + row, 0.0)
        if LEARNS:
            clear(logits, stride, v, BLOCK)
    else:
        known = (label >= 0) & (label < v)
        own = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        origin = tl.where(own == -float("inf"), 0.0, own)
        top, total, level = measure(logits, stride, v, origin, SMOOTHS, BLOCK)
        loss = (top - own) + tl.log(total)
        if SMOOTHS:
            loss = loss * (1.0 - smoothing) + ((top - origin) + tl.log(total) - level / v) * smoothing
        tl.store(losses + row, loss)
        if LEARNS:
            tl.debug_barrier()  # all have read before the first overwrites
            share = tl.where(known, 1.0 / total, float("nan"))
            overwrite(logits, stride, v, label, top, share, smoothing, BLOCK)
