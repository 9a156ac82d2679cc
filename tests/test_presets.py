"""The paper's models by name: lengths and figures as printed, parameters, and models that learn and ignore padding."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from pyramidion.cli import main
from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration
from pyramidion.presets import PRESETS, Preset, find, preset

# Read off the paper: family, attention, what enters, what leaves each encoder layer, what the decoder attends to.
PRINTED: dict[int, tuple[str, str, int, list[int], int]] = {
    1: ("vanilla", "full", 512, [512, 512], 512),
    2: ("vanilla", "full", 2048, [2048, 2048], 2048),
    3: ("vanilla", "full", 8192, [8192, 8192], 8192),
    4: ("blockwise", "block 512", 2048, [2048, 2048], 2048),
    5: ("blockwise", "block 512", 8192, [8192, 8192], 8192),
    6: ("transpooler", "block 512", 2048, [2048, 512], 512),
    7: ("transpooler", "block 512", 8192, [8192, 512], 512),
    8: ("transpooler", "block 512", 8192, [8192, 2048], 2048),
    9: ("lsh", "lsh", 512, [512, 512], 512),
    10: ("lsh", "lsh", 2048, [2048, 2048], 2048),
    11: ("lsh", "lsh", 8192, [8192, 8192], 8192),
    12: ("efficient", "efficient", 512, [512, 512], 512),
    13: ("efficient", "efficient", 2048, [2048, 2048], 2048),
    14: ("efficient", "efficient", 8192, [8192, 8192], 8192),
    15: ("power", "block 512", 2048, [1024, 512], 512),
    16: ("power", "block 512", 8192, [2048, 512], 512),
    17: ("power", "block 512", 8192, [4096, 2048], 2048),
    18: ("funnel", "block 512", 2048, [512, 512], 2048),
    19: ("funnel", "block 512", 8192, [512, 512], 8192),
    20: ("funnel", "block 512", 8192, [2048, 2048], 8192),
    21: ("pyramidion", "block 512", 8192, [2048, 512], 512),
    22: ("pyramidion", "block 512", 8192, [8192, 2048, 512], 512),
    23: ("pyramidion", "block 512", 8192, [8192, 2048, 512, 128], 128),
    24: ("pyramidion", "block 512", 8192, [8192, 4096, 2048], 2048),
    25: ("transpooler", "block 512", 8192, [8192, 2048], 2048),
    26: ("transpooler", "block 512", 8192, [8192, 8192, 2048], 2048),
    27: ("blockwise", "block 128", 2048, [2048, 2048], 2048),
    28: ("blockwise", "block 512", 2048, [2048, 2048], 2048),
    29: ("vanilla", "full", 2048, [2048, 2048], 2048),
    30: ("transpooler", "block 128", 2048, [2048, 512], 512),
    31: ("transpooler", "block 512", 2048, [2048, 512], 512),
    32: ("transpooler", "full", 2048, [2048, 512], 512),
}
POOLING = {"transpooler": "soft", "pyramidion": "soft", "power": "power", "funnel": "funnel"}
ALIASES = {"row-25": "row-8", "row-28": "row-4", "row-29": "row-2", "row-31": "row-6", "scorer-linear": "row-6"}
OTHERS = ["deep-blockwise", "deep-pyramidion"]
OTHERS += ["tiny-pyramidion", "small-blockwise", "small-transpooler", "small-pyramidion"]
SCORERS = ["linear", "nonlinear", "random", "index", "embedding", "power", "mean-pooling", "max-pooling"]
NAMES = [*(f"row-{row}" for row in range(1, 33)), *(f"scorer-{name}" for name in SCORERS), *OTHERS]
MODELS = [name for name in NAMES if name not in ALIASES]


# --------------------------------------------------------------------------------------------------------------------
# What the paper prints
# --------------------------------------------------------------------------------------------------------------------


def test_names_are_these():
    assert list(PRESETS) == NAMES
    assert [name for name, one in PRESETS.items() if one.name == name] == MODELS


@pytest.mark.parametrize("row", PRINTED)
def test_a_row_is_the_papers(row: int):
    family, attention, entering, leaving, memory = PRINTED[row]
    one, config = PRESETS[f"row-{row}"], preset(f"row-{row}")
    assert one.family == family
    blocks = f"block {config.block_size}" if config.attention == "blockwise" else config.attention
    assert blocks == attention
    assert (config.entering[0], config.encoder_lengths, config.memory_length) == (entering, leaving, memory)
    assert {pooling.kind for pooling in config.poolings.values()} == ({POOLING[family]} if family in POOLING else set())
    assert {pooling.scorer for pooling in config.poolings.values()} <= {"linear", None}
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32768, 512, 2048)
    assert (config.num_attention_heads, config.decoder_layers) == (8, 2)
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0.1, 0.1)
    assert config.activation_function == "relu"
    if family in ("lsh", "efficient"):
        assert (config.local_heads, config.bucket_size, config.num_hashes) == (2, 64, 4)


@pytest.mark.parametrize(
    ("name", "rouge1", "interval1", "rouge2", "interval2", "seconds"),
    [
        ("row-1", 28.1, (27.8, 28.3), 8.3, (8.1, 8.4), (0.13, 2.05, 4.23)),
        ("row-3", 41.8, (41.6, 42.1), 16.1, (15.9, 16.4), (4.46, 6.56, 13.27)),
        ("row-5", 41.9, (41.6, 42.1), 16.7, (16.5, 17.0), (0.85, 5.40, 11.49)),
        ("row-11", 35.7, (35.5, 36.0), 11.2, (11.1, 11.4), (1.69, 0.87, 13.41)),
        ("row-14", 35.0, (34.7, 35.2), 10.8, (10.7, 11.0), (0.82, 6.91, 13.75)),
        ("row-17", 42.0, (41.7, 42.3), 16.5, (16.3, 16.7), (2.06, 3.57, 6.92)),
        ("row-20", 42.0, (41.7, 42.2), 16.4, (16.2, 16.6), (1.53, 2.64, 5.25)),
        ("row-21", 31.1, (30.7, 31.6), 11.5, (11.3, 11.7), (1.07, 2.12, 4.18)),
        ("row-25", 42.7, (42.4, 43.0), 16.7, (16.5, 16.9), (1.26, 2.71, 5.51)),
        ("row-26", 43.1, (42.8, 43.3), 17.3, (17.0, 17.5), (1.74, 2.73, 5.54)),
        ("row-32", 37.1, (36.9, 37.4), 13.7, (13.5, 13.8), (0.82, 2.20, 4.49)),
        ("scorer-linear", 39.1, (38.9, 39.4), 14.6, (14.4, 14.8), (0.54, 2.09, 4.24)),
        ("scorer-random", 32.3, None, 11.4, None, (None, None, None)),
        ("scorer-max-pooling", 38.4, None, 14.2, None, (None, None, None)),
        ("deep-blockwise", 46.85, None, 19.39, None, (4.85, None, 37.15)),
        ("deep-pyramidion", 47.15, None, 19.99, None, (2.71, None, 8.12)),
    ],
)
def test_figures_are_the_papers(
    name: str, rouge1: float, interval1: Any, rouge2: float, interval2: Any, seconds: tuple[float | None, ...]
):
    paper = PRESETS[name].paper
    assert paper is not None
    assert (paper.rouge1, paper.rouge1_interval) == (rouge1, interval1)
    assert (paper.rouge2, paper.rouge2_interval) == (rouge2, interval2)
    assert (paper.train_s, paper.infer256_s, paper.infer512_s) == seconds
    assert paper.pubmed == ((47.81, 21.14) if name == "deep-pyramidion" else None)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("row")])
def test_figures_are_plausible(name: str):
    paper = PRESETS[name].paper
    assert paper is not None
    assert paper.rouge1_interval is not None
    assert paper.rouge2_interval is not None
    assert paper.rouge1_interval[0] < paper.rouge1 < paper.rouge1_interval[1]
    assert paper.rouge2_interval[0] < paper.rouge2 < paper.rouge2_interval[1]
    assert paper.infer256_s is not None
    assert paper.infer512_s is not None
    twice = 1.9 < paper.infer512_s / paper.infer256_s < 2.2
    assert twice != (name == "row-11"), "only row 11 has a time that cannot be"


@pytest.mark.parametrize(
    ("name", "pooling", "scorer", "rouge"),
    [
        ("linear", "soft", "linear", (39.1, 14.6)),
        ("nonlinear", "soft", "nonlinear", (38.9, 14.6)),
        ("random", "hard", "random", (32.3, 11.4)),
        ("index", "hard", "index", (38.2, 13.9)),
        ("embedding", "soft", "embedding", (37.6, 14.0)),
        ("power", "power", None, (36.9, 13.6)),
        ("mean-pooling", "mean", None, (38.1, 13.9)),
        ("max-pooling", "max", None, (38.4, 14.2)),
    ],
)
def test_scorers_are_the_ablations(name: str, pooling: str, scorer: str | None, rouge: tuple[float, float]):
    one, config = PRESETS[f"scorer-{name}"], preset(f"scorer-{name}")
    assert config.poolings == {1: (pooling, scorer, 512)}
    assert (config.encoder_lengths, config.attention, config.block_size) == ([2048, 512], "blockwise", 512)
    assert one.paper is not None
    assert (one.paper.rouge1, one.paper.rouge2) == rouge


def test_deep_pyramidion_is_the_default_configuration():
    named = preset("deep-pyramidion").to_dict()
    assert named == PyramidionConfig(scorer="linear").to_dict()
    assert preset("deep-pyramidion").poolings == PyramidionConfig().poolings
    assert preset("deep-blockwise").encoder_lengths == [8192] * 6
    assert preset("deep-blockwise").hidden_size == 768


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("row-11", "0.87"),
        ("row-21", "1.05"),
        ("row-15", "row 4"),
        ("row-17", "row 5"),
        ("row-18", "row 4"),
        ("row-20", "row 5"),
    ],
)
def test_slips_and_circumstances_are_noted(name: str, words: str):
    assert words in PRESETS[name].note
    assert words in PRESETS[name].description.replace("\n" + " " * 12, " ")


# --------------------------------------------------------------------------------------------------------------------
# Names
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_same_preset_and_says_so(alias: str, name: str):
    assert PRESETS[alias] is PRESETS[name]
    assert alias in PRESETS[name].aliases
    assert alias in PRESETS[alias].description.splitlines()[0]


def test_presets_without_aliases_have_none():
    assert {alias for one in PRESETS.values() for alias in one.aliases} == set(ALIASES)
    assert PRESETS["row-6"].aliases == ("row-31", "scorer-linear")


def test_settings_are_changed_for_one_configuration_only():
    config = preset("row-8", vocab_size=101, encoder_lengths=[8192, 1031])
    assert (config.vocab_size, config.encoder_lengths) == (101, [8192, 1031])
    preset("row-8").encoder_lengths.append(7)
    find("row-8").to_dict()["settings"]["encoder_lengths"].append(7)
    assert preset("row-8").encoder_lengths == [8192, 2048]
    with pytest.raises(TypeError):
        find("row-8").settings["vocab_size"] = 7  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("row_7", "row-7"),
        ("Row-12", "row-12"),
        ("7", "row-7"),
        ("scorer-max", "scorer-max-pooling"),
        ("deep-pyramid", "deep-pyramidion"),
        ("tiny", "tiny-pyramidion"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str):
    with pytest.raises(ValueError, match=rf"`name` must be .*got '{name}'\. Did you mean `{near}`\?$"):
        preset(name)


def test_a_name_like_no_other_is_refused_without_a_guess():
    with pytest.raises(ValueError, match=r"`pyramidion presets` lists, got 'qqq'\.$"):
        preset("qqq")


def test_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="`blocksize` is not a setting"):
        preset("row-8", blocksize=7)


# --------------------------------------------------------------------------------------------------------------------
# Parameters
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name: str):
    with torch.device("meta"):
        model = PyramidionForConditionalGeneration(preset(name))
    assert PRESETS[name].parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("row-1", 31.5),
        ("row-6", 31.5),
        ("row-9", 31.0),
        ("row-22", 34.6),
        ("row-23", 37.8),
        ("scorer-nonlinear", 31.8),
        ("deep-blockwise", 124.4),
        ("deep-pyramidion", 124.4),
        ("tiny-pyramidion", 0.3),
        ("small-pyramidion", 9.5),
    ],
)
def test_parameters_in_millions(name: str, millions: float):
    assert round(PRESETS[name].parameters / 1e6, 1) == millions


def test_parameters_by_hand():
    """Count the differences that the paper's models have: a direction to score by, and keys that are queries."""
    assert PRESETS["row-6"].parameters - PRESETS["row-4"].parameters == 512 + 1
    assert PRESETS["deep-pyramidion"].parameters - PRESETS["deep-blockwise"].parameters == 2 * (768 + 1)
    assert PRESETS["row-1"].parameters - PRESETS["row-9"].parameters == 2 * (512 + 1) * 512
    assert PRESETS["row-1"].parameters == PRESETS["row-14"].parameters == PRESETS["row-19"].parameters


