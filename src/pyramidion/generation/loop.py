"""A decode loop without the host in the way, behind transformers' own `generate`.

`generate` prepares everything as ever: settings, the encoder, what changes scores and what stops. Then `decode` lets
our loop take the place of its own. The memory's keys and values are computed once for a document, the state lives in
buffers on the device, and a step asks the device nothing: on a GPU it is captured once for each bucket of lengths, and
replayed. Whether all texts have ended is looked at now and then, a copy late. So is the encoder where documents fill
their batch, and all that is done before the first token. What the loop does not know, such as sampling, is left to
transformers, and a line of the log (a warning of this module's logger, once a reason) says why.
"""

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GENERATION_MODES_MAPPING

from pyramidion import modeling_pyramidion as modeling
from pyramidion.attention.layout import counted_on_device
from pyramidion.generation import fused
from pyramidion.generation.search import Beam, Greedy, Rules, Search
from pyramidion.generation.step import Decoder, compute_dtype
from pyramidion.kernels.recording import Recorder

logger = logging.getLogger(__name__)

# --------------------------------------------------------------------------------------------------------------------
# What is supported
# --------------------------------------------------------------------------------------------------------------------

# What changes scores, in the order in which it does.
PROCESSORS: dict[type, Callable[[Any], dict[str, Any]]] = {
    logits_process.RepetitionPenaltyLogitsProcessor: lambda one: {"repetition": one.penalty},
    logits_process.NoRepeatNGramLogitsProcessor: lambda one: {"ngram": one.ngram_size},
    logits_process.NoBadWordsLogitsProcessor: lambda one: {"banned": tuple(one.sequence_bias)},
    logits_process.MinLengthLogitsProcessor: lambda one: {"floor": one.min_length},
    logits_process.MinNewTokensLengthLogitsProcessor: lambda one: {
        "floor": one.min_new_tokens + one.prompt_length_to_skip
    },
    logits_process.ForcedBOSTokenLogitsProcessor: lambda one: {"first": (one.bos_token_id,)},
    logits_process.ForcedEOSTokenLogitsProcessor: lambda one: {"last": tuple(one.eos_token_id.flatten().tolist())},
}
CRITERIA = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
# Options that are off unless they are set, and that the loop does not know whatever they are set to.
PLAIN = (
    *("do_sample", "return_dict_in_generate", "output_scores", "output_logits", "output_attentions"),
    *("output_hidden_states", "cache_implementation", "prefill_chunk_size", "low_memory", "token_healing"),
)
HANDED = {"encoder_outputs", "attention_mask", "past_key_values", "use_cache", "inputs_embeds"}
PARTS = {
    *(modeling.PyramidionDecoder, modeling.PyramidionDecoderLayer, modeling.PyramidionDecoderAttention),
    *(modeling.PyramidionResidual, modeling.PyramidionFeedForward, modeling.PyramidionEmbedding),
    *(modeling.PyramidionNorm, modeling.PyramidionCopier, nn.Linear, nn.ModuleList),
}


class Unsupported(Exception):
    """Names what the loop does not do."""


def read_rules(generation: GenerationConfig, processors: Sequence[Any], criteria: Sequence[Any]) -> Rules:
    """Put into numbers what `generate` has prepared, or name what the loop does not know."""
    for name in PLAIN:
        if getattr(generation, name, None):
            raise Unsupported(f"`{name}`")
    if generation.num_return_sequences != 1:
        raise Unsupported("`num_return_sequences`")
    known, order = list(PROCESSORS), -1
    found: dict[str, Any] = {"floor": 0}
    for one in processors:
        place = known.index(type(one)) if type(one) in PROCESSORS else -1
        if place <= order or getattr(one, "prompt_ignore_length", None):
            raise Unsupported(type(one).__name__)
        order, news = place, PROCESSORS[type(one)](one)
        found |= {**news, "floor": max(found["floor"], news.get("floor", 0))}
    for one in criteria:
        if type(one) not in CRITERIA:
            raise Unsupported(type(one).__name__)
    ends, pad = _numbers(generation._eos_token_tensor), _numbers(generation._pad_token_tensor)
    beams, filler = generation.num_beams or 1, pad[0] if pad else 0
    if beams > 1:
        found |= {"length_penalty": generation.length_penalty, "early_stopping": generation.early_stopping}
        filler = filler or (ends[0] if ends else 0)  # its beam search takes a padding of 0 for none
    return Rules(beams, generation.max_length, filler, ends, **found)


