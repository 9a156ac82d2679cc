"""What is counted agrees with what torch counts and keeps, with numbers worked out by hand, and with the paper."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from pyramidion.attention import lsh
from pyramidion.cli import main
from pyramidion.complexity import (
    PARTS,
    Sizes,
    claims,
    count,
    count_generation,
    fit,
    longest_document,
    parameters,
    parse_memory,
    plot,
    report,
    sizes,
    table,
    training_need,
)
from pyramidion.complexity.fitting import schedules
from pyramidion.complexity.parameters import matrix_elements
from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration
from pyramidion.presets import PRESETS, preset

NAMES = sorted({one.name for one in PRESETS.values()})
GIB = 2**30

# --------------------------------------------------------------------------------------------------------------------
# Against torch's own counter
# --------------------------------------------------------------------------------------------------------------------


@contextmanager
def shapes_alone(config: PyramidionConfig) -> Iterator[None]:
    """Compute shapes and nothing else, so that models of any size are run in no time."""
    if config.attention != "lsh":
        with torch.device("meta"):
            yield
        return
    lsh.kept_rotations.cache_clear()  # what is kept of other modes, and then of this one, must not meet
    with FakeTensorMode():
        yield
    lsh.kept_rotations.cache_clear()


def counted_by_torch(config: PyramidionConfig, length: int, target: int, batch: int = 1) -> int:
    """Give the floating-point operations of one forward pass."""
    config._attn_implementation = "eager"
    with shapes_alone(config):
        model = PyramidionForConditionalGeneration(config).eval()
        source = torch.zeros(batch, length, dtype=torch.long)
        written = torch.zeros(batch, target, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=source, decoder_input_ids=written, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_at_full_size(name: str):
    config = preset(name)
    cost = count(config, target=509, batch=3)
    assert 2 * cost.products == counted_by_torch(config, config.entering[0], 509, 3)
    assert cost.multiplications - cost.products == cost.of("pooling").multiplications


@pytest.mark.parametrize("length", [2, 61, 513, 8193])
@pytest.mark.parametrize("name", ["row-3", "row-5", "row-11", "row-14", "row-16", "row-19", "row-23", "row-27"])
def test_odd_lengths(name: str, length: int):
    assert 2 * count(preset(name), length=length, target=7).products == counted_by_torch(preset(name), length, 7)


@pytest.mark.parametrize("length", [61, 8193])
def test_copying_is_counted(length: int):
    config = preset("row-23", copies=1)
    cost = count(config, length=length, target=7)
    assert 2 * cost.products == counted_by_torch(config, length, 7)
    assert cost.of("copying").multiplications > 0
    assert not count(preset("row-23"), length=length, target=7).of("copying").rows


@pytest.mark.parametrize("name", ["row-3", "row-5", "row-11", "row-14", "row-23"])
def test_one_token(name: str):
    outer = 2 * 2 * 6 * 64 * 64 if name == "row-14" else 0  # key with value: torch sees no product of matrices
    assert 2 * count(preset(name), length=1, target=1).products == counted_by_torch(preset(name), 1, 1) + outer


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "full", "pooling": "power"},
        {"attention": "efficient", "local_heads": 0, "pooling": "max"},
        {"attention": "efficient", "local_heads": 8, "local_window": 37},
        {"attention": "lsh", "local_heads": 0, "bucket_size": 19, "num_hashes": 3, "scorer": None, "pooling": "mean"},
        {"pooling": ["soft", None, "hard"], "scorer": ["nonlinear", None, "nonlinear"], "pre_norm": True},
        {"pooling": "straight-through", "block_size": 211},
        {"pooling": "funnel", "decoder_positions": True},
    ],
    ids=str,
)
def test_any_configuration(changes: dict[str, Any]):
    lengths = {"input_length": 1031, "encoder_lengths": [509, 509, 127]}
    config = PyramidionConfig(hidden_size=96, intermediate_size=152, vocab_size=211, **{**lengths, **changes})
    for length in (1031, 97):
        assert 2 * count(config, length=length, target=13).products == counted_by_torch(config, length, 13)


@pytest.mark.parametrize("name", ["row-5", "row-23", "tiny-pyramidion"])
def test_generation_against_a_loop_with_a_cache(name: str):
    config = preset(name, attn_implementation="eager")
    tokens, length = 5, 4099
    with torch.device("meta"), torch.no_grad():
        model = PyramidionForConditionalGeneration(config).eval()
        source, one = torch.zeros(2, length, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)
        with FlopCounterMode(display=False) as encoding:
            encoded = model.model.encoder(source)
        past = None
        with FlopCounterMode(display=False) as writing:
            for _ in range(tokens):
                written = model(encoder_outputs=encoded, decoder_input_ids=one, past_key_values=past, use_cache=True)
                past = written.past_key_values
    found = count_generation(config, length=length, target=tokens, batch=2)
    memory = found.once.of("memory projections").multiplications
    assert 2 * (found.once.products - memory) == encoding.get_total_flops()
    assert 2 * (found.written.multiplications + memory) == writing.get_total_flops()
    assert found.per_token == found.written.multiplications / 10


# --------------------------------------------------------------------------------------------------------------------
# By hand
# --------------------------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 10, "decoder_layers": 1}


def test_a_small_case_by_hand():
    """Ten tokens are three blocks of 4, so 12 places; 4 representations go on, in one block."""
    config = PyramidionConfig(**SMALL, block_size=4, input_length=10, encoder_lengths=[4, 4])
    found = {(row.part, row.layer): row.multiplications for row in count(config, target=3).rows if row.multiplications}
    assert found == {
        ("encoder projections", 1): 4 * 12 * 64,
        ("encoder self-attention", 1): 768,  # two products of 3 blocks × 4 × 4 tokens × width 8
        ("encoder feed-forward", 1): 3072,
        ("scoring", 1): 80,
        ("pooling", 1): 80,
        ("encoder projections", 2): 1024,
        ("encoder self-attention", 2): 256,
        ("encoder feed-forward", 2): 1024,
        ("decoder projections", 1): 768,
        ("decoder self-attention", 1): 144,  # the masked half is computed
        ("cross projections", 1): 384,
        ("memory projections", 1): 512,
        ("cross-attention", 1): 192,
        ("decoder feed-forward", 1): 768,
        ("output head", None): 240,
    }


def test_generation_by_hand():
    config = PyramidionConfig(**SMALL, block_size=4, input_length=10, encoder_lengths=[4, 4])
    found = count_generation(config, length=10, target=3)
    written = {row.part: row.multiplications for row in found.written.rows if row.multiplications}
    assert written == {
        "decoder projections": 768,
        "decoder self-attention": 96,  # looking back on 1, 2 and 3 tokens: 2 × 6 × 8
        "cross projections": 384,
        "cross-attention": 192,
        "decoder feed-forward": 768,
        "output head": 240,
    }
    assert found.once.of("memory projections").multiplications == 512
    assert found.per_token == 816.0
    assert found.multiplications == count(config, length=10, target=3).multiplications - 144 + 96
    assert not any(row.bytes for row in (*found.once.rows, *found.written.rows))


def test_kept_bytes_by_hand():
    """One layer, float32, one block of 4 tokens, width 8: a tensor of tokens is 128 bytes, a widened one 256."""
    config = PyramidionConfig(**SMALL, block_size=4, encoder_lengths=[4])
    cost = count(config, target=3, bytes=4)
    residual = 128 + 2 * 16  # what is added, mean and deviation of the sum
    assert cost.of("encoder projections").bytes == 128 + residual
    assert cost.of("encoder self-attention").bytes == 4 * 128 + 4 * 2 * 4  # query, key, value, result; sums of rows
    assert cost.of("encoder feed-forward").bytes == 128 + 256 + residual
    assert cost.of("output head").bytes == 3 * 8 * 4
    plain = count(config, target=3, bytes=4, device="cpu")
    residual = 32 + 128 + 2 * 16  # a byte a number of dropout, the norm's input, mean and deviation
    assert plain.of("encoder projections").bytes == 128 + residual
    assert plain.of("encoder feed-forward").bytes == 128 + 2 * 256 + 64 + residual

    half = count(config, target=3, bytes=2)
    assert half.of("encoder projections").bytes == 64 + 64 + 2 * 16  # the stream is half as wide, too
    plain = count(config, target=3, bytes=2, device="cpu")
    residual = 32 + 128 + 2 * 16
    assert plain.of("encoder projections").bytes == 3 * 64 + residual  # query, key and value each cast the input
    eager = count(config, target=3, bytes=4, implementation="eager")
    matrix = 2 * 4 * 4
    deeper = PyramidionConfig(**{**SMALL, "decoder_layers": 3}, block_size=4, encoder_lengths=[4])
    assert count(deeper, target=3, bytes=4).of("memory projections").bytes == 128  # the memory, once for all layers
    assert count(deeper, target=3, bytes=2).of("memory projections").bytes == 64
    assert count(deeper, target=3, bytes=2, device="cpu").of("memory projections").bytes == 3 * 2 * 64
    assert eager.of("encoder self-attention").bytes == 4 * 128 + matrix * (4 + 1 + 4)  # softmax, dropout, dropped


def test_sizes_follow_the_document():
    config = PyramidionConfig()
    entering = {n: [size.n for size in sizes.encoder_sizes(config, n)] for n in (None, 1, 511, 2049, 8193, 100_003)}
    assert entering == {
        None: [8192, 8192, 8192, 2048, 512, 512],
        1: [1, 1, 1, 1, 1, 1],
        511: [511] * 6,
        2049: [2049, 2049, 2049, 2048, 512, 512],
        8193: [8193, 8193, 8193, 2048, 512, 512],
        100_003: [100_003, 100_003, 100_003, 2048, 512, 512],
    }
    assert [size.places for size in sizes.encoder_sizes(config, 8193)] == [8704, 8704, 8704, 2048, 512, 512]
    assert sizes.encoder_sizes(config, 61)[0].places == 61  # no block is longer than the document
    full = preset("row-3")
    assert sizes.encoder_sizes(full, 8193)[0].places == 8256  # 129 blocks of 64
    assert sizes.memory_length(sizes.encoder_sizes(preset("row-19"), 8193)) == 8193  # Funnel spreads again


def test_costs_are_sums():
    config = preset("row-22")
    cost = count(config)
    assert sum(cost.of(part).multiplications for part in PARTS) == cost.multiplications
    assert sum(cost.of(part).bytes for part in PARTS) == cost.bytes
    looked_up = cost.of("embedding")
    assert cost.encoder.multiplications + cost.decoder.multiplications == cost.multiplications
    assert cost.encoder.bytes + cost.decoder.bytes + looked_up.bytes == cost.bytes
    layers = [cost.of("encoder self-attention", layer=layer).multiplications for layer in (1, 2, 3)]
    assert layers == [2 * n * 512 * 512 for n in (8192, 8192, 2048)]
    thrice = count(config, batch=3)
    assert (thrice.multiplications, thrice.bytes) == (3 * cost.multiplications, 3 * cost.bytes)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_every_preset(name: str):
    with torch.device("meta"):
        model = PyramidionForConditionalGeneration(preset(name))
    assert parameters(preset(name)) == sum(p.numel() for p in model.parameters())


def test_parameters_with_every_option():
    changes = {"pre_norm": True, "scorer": "nonlinear"}
    config = preset("tiny-pyramidion", **changes)
    model = PyramidionForConditionalGeneration(config)
    assert parameters(config) == sum(p.numel() for p in model.parameters())


# --------------------------------------------------------------------------------------------------------------------
# Memory, measured
# --------------------------------------------------------------------------------------------------------------------

FAMILIES = (
    *("row-3", "row-5", "row-7", "row-11", "row-14", "row-17", "row-20", "row-23", "deep-pyramidion"),
    *("scorer-nonlinear", "scorer-random", "scorer-embedding", "scorer-mean-pooling", "scorer-max-pooling"),
)


def shrunk(name: str, **changes: Any) -> PyramidionConfig:
    """Make a preset small in everything but its proportions."""
    config = preset(name)
    shorter = 16 if config.entering[0] == 8192 else 4
    small = {
        "encoder_lengths": [length // shorter for length in config.encoder_lengths],
        "input_length": config.entering[0] // shorter,
        **{"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 199},
        **{"block_size": 64, "bucket_size": 16, "local_window": 32, "decoder_layers": 2},
    }
    return preset(name, **{**small, **changes})


def kept_by_torch(config: PyramidionConfig, length: int, target: int, *, half: bool = False) -> int:
    """Sum the bytes that autograd keeps in a training step on the CPU, the parameters' own left out."""
    model = PyramidionForConditionalGeneration(config).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == model.lm_head.weight.shape:
            return tensor  # the vocabulary's gradient, which the loss has computed already: not for backward, but of it
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # held, so that no address is used again
        return tensor

    source = torch.randint(3, config.vocab_size, (2, length))
    labels = torch.randint(3, config.vocab_size, (2, target))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        model(input_ids=source, labels=labels)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


