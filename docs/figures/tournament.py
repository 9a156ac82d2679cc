"""Draw a real tournament: twenty-four tokens, their scores, and the four slots they end in.

Run from the root of the repository: python docs/figures/tournament.py
"""

from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon

from pyramidion import soft_topk

N, K = 24, 4
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
INK, PALE = "#333333", "#9a9a9a"


def ribbon(top: tuple[float, float], bottom: tuple[float, float], colour: str, depth: float) -> Polygon:
    """A band that falls from one interval to another along a smooth curve."""
    t = torch.linspace(0, 1, 40)
    ease = 3 * t**2 - 2 * t**3
    y = 3.0 - 2.0 * t
    left, right = (a + (b - a) * ease for a, b in zip(top, bottom, strict=True))
    edge = torch.cat((torch.stack((left, y), 1), torch.stack((right, y), 1).flip(0)))
    return Polygon(edge.tolist(), closed=True, facecolor=colour, alpha=depth, edgecolor="none")


def draw(path: Path) -> None:
    torch.manual_seed(11)
    scores = torch.randn(1, N) * 1.6
    chosen = soft_topk(scores, K)
    figure = Figure(figsize=(10, 3.9), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    place = {j: (j + 0.5) * N / K for j in range(K)}
    filled = dict.fromkeys(range(K), 0.0)
    width = 4.4
    height = (scores[0] - scores.min()) / (scores.max() - scores.min())
    for i in sorted(range(N), key=lambda i: i):
        slot, weight = int(chosen.slots[0, i]), float(chosen.weights[0, i])
        won = int(chosen.winners[0, slot]) == i
        start = place[slot] - width / 2 + filled[slot] * width
        filled[slot] += weight
        bottom = (start, start + weight * width)
        axes.add_patch(ribbon((i + 0.2, i + 0.8), bottom, COLOURS[slot], 0.85 if won else 0.28))
        bar = FancyBboxPatch(
            (i + 0.2, 3.0), 0.6, 0.15 + 1.25 * float(height[i]), boxstyle="round,pad=0,rounding_size=0.08"
        )
        bar.set(facecolor=COLOURS[slot], alpha=1.0 if won else 0.45, edgecolor="none")
        axes.add_patch(bar)
    for slot in range(K):
        winner = int(chosen.winners[0, slot])
        box = FancyBboxPatch((place[slot] - width / 2, 0.62), width, 0.38, boxstyle="round,pad=0,rounding_size=0.1")
        box.set(facecolor=COLOURS[slot], edgecolor="none")
        axes.add_patch(box)
        share = float(chosen.weights[0, winner])
        label = {"ha": "center", "va": "center"}
        axes.text(
            place[slot], 0.8, f"{share:.0%} of token {winner}", color="white", fontsize=9.5, fontweight="bold", **label
        )
    axes.text(-0.3, 3.7, f"{N} scored\ntokens", ha="right", va="center", color=INK, fontsize=11)
    axes.text(-0.3, 2.0, "tournament", ha="right", va="center", color=PALE, fontsize=11)
    axes.text(-0.3, 0.8, f"{K} slots,\nin order", ha="right", va="center", color=INK, fontsize=11)
    axes.set(xlim=(-3.4, N + 0.3), ylim=(0.45, 4.6))
    axes.axis("off")
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
