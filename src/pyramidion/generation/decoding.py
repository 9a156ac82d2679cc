"""How a summary is searched for: the paper's settings, then the model folder's, then the caller's."""

import difflib
from typing import Any

from transformers import GenerationConfig

from pyramidion.configuration_pyramidion import PyramidionConfig

DEEP = 6  # decoder layers from which on the paper calls a model deep
FIXED: dict[str, Any] = {"num_return_sequences": 1, "return_dict_in_generate": False}  # one summary a document
BEAM_ONLY = ("length_penalty", "early_stopping")
LENGTHS = (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens"))  # two names of one limit


def decoding_defaults(config: PyramidionConfig) -> dict[str, Any]:
    """Give the paper's decoding settings.

    Deep models search with 2 beams, after HAT-BART: length penalty 1, from 72 to 966 tokens. Shallow ones search with 8
    (the paper's table of hyperparameters, which gives no lengths for them: they get the same).
    """
    beams = 2 if config.decoder_layers >= DEEP else 8
    return {"num_beams": beams, "length_penalty": 1.0, "min_new_tokens": 72, "max_new_tokens": 966}


def decoding_options(
    config: PyramidionConfig, saved: GenerationConfig | None = None, **options: Any
) -> GenerationConfig:
    """Lay the folder's settings over the paper's, and the caller's over both; None means not given."""
    given = {name: value for name, value in options.items() if value is not None}
    _refuse(given)
    chosen = decoding_defaults(config)
    for layer in (_set_in(saved), given):
        for pair in LENGTHS:
            if any(name in layer for name in pair):
                chosen = {name: value for name, value in chosen.items() if name not in pair}
        chosen |= layer
    _agree(chosen, given)
    if chosen["num_beams"] == 1:
        chosen = {name: value for name, value in chosen.items() if name not in BEAM_ONLY}
    return GenerationConfig(**{**chosen, **FIXED})


def options_of(generation: GenerationConfig) -> dict[str, Any]:
    """List what is set, ready for JSON: what a run has to record."""
    return {name: value for name, value in sorted(_set_in(generation).items()) if name not in FIXED}


def _set_in(generation: GenerationConfig | None) -> dict[str, Any]:
    found = {} if generation is None else generation.to_diff_dict()
    return {name: value for name, value in found.items() if name != "transformers_version" and not name.startswith("_")}


def _refuse(given: dict[str, Any]) -> None:
    known = set(GenerationConfig().to_dict())
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(f"`{name}` is not an option of `generate`, got {value!r}.{hint}")
        if name in FIXED and value != FIXED[name]:
            raise ValueError(f"`{name}` must be {FIXED[name]}: a document gets one summary, got {value!r}.")
    for name, least in (("num_beams", 1), ("max_new_tokens", 1), ("min_new_tokens", 0), ("no_repeat_ngram_size", 0)):
        value = given.get(name, least)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")


def _agree(chosen: dict[str, Any], given: dict[str, Any]) -> None:
    """Lower a minimum that nobody asked for under the maximum that somebody did."""
    low, high = chosen.get("min_new_tokens"), chosen.get("max_new_tokens")
    if low is None or high is None or low <= high:
        return
    if "min_new_tokens" in given:
        raise ValueError(f"`min_new_tokens` must be at most `max_new_tokens`, which is {high}, got {low}.")
    chosen["min_new_tokens"] = high


__all__ = ["decoding_defaults", "decoding_options", "options_of"]