@pytest.mark.parametrize("length", [None, 211])
@pytest.mark.parametrize("bytes", [4, 2])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_kept_bytes_are_those_that_autograd_keeps(name: str, implementation: str, bytes: int, length: int | None):
    """Dropout is on as in training, but for attention weights where a CPU has no fused kernel for it."""
    rate = 0.1 if implementation == "eager" else 0.0
    config = shrunk(name, attn_implementation=implementation, attention_dropout=rate)
    error = 0.014 if length is None else 0.055  # a tail brings masks and copies, which count in small models
    length = config.entering[0] if length is None else length
    options = {"length": length, "target": 37, "batch": 2, "bytes": bytes, "implementation": implementation}
    counted = count(config, **options, device="cpu").bytes + (2 * matrix_elements(config) if bytes == 2 else 0)
    assert counted == pytest.approx(kept_by_torch(config, length, 37, half=bytes == 2), rel=error)


@pytest.mark.parametrize(
    "changes",
    [{"dropout": 0.0, "activation_dropout": 0.0}, {"activation_function": "gelu"}, {"pre_norm": True}],
    ids=str,
)
def test_kept_bytes_with_other_settings(changes: dict[str, Any]):
    config = shrunk("row-22", attn_implementation="sdpa", attention_dropout=0.0, **changes)
    counted = count(config, target=37, batch=2, bytes=4, device="cpu").bytes
    assert counted == pytest.approx(kept_by_torch(config, 512, 37), rel=0.02)


