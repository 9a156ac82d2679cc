"""Show what was counted: tables that fit 100 columns, and the same for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyramidion.complexity.claims import Claim, claims
from pyramidion.complexity.cost import DECODER, ENCODER, PARTS, Cost, Generation, count, count_generation
from pyramidion.complexity.fitting import Fit, Suggestion, fit
from pyramidion.complexity.need import Need, training_need
from pyramidion.complexity.parameters import parameters
from pyramidion.complexity.sizes import EncoderSizes, encoder_sizes, memory_length
from pyramidion.complexity.table import Sizes, TableRow, table
from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.presets import preset

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COUNTED = (
    "Multiplied: in a forward pass; each is two floating-point operations. Kept: bytes held for the backward pass in "
    "{precision}, with fused attention. The last block of a document is computed whole, and the decoder's "
    "self-attention with its masked half."
)
TWICE = "Ours counts both products of attention, the paper one: where they agree, ours is twice the formula."
PRECISIONS = {2: "bfloat16 autocast", 4: "float32"}


@dataclass(frozen=True)
class Question:
    """What is asked: presets, one or two to compare, of which size, and what else to show.

    memory  bytes into which the first preset should fit
    """

    presets: tuple[str, ...] = ()
    length: int | None = None
    target: int = 512
    batch: int = 1
    bytes: int = 2
    table: bool = False
    claims: bool = False
    memory: int | None = None

    def accounts(self) -> list[Account]:
        """Count each preset."""
        return [self._account(name, preset(name)) for name in self.presets]

    def _account(self, name: str, config: PyramidionConfig) -> Account:
        sizes: dict[str, Any] = {"length": self.length, "target": self.target, "batch": self.batch}
        return Account(
            name,
            self,
            encoder_sizes(config, self.length),
            parameters(config),
            count(config, bytes=self.bytes, **sizes),
            count_generation(config, **sizes),
            training_need(config, bytes=self.bytes, **sizes),
        )

    def fitted(self) -> tuple[Fit, int, int] | None:
        """Find what fits, into how many bytes and for how many tokens."""
        if self.memory is None:
            return None
        config = preset(self.presets[0])
        length = config.entering[0] if self.length is None else self.length
        found = fit(config, self.memory, length, batch=self.batch, bytes=self.bytes, target=self.target)
        return found, self.memory, length


@dataclass(frozen=True)
class Account:
    """Everything that is counted of one preset."""

    name: str
    asked: Question
    sizes: list[EncoderSizes]
    parameters: int
    cost: Cost
    generation: Generation
    need: Need

    @property
    def memory(self) -> int:
        """Count what the decoder attends to."""
        return memory_length(self.sizes)

    @property
    def title(self) -> str:
        """Say what was counted."""
        lengths = " → ".join(map(str, dict.fromkeys([*(size.n for size in self.sizes), self.sizes[-1].kept])))
        documents = f"{self.asked.batch} document{'s' * (self.asked.batch > 1)} of {lengths} representations"
        return f"{self.name}: {documents}, target {self.asked.target}; {self.parameters / 1e6:.1f}M parameters"


def answer(asked: Question) -> Iterator[RenderableType]:
    """Show all that is asked, one thing after the other."""
    if accounts := asked.accounts():
        yield from (one.title for one in accounts)
        yield from (rich_parts(accounts), rich_layers(accounts), rich_use(accounts))
    if found := asked.fitted():
        yield rich_fit(*found)
    if asked.table:
        yield rich_table_1(table(), Sizes())
    if asked.claims:
        yield rich_claims(claims())


def answer_data(asked: Question) -> dict[str, Any]:
    """Give all that is asked, ready for JSON."""
    data: dict[str, Any] = {"presets": [account_data(one) for one in asked.accounts()]}
    if found := asked.fitted():
        data["fit"] = fit_data(found[0])
    if asked.table:
        data["table"] = {"sizes": asdict(Sizes()), "rows": [asdict(row) for row in table()]}
    if asked.claims:
        data["claims"] = [asdict(claim) for claim in claims()]
    return data


def number(value: float) -> str:
    """Write multiplications with three digits that count: 950, 1.23 k, 45.6 G, 7,890 T."""
    return _scaled(value, 1000, ("", " k", " M", " G", " T"))


def size(value: float) -> str:
    """Write bytes with three digits that count: 12 B, 1.23 KiB, 45.6 GiB."""
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    step = 0
    while abs(value) >= 999.5 and step < len(units) - 1:
        value, step = value / base, step + 1
    whole = step == 0 or value >= 99.95
    return (f"{value:,.0f}" if whole else f"{value:#.3g}") + units[step]


def ratio(first: float, second: float) -> str:
    """Write how many times as much the second is."""
    if not first or not second:
        return ""
    return f"{second / first:.2f}×" if second < 9.995 * first else f"{second / first:#.3g}×"


# --------------------------------------------------------------------------------------------------------------------
# What a model costs
# --------------------------------------------------------------------------------------------------------------------


def rich_parts(accounts: Sequence[Account]) -> Table:
    """Lay the parts of one model out, or of two beside each other."""
    caption = COUNTED.format(precision=PRECISIONS[accounts[0].asked.bytes])
    if len(accounts) > 1:
        caption += f" Ratio: how many times as much {accounts[1].name} takes."
    laid = _table(["part", *_headings(accounts, "multiplied"), *_headings(accounts, "kept")], caption)
    for part in PARTS:
        costs = [one.cost.of(part) for one in accounts]
        if any(cost.rows for cost in costs):
            laid.add_row(part, *_cells(costs), end_section=part == PARTS[-1])
    for label, parts in (("the encoder", ENCODER), ("the decoder", DECODER), ("all", PARTS)):
        laid.add_row(label, *_cells([one.cost.of(*parts) for one in accounts]), style="bold")
    return laid


def rich_layers(accounts: Sequence[Account]) -> Table:
    """Lay the layers out, each with how many representations enter it; the decoder's are all alike."""
    entering = [f"enter\n{_broken(one.name)}" if len(accounts) > 1 else "enter" for one in accounts]
    headings = ["layer", *entering, *_headings(accounts, "multiplied"), *_headings(accounts, "kept")]
    laid = _table(headings)
    for layer in range(1, max(len(one.sizes) for one in accounts) + 1):
        entered = [str(one.sizes[layer - 1].n) if layer <= len(one.sizes) else "" for one in accounts]
        costs = [one.cost.of(*ENCODER, layer=layer) for one in accounts]
        laid.add_row(f"encoder {layer}", *entered, *_cells(costs))
    costs = [one.cost.of(*DECODER, layer=1) for one in accounts]
    laid.add_row("decoder, each", *(str(one.memory) for one in accounts), *_cells(costs))
    return laid


