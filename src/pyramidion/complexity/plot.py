"""Cost against the length of a document, as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyramidion.complexity.cost import Cost, count
from pyramidion.presets import preset

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS = [2**i for i in range(9, 18)]  # 512 to 131072
FORMATS = (".png", ".pdf", ".svg")


class Line(NamedTuple):
    """One line of a figure: what is counted, and how it is drawn.

    settings  beside those of DeepPyramidion
    label     where it ends, moved up by so many points
    """

    settings: dict[str, Any]
    label: str
    colour: str
    raised: int = 0
    style: Any = "-"
    implementation: str = "sdpa"


# Okabe and Ito's colours: told apart with any colour vision.
RED, BLUE, YELLOW, GREEN = "#D55E00", "#0072B2", "#C28800", "#009E73"
UNPOOLED: dict[str, Any] = {"encoder_lengths": [8192] * 6, "scorer": None}
FULL: dict[str, Any] = UNPOOLED | {"attention": "full"}
POOLED_LAST: dict[str, Any] = {"encoder_lengths": [8192] * 5 + [512]}

MULTIPLICATIONS = (
    Line(FULL, "vanilla", RED),
    Line(UNPOOLED, "blockwise and\ntranspooler", BLUE),  # alike to 1 in 10⁴: one line
    Line({}, "pyramidion", GREEN),
)
MEMORY = (
    Line(FULL, "vanilla, matrix\nwritten out", RED, style=(0, (4, 2)), implementation="eager"),
    Line(UNPOOLED, "blockwise, and\nvanilla if fused", BLUE, 11),  # a fused kernel keeps no matrix of any size
    Line(POOLED_LAST, "transpooler", YELLOW, -7),
    Line({}, "pyramidion", GREEN),
)
NOTE = "six layers, width 768, blocks of 512, pyramidion → 2k → 512"
TRAINING = "one document, target 512, bfloat16 autocast, fused attention"
CARD = 80  # GiB


def curve(line: Line, lengths: list[int]) -> list[Cost]:
    """Count one model at each length."""
    config = preset("deep-pyramidion", **line.settings)
    return [count(config, length=n, implementation=line.implementation) for n in lengths]


def write_plot(path: Path) -> Path:
    """Draw multiplications of the encoder and activation memory over n, for the deep models of the paper."""
    if path.suffix not in FORMATS:
        raise ValueError(f"`path` must be a file that ends in {', '.join(FORMATS)}, got {str(path)!r}.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.4, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.06})
    for line in MULTIPLICATIONS:
        _draw(left, line, [cost.encoder.multiplications / 1e12 for cost in curve(line, LENGTHS)])
    right.set_ylim(0.2, 200)
    for line in MEMORY:
        _draw(right, line, [cost.bytes / 2**30 for cost in curve(line, LENGTHS)])
    right.axhline(CARD, color="0.6", linewidth=1, zorder=0)
    right.annotate(
        f"a GPU of {CARD} GiB", (LENGTHS[0], CARD), (0, -12), textcoords="offset points", color="0.4", size=9
    )
    _finish(left, "Multiplications of the encoder, × 10¹²", NOTE)
    _finish(right, "Activations kept for the backward pass, GiB", TRAINING)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw(axes: Axes, line: Line, values: list[float]) -> None:
    """Draw a line with its label at its end, or where it leaves the figure."""
    axes.plot(LENGTHS, values, color=line.colour, linestyle=line.style, linewidth=2)
    place: dict[str, Any] = {"textcoords": "offset points", "size": 9, "color": line.colour, "annotation_clip": False}
    if line.implementation == "eager":
        inside = max(i for i, value in enumerate(values) if value < axes.get_ylim()[1] / 2)
        axes.annotate(line.label, (LENGTHS[inside], values[inside]), (-8, 6), ha="right", **place)
    else:
        axes.annotate(line.label, (LENGTHS[-1], values[-1]), (6, line.raised), va="center", **place)


def _finish(axes: Axes, title: str, note: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=22)
    axes.annotate(note, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", size=8.5, color="0.35")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{n // 1024}k" if n >= 1024 else str(n) for n in LENGTHS])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of the document, n")
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