@pytest.mark.parametrize("changes", [{"copies": 1}, {"copies": 5}, {"copies": 1, "copy_length": 128}], ids=str)
def test_copying_keeps_what_is_counted(changes: dict[str, int]):
    """By itself: beside all else it would be lost in what may be off."""
    configs = [shrunk("row-22", attn_implementation="sdpa", attention_dropout=0.0, **one) for one in ({}, changes)]
    before, after = (kept_by_torch(config, 512, 37) for config in configs)
    counted = count(configs[1], target=37, batch=2, bytes=4, device="cpu")
    assert counted.of("copying", "keys to copy by").bytes == pytest.approx(after - before, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("bytes", [2, 4])
@pytest.mark.parametrize("name", ["row-3", "row-7", "row-11", "row-14", "row-17", "row-20", "row-24"])
def test_a_training_step_on_a_gpu_needs_what_is_said(name: str, bytes: int):
    config, others = preset(name, attn_implementation="sdpa"), torch.cuda.memory_allocated()
    model = PyramidionForConditionalGeneration(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    source, labels = torch.randint(3, 32000, (4, 8192)).cuda(), torch.randint(3, 32000, (4, 512)).cuda()
    need = training_need(config, batch=4, bytes=bytes)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=bytes == 2):
            output = model(input_ids=source, labels=labels)
        kept = (
            torch.cuda.memory_allocated() - before - 4 * model.lm_head.weight.numel()
        )  # its gradient is there already
        output.loss.backward()
        optimizer.step()
        del output
    peak = torch.cuda.max_memory_allocated() - others
    assert need.activations + need.cast == pytest.approx(kept, rel=0.02)
    gradients = 4 * parameters(config)  # not there yet at the peak
    assert need.total - need.margin == pytest.approx(peak + gradients, rel=0.1)
    assert peak < need.total


# --------------------------------------------------------------------------------------------------------------------
# What fits
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("24GB", 24 * 10**9),
        ("141 GB", 141 * 10**9),
        (" 1.5 tib ", 3 * 2**39),
        ("512mb", 512 * 10**6),
        ("7b", 7),
    ],
)
def test_memory_is_read(text: str, expected: int):
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["80", "GiB", "", "-1GB", "0GB", "80 Gib s", "80 XB", "1e3GB", "80GiB 2"])
def test_memory_that_cannot_be_read(text: str):
    with pytest.raises(ValueError, match=re.escape(f"like 80GiB or 24GB, got {text!r}.")):
        parse_memory(text)


