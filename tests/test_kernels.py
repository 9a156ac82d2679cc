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


def residual_by_torch(inputs: list[Tensor], keep: Tensor, rate: float, half: torch.dtype | None) -> Tensor:
    x, change, weight, bias = inputs
    change = torch.where(keep.to(x.device).view(change.shape), change * scale(rate), 0.0)
    out = F.layer_norm((x + change).to(weight.dtype), weight.shape, weight, bias)
    return out.to(half or x.dtype)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("shape", "d"), [((1,), 8), ((3, 5), 24), ((7,), 768), ((2, 9), 64)])
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
def test_add_norm(
    shape: tuple[int, ...], d: int, rate: float, x_dtype: torch.dtype, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(d)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    x, change, weight, bias = draw(*shape, d) * 3 + 1, draw(*shape, d), 1 + draw(d) / 2, draw(d)
    along = draw(*shape, d).to(dtype)
    inputs = [
        part.to(DEVICE, kind)
        for part, kind in zip((x, change, weight, bias), (x_dtype, dtype, *[torch.float32] * 2), strict=True)
    ]
    keep = torch.from_numpy(kept(seed, along.numel() // 8, rate))

    def both(leaves: list[Tensor], run: Any) -> list[Tensor]:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = run(leaves)
        return [out, *torch.autograd.grad(out, leaves, along.to(out))]

    def fused(leaves: list[Tensor]) -> Tensor:
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            return residual.add_norm(*leaves, rate, 1e-5)

    want = both([part.double().cpu() for part in inputs], lambda leaves: residual_by_torch(leaves, keep, rate, None))
    plain = both(inputs, lambda leaves: residual_by_torch(leaves, keep, rate, dtype))
    names = ("out", "grad x", "grad change", "grad weight", "grad bias")
    for name, found, exact, usual in zip(names, both(inputs, fused), want, plain, strict=True):
        near(found, exact, usual, name)


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
        inputs = (x, change, weight, bias, drawn, 0.1 if drawn is not None else 0.0, 1e-5, torch.float32)
        torch.library.opcheck(residual._add_norm.registered, inputs, test_utils=checks)
    torch.library.opcheck(feed_forward._relu_dropout.registered, (x, seed, 0.1), test_utils=checks)


def test_nothing_may_come_in() -> None:
    x = torch.empty(0, 16, device=DEVICE, requires_grad=True)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    out = residual.add_norm(x, x, weight, weight, 0.0, 1e-5)
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert grads[0].shape == (0, 16)
    assert torch.equal(grads[1], torch.zeros_like(weight))
    assert feed_forward.relu_dropout(x, 0.1).shape == (0, 16)
