"""Compile every kernel for a GPU where there is none, and print their names: what the interpreter lets pass is seen.

Models run on the CPU as they would on a GPU, but a launch only compiles what it would start. What they compute is of no
use: their results are zeros, into which nothing has been written.
"""

import importlib
import json
import pkgutil
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pyramidion import kernels
from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.kernels import functions, launching, loss
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration

TARGET = GPUTarget("cuda", 90, 32)
KINDS = {
    **{torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"},
    **{torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1"},
}  # fmt: skip
compiled: dict[tuple[Any, ...], str] = {}


def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Take the place of a launch."""
    given = dict(zip(self.arg_names, arguments, strict=False))
    given |= {name: options.pop(name) for name in self.arg_names if name in options}
    signature, constants = {}, {}
    for parameter in self.params:
        value = given.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{KINDS[value.dtype]}"
        else:
            whole = "i32" if -(2**31) <= value < 2**31 else "i64"
            signature[parameter.name] = "fp32" if isinstance(value, float) else whole
    key = (self.fn.__qualname__, str(signature), str(constants), str(options))
    if key not in compiled:
        compiled[key] = self.fn.__name__
        triton.compile(ASTSource(self, signature, constants), target=TARGET, options=options)


def roots() -> set[str]:
    """Name the kernels that are launched: those that no other one calls."""
    names = [f"{kernels.__name__}.{found.name}" for found in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(name) for name in (*names, "pyramidion.topk.fused")]
    found = {name: part for module in modules for name, part in vars(module).items() if isinstance(part, JITFunction)}
    called = {name for part in found.values() for name in part.fn.__code__.co_names}
    return set(found) - called


def train(config: PyramidionConfig) -> None:
    """Take a step of training."""
    model = PyramidionForConditionalGeneration(config).train()
    tokens, mask = torch.randint(3, config.vocab_size, (2, 96)), torch.arange(96) < torch.tensor([[96], [50]])
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, attention_mask=mask, labels=tokens[:, :20]).loss.backward()


def write(config: PyramidionConfig, beams: int, k: int) -> None:
    """Take a step of the decoder, beside k representations."""
    from pyramidion.generation.fused import FusedDecoder
    from pyramidion.generation.search import Beam, Greedy, Rules

    model = PyramidionForConditionalGeneration(config).to(torch.bfloat16).eval()
    kind, rules = Greedy if beams == 1 else Beam, Rules(beams, 33, 0, ends=(2,), floor=3)
    search = kind(rules, 2, config.vocab_size, model.device)
    decoder = FusedDecoder(model, search, k, masked=beams > 1)
    decoder._lay_out(2 * beams)
    with torch.inference_mode():
        decoder.step(32)


if __name__ == "__main__":
    JITFunction.run = compile_only
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    for module in (functions, loss, launching):
        module.served = lambda x: x.dtype != torch.float64  # type: ignore[attr-defined]
    config = PyramidionConfig(
        vocab_size=61, hidden_size=96, num_attention_heads=2, intermediate_size=128, decoder_layers=2,
        encoder_lengths=[96, 32], block_size=32, pooling="soft", scorer="linear",
    )  # fmt: skip
    for beams, pre, k in ((1, False, 24), (2, True, 300)):  # few keys that are taken at once, and many
        form = PyramidionConfig(**{**config.to_diff_dict(), "pre_norm": pre, "decoder_positions": pre})
        write(form, beams, k)
    train(form)
    json.dump({"roots": sorted(roots()), "compiled": sorted(set(compiled.values()))}, sys.stdout)
