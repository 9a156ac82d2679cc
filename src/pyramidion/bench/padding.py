"""What padding costs: documents of mixed lengths in one batch, beside the same documents cut to equal length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyramidion.bench import report
from pyramidion.bench.measure import race
from pyramidion.bench.report import Column
from pyramidion.kernels.launching import choose_device
from pyramidion.modeling_pyramidion import PyramidionEncoder
from pyramidion.presets import preset

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCHES = {
    "mixed": "as they are, padded to the longest, the padding marked",
    "cut": "each cut to the length of the shortest",
    "equal": "as many tokens in all, every document equally long",
    "unmarked": "as they are, the padding computed like text",
}
COLUMNS = (
    Column("preset", "preset"),
    Column("batch", "documents"),
    Column("tokens", "tokens", ","),
    Column("ms", "ms", "3"),
    Column("per_token", "µs a token", "3"),
    Column("ratio", "time ratio / token ratio, to cut", ".2f"),
)


@dataclass(frozen=True)
class Settings:
    """What is measured: an encoder's forward and backward pass over `batch` documents of evenly spread lengths."""

    presets: tuple[str, ...]
    device: str
    batch: int
    dtype: str
    shortest: int = 512
    longest: int = 8192
    repeats: int = 9


def default_settings(device: str = "auto", **given: Any) -> Settings:
    """Fill in what suits the device: the deep models on a GPU, the small ones on a CPU."""
    on_gpu = choose_device(device).type == "cuda"
    usual: dict[str, Any] = (
        {"presets": ("deep-blockwise", "deep-pyramidion"), "batch": 16, "dtype": "bfloat16"}
        if on_gpu
        else {"presets": ("small-blockwise", "small-pyramidion"), "batch": 4, "dtype": "float32", "repeats": 5}
    )
    settings = Settings(device="cuda" if on_gpu else "cpu", **{**usual, **given})
    for name, least in (("batch", 2), ("shortest", 1), ("longest", settings.shortest), ("repeats", 1)):
        if getattr(settings, name) < least:
            raise ValueError(f"`{name}` must be at least {least}, got {getattr(settings, name)}.")
    if settings.dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {settings.dtype!r}.")
    for name in settings.presets:
        preset(name)
    return settings


def spread(settings: Settings) -> list[int]:
    """Give the documents their lengths, evenly from the shortest to the longest."""
    return [round(n) for n in torch.linspace(settings.shortest, settings.longest, settings.batch).tolist()]


def batches(settings: Settings, vocabulary: int) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Lay the same documents out in each way: ids [b n], mask [b n], and the tokens that count."""
    lengths = spread(settings)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (settings.batch, settings.longest), generator=generator)
    mean = sum(lengths) // len(lengths)
    wanted = {
        "mixed": (lengths, settings.longest),
        "cut": ([settings.shortest] * len(lengths), settings.shortest),
        "equal": ([mean] * len(lengths), mean),
        "unmarked": ([settings.longest] * len(lengths), settings.longest),
    }
    made = {}
    for name, (real, n) in wanted.items():
        mask = torch.arange(n) < torch.tensor(real).unsqueeze(1)
        made[name] = (ids[:, :n].to(settings.device), mask.to(settings.device), sum(real))
    return made


def run(settings: Settings, tell: Callable[[int, int, str], None] = lambda *_: None) -> dict[str, Any]:
    """Measure every preset over every batch, in turn within one race."""
    rows: list[dict[str, Any]] = []
    for done, name in enumerate(settings.presets):
        tell(done, len(settings.presets), name)
        config = preset(name)
        torch.manual_seed(0)
        encoder = PyramidionEncoder(config).to(settings.device).train()
        made = batches(settings, config.vocab_size)
        steps = {what: partial(_step, encoder, ids, mask, settings) for what, (ids, mask, _) in made.items()}
        times = race(steps, device=settings.device, repeats=settings.repeats)
        short, tokens = times["cut"].median, made["cut"][2]
        for what, timing in times.items():
            count = made[what][2]
            rows.append(
                {
                    "preset": name,
                    "batch": what,
                    "tokens": count,
                    "ms": timing.median * 1e3,
                    "lower_ms": timing.lower * 1e3,
                    "upper_ms": timing.upper * 1e3,
                    "per_token": timing.median / count * 1e6,
                    "ratio": (timing.median / short) / (count / tokens),
                }
            )
    tell(len(settings.presets), len(settings.presets), "")
    return {"settings": asdict(settings), "lengths": spread(settings), "rows": rows}


def _step(encoder: PyramidionEncoder, ids: Tensor, mask: Tensor, settings: Settings) -> None:
    encoder.zero_grad(set_to_none=True)
    dtype = DTYPES[settings.dtype]
    with torch.autocast(settings.device, dtype, enabled=dtype != torch.float32):
        memory = encoder(ids, mask).last_hidden_state
    memory.float().mean().backward()


def write(result: Mapping[str, Any], machine: Mapping[str, Any], folder: Path, what: str) -> list[Path]:
    """Write the run as JSON and Markdown into `folder`."""
    stem, settings = report.result_stem(what, machine), result["settings"]
    text = (
        f"An encoder's forward and backward pass over {settings['batch']} documents of {settings['shortest']} to "
        f"{settings['longest']} tokens, {settings['dtype']}, dropout on, each batch with its mask; medians of "
        f"{settings['repeats']} turns. "
        + "; ".join(f"*{name}*: {meaning}" for name, meaning in BATCHES.items())
        + ". A ratio of 1 means that a batch costs what its real tokens cost."
    )
    page = report.write_markdown(
        folder / f"{stem}.md", "Mixed lengths", machine, (text, report.markdown_table(result["rows"], COLUMNS))
    )
    return [report.write_json(folder / f"{stem}.json", machine, result), page]
