"""What is compared: our models and those of transformers that a user would pick instead, at matched size.

All have random weights. A peer gets our width, layers, heads, feed-forward and vocabulary; windows and blocks are those
of its own configuration at the deep size. Tables of positions are as long as the documents, and counted apart. Dropout
is that of the peers' configurations for all: on what enters and what sublayers give, not within attention and
feed-forward. LongT5 has one rate for everything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration
from pyramidion.presets import DROPOUTS, preset

SCALES = ("deep", "small", "tiny")
FORMS = ("pyramidion", "blockwise", "full")  # ours, by what the encoder does
IMPLEMENTATIONS = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}


@dataclass(frozen=True)
class Candidate:
    """One model to be measured: its class and its configuration."""

    name: str
    kind: Any
    config: Any

    @property
    def ours(self) -> bool:
        """Tell our models from the peers."""
        return self.kind is PyramidionForConditionalGeneration

    def build(self, device: str, attention: str = "eager", *, seed: int = 0) -> Any:
        """Make the model on `device`, with random weights that depend on the seed alone."""
        torch.manual_seed(seed)
        with torch.device(device):
            return self.kind._from_config(copy.deepcopy(self.config), attn_implementation=attention)

    def parameters(self) -> tuple[int, int]:
        """Count the parameters: all of them, and those that are not tables of positions."""
        named = dict(self.build("meta").named_parameters())
        tables = sum(weight.numel() for name, weight in named.items() if "embed_positions" in name)
        every = sum(weight.numel() for weight in named.values())
        return every, every - tables

    def describe(self) -> dict[str, Any]:
        """Tell what it is, ready for JSON."""
        usable, refused = attentions(self)
        every, matched = self.parameters()
        return {
            "model": self.name,
            "class": self.kind.__name__,
            "parameters": every,
            "without_positions": matched,
            **{rate: getattr(self.config, rate, getattr(self.config, "dropout_rate", None)) for rate in DROPOUTS},
            "attentions": usable,
            "refused": refused,
        }


def attentions(candidate: Candidate) -> tuple[list[str], dict[str, str]]:
    """List the ways to attend that work here, eager only where no other does, and say why the others do not."""
    usable, refused = [], {}
    for way, flag in IMPLEMENTATIONS.items():
        if not getattr(candidate.kind, flag, False):
            refused[way] = "not supported by the model"
            continue
        try:
            candidate.build("meta", way)
            usable.append(way)
        except (ImportError, ValueError, OSError) as error:
            refused[way] = str(error).partition("\n")[0][:200]
    return usable or ["eager"], refused


def scale_config(scale: str, form: str = "pyramidion") -> PyramidionConfig:
    """Give our configuration of a size, with the peers' dropout: deep, as in the paper, or small or tiny, for a CPU."""
    name, inner = f"{scale}-pyramidion", {"attention_dropout": 0.0, "activation_dropout": 0.0}
    if form == "pyramidion":
        return preset(name, **inner)
    whole = preset(name).entering[:1] * len(preset(name).encoder_lengths)
    attention = "full" if form == "full" else "blockwise"
    return preset(name, encoder_lengths=whole, scorer=None, attention=attention, **inner)


# --------------------------------------------------------------------------------------------------------------------
# Peers: from our configuration, the tokens of a document and those that are written, to theirs
# --------------------------------------------------------------------------------------------------------------------


def _layers(like: PyramidionConfig) -> dict[str, Any]:
    """Translate the sizes into the names of BART and those that follow it."""
    shared = {"vocab_size": like.vocab_size, "d_model": like.hidden_size, "forced_eos_token_id": None}
    sides = {"encoder": len(like.encoder_lengths), "decoder": like.decoder_layers}
    for side, layers in sides.items():
        shared[f"{side}_layers"] = layers
        shared[f"{side}_attention_heads"] = like.num_attention_heads
        shared[f"{side}_ffn_dim"] = like.intermediate_size
    return shared


def _led(like: PyramidionConfig, n: int, written: int) -> tuple[Any, Any]:
    from transformers import LEDConfig, LEDForConditionalGeneration

    positions = {"max_encoder_position_embeddings": n, "max_decoder_position_embeddings": max(1024, written)}
    return LEDForConditionalGeneration, LEDConfig(**_layers(like), **positions, attention_window=like.block_size)


def _longt5(like: PyramidionConfig, kind: str) -> tuple[Any, Any]:
    from transformers import LongT5Config, LongT5ForConditionalGeneration

    return LongT5ForConditionalGeneration, LongT5Config(
        vocab_size=like.vocab_size,
        d_model=like.hidden_size,
        d_kv=like.hidden_size // like.num_attention_heads,
        d_ff=like.intermediate_size,
        num_layers=len(like.encoder_lengths),
        num_decoder_layers=like.decoder_layers,
        num_heads=like.num_attention_heads,
        encoder_attention_type=kind,
        decoder_start_token_id=0,
    )


def _pegasus_x(like: PyramidionConfig, n: int, written: int) -> tuple[Any, Any]:
    from transformers import PegasusXConfig, PegasusXForConditionalGeneration

    options = {"block_size": like.block_size, "max_position_embeddings": max(n, written)}
    return PegasusXForConditionalGeneration, PegasusXConfig(**_layers(like), **options)


def _bigbird(like: PyramidionConfig, n: int, written: int) -> tuple[Any, Any]:
    from transformers import BigBirdPegasusConfig, BigBirdPegasusForConditionalGeneration

    block = 64 if n > 11 * 64 else 16  # with fewer than 11 blocks it would attend fully
    options = {"block_size": block, "max_position_embeddings": max(n, written)}
    return BigBirdPegasusForConditionalGeneration, BigBirdPegasusConfig(**_layers(like), **options)


def _bart(like: PyramidionConfig, n: int, written: int) -> tuple[Any, Any]:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration, BartConfig(**_layers(like), max_position_embeddings=max(n, written))


PEERS: dict[str, Callable[[PyramidionConfig, int, int], tuple[Any, Any]]] = {
    "led": _led,
    "longt5-local": lambda like, n, written: _longt5(like, "local"),
    "longt5-tglobal": lambda like, n, written: _longt5(like, "transient-global"),
    "pegasus-x": _pegasus_x,
    "bigbird-pegasus": _bigbird,
    "bart": _bart,
}


def names(scale: str) -> tuple[str, ...]:
    """List what is compared at a size, ours first."""
    return (f"{scale}-pyramidion", f"{scale}-blockwise", *PEERS)


@cache
def candidate(name: str, scale: str, n: int, written: int = 1024) -> Candidate:
    """Make what `name` says, for documents of `n` tokens and texts of at most `written`."""
    if name in PEERS:
        return Candidate(name, *PEERS[name](scale_config(scale), n, written + 1))
    form = name.removeprefix(f"{scale}-")
    if form not in FORMS:
        raise ValueError(f"`models` must be among {', '.join(names(scale))}, got {name}.")
    return Candidate(name, PyramidionForConditionalGeneration, scale_config(scale, form))


def module_bytes(model: nn.Module) -> int:
    """Count the bytes of weights and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


__all__ = ["PEERS", "Candidate", "attentions", "candidate", "module_bytes", "names", "scale_config"]
