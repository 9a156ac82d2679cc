"""Read a text with a Summarizer and look on: what it wrote, where the tokens went, what the decoder attended to."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from pyramidion.explain.account import ROUNDING, Copies, Explanation, Stage
from pyramidion.explain.passages import find_words
from pyramidion.generation.engine import Engine
from pyramidion.generation.summarizer import Summarizer, Summary
from pyramidion.generation.texts import SURROGATE, Unusable, usable
from pyramidion.topk import Selection

Progress = Callable[[int, int | None, str], None]  # how many steps are done, of how many, and what comes
Spans = list[tuple[int, int]]
TITLE = 80  # characters of a text that stand for its title


def explain(
    summarizer: Summarizer,
    text: str | bytes,
    *,
    title: str | None = None,
    max_length: int | None = None,
    progress: Progress = lambda done, total, what: None,
    **options: Any,
) -> Explanation:
    """Summarise a text, and say which of its tokens were kept and what each word of the summary drew on.

    The summary is the one that the Summarizer gives for the same text and options. Source and summary then go through
    the model once more: the encoder tells its Selections, and the decoder, given what was written, its attention.

    title       of the explanation; None: the beginning of the text
    max_length  at most so many tokens enter the model, the end token counted; None: all
    progress    told what is done now
    options     of `generate`, over the folder's and the paper's
    """
    if not isinstance(text, str | bytes):
        raise ValueError(f"`text` must be one text, str or bytes, got {type(text).__name__}.")
    progress(0, 2, "writing the summary")
    watch = _Watch(summarizer.engine)
    watched = Summarizer(summarizer.model, summarizer.tokenizer, engine=watch)
    [summary] = watched([text], batch_size=1, max_length=max_length, **options)
    if summary.error is not None:
        raise ValueError(f"`text` must be something to summarise: {summary.error}.")
    progress(1, 2, "looking at what was kept")
    return _look(summarizer, _read(text), summary, watch, title)


@dataclass
class _Watch:
    """Write with another engine, and keep what it read and wrote."""

    engine: Engine
    read: Tensor = field(init=False)  # [1 n]
    mask: Tensor = field(init=False)  # [1 n]
    wrote: Tensor = field(init=False)  # [1 t], start token included
    ends: set[int] = field(init=False)

    def __call__(self, model: Any, input_ids: Tensor, attention_mask: Tensor, generation: GenerationConfig) -> Tensor:
        self.read, self.mask = input_ids, attention_mask
        self.wrote = self.engine(model, input_ids, attention_mask, generation)
        settings = (generation, model.generation_config, model.config)
        self.ends = {end for one in settings for end in _listed(one.eos_token_id)}
        return self.wrote

    def written(self, pad: int | None) -> Tensor:
        """Give the start token and what was written, to its end: [1 t+1]."""
        tokens = self.wrote[0].tolist()
        end = next((place for place, token in enumerate(tokens) if place and token in self.ends), len(tokens) - 1)
        while end > 1 and tokens[end] == pad:
            end -= 1
        return self.wrote[:, : end + 1]


def _listed(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _read(text: str | bytes) -> str:
    """Give the text as the Summarizer gives it to its tokenizer."""
    read = usable(text)
    assert not isinstance(read, Unusable)  # or there would be no summary
    return read[0]


def _look(summarizer: Summarizer, text: str, summary: Summary, watch: _Watch, title: str | None) -> Explanation:
    model, tokenizer = summarizer.model, summarizer.tokenizer
    tokens = watch.read[0].tolist()
    spans = _source_spans(tokenizer, text, tokens)
    read = text[: spans[-1][1]]
    written = watch.written(tokenizer.pad_token_id)
    told, places = _written_spans(tokenizer, written[0, 1:].tolist())
    assert told == summary.text, "the tokens that are explained must be the summary's"
    with torch.inference_mode():
        kept = model.model.encoder(watch.read, watch.mask, output_selections=True, return_dict=True)
        layers, states = _decode(model, kept, written[:, :-1])
        copies = None if model.copier is None else _copies(model, kept, watch.mask, states, written[:, 1:])
    return Explanation(
        title=SURROGATE.sub("\ufffd", _beginning(text) if title is None else title),
        model=model_name(model),
        source=read,
        summary=summary.text,
        note=summary.note,
        words=find_words(read, spans),
        written=find_words(told, places),
        stages=_stages(model, kept.selections, kept.selection, len(tokens)),
        layers=layers,
        copies=copies,
        rounding=max(ROUNDING, 2 * torch.finfo(model.dtype).eps),
    )


def model_name(model: Any) -> str:
    """Give the name of the folder that a model came from; training calls it `model`, in a folder with a name."""
    folder = Path(str(model.config.name_or_path))
    named = folder.parent.name if folder.name == "model" else ""
    return named or folder.name or str(model.config.model_type)


def _beginning(text: str) -> str:
    """Give the line that stands alone above a text, or else its first words."""
    heading, _, rest = text.lstrip()[: 4 * TITLE].partition("\n")
    alone = len(heading) <= TITLE and rest.partition("\n")[0].strip() == "" and rest.strip()
    words = " ".join((heading if alone else text[: 4 * TITLE]).split())
    return words if len(words) <= TITLE else words[: TITLE - 1].rstrip() + "…"


def _source_spans(tokenizer: Any, text: str, tokens: Sequence[int]) -> Spans:
    """Find the characters that each source token stands for; an end token stands behind them, for none."""
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, verbose=False, return_offsets_mapping=True
    )
    count = len(tokens) - (tokenizer.eos_token_id is not None)
    spans: Spans = [tuple(span) for span in encoded["offset_mapping"][:count]]
    assert encoded["input_ids"][:count] == list(tokens[:count]), "the tokens that are explained must be the source's"
    reached = max(end for _, end in spans)
    return spans + [(reached, reached)] * (len(tokens) - count)


def _written_spans(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, Spans]:
    """Find the characters of the summary that each of its tokens stands for, by decoding it token by token.

    Of tokens that make up a character together each stands for it. A special token stands for none.
    """

    def decode(some: Sequence[int]) -> str:
        decoded: str = tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return decoded

    whole = decode(tokens)
    told, lead = whole.strip(), len(whole) - len(whole.lstrip())
    reached = [_common(decode(tokens[: count + 1]), whole) for count in range(len(tokens))]
    ends = np.maximum.accumulate([0, *reached])
    special = set(tokenizer.all_special_ids)
    spans: Spans = []
    for place, token in enumerate(tokens):
        start, end = int(ends[place]), int(ends[place + 1])
        if start == end and token not in special:
            end = next((int(later) for later in ends[place + 1 :] if later > end), end)
        first, last = (min(max(edge - lead, 0), len(told)) for edge in (start, end))
        spans.append((first, last))
    return told, spans


def _common(prefix: str, whole: str) -> int:
    """Count the characters that a text and its beginning share: half a character is decoded as something else."""
    size = min(len(prefix), len(whole))
    while prefix[:size] != whole[:size]:
        size -= 1
    return size


def _decode(model: Any, kept: Any, read: Tensor) -> tuple[np.ndarray, Tensor]:
    """Let the decoder read what it wrote [1 t]: the attention of each layer to each slot [l t k], its states [1 t d].

    Attention that writes its matrix out is a setting of the decoder. It is made on a copy that has the same weights,
    so that nobody else who uses the model meanwhile is touched.
    """
    decoder = model.model.decoder
    copied = copy.deepcopy(decoder, {id(weight): weight for weight in (*decoder.parameters(), *decoder.buffers())})
    copied.config._attn_implementation = "eager"
    looked = copied(
        input_ids=read,
        encoder_hidden_states=kept.last_hidden_state,
        encoder_attention_mask=kept.memory_mask,
        output_attentions=True,
        use_cache=False,
        return_dict=True,
    )
    layers = [weights[0].double().mean(0) for weights in looked.cross_attentions]  # [t k] each
    return torch.stack(layers).cpu().numpy(), looked.last_hidden_state


def _copies(model: Any, kept: Any, read: Tensor, states: Tensor, written: Tensor) -> Copies:
    """Say what part of the probability of each written token [1 t] came of copying it, and from where.

    read  [1 n] the mask of the source
    """
    copying = model.copier(states, kept.copy_states, kept.copy_shares)
    whole = copying.mix(model.lm_head(states), kept.copy_tokens)  # [1 t v] logarithms
    real = kept.copy_shares[0] > 0  # [c]
    each = copying.each[0, :, real]  # [t c w]
    same = kept.copy_tokens[0, real] == written[0, :, None, None]
    shares = torch.where(same, each, 0) / whole[0].gather(1, written[0, :, None])[:, :, None].exp()
    origins, _ = model.model.encoder.reach(kept.selections, read != 0)  # [1 c w]
    return Copies(origins[0, : len(real)][real].flatten().cpu().numpy(), shares.flatten(1).double().cpu().numpy())


def _stages(model: Any, selections: Sequence[Selection], memory: Selection, n: int) -> tuple[Stage, ...]:
    """Compose the Selections one by one: where the source tokens are behind each layer that pools."""
    names = [f"layer {layer + 1}" for layer in model.config.poolings]
    composed = list(accumulate(selections, Selection.then))
    stages = [Stage("tokens", n, np.arange(n), np.ones(n))]
    stages += [_stage(name, selection) for name, selection in zip(names, composed, strict=True)]
    return (*stages, _stage("memory", memory)) if model.model.encoder.spreads else tuple(stages)


def _stage(name: str, selection: Selection) -> Stage:
    slots, weights = selection.slots[0].cpu().numpy(), selection.weights[0].double().cpu().numpy()
    return Stage(name, int(selection.mask[0].sum()), slots, weights)


__all__ = ["Progress", "explain", "model_name"]