@pytest.mark.parametrize(
    ("name", "memory", "batch"),
    [("deep-pyramidion", 9, 1), ("deep-blockwise", 10, 1), ("row-20", 24, 4), ("row-11", 12, 1), ("row-17", 8, 1)],
)
def test_what_is_suggested_fits_and_less_pooling_does_not(name: str, memory: int, batch: int):
    config, length = preset(name), 65_537
    found = fit(config, memory * GIB, length, batch=batch)
    tried = [
        (one.encoder_lengths, training_need(one, length=length, batch=batch).total)
        for one, _, _ in schedules(config, length)
    ]
    fitting = [lengths for lengths, total in tried if total <= memory * GIB]
    assert 0 < len(found.suggestions) == min(5, len(fitting))
    assert [one.lengths for one in found.suggestions] == fitting[:5]
    for one in found.suggestions:
        assert training_need(one.config, length=length, batch=batch) == one.need
        assert one.need.total <= memory * GIB
        assert one.multiplications == count(one.config, length=length, batch=batch).multiplications
        assert len(one.lengths) == len(config.encoder_lengths)
    if name in ("deep-pyramidion", "deep-blockwise"):
        first = next(index for index, (_, total) in enumerate(tried) if total <= memory * GIB)
        assert first > 0
        assert tried[first - 1][1] > memory * GIB


