"""The kernels of a model against torch in float64, with Philox written out: in Triton's interpreter, or on a GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from pyramidion.kernels import feed_forward, residual
from pyramidion.kernels.chance import scale, threshold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter's arithmetic is modulo 2³²
        yield


def philox(seed: int, draws: np.ndarray) -> list[np.ndarray]:
    """Draw four words for each counter, as Salmon et al. (2011) define Philox 4x32, with 7 rounds."""
    counter = [draws.astype(np.uint64), *(np.zeros_like(draws, dtype=np.uint64) for _ in range(3))]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        one, two = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
        counter = [(two >> high) ^ counter[1] ^ np.uint64(key[0]), two & low,
                   (one >> high) ^ counter[3] ^ np.uint64(key[1]), one & low]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def kept(seed: int, draws: int, rate: float) -> np.ndarray:
    """Say which of the 8 neighbours of each draw stay: [8 * draws]."""
    words = philox(seed, np.arange(draws))
    halves = [(word >> np.uint64(shift)) & np.uint64(0xFFFF) for word in words for shift in (0, 16)]
    return (np.stack(halves, 1) >= threshold(rate)).reshape(-1)


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> int:
    fixed = (0x12345678 << 32) | 0x9ABCDEF1
    for module in (residual, feed_forward):
        monkeypatch.setattr(module, "new_seed", lambda device: torch.tensor([fixed], device=device))
    return fixed


def near(found: Tensor, want: Tensor, plain: Tensor, what: str) -> None:
    """Ask for an error at most twice that of torch's own computation in the same precision."""
    assert found.shape == want.shape, what
    assert found.dtype == plain.dtype, what
    error, allowed = ((one.double().cpu() - want).norm() for one in (found, plain))
    assert error <= 2 * allowed + want.norm() * torch.finfo(plain.dtype).eps, f"{what}: {error:.2e}, {allowed:.2e}"


Inputs = list[Tensor]


def by_torch(kind: str, inputs: Inputs, keep: Tensor, rate: float, half: torch.dtype | None) -> Inputs:
    """Compute what the kernels do, in the precision of the inputs, or with the norm in `half`."""
    x, change, weight, bias = inputs
    total = x if kind == "norm" else x + torch.where(keep.to(x.device).view(x.shape), change * scale(rate), 0.0)
    normed = F.layer_norm(total.to(weight.dtype), weight.shape, weight, bias).to(half or x.dtype)
    return {"norm": [normed], "add_norm": [normed], "add_and_norm": [total.to(x.dtype), normed], "add": [total]}[kind]


def by_kernels(kind: str, inputs: Inputs, rate: float, half: torch.dtype) -> Inputs:
    x, change, weight, bias = inputs
    with torch.autocast(DEVICE, half, enabled=half != torch.float32):
        if kind == "norm":
            return [residual.norm(x, weight, bias, 1e-5)]
        if kind == "add":
            return [residual.add(x, change, rate)]
        if kind == "add_norm":
            return [residual.add_norm(x, change, weight, bias, rate, 1e-5)]
        return list(residual.add_and_norm(x, change, weight, bias, rate, 1e-5))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("shape", "d"), [((1,), 8), ((3, 5), 24), ((7,), 768)])
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
@pytest.mark.parametrize("kind", ["norm", "add_norm", "add_and_norm", "add"])
def test_residual_connections(
    kind: str, shape: tuple[int, ...], d: int, rate: float, x_dtype: torch.dtype, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(d)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    sizes, dtypes = ((*shape, d), (*shape, d), (d,), (d,)), (x_dtype, dtype, torch.float32, torch.float32)
    drawn = draw(*shape, d) * 3 + 1, draw(*shape, d), 1 + draw(d) / 2, draw(d)
    inputs = [one.to(DEVICE, as_) for one, as_ in zip(drawn, dtypes, strict=True)]
    assert [one.shape for one in inputs] == [torch.Size(size) for size in sizes]
    along = [draw(*shape, d) for _ in range(2)]
    keep = torch.from_numpy(kept(seed, along[0].numel() // 8, rate))

    def both(leaves: Inputs, run: Any) -> Inputs:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        outs = run(leaves)
        arriving = [one.to(dtype).to(out) for one, out in zip(along, outs, strict=False)]
        grads = torch.autograd.grad(outs, leaves, arriving, allow_unused=True)
        return [*outs, *(grad for grad in grads if grad is not None)]

    want = both([one.double().cpu() for one in inputs], lambda leaves: by_torch(kind, leaves, keep, rate, None))
    plain = both(inputs, lambda leaves: by_torch(kind, leaves, keep, rate, dtype))
    found = both(inputs, lambda leaves: by_kernels(kind, leaves, rate, dtype))
    assert len(found) == len(plain)
    for place, (one, exact, usual) in enumerate(zip(found, want, plain, strict=True)):
        near(one, exact, usual, f"{kind} {place}")


@pytest.mark.parametrize("size", [1, 8, 2047, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_dropout(size: int, dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(DEVICE, dtype).requires_grad_()
    keep = kept(seed, -(-size // 8), 0.1)[:size]
    want = torch.where(torch.from_numpy(keep.copy()).to(DEVICE), x.float().relu() * scale(0.1), 0.0)
    out = feed_forward.relu_dropout(x, 0.1)
    torch.testing.assert_close(out, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)  # the interpreter cuts off
    along = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(out)
    (grad,) = torch.autograd.grad(out, x, along)
    passed = torch.where(out > 0, along.float() * scale(0.1), 0.0).to(dtype)
    torch.testing.assert_close(grad, passed, rtol=torch.finfo(dtype).eps, atol=0)


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    x = torch.ones(200_000 if DEVICE == "cuda" else 40_000, device=DEVICE)
    torch.manual_seed(0)
    one, two = (feed_forward.relu_dropout(x, 0.1) for _ in range(2))
    for out in (one, two):
        assert (out == 0).double().mean().item() == pytest.approx(0.1, abs=0.006)
        assert out.double().mean().item() == pytest.approx(1, abs=0.006)
    both = ((one == 0) & (two == 0)).double().mean().item()
    assert both == pytest.approx(0.01, abs=0.002), "two draws are independent"
    torch.manual_seed(0)
    assert torch.equal(feed_forward.relu_dropout(x, 0.1), one), "torch's seed decides"


def test_operators_are_registered_as_torch_asks() -> None:
    seed = torch.tensor([5], device=DEVICE)
    x, change = (torch.randn(3, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(16, device=DEVICE, requires_grad=True) for _ in range(2))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for drawn in (seed, None):
        for changed, keeps_sum in ((change, False), (change, True), (None, False)):
            rate = 0.1 if drawn is not None and changed is not None else 0.0
            inputs = (x, changed, weight, bias, drawn if rate else None, rate, 1e-5, torch.float32, keeps_sum)
            torch.library.opcheck(residual._normed.registered, inputs, test_utils=checks)
    torch.library.opcheck(residual._added.registered, (x, change, seed, 0.1), test_utils=checks)
    torch.library.opcheck(feed_forward._relu_dropout.registered, (x, seed, 0.1), test_utils=checks)


def test_nothing_may_come_in() -> None:
    x = torch.empty(0, 16, device=DEVICE, requires_grad=True)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    out = residual.add_norm(x, x, weight, weight, 0.0, 1e-5)
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert grads[0].shape == (0, 16)
    assert torch.equal(grads[1], torch.zeros_like(weight))
    assert feed_forward.relu_dropout(x, 0.1).shape == residual.add(x, x, 0.1).shape == (0, 16)