def _numbers(tokens: Tensor | None) -> tuple[int, ...]:
    return () if tokens is None else tuple(tokens.flatten().tolist())


def check_model(model: Any) -> None:
    """Refuse a model that is not what the loop computes: other modules, hooks, weights that are elsewhere."""
    if not isinstance(model, modeling.PyramidionForConditionalGeneration):
        raise Unsupported(type(model).__name__)
    if model.training:
        raise Unsupported("training mode")
    decoder = model.model.decoder
    copier = [] if model.copier is None else model.copier.named_modules()
    for name, part in (*decoder.named_modules(), ("head", model.lm_head), *copier):
        if ".activation" in name:
            continue
        if type(part) not in PARTS:
            raise Unsupported(f"a decoder with {type(part).__name__}")
        if not name.endswith((".cross_attention.key", ".cross_attention.value")) and _watched(part):
            raise Unsupported(f"a hook on {type(part).__name__}")
    weights = _weights(model)
    if any(type(weight) is not nn.Parameter or not weight.numel() for weight in weights):
        raise Unsupported("weights that are spread over devices")
    if len({weight.device for weight in weights}) > 1 or weights[0].device.type == "meta":
        raise Unsupported("weights on several devices")


def _weights(model: Any) -> list[Any]:
    """List the weights that writing reads."""
    copier = [] if model.copier is None else model.copier.parameters()
    return [*model.model.decoder.parameters(), model.lm_head.weight, *copier]


def _watched(part: nn.Module) -> bool:
    """Tell whether somebody looks on when a module runs; transformers' own recorders only do while asked to."""
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks)


def check_call(model: Any, tokens: Tensor, handed: dict[str, Any]) -> None:
    """Refuse what a caller of `generate` may hand over besides documents."""
    if tokens.shape[1] != 1:
        raise Unsupported("`decoder_input_ids`")
    for name, value in handed.items():
        if name not in HANDED and value is not None:
            raise Unsupported(f"`{name}`")
    if handed.get("use_cache") is False:
        raise Unsupported("`use_cache`")
    cache = handed.get("past_key_values")
    if cache is not None and getattr(cache, "_is_user_defined", False):
        raise Unsupported("`past_key_values`")
    if tokens.device != model.device:
        raise Unsupported("documents on another device")


@functools.cache
def tell(reason: str) -> None:
    """Say once for each reason that transformers' own loop writes instead of ours."""
    logger.warning("%s: not supported by the fast decode loop; transformers' own loop writes instead.", reason)