def test_schedules_by_hand():
    tried = [(one.encoder_lengths, factor, earlier) for one, factor, earlier in schedules(PyramidionConfig(), 8193)]
    assert tried[:3] == [
        ([8193, 8193, 4097, 2049, 2049, 2049], 2, 0),
        ([8193, 8193, 2049, 513, 513, 513], 4, 0),
        ([8193, 8193, 1025, 129, 129, 129], 8, 0),
    ]
    assert tried[3:6] == [
        ([8193, 4097, 2049, 2049, 2049, 2049], 2, 1),
        ([8193, 2049, 513, 513, 513, 513], 4, 1),
        ([8193, 1025, 129, 129, 129, 129], 8, 1),
    ]
    assert len(tried) == 9
    plain = [one.encoder_lengths for one, _, _ in schedules(PyramidionConfig(encoder_lengths=[512, 512]), 512)]
    assert plain == [[512, 512], [512, 256], [512, 128], [256, 256], [128, 128]]


def test_schedules_keep_what_stands_behind_each_pooling():
    config = PyramidionConfig(
        encoder_lengths=[8192, 2048, 512], pooling=[None, "soft", "hard"], scorer=[None, "nonlinear", "embedding"]
    )
    found = {earlier: one.poolings for one, factor, earlier in schedules(config, 4096) if factor == 4}
    assert found == {
        0: {1: ("soft", "nonlinear", 1024), 2: ("hard", "embedding", 256)},
        1: {0: ("soft", "nonlinear", 1024), 1: ("hard", "embedding", 256)},
    }
    one_token = [one.encoder_lengths for one, _, _ in schedules(config, 1)]
    assert one_token == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("name", ["deep-pyramidion", "row-5", "row-16"])
def test_the_longest_document_fits_and_one_token_more_does_not(name: str):
    config = preset(name)
    longest = longest_document(config, 8 * GIB, batch=2, bytes=4)
    assert longest > 8192
    assert training_need(config, length=longest, batch=2, bytes=4).total <= 8 * GIB
    assert training_need(config, length=longest + 1, batch=2, bytes=4).total > 8 * GIB


def test_nothing_fits():
    found = fit(PyramidionConfig(), 4 * GIB, 65_536)
    assert found.suggestions == []
    assert found.smallest.lengths == [4096, 256, 256, 256, 256, 256]
    assert found.smallest.need.total > 4 * GIB
    assert 0 < found.longest < 65_536
    assert fit(PyramidionConfig(), GIB, 512).longest == 0


