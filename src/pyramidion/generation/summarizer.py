"""Summarise texts of any length: `Summarizer.from_pretrained(path)(texts)`.

Documents are taken in windows. In a window those of like length share a batch; results leave in the order the documents
came in. Which documents share a batch depends on the documents alone, so that work that was interrupted and goes on
gives the same as work that was not.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.generation.decoding import decoding_options
from pyramidion.generation.engine import Engine, generate, out_of_memory
from pyramidion.generation.texts import Unusable, usable
from pyramidion.kernels.launching import choose_device
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration

WINDOW = 8  # batches that are sorted by length together
MANY_UNKNOWN = 0.1
BUNDLED = "default"  # the name of the model that comes with the package
Text = str | bytes | Sequence[int] | Unusable  # text, its encoding, its tokens without special ones, or none


@dataclass(frozen=True)
class Summary:
    """What became of one document.

    text             the summary, empty where there is an error
    document_tokens  tokens of the document, as it was given
    cut              how many of them were cut off by `max_length`
    note             what a reader should know: replaced characters, a document longer than those trained on
    error            why there is no summary
    """

    text: str = ""
    document_tokens: int = 0
    cut: int = 0
    note: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class _Source:
    """A document ready for the model: its tokens with the end token, and what is known of the result already."""

    tokens: list[int]
    result: Summary


class Summarizer:
    """Summarise texts with a model and its tokenizer, in batches of like length, results in the texts' order."""

    def __init__(
        self,
        model: PyramidionForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast,
        *,
        engine: Engine = generate,
    ) -> None:
        size = model.config.vocab_size
        if len(tokenizer) > size:
            raise ValueError(
                f"`tokenizer` must have at most the {size:,} tokens that the model has vectors for, "
                f"got {len(tokenizer):,}."
            )
        self.model, self.tokenizer, self.engine = model.eval(), tokenizer, engine
        self.trained_length = model.config.entering[0]

    @classmethod
    def from_pretrained(cls, path: str | Path, device: str = "auto", dtype: torch.dtype | str | None = None) -> Self:
        """Load a folder with a model and its tokenizer; nothing is fetched.

        path    of the folder; `default`: the model that comes with the package, unless a folder here is called so
        device  cpu, cuda, or auto: a GPU where there is one. A CPU computes in no more threads than it may use
        dtype   of the weights; None: as they were saved
        """
        folder = model_folder(path)
        chosen = choose_device(device)
        if chosen.type == "cpu":
            limit_threads()
        kept: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        try:
            with _no_bars():
                tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
                model, report = PyramidionForConditionalGeneration.from_pretrained(
                    folder, local_files_only=True, output_loading_info=True, **kept
                )
        except OSError as error:
            raise ValueError(f"`path` must hold a model and its tokenizer, got {str(folder)!r}: {error}") from error
        absent = sorted(report["missing_keys"]) or sorted(report["unexpected_keys"])
        if absent:
            raise ValueError(f"`path` must hold the model's weights, no fewer and no others, got {absent[0]!r} wrong.")
        return cls(model.to(chosen), tokenizer)

    def __call__(
        self, texts: Iterable[Text], *, batch_size: int = 8, max_length: int | None = None, **options: Any
    ) -> list[Summary]:
        """Summarise each text; the options are those of `stream`."""
        return list(self.stream(texts, batch_size=batch_size, max_length=max_length, **options))

    def stream(
        self,
        texts: Iterable[Text],
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        skip: int = 0,
        **options: Any,
    ) -> Iterator[Summary]:
        """Summarise texts as they come, and yield each result as soon as those before it are there.

        texts       str, bytes in UTF-8, or token numbers without special tokens
        batch_size  documents at once; 1 yields each before it asks for the next
        max_length  at most so many tokens enter the model, the end token counted; None: all
        skip        the first so many texts are read, but not answered: an earlier run did
        options     of `generate`, over the folder's and the paper's
        """
        if isinstance(texts, str | bytes):
            raise ValueError(f"`texts` must be several texts, got one {type(texts).__name__}: put it into a list.")
        for name, value, least in (("batch_size", batch_size, 1), ("max_length", max_length, 2), ("skip", skip, 0)):
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        generation = decoding_options(self.model.config, self.model.generation_config, **options)
        return self._windows(iter(texts), batch_size, max_length, skip, generation)

    def _windows(
        self, texts: Iterator[Text], batch_size: int, max_length: int | None, skip: int, generation: GenerationConfig
    ) -> Iterator[Summary]:
        window = batch_size * WINDOW if batch_size > 1 else 1
        while chunk := list(islice(texts, window)):
            if skip < len(chunk):
                sources = [self._read(text, max_length) for text in chunk]
                yield from self._window(sources, batch_size, max(skip, 0), generation)
            skip -= len(chunk)

    def _window(
        self, sources: list[_Source], batch_size: int, first: int, generation: GenerationConfig
    ) -> Iterator[Summary]:
        """Write a window batch by batch, and yield from `first` on whatever has no gap before it."""
        results = {place: source.result for place, source in enumerate(sources) if source.result.error}
        lengths = {place: len(source.tokens) for place, source in enumerate(sources) if place not in results}
        for batch in batches(lengths, batch_size):
            if max(batch) >= first:
                results.update(zip(batch, self._write([sources[place] for place in batch], generation), strict=True))
            while first in results:
                yield results[first]
                first += 1
        for place in range(first, len(sources)):
            yield results[place]

    def _read(self, text: Text, max_length: int | None) -> _Source:
        """Turn a document into tokens, or into an error."""
        if isinstance(text, Unusable):
            return _Source([], Summary(error=text.reason))
        note = None
        if isinstance(text, str | bytes):
            read = usable(text)
            if isinstance(read, Unusable):
                return _Source([], Summary(error=read.reason))
            tokens: list[int] = self.tokenizer(
                read[0], add_special_tokens=False, split_special_tokens=True, verbose=False
            )["input_ids"]
            note = read[1]
        else:
            tokens = torch.as_tensor(text).tolist()
        return self._enter(tokens, note, max_length)

    def _enter(self, tokens: list[int], note: str | None, max_length: int | None) -> _Source:
        """Check tokens, cut them where that is asked for, and put the end token behind them."""
        count, size = len(tokens), self.model.config.vocab_size
        unknown = tokens.count(self.tokenizer.unk_token_id) if self.tokenizer.unk_token_id is not None else 0
        if unknown == count:
            reason = "the tokenizer knows none of it" if count else "no token came of it"
            return _Source([], Summary(document_tokens=count, error=f"no usable text: {reason}"))
        if not 0 <= min(tokens) <= max(tokens) < size:
            wrong = f"token numbers must be below {size:,}, got {min(tokens):,} to {max(tokens):,}"
            return _Source([], Summary(document_tokens=count, error=f"no usable text: {wrong}"))
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        kept = count if max_length is None else min(count, max_length - len(end))
        notes = [note] if note else []
        if unknown > MANY_UNKNOWN * count:
            notes.append(f"the tokenizer does not know {unknown:,} of {count:,} tokens")
        if kept < count:
            notes.append(f"cut: {count - kept:,} of {count:,} tokens left out")
        if kept + len(end) > self.trained_length:
            notes.append(f"{kept:,} tokens, more than the {self.trained_length:,} the model is for: processed whole")
        result = Summary(document_tokens=count, cut=count - kept, note="; ".join(notes) or None)
        return _Source([*tokens[:kept], *end], result)

    def _write(self, sources: list[_Source], generation: GenerationConfig) -> list[Summary]:
        """Write a batch; where that fails, its halves, so that at last a failure has a document's name."""
        try:
            written = self.engine(self.model, *self._batch(sources), generation)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            failure, memory = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}", out_of_memory(error)
        else:
            return self._decode(sources, written)
        if memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(sources) > 1:
            half = len(sources) // 2
            return self._write(sources[:half], generation) + self._write(sources[half:], generation)
        reason = "out of memory, even by itself" if memory else failure
        given = sources[0].result
        return [Summary(document_tokens=given.document_tokens, cut=given.cut, note=given.note, error=reason)]

    def _batch(self, sources: list[_Source]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(source.tokens) for source in sources])
        tokens = torch.full((len(sources), int(lengths.max())), self.model.config.pad_token_id)  # [b n]
        for row, source in zip(tokens, sources, strict=True):
            row[: len(source.tokens)] = torch.tensor(source.tokens)
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]  # [b n]
        return tokens.to(self.model.device), mask.to(self.model.device)

    def _decode(self, sources: list[_Source], written: Tensor) -> list[Summary]:
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        given = (source.result for source in sources)
        return [
            Summary(text.strip(), known.document_tokens, known.cut, known.note)
            for text, known in zip(texts, given, strict=True)
        ]


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers from drawing a progress bar while it loads weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def batches(lengths: dict[int, int], batch_size: int) -> list[list[int]]:
    """Put documents of like length together; the batch with the earliest document comes first."""
    order = sorted(lengths, key=lambda place: (lengths[place], place))
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return sorted(groups, key=min)


