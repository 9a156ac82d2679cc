"""What the paper says about its own cost, counted again."""

from collections.abc import Callable
from dataclasses import dataclass

from pyramidion.complexity.cost import Cost, count, count_generation
from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.presets import preset

ATTENDED = ("decoder self-attention", "cross-attention")


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and its figure counted again.

    said      in the paper's words, or nearly; `stated` is its figure
    counted   ours, and `how` it comes about
    agrees    whether ours rounds to the paper's
    why       where the difference comes from, or what to know where there is none
    readings  other ways to read the sentence, and what they give
    """

    said: str
    stated: float
    counted: float
    how: str
    agrees: bool
    why: str
    readings: tuple[tuple[str, float], ...] = ()


def claims() -> list[Claim]:
    """Count every claim again."""
    return [make() for make in CLAIMS]


def _claim(
    said: str, stated: float, counted: float, how: str, why: str, *readings: tuple[str, float], digits: int = 0
) -> Claim:
    return Claim(said, stated, counted, how, round(counted, digits) == stated, why, readings)


def _deep() -> tuple[PyramidionConfig, PyramidionConfig]:
    return preset("deep-blockwise"), preset("deep-pyramidion")


def _ratio(first: Cost, second: Cost, *parts: str) -> float:
    return first.of(*parts).multiplications / second.of(*parts).multiplications


def _blockwise() -> Claim:
    full = count(preset("deep-blockwise", attention="full"))
    block = count(preset("deep-blockwise"))
    return _claim(
        "Blockwise reduces self-attention in the encoder 16× against Vanilla",
        16,
        _ratio(full, block, "encoder self-attention"),
        "6 layers of 8192 × 8192 against 8192 × 512",
        "",
        ("the whole encoder, projections and feed-forward too", full.encoder.products / block.encoder.products),
    )


def _self_attention() -> Claim:
    block, pyramid = (count(config) for config in _deep())
    leaving = 6 * 8192 / sum(preset("deep-pyramidion").encoder_lengths)
    return _claim(
        "DeepPyramidion lowers the cost of self-attention 2.5× against Blockwise",
        2.5,
        _ratio(block, pyramid, "encoder self-attention"),
        "lengths that enter the layers: 6 × 8192 against 3 × 8192 + 2048 + 2 × 512",
        "The figure follows from the lengths that leave the layers; a layer attends to what enters it. "
        "Row 24 below is counted by what enters, so the paper does not count alike.",
        ("lengths that leave the layers: 49152 / 19968", leaving),
        ("the whole encoder, projections and feed-forward too", block.encoder.products / pyramid.encoder.products),
        digits=1,
    )


def _cross_attention() -> Claim:
    block, pyramid = (count(config) for config in _deep())
    parts = ("cross-attention", "cross projections", "memory projections")
    return _claim(
        "DeepPyramidion improves cross-attention 16× over Blockwise",
        16,
        _ratio(block, pyramid, "cross-attention"),
        "a memory of 8192 against 512",
        "",
        ("with its four projections, target 512", _ratio(block, pyramid, *parts)),
    )


def _decoder() -> Claim:
    block, pyramid = _deep()
    attended, whole = {}, {}
    for tokens in (256, 512):
        first, second = (count_generation(config, target=tokens) for config in (block, pyramid))
        attended[tokens] = _ratio(first.written, second.written, *ATTENDED)
        whole[tokens] = first.written.products / second.written.products
    trained = count(block).decoder, count(pyramid).decoder
    return _claim(
        "DeepPyramidion needs 13× fewer multiplications in the decoder",
        13,
        attended[256],
        "attention alone while 256 tokens are written: looking back on 128.5 on average, and at the memory",
        "Only this reading gives 13: with projections, feed-forward and output head there is much less to gain.",
        ("the same for 512 tokens", attended[512]),
        ("attention in training, target 512", _ratio(*trained, *ATTENDED)),
        ("everything the decoder computes for each of 256 tokens", whole[256]),
        ("everything the decoder computes in training, target 512", trained[0].products / trained[1].products),
    )


def _one_layer() -> Claim:
    layer = count(preset("deep-blockwise", attention="full", encoder_lengths=[8192])).encoder
    pyramid = count(preset("deep-pyramidion"))
    part = "encoder self-attention"
    return _claim(
        "An entire DeepPyramidion costs five times less than one Transformer layer with 8k tokens",
        5,
        _ratio(layer, pyramid, part),
        "self-attention alone: 8192 × 8192 against 27648 × 512",
        "It holds for what is attended in the encoder, not for the model.",
        ("whole encoder against whole layer", layer.products / pyramid.encoder.products),
        ("whole model against whole layer, target 512", layer.products / pyramid.products),
    )


def _row_24_encoder() -> Claim:
    vanilla, pyramid = count(preset("row-3")), count(preset("row-24"))
    return _claim(
        "Row 24 against row 3: complexity of the encoder reduced by a factor of 13",
        13,
        _ratio(vanilla, pyramid, "encoder self-attention"),
        "2 × 8192 × 8192 against (8192 + 8192 + 4096) × 512: self-attention, what enters",
        "",
        ("the whole encoder, projections and feed-forward too", vanilla.encoder.products / pyramid.encoder.products),
    )


def _row_24_decoder() -> Claim:
    vanilla, pyramid = count(preset("row-3")), count(preset("row-24"))
    return _claim(
        "Row 24 against row 3: complexity of the decoder reduced by a factor of 4",
        4,
        _ratio(vanilla, pyramid, "cross-attention"),
        "a memory of 8192 against 2048: cross-attention",
        "",
        ("attention in training, target 512", _ratio(vanilla, pyramid, *ATTENDED)),
    )


def _break_even() -> Claim:
    config = preset("deep-blockwise", attention="full", encoder_lengths=[8192])
    n = next(n for n in range(64, 8193, 64) if _attends_most(config, n))
    return Claim(
        "Below about 4k tokens, feed-forward and projections multiply more than attention (width 768)",
        4096,
        n,
        "2 n² d = 12 n d², so n = 6 d",
        not _attends_most(config, 4096) and round(n / 1024, 0) in (4, 5),
        "True as said: 4.5k, which the paper rounds down.",
    )


def _attends_most(config: PyramidionConfig, n: int) -> bool:
    cost = count(config, length=n)
    others = cost.of("encoder projections", "encoder feed-forward")
    return cost.of("encoder self-attention").multiplications >= others.multiplications


def _bound() -> Claim:
    n, m, k = 8192, 512, 512
    lengths = [4096, 2048, 1024, 512, 512]  # halved behind every layer, down to k; the last layer attends to k
    config = preset("deep-pyramidion", input_length=n, encoder_lengths=lengths)
    attended = count(config).of("encoder self-attention").multiplications
    return Claim(
        "Pooling behind every layer costs Σ 2⁻ⁱ mnd = (2 - k/n) mnd, below 2 mnd",
        2 - k / n,
        attended / (2 * m * n * config.hidden_size),
        "8192 halved to 512 in 4 passes, 5 layers; in units of mnd for each of the two products",
        attended / (2 * m * n * config.hidden_size) == 2 - k / n < 2,
        "Exact while m ≤ k. With k below m the last layers attend to fewer than m, and it is less still.",
    )


CLAIMS: tuple[Callable[[], Claim], ...] = (
    _blockwise,
    _self_attention,
    _cross_attention,
    _decoder,
    _one_layer,
    _row_24_encoder,
    _row_24_decoder,
    _break_even,
    _bound,
)