# --------------------------------------------------------------------------------------------------------------------
# Models, shrunk
# --------------------------------------------------------------------------------------------------------------------

PRIMES = {8192: 127, 4096: 61, 2048: 29, 1024: 17, 512: 11, 256: 7, 128: 5, 64: 3, 32: 2}
VOCABULARY = 53


def shrunk(one: Preset, **changes: Any) -> PyramidionConfig:
    """Keep layers, pooling and attention, and make everything else small: lengths and blocks become primes."""
    config = one.config()
    changes = {
        "encoder_lengths": [PRIMES[length] for length in config.encoder_lengths],
        "input_length": None if config.input_length is None else PRIMES[config.input_length],
        "block_size": PRIMES[config.block_size],
        "bucket_size": PRIMES[config.bucket_size],
        "local_window": PRIMES[config.local_window],
        "vocab_size": VOCABULARY,
        "hidden_size": 30,
        "num_attention_heads": 3,
        "intermediate_size": 41,
        **changes,
    }
    return one.config(**changes)


def batch(longest: int) -> tuple[Tensor, Tensor]:
    """Make documents of four lengths, from `longest` to a single token, padded with tokens that must not be read."""
    lengths = torch.tensor([longest, 1, longest * 2 // 3, longest // 2 + 1])
    tokens = torch.randint(3, VOCABULARY, (4, longest))
    return tokens, (torch.arange(longest) < lengths.unsqueeze(1)).long()


@pytest.mark.parametrize("name", MODELS)
def test_shrinking_keeps_the_structure(name: str):
    full, small = preset(name), shrunk(PRESETS[name])
    assert {layer: pooling[:2] for layer, pooling in small.poolings.items()} == {
        layer: pooling[:2] for layer, pooling in full.poolings.items()
    }
    assert (small.attention, small.decoder_layers) == (full.attention, full.decoder_layers)
    assert small.memory_length == PRIMES[full.memory_length]


def is_indifferent(parameter: str) -> bool:
    """Tell a bias that is added to everything a softmax compares: its gradient is zero but for rounding."""
    compared = (".key.bias", ".scorer.linear.bias", ".scorer.outer.bias")
    return parameter.endswith(compared)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns(name: str):
    config = shrunk(PRESETS[name], dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    model = PyramidionForConditionalGeneration(config).double().train()
    tokens, mask = batch(config.entering[0])
    labels = torch.randint(3, VOCABULARY, (4, 7))
    outputs = model(tokens, mask, labels=labels)
    outputs.loss.backward()

    assert outputs.logits is None, "training does not hold them all"
    assert model(tokens, mask, labels=labels, output_logits=True).logits.shape == (4, 7, VOCABULARY)
    assert outputs.encoder_last_hidden_state.shape == (4, config.memory_length, 30)
    for parameter, value in model.named_parameters():
        assert value.requires_grad, parameter
        assert value.grad is not None, parameter
        assert value.grad.isfinite().all(), parameter
        assert (value.grad.abs().max() < 1e-12) == is_indifferent(parameter), parameter


@pytest.mark.parametrize("name", MODELS)
def test_a_document_is_read_alone_in_any_batch(name: str):
    model = PyramidionForConditionalGeneration(shrunk(PRESETS[name])).eval()
    tokens, mask = batch(model.config.entering[0])
    written = torch.randint(3, VOCABULARY, (4, 7))
    with torch.no_grad():
        together = model(tokens, mask, decoder_input_ids=written)
        for row, length in enumerate(mask.sum(1).tolist()):
            alone = model(tokens[row : row + 1, :length], decoder_input_ids=written[row : row + 1])
            torch.testing.assert_close(together.logits[row], alone.logits[0], atol=1e-5, rtol=0)
            kept = min(length, model.config.memory_length)
            assert alone.encoder_last_hidden_state.shape[1] == kept
            assert together.memory_mask[row].tolist() == [True] * kept + [False] * (model.config.memory_length - kept)


# --------------------------------------------------------------------------------------------------------------------
# In words
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("row-1", "512 → 512, 512"),
        ("row-8", "8192 → 8192, 2048"),
        ("row-15", "2048 → 1024, 512"),
        ("row-20", "8192 → 2048, 2048 → 8192"),
        ("row-23", "8192 → 8192, 2048, 512, 128"),
        ("deep-blockwise", "8192 → 8192×6"),
        ("deep-pyramidion", "8192 → 8192×2, 2048, 512×3"),
        ("small-pyramidion", "4096 → 4096, 1024, 256×2"),
    ],
)
def test_lengths_are_written_briefly(name: str, lengths: str):
    assert PRESETS[name].lengths == lengths


def test_a_description_tells_what_it_is_what_the_paper_got_and_how_to_run_it():
    assert PRESETS["row-8"].description.splitlines() == [
        "row-8 (transpooler), also called row-25",
        "",
        "One trainable selection, behind the last encoder layer: the decoder attends to what it keeps.",
        "",
        "lengths     8192 tokens enter, 8192 and 2048 leave the encoder layers, the decoder attends to 2048",
        "attention   blockwise, blocks of 512",
        "pooling     soft by linear scores behind layer 2",
        "size        2 encoder and 2 decoder layers, width 512, 8 heads, vocabulary 32768",
        "parameters  31,490,561",
        "paper       ROUGE-1 42.7 (42.4 to 43.0), ROUGE-2 16.7 (16.5 to 16.9) on arXiv, validation",
        "            1.26 s to train on 64 documents, 2.71 s and 5.51 s to write 256 and 512 tokens for 8, on A100s",
        "",
        "Python      from pyramidion import PyramidionForConditionalGeneration, preset",
        '            model = PyramidionForConditionalGeneration(preset("row-8"))',
        "shell       pyramidion complexity --preset row-8",
    ]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("row-19", "512 and 512 leave the encoder layers, the decoder attends to 8192 again"),
        ("row-19", "funnel behind layer 1"),
        ("row-10", "lsh, buckets of 64, 4 hashes, 2 heads of windows of 128"),
        ("row-13", "efficient, 2 heads of windows of 128"),
        ("row-32", "attention   full"),
        ("scorer-index", "hard by index scores behind layer 2"),
        ("scorer-index", "ROUGE-1 38.2, ROUGE-2 13.9 on arXiv, validation"),
        ("deep-pyramidion", "soft by linear scores behind layers 3 and 4"),
        ("deep-pyramidion", "ROUGE-1 47.81, ROUGE-2 21.14 on PubMed, test"),
        ("deep-pyramidion", "2.71 s to train on 64 documents, 8.12 s to write 512 tokens for 8, on A100s"),
        ("small-blockwise", "paper       not in it"),
    ],
)
def test_a_description_tells_what_is_special(name: str, told: str):
    assert told in PRESETS[name].description