def test_needs_by_hand():
    config = preset("deep-pyramidion")
    need = training_need(config)
    assert need.state == 16 * 124_405_250
    assert need.cast == 2 * (6 * 12 * 768**2 + 6 * 16 * 768**2 + 32768 * 768)
    assert need.activations == count(config).bytes
    assert need.passing == 8192 * 2 * 3072 * 2  # the backward pass of a layer
    assert training_need(config, length=512).passing == 512 * 32768 * 2  # the logits
    assert training_need(config, length=512, batch=64, target=8192).passing == 512 * 2**20  # no more of them
    assert need.margin == int(0.1 * (need.total - need.margin)) + GIB
    assert training_need(config, bytes=4).cast == 0
    assert training_need(config, bytes=4).passing == 8192 * 2 * 3072 * 4


# --------------------------------------------------------------------------------------------------------------------
# The paper
# --------------------------------------------------------------------------------------------------------------------


def test_table_1():
    n, d = 8192, 768
    found = {row.model: (row.self_value, row.cross_value) for row in table()}
    assert found == {
        "Vanilla": (6 * n * n * d, 6 * 512 * n * d),
        "Sparse": (6 * 512 * n * d, 6 * 512 * n * d),
        "Linformer": (6 * n * 256 * d, None),
        "LSH": (6 * 64 * 4 * n * d, None),
        "Efficient": (6 * n * d * d, None),
        "PoWER": (3.0703125 * n * n * d, None),
        "Transpooler": (6 * 512 * n * d, 6 * 512 * 512 * d),
        "Pyramidion": (3.375 * 512 * n * d, 6 * 512 * 512 * d),
    }
    assert found["Vanilla"] == (309_237_645_312, 19_327_352_832)
    assert found["Pyramidion"] == (10_871_635_968, 1_207_959_552)


def test_table_1_is_half_of_what_is_counted():
    for row in table():
        if row.model not in ("Linformer", "LSH", "Efficient"):  # those have no model here, or local heads beside
            assert row.self_counted == 2 * row.self_value, row.model
        if row.cross_value is not None:
            assert row.cross_counted == 2 * row.cross_value, row.model
    counted = {row.model: row.self_counted for row in table()}
    near = 2 * 8192 * 3 * 128 * 2 * 96  # two local heads: three windows of 128
    assert counted["Efficient"] == 6 * (2 * 8192 * 6 * 96 * 96 + near)
    assert counted["LSH"] == 6 * (24 * 96 * (8192 * 64 + 2 * 8192 * 128) + near)
    assert counted["Linformer"] is None


def test_table_1_at_other_sizes():
    small = Sizes(layers=3, n=1024, d=64, t=16, m=128, k=128, entering=(1024, 512, 256))
    found = {row.model: row for row in table(small)}
    assert found["Pyramidion"].self_value == 1.75 * 128 * 1024 * 64
    assert found["Pyramidion"].self_counted == 2 * 1.75 * 128 * 1024 * 64
    assert found["PoWER"].self_value == (1 + 1 / 4 + 1 / 16) * 1024 * 1024 * 64


def test_claims():
    """Each figure worked out by hand: what the paper says, what is counted, and whether they agree."""
    found = [(claim.stated, claim.counted, claim.agrees) for claim in claims()]
    assert found == [
        (16, 8192 / 512, True),
        (2.5, pytest.approx(49152 / 27648), False),
        (16, 8192 / 512, True),
        (13, pytest.approx((128.5 + 8192) / (128.5 + 512)), True),
        (5, pytest.approx(8192 * 8192 / (27648 * 512)), True),
        (13, pytest.approx(2 * 8192 * 8192 / (20480 * 512)), True),
        (4, 8192 / 2048, True),
        (4096, 4608, True),
        (1.9375, 1.9375, True),
    ]
    assert [round(claim.counted, 2) for claim in claims()] == [16, 1.78, 16, 12.99, 4.74, 12.8, 4, 4608, 1.94]


def test_other_readings_of_the_claims():
    readings = [dict(claim.readings) for claim in claims()]
    assert next(iter(readings[1].values())) == pytest.approx(49152 / 19968)  # 2.46: the lengths that leave the layers
    assert [round(value, 2) for value in readings[3].values()] == [10.99, 8.5, 1.88, 2.94]
    assert [round(value, 2) for value in readings[4].values()] == [0.74, 0.61]
    linear = 12 * 768  # projections and feed-forward, a token and width
    assert readings[0] == {
        "the whole encoder, projections and feed-forward too": (2 * 8192 + linear) / (2 * 512 + linear)
    }
    assert all(claim.agrees or claim.why for claim in claims())