# --------------------------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """How a kind of device is driven.

    grain   documents and representations are filled up to a multiple of these, so that lengths that vary meet again
    bucket  positions that the first steps attend to; the next bucket is this many more, or twice as many if it doubles
    check   steps between two looks at whether all have ended
    kept    sets of buffers, and of graphs, that are kept for a model
    turns   steps that are captured together
    fused   whether kernels of our own compute a step, where they can
    """

    grain: tuple[int, int] = (1, 1)
    bucket: int = 16
    doubles: bool = False
    check: int = 1
    kept: int = 0
    turns: int = 1
    fused: bool = False

    def length(self, position: int, limit: int) -> int:
        """Give how many positions a step at this one attends to."""
        length = self.bucket
        while length <= position:
            length += length if self.doubles else self.bucket
        return min(length, limit - 1)


MEMORY = ("last_hidden_state", "memory_mask", "copy_states", "copy_tokens", "copy_shares")  # what writing reads of it
SHAPES = 4  # of documents, and of what was kept of them, that are recorded
TOKENS = 1 << 17  # of a batch that is: with more, the device takes longer to encode than the host to tell it to
STEADY = ("blockwise", "full")  # attentions that draw no numbers on the host
PACES = {"cuda": Pace(grain=(4, 64), bucket=64, doubles=True, check=16, kept=4, turns=8, fused=True)}


def up(count: int, grain: int) -> int:
    """Round up to a multiple."""
    return -(-count // grain) * grain


def begin(owner: "ref[Any]", decoder: Decoder, search: Search, inputs: dict[str, Any]) -> None:
    """Take up the weights as they are now, the start tokens [b*beams 1], and what was kept of documents."""
    model, beams = owner(), search.rules.beams
    assert model is not None
    start = inputs.pop("start")
    decoder.refresh(model)
    decoder.read(model, modeling.PyramidionEncoderOutput(**inputs), beams)
    search.reset(start[::beams, 0])


class Writer:
    """Buffers, and graphs on a GPU, for one size of batch and one set of rules."""

    def __init__(
        self, model: modeling.PyramidionForConditionalGeneration, rules: Rules, b: int, k: int, c: int, masked: bool
    ) -> None:
        kind: type[Search] = Greedy if rules.beams == 1 else Beam
        self.pace = PACES.get(model.device.type, Pace())
        self.search = kind(rules, b, model.config.vocab_size, model.device)
        ours = self.pace.fused and fused.serves(model, self.search, k)
        self.decoder = (fused.FusedDecoder if ours else Decoder)(model, self.search, k, c, masked=masked)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        do = functools.partial(begin, ref(model), self.decoder, self.search)
        self.begin = Recorder(do, model.device, most=SHAPES, name="Beginnings")

    def write(self, start: Tensor, memory: modeling.PyramidionEncoderOutput) -> Tensor:
        """Write about documents from their start tokens [b*beams 1] and what was kept of them [b*beams k d]."""
        beams, limit = self.search.rules.beams, self.search.rules.limit
        self.begin({"start": start, **{name: memory[name] for name in MEMORY if memory.get(name) is not None}})
        live = _Watch(self.search.live, self.pace.check)
        position = 0
        while position < limit - 1 and not live.over(position):
            position += self._go_on(position, limit)
        return self.search.texts(len(start) // beams)

    def _go_on(self, position: int, limit: int) -> int:
        """Write some tokens, and say how many."""
        length, turns = self.pace.length(position, limit), self.pace.turns
        if self.pool is None or position + turns > length:
            turns = 1
        if self.pool is None:
            self.decoder.step(length)
            return turns
        if (length, turns) not in self.graphs:
            self.graphs[length, turns] = self._capture(length, turns)
        self.graphs[length, turns].replay()
        return turns

    def _capture(self, length: int, turns: int) -> torch.cuda.CUDAGraph:
        """Capture some steps; one that runs before, so that all kernels are there, leaves nothing behind."""
        state = [buffer.clone() for buffer in self.search.moving()]
        side = torch.cuda.Stream()  # of the current device, which is the model's
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.decoder.step(length)
                for buffer, before in zip(self.search.moving(), state, strict=True):
                    buffer.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side, capture_error_mode="thread_local"):
            for _ in range(turns):
                self.decoder.step(length)
        return graph


class _Watch:
    """Look every few steps at whether all texts have ended: on a GPU at a copy made that many steps ago."""

    def __init__(self, live: Tensor, every: int) -> None:
        self.live, self.every = live, every
        self.copies = [torch.ones(1, dtype=torch.bool, pin_memory=live.is_cuda) for _ in range(2)]
        self.made: torch.cuda.Event | None = None

    def over(self, written: int) -> bool:
        """Tell after so many steps whether nothing is left to write, as far as is known."""
        if not written or written % self.every:
            return False
        if not self.live.is_cuda:
            return not self.live
        ended = False
        if self.made is not None:
            self.made.synchronize()
            ended = not self.copies[1]
        self.copies.reverse()
        self.copies[1].copy_(self.live, non_blocking=True)
        self.made = torch.cuda.Event()
        self.made.record()
        return ended


_KEPT: WeakKeyDictionary[nn.Module, OrderedDict[Any, Writer]] = WeakKeyDictionary()


def writer_for(
    model: modeling.PyramidionForConditionalGeneration, rules: Rules, b: int, k: int, c: int, masked: bool
) -> Writer:
    """Find the writer for a batch of b documents with k representations, and c to copy from, or make it."""
    pace = PACES.get(model.device.type, Pace())
    if not pace.kept:
        return Writer(model, rules, b, k, c, masked)
    rows, wide, copied = up(b, pace.grain[0]) if b > 2 else b, up(k, pace.grain[1]), up(c, pace.grain[1])
    masked = masked or wide > k
    weights = tuple(weight.data_ptr() for weight in _weights(model))
    autocast = torch.is_autocast_enabled(model.device.type)
    key = (rules, rows, wide, copied, masked, compute_dtype(model), autocast, weights)
    kept = _KEPT.setdefault(model, OrderedDict())
    if key not in kept:
        kept[key] = Writer(model, rules, rows, wide, copied, masked)
    kept.move_to_end(key)
    while len(kept) > pace.kept:
        kept.popitem(last=False)
    return kept[key]


_ENCODERS: WeakKeyDictionary[nn.Module, tuple[Any, Recorder[modeling.PyramidionEncoderOutput]]] = WeakKeyDictionary()


def encode(model: Any, input_ids: Tensor, attention_mask: Tensor) -> modeling.PyramidionEncoderOutput | None:
    """Encode documents [b n] as a recording; None where none is made: who writes then encodes as it stands."""
    if not recordable(model, input_ids) or not attention_mask.all():
        return None
    weights = tuple(weight.data_ptr() for weight in model.model.encoder.parameters())
    key = (weights, compute_dtype(model), torch.is_autocast_enabled(model.device.type))
    if model not in _ENCODERS or _ENCODERS[model][0] != key:
        found = functools.partial(_encode, ref(model))
        _ENCODERS[model] = key, Recorder(found, model.device, most=SHAPES, name="Encodings")
    try:
        with torch.cuda.device(model.device) if input_ids.is_cuda else nullcontext():
            kept: Any = _ENCODERS[model][1]({"input_ids": input_ids})
            return modeling.PyramidionEncoderOutput(**kept)  # `generate` changes what it is given
    except BaseException:
        forget(model)
        raise


def _encode(owner: "ref[Any]", inputs: dict[str, Tensor]) -> modeling.PyramidionEncoderOutput:
    model = owner()
    assert model is not None
    with counted_on_device():
        found: modeling.PyramidionEncoderOutput = model.get_encoder()(**inputs)
    return found


def recordable(model: Any, input_ids: Tensor) -> bool:
    """Tell whether encoding such documents is the same work each time, and nobody looks on."""
    pace = PACES.get(input_ids.device.type, Pace())
    if not isinstance(model, modeling.PyramidionForConditionalGeneration) or model.training or not pace.kept:
        return False
    encoder, config = model.model.encoder, model.config
    return (
        input_ids.numel() <= TOKENS
        and config.attention in STEADY
        and not any(pooling.scorer == "random" for pooling in config.poolings.values())
        and all(type(weight) is nn.Parameter and weight.device == input_ids.device for weight in encoder.parameters())
        and not any(_watched(part) for part in encoder.modules())
    )


def forget(model: nn.Module) -> None:
    """Give back the buffers and graphs that are kept for a model."""
    _KEPT.pop(model, None)
    _ENCODERS.pop(model, None)


# --------------------------------------------------------------------------------------------------------------------
# The way in
# --------------------------------------------------------------------------------------------------------------------


def _write(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    **handed: Any,
) -> Tensor:
    """Take the place of transformers' `_sample` and `_beam_search`, or leave it to them."""
    mode = GENERATION_MODES_MAPPING[generation_config.get_generation_mode()]
    try:
        if mode not in ("_sample", "_beam_search"):
            raise Unsupported(f"`{generation_config.get_generation_mode().value}`")
        check_model(model)
        check_call(model, input_ids, handed)
        rules = read_rules(generation_config, logits_processor, stopping_criteria)
        if any(max(sequence) >= model.config.vocab_size for sequence in rules.banned):
            raise Unsupported("`bad_words_ids` with a token that the model does not have")
    except Unsupported as reason:
        if mode not in ("_sample", "_beam_search"):
            raise
        tell(str(reason))
        own = getattr(type(model), mode)
        settings = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        written: Tensor = own(model, input_ids, generation_config=generation_config, **settings, **handed)
        return written
    memory = handed["encoder_outputs"]
    b, k = len(input_ids) // rules.beams, memory.last_hidden_state.shape[1]
    c = 0 if memory.copy_shares is None else memory.copy_shares.shape[1]
    try:
        with torch.cuda.device(model.device) if input_ids.is_cuda else nullcontext():
            writer = writer_for(model, rules, b, k, c, memory.memory_mask is not None)
            return writer.write(input_ids, memory)
    except BaseException:
        forget(model)  # a half-made graph, or no memory left
        raise


def decode(model: Any, input_ids: Tensor, attention_mask: Tensor, generation: GenerationConfig) -> Tensor:
    """Write about documents [b n]: the tokens that `model.generate` gives, sooner."""
    given: dict[str, Any] = {"attention_mask": attention_mask, "generation_config": generation}
    with torch.inference_mode():
        if (kept := encode(model, input_ids, attention_mask)) is not None:
            given["encoder_outputs"] = kept
        try:
            written: Tensor = model.generate(input_ids, **given, custom_generate=_write)
        except Unsupported as reason:
            tell(str(reason))
            written = model.generate(input_ids, **given)
    return written


__all__ = ["decode", "forget"]