def rich_use(accounts: Sequence[Account]) -> Table:
    """Lay out what writing a text and a step of training take."""
    laid = _table(["use", *(_broken(one.name) for one in accounts), *(["ratio"] if len(accounts) > 1 else [])])

    def add(label: str, write: Callable[[float], str], values: list[float], **style: Any) -> None:
        laid.add_row(label, *map(write, values), *([ratio(*values)] if len(values) > 1 else []), **style)

    target = accounts[0].asked.target
    add("writing: once, encoder and memory", number, [one.generation.once.multiplications for one in accounts])
    add(f"writing: a token, of {target} on average", number, [one.generation.per_token for one in accounts])
    add(f"writing: {target} tokens", number, [one.generation.multiplications for one in accounts], end_section=True)
    for field, label in NEEDS.items():
        add(f"training: {label}", size, [getattr(one.need, field) for one in accounts])
    add("training: all", size, [one.need.total for one in accounts], style="bold")
    return laid


NEEDS = {
    "state": "weights, gradients, Adam's moments",
    "cast": "weights in bfloat16",
    "activations": "activations",
    "passing": "around the loss, or in one layer",
    "margin": "margin, 10 % and 1 GiB",
}


def _headings(accounts: Sequence[Account], what: str) -> list[str]:
    if len(accounts) == 1:
        return [what]
    return [*(f"{what}\n{_broken(one.name)}" for one in accounts), "ratio"]


def _broken(name: str) -> str:
    return name if len(name) <= 10 else name.replace("-", "-\n")


def _cells(costs: Sequence[Cost]) -> list[str]:
    cells = []
    for key, write in (("multiplications", number), ("bytes", size)):
        values = [getattr(cost, key) for cost in costs]
        cells += [write(value) if value else "" for value in values]
        cells += [ratio(*values)] if len(values) == 2 else []
    return cells


# --------------------------------------------------------------------------------------------------------------------
# What the paper says, and what fits
# --------------------------------------------------------------------------------------------------------------------