# --------------------------------------------------------------------------------------------------------------------
# The figure, the command, the start
# --------------------------------------------------------------------------------------------------------------------


def test_the_figure_is_written(tmp_path: Path):
    path = plot.write_plot(tmp_path / "new" / "cost.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
    with pytest.raises(ValueError, match=r"`path` must be a file that ends in .png, .pdf, .svg, got 'cost.txt'"):
        plot.write_plot(Path("cost.txt"))


def test_the_lines_of_the_figure():
    many, few = ([plot.curve(line, [n])[0] for line in plot.MULTIPLICATIONS] for n in (131_072, 512))
    vanilla, block, pyramid = (cost.encoder.multiplications for cost in many)
    assert vanilla == 6 * (2 * 131_072**2 * 768 + 12 * 131_072 * 768**2)
    assert block / pyramid == pytest.approx(6 / (3 + 1 / 64 + 2 / 256), rel=1e-3)
    assert len({cost.products - cost.of("scoring").multiplications for cost in few}) == 1  # one block for all
    pooled_last = plot.curve(plot.MEMORY[2], [8192])[0]
    unpooled = plot.curve(plot.MEMORY[1], [8192])[0]
    assert pooled_last.encoder.multiplications == pytest.approx(unpooled.encoder.multiplications, rel=1e-4)
    kept = [plot.curve(line, [8192])[0].bytes for line in plot.MEMORY]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 10 * kept[1]  # the matrix


def run(*arguments: str) -> str:
    """Run the command and return what it printed."""
    done = CliRunner().invoke(main, ["complexity", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def line_of(printed: str, label: str) -> list[str]:
    """Split the one line that starts with a label into what follows it."""
    (line,) = [line for line in printed.splitlines() if line.strip().startswith(label)]
    return re.split(r"\s{2,}", line.strip())[1:]


def test_command_compares_two_models():
    printed = run("--preset", "deep-pyramidion", "--compare", "deep-blockwise")
    assert "deep-pyramidion: 1 document of 8192 → 2048 → 512 representations, target 512; 124.4M" in printed
    assert line_of(printed, "encoder self-attention") == ["21.7 G", "38.7 G", "1.78×", "163 MiB", "290 MiB", "1.78×"]
    assert line_of(printed, "cross-attention")[:3] == ["2.42 G", "38.7 G", "16.0×"]
    assert line_of(printed, "encoder 4")[:5] == ["2048", "8192", "16.1 G", "64.4 G", "4.00×"]
    assert line_of(printed, "scoring") == ["7.86 M", "120 KiB"]
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize("names", [("scorer-mean-pooling", "scorer-max-pooling"), ("small-transpooler", "row-11")])
def test_command_fits_100_columns(names: tuple[str, str]):
    printed = run("--preset", names[0], "--compare", names[1], "--length", "131072", "--batch", "64")
    assert max(map(len, printed.splitlines())) <= 100
    assert "…" not in printed


def test_command_counts_one_model_of_a_length():
    printed = run("--preset", "tiny-pyramidion", "--length", "61", "--target", "7", "--batch", "2", "--bytes", "4")
    assert "tiny-pyramidion: 2 documents of 61 → 32 representations, target 7" in printed
    assert "in float32, with fused attention" in re.sub(r"\s+", " ", printed)
    assert line_of(printed, "encoder 3")[0] == "61"
    assert line_of(printed, "writing: 7 tokens") == [
        report.number(count_generation(preset("tiny-pyramidion"), length=61, target=7, batch=2).multiplications)
    ]


def test_command_shows_the_paper():
    printed = run("--table", "--claims")
    assert "part" not in printed.split()  # nothing else is counted
    assert line_of(printed, "Vanilla") == ["l × n × n × d", "309 G", "618 G", "l × t × n × d", "19.3 G", "38.7 G"]
    assert line_of(printed, "Linformer  ") == ["l × n × r × d", "9.66 G", "—"]
    assert (printed.count("agrees"), printed.count("differs")) == (8, 1)
    assert "2.462" in line_of(printed, "lengths that leave the layers: 49152 / 19968")
    assert max(map(len, printed.splitlines())) <= 100


def test_command_suggests_lengths():
    printed = run("--fit", "80GiB", "--length", "65536")
    assert "65536, 65536, 32768, 16384, 16384, 16384" in printed
    assert "which fits" in printed
    printed = run("--fit", "4 GiB", "--length", "65536")
    assert "Nothing fits into 4.00 GiB" in printed
    assert "which does not fit" in re.sub(r"\s+", " ", printed)


def test_command_speaks_json():
    read = json.loads(run("--compare", "row-3", "--fit", "24GB", "--table", "--claims", "--json"))
    assert [one["preset"] for one in read["presets"]] == ["deep-pyramidion", "row-3"]
    config = preset("deep-pyramidion")
    assert read["presets"][0]["products"] == count(config).products
    assert sum(row["bytes"] for row in read["presets"][0]["rows"]) == count(config).bytes
    assert read["presets"][1]["training"]["total"] == training_need(preset("row-3")).total
    assert read["fit"]["longest"] == longest_document(config, 24 * 10**9)
    assert read["table"]["rows"][0]["self_value"] == 309_237_645_312
    assert read["claims"][1]["agrees"] is False


def test_command_draws(tmp_path: Path):
    path = tmp_path / "cost.svg"
    done = CliRunner().invoke(main, ["complexity", "--plot", str(path)])
    assert (done.exit_code, done.stdout) == (0, "")
    assert str(path) in done.stderr
    assert path.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--preset deep-pyramid",
            "`--preset` must be one of those that `pyramidion presets` lists, got 'deep-pyramid'. "
            "Did you mean `deep-pyramidion`?",
        ),
        (
            "--compare rwo-3",
            "`--compare` must be one of those that `pyramidion presets` lists, got 'rwo-3'. Did you mean",
        ),
        ("--length 0", "`--length` must be at least 1, got 0."),
        ("--target -3", "`--target` must be at least 1, got -3."),
        ("--batch 0", "`--batch` must be at least 1, got 0."),
        ("--bytes 3", "`--bytes` must be 2 or 4, got 3."),
        ("--fit 80", "`--fit` must be a size of memory, a number above 0 with its unit, like 80GiB or 24GB, got '80'."),
        ("--plot cost.txt", "`--plot` must be a file that ends in .png, .pdf, .svg, got 'cost.txt'."),
    ],
)
def test_command_refuses(arguments: str, message: str):
    done = CliRunner().invoke(main, ["complexity", *arguments.split()])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "`length` must be at least 1, got 0."),
        ({"target": 0}, "`target` must be at least 1, got 0."),
        ({"batch": -1}, "`batch` must be at least 1, got -1."),
        ({"bytes": 8}, "`bytes` must be 2, for bfloat16 autocast, or 4, for float32, got 8."),
        ({"implementation": "flash"}, "`implementation` must be one of sdpa, eager, got 'flash'."),
        ({"device": "tpu"}, "`device` must be one of cuda, cpu, got 'tpu'."),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        count(PyramidionConfig(), **changes)


def test_bad_names_and_sizes_are_refused():
    with pytest.raises(ValueError, match=r"`parts` must be among embedding, .*, got 'attention'"):
        count(PyramidionConfig()).of("attention")
    with pytest.raises(ValueError, match="`memory_bytes` must be at least 1, got 0"):
        fit(PyramidionConfig(), 0, 512)
    with pytest.raises(ValueError, match="`length` must be at least 1, got 0"):
        fit(PyramidionConfig(), GIB, 0)


@pytest.mark.parametrize(
    ("value", "written", "bytes"),
    [
        (950, "950", "950 B"),
        (1234, "1.23 k", "1.21 KiB"),
        (999_499, "999 k", "976 KiB"),
        (10**6, "1.00 M", "977 KiB"),
        (45_600_000_000, "45.6 G", "42.5 GiB"),
        (7_890_000_000_000_000, "7,890 T", "7,176 TiB"),
    ],
)
def test_numbers_are_readable(value: int, written: str, bytes: str):
    assert (report.number(value), report.size(value)) == (written, bytes)


@pytest.mark.slow
def test_counting_needs_nothing_to_draw_or_show_with():
    code = "import sys, pyramidion.complexity; print(sorted({'matplotlib', 'rich', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
