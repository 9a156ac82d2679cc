"""The command `pyramidion compact`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyramidion.cli.screen import refuse

if TYPE_CHECKING:
    from torch import Tensor

FARTHEST = 0.1  # relative distance of logits beyond which something is wrong: it is about 0.004 in trained models
TOKENS, WRITTEN = 1024, 64  # of the sample: what is read, and how much of it is given as written


def compact(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a model.")],
    output: Annotated[Path, typer.Option(help="Folder to write to: a new or an empty one.")],
) -> None:
    """Write a model in a quarter of the space: weights of 8 bits with a scale for each row.

    The folder is used like any other. The other files of the model's folder go along, subfolders do not. Then both
    models read a text, and their logits are compared. Exit code 1: these are too far apart; 2: a wrong call.

    Example: pyramidion compact runs/mine/model --output mine-small
    """
    from transformers.utils import logging

    from pyramidion.compact import compact as write

    logging.disable_progress_bar()
    try:
        done = write(model, output)
        typer.echo(f"before   {done.before / 1e6:9.2f} MB of weights")
        typer.echo(f"after    {done.after / 1e6:9.2f} MB, {done.before / done.after:.1f} times smaller")
        typer.echo(f"weights  {done.error:9.2%} relative error; most, {done.worst[1]:.2%}, in {done.worst[0]}")
        near = _compare(model, output)
    except (ValueError, OSError) as error:
        refuse(str(error))
    raise typer.Exit(0 if near else 1)


def _compare(before: Path, after: Path) -> bool:
    """Let both models read a text, and say how far apart their logits are."""
    from pyramidion.compact import distance

    inputs = _sample(before)
    far, same = distance(_load(before), _load(after), **inputs)
    where = f"reading {inputs['input_ids'].shape[1]:,} tokens; at most {FARTHEST:.0%} is expected"
    typer.echo(f"logits   {far:9.2%} relative distance, {where}")
    typer.echo(f"likeliest{same:9.2%} the same")
    return far <= FARTHEST


def _load(folder: Path) -> Any:
    """Load a model as what it is."""
    import json

    from pyramidion import modeling_pyramidion as modeling

    named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or [None]
    if named[0] not in modeling.__all__:
        raise ValueError(f"`MODEL` must name its class in config.json, to be compared, got {named[0]!r}.")
    return getattr(modeling, named[0]).from_pretrained(folder, local_files_only=True, dtype="float32")


def _sample(folder: Path) -> dict[str, Tensor]:
    """Take the tokens of a text that comes with the package, or some at random where there is no tokenizer."""
    from importlib.resources import files

    import torch
    from transformers import PreTrainedTokenizerFast

    from pyramidion.configuration_pyramidion import PyramidionConfig

    config = PyramidionConfig.from_pretrained(folder, local_files_only=True)
    if (folder / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        text = (files("pyramidion") / "assets" / "document.txt").read_text(encoding="utf-8")
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:TOKENS])
    else:
        tokens = torch.randint(config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens.clamp(max=config.vocab_size - 1).unsqueeze(0)}  # [1 n]
    return inputs | {"decoder_input_ids": inputs["input_ids"][:, :WRITTEN]}