def model_folder(path: str | Path) -> Path:
    """Check that a folder holds a model of the family, before anything heavy is done with it.

    `default` is the model that comes with the package. As with every name, a model's folder that is called so comes
    first.
    """
    folder = Path(path)
    if folder == Path(BUNDLED) and not (folder / "config.json").is_file():
        folder = bundled_folder()
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"`path` must be a folder with a model's config.json, got {str(path)!r}.") from error
    if kind != PyramidionConfig.model_type:
        raise ValueError(f"`path` must hold a pyramidion model, got one of type {kind!r} in {str(path)!r}.")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"`path` must hold the model's tokenizer.json too, got {str(path)!r}.")
    return folder


def bundled_folder() -> Path:
    """Find the model that comes with the package."""
    folder = Path(str(files("pyramidion") / "assets" / BUNDLED))
    if not (folder / "config.json").is_file():
        raise ValueError(f"`path` must be a model's folder: this build of pyramidion has no bundled model {BUNDLED!r}.")
    return folder


def limit_threads() -> None:
    """Let torch compute in no more threads than a container may use processors: it counts those of the machine.

    Threads above that stop each other in the middle of every product. A lower number, by whomever, stays.
    """
    allowed = allowed_processors()
    if allowed is not None and torch.get_num_threads() > allowed:
        torch.set_num_threads(allowed)


def allowed_processors(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Read how many processors the control groups of Linux grant a container; None where they grant all."""
    for quota, period in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            granted = (groups / quota).read_text().split()
            granted += [] if period is None else (groups / period).read_text().split()
            share = int(granted[0]) / int(granted[1])
        except (OSError, ValueError, IndexError, ZeroDivisionError):  # absent, or `max`
            continue
        if share > 0:
            return max(1, int(share))
    return None


__all__ = ["Summarizer", "Summary", "Text", "batches", "model_folder"]