def rich_table_1(rows: Sequence[TableRow], sizes: Sizes) -> Table:
    """Lay the paper's Table 1 out, with numbers, and what this library's models multiply beside it."""
    letters = f"l = {sizes.layers}, n = {sizes.n}, d = {sizes.d}, m = {sizes.m}, t = {sizes.t}, k = {sizes.k}"
    caption = f"{letters}. {TWICE}"
    caption += "".join(f"\n{row.model}: {row.note}." for row in rows if row.note)
    laid = _table(["model", "self-attention", "value", "ours", "cross-attention", "value", "ours"], caption)
    for row in rows:
        cross = [row.cross_attention or "—", row.cross_value, row.cross_counted if row.cross_attention else None]
        cells = [row.self_attention, row.self_value, row.self_counted, *cross]
        laid.add_row(row.model, *(cell if isinstance(cell, str) else number(cell) if cell else "" for cell in cells))
    return laid


def rich_claims(found: Sequence[Claim]) -> Table:
    """Lay the paper's claims out, each with ours and with the other ways to read it."""
    laid = _table(["claim, and how it is counted", "paper", "counted", "verdict"])
    laid.columns[0].no_wrap = False
    for claim in found:
        said = f"[bold]{claim.said}[/]\n{claim.how}" + f"\n[italic]{claim.why}[/]" * bool(claim.why)
        verdict = "agrees" if claim.agrees else "[red]differs[/]"
        laid.add_row(said, _figure(claim.stated), _figure(claim.counted), verdict, end_section=not claim.readings)
        for index, (reading, value) in enumerate(claim.readings, 1):
            laid.add_row(f"  {reading}", "", _figure(value), "", style="dim", end_section=index == len(claim.readings))
    return laid


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:.4g}"


def rich_fit(found: Fit, memory_bytes: int, length: int) -> Table:
    """Lay out which lengths fit, or what the least would need."""
    fits = "which fits" if found.given.total <= memory_bytes else "which does not fit"
    caption = f"As it is, the model needs {size(found.given.total)} for {length:,} tokens, {fits}; "
    caption += f"it could be trained on documents of up to {found.longest:,} tokens."
    if not found.suggestions:
        caption = f"Nothing fits into {size(memory_bytes)}: the lengths above need least. {caption}"
    laid = _table(["lengths that leave the layers", "each pools", "needs", "multiplied"], caption)
    laid.columns[0].no_wrap = False
    for one in found.suggestions or [found.smallest]:
        moved = f", {one.earlier} layer{'s' * (one.earlier > 1)} earlier" if one.earlier else ""
        pools = f"to 1/{one.factor}{moved}" if one.factor > 1 else "nothing"
        laid.add_row(", ".join(map(str, one.lengths)), pools, size(one.need.total), number(one.multiplications))
    return laid


def _table(headings: Sequence[str], caption: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    laid = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for index, heading in enumerate(headings):
        laid.add_column(heading, justify="right" if index else "left", no_wrap=True, vertical="top")
    return laid


# --------------------------------------------------------------------------------------------------------------------
# The same for machines
# --------------------------------------------------------------------------------------------------------------------


def account_data(one: Account) -> dict[str, Any]:
    """Give all that was counted of a preset, ready for JSON."""
    return {
        "preset": one.name,
        "length": one.sizes[0].n,
        "entering": [size.n for size in one.sizes],
        "memory_length": one.memory,
        "target": one.asked.target,
        "batch": one.asked.batch,
        "bytes": one.asked.bytes,
        "parameters": one.parameters,
        "multiplications": one.cost.multiplications,
        "products": one.cost.products,
        "activation_bytes": one.cost.bytes,
        "rows": [row._asdict() for row in one.cost.rows],
        "generation": {
            "once": one.generation.once.multiplications,
            "per_token": one.generation.per_token,
            "all": one.generation.multiplications,
        },
        "training": need_data(one.need),
    }


def need_data(need: Need) -> dict[str, int]:
    """Give what training needs, ready for JSON."""
    return {**asdict(need), "margin": need.margin, "total": need.total}


def fit_data(found: Fit) -> dict[str, Any]:
    """Give what fits, ready for JSON."""

    def data(one: Suggestion) -> dict[str, Any]:
        shape = {"encoder_lengths": one.lengths, "factor": one.factor, "earlier": one.earlier}
        return {**shape, "multiplications": one.multiplications, "need": need_data(one.need)}

    return {
        "suggestions": [data(one) for one in found.suggestions],
        "smallest": data(found.smallest),
        "given": need_data(found.given),
        "longest": found.longest,
    }