@pytest.mark.parametrize("name", MODELS)
def test_a_description_is_complete_and_fits(name: str):
    one = PRESETS[name]
    text = one.description
    assert max(map(len, text.splitlines())) <= 110
    assert f"{one.parameters:,}" in text
    assert one.summary in text
    assert f'(preset("{name}"))' in text
    if one.paper is not None:
        assert f"ROUGE-1 {one.paper.rouge1}" in text
        assert f"ROUGE-2 {one.paper.rouge2}" in text
        assert one.paper.train_s is None or f"{one.paper.train_s:.2f} s to train" in text


def test_the_python_in_a_description_runs():
    lines = [
        line[12:]
        for line in PRESETS["tiny-pyramidion"].description.splitlines()
        if "Python" in line or "model =" in line
    ]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert isinstance(names["model"], PyramidionForConditionalGeneration)


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    """Run the command and return what it printed."""
    result = CliRunner().invoke(main, ["presets", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_lists_all_in_120_columns():
    lines = run().splitlines()
    assert max(map(len, lines)) <= 120
    rows = {line.split()[0]: " ".join(line.split()) for line in lines if line.strip()}
    assert [name for name in rows if name in NAMES] == NAMES
    assert not any("…" in line for line in lines)
    for row in (
        "row-8 transpooler 8192 → 8192, 2048 block 512 soft linear 31.5M 42.7 16.7 1.26 2.71 5.51",
        "row-25 = row-8",
        "row-3 vanilla 8192 → 8192, 8192 full 31.5M 41.8 16.1 4.46 6.56 13.27",
        "scorer-linear = row-6",
        "deep-pyramidion pyramidion 8192 → 8192×2, 2048, 512×3 block 512 soft linear 124.4M 47.15 19.99 2.71 8.12",
        "small-blockwise blockwise 4096 → 4096×4 block 256 9.5M",
    ):
        assert rows[row.split()[0]] == row


def test_the_columns_stand_under_their_titles():
    header, *lines = run().splitlines()
    (deep,) = (line for line in lines if line.startswith("deep-pyramidion"))
    for title, cell in {"R-1": "47.15", "R-2": "19.99", "train": "2.71", "@512": "8.12"}.items():
        assert header.index(title) + len(title) == deep.index(cell) + len(cell)


@pytest.mark.parametrize("name", ["row-8", "row-25"])
def test_the_command_describes_one(name: str):
    assert run(name).rstrip("\n") == PRESETS["row-8"].description


def test_the_command_prints_json():
    every = json.loads(run("--json"))
    assert list(every) == MODELS
    assert {alias: name for name, one in every.items() for alias in one["aliases"]} == ALIASES
    row = every["row-20"]
    assert (row["lengths"], row["memory_length"], row["parameters"]) == ([8192, 2048, 2048], 8192, 31_490_048)
    assert row["paper"]["rouge1_interval"] == [41.7, 42.2]
    assert every["tiny-pyramidion"]["paper"] is None
    assert json.loads(run("row-31", "--json")) == every["row-6"]
    for name, one in every.items():
        assert PyramidionConfig(**one["settings"]).to_dict() == preset(name).to_dict()


def test_the_command_refuses_an_unknown_name():
    result = CliRunner().invoke(main, ["presets", "row-77"])
    assert result.exit_code == 2
    assert result.stderr.startswith("pyramidion: `name` must be")
    assert "Did you mean `row-7`?" in result.stderr
    assert result.stdout == ""


def test_help_teaches_by_an_example():
    assert "Example: pyramidion presets row-8" in run("--help")
