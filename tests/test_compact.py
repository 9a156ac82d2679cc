"""Compact models: rows rounded as they should be, loaded by every class, refused where damaged, written whole."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, GenerationConfig
from typer.testing import CliRunner

from pyramidion import compact as room
from pyramidion.cli import main
from pyramidion.compact import FILE, ByteMatrix, compact, dequantize, distance, expand, find, quantize
from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.evaluation.run import fingerprint
from pyramidion.generation import Summarizer, engine, loop, step, summarizer
from pyramidion.modeling_pyramidion import (
    PyramidionEncoderModel,
    PyramidionEncoderOutput,
    PyramidionForConditionalGeneration,
    PyramidionForSequenceClassification,
    PyramidionModel,
)
from pyramidion.presets import preset
from pyramidion.training.recipe import read_recipe
from test_generation import TEXTS, write_model

HEADER = {"format": "pyramidion-int8-v1"}


# --------------------------------------------------------------------------------------------------------------------
# Rows of whole numbers
# --------------------------------------------------------------------------------------------------------------------


def reference(weight: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Round a matrix of float32 row by row, as the docstring says: numbers, and scales."""
    numbers, scales = np.zeros(weight.shape), np.zeros(len(weight), dtype=np.float32)
    for place, row in enumerate(weight):
        scales[place] = max((abs(value) for value in row), default=np.float32(0)) / np.float32(127)
        if scales[place] > 0:
            numbers[place] = np.rint(row / scales[place])
    return numbers, scales


SHAPES = [(1, 7), (7, 1), (1, 1), (5, 3), (31, 257), (3, 0), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30], ids=str)
def test_rows_are_rounded_as_a_plain_loop_does(shape: tuple[int, int], size: float):
    weight = torch.randn(shape) * size
    numbers, scale = quantize(weight)
    expected, scales = reference(weight.numpy())
    assert (numbers.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert np.array_equal(numbers.numpy(), expected)
    np.testing.assert_allclose(scale.numpy(), scales, rtol=1e-6)
    np.testing.assert_allclose(dequantize(numbers, scale).numpy(), expected * scales[:, None], rtol=1e-6)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if all(shape)], ids=str)
def test_nothing_is_off_by_more_than_half_a_step_of_its_own_row(shape: tuple[int, int]):
    weight = torch.randn(shape) * torch.logspace(-20, 20, shape[0])[:, None]
    numbers, scale = quantize(weight)
    assert ((dequantize(numbers, scale) - weight).abs() <= 0.5001 * scale[:, None]).all()
    assert (numbers.abs().amax(1) == 127).all(), "a row uses all of its range"


def test_rows_of_zeros_and_of_one_value():
    weight = torch.tensor([[0.0, 0.0, 0.0], [-3.0, -3.0, -3.0], [1e-44, 0.0, -1e-44], [0.5, 0.25, 0.0]])
    numbers, scale = quantize(weight)
    assert numbers[0].tolist() == [0, 0, 0]
    assert scale[0] == 0
    assert numbers[1].tolist() == [-127, -127, -127]
    torch.testing.assert_close(dequantize(numbers, scale), weight, rtol=0, atol=0.5 / 254)
    assert dequantize(numbers, scale)[0].tolist() == [0.0, 0.0, 0.0]
    assert room._numbers(weight, scale).isfinite().all(), "nothing is divided by 0"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_are_rounded_in_float32(dtype: torch.dtype):
    weight = torch.randn(5, 11).to(dtype)
    assert all(map(torch.equal, quantize(weight), quantize(weight.float())))


def test_what_was_rounded_once_is_not_changed_again():
    once = dequantize(*quantize(torch.randn(40, 33)))
    torch.testing.assert_close(dequantize(*quantize(once)), once, rtol=1e-6, atol=0)


# --------------------------------------------------------------------------------------------------------------------
# A folder
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model as training does, with files around it."""
    folder = write_model(tmp_path_factory.mktemp("source") / "model")
    (folder / "README.md").write_text("what it is\n")
    (folder / "manifest.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"pickle")
    (folder / ".hidden").write_text("")
    (folder / "evaluation-val").mkdir()
    (folder / "evaluation-val" / "scores.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def small(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compact(source, tmp_path_factory.mktemp("small") / "deep" / "folder").folder


def same_weights(one: Any, other: Any) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def rounded(model: Any) -> Any:
    """Round the matrices of a model in place, by the plain loop."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                numbers, scales = reference(weight.numpy())
                weight.copy_(torch.from_numpy(numbers.astype(np.float32) * scales.astype(np.float32)[:, None]))
    return model


def test_a_folder_has_what_the_models_has_but_for_weights(source: Path, small: Path):
    kept = {"README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in small.iterdir()} == {*kept, FILE}
    assert all((small / name).read_bytes() == (source / name).read_bytes() for name in kept)
    assert os.stat(small / FILE).st_mode & 0o777 == os.stat(small / "README.md").st_mode & 0o777
    assert not list(small.parent.glob(".*"))


def test_the_file_holds_each_table_once_matrices_as_bytes_and_the_others_as_they_were(source: Path, small: Path):
    before = load_file(source / "model.safetensors")
    with safe_open(small / FILE, framework="pt") as opened:
        assert opened.metadata() == HEADER
        after = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    matrices = {name for name, weight in before.items() if weight.ndim == 2}
    assert after.keys() == before.keys() | {f"{name}.scale" for name in matrices}
    assert sum(weight.numel() == 300 * 32 for weight in after.values()) == 1, "the shared table"
    for name, weight in before.items():
        assert after[name].dtype == (torch.int8 if name in matrices else torch.float32)
        assert after[name].shape == weight.shape
        assert name in matrices or torch.equal(after[name], weight)


def test_sizes_and_errors_are_told(source: Path, small: Path, tmp_path: Path):
    told = compact(source, tmp_path / "again")
    assert (told.before, told.after) == ((source / "model.safetensors").stat().st_size, (small / FILE).stat().st_size)
    before, after = load_file(source / "model.safetensors"), expand(small / FILE)
    matrices = [name for name, weight in before.items() if weight.ndim == 2]
    lost = {name: ((after[name] - before[name]).norm() / before[name].norm()).item() for name in matrices}
    assert told.worst[0] == max(lost, key=lambda name: lost[name])
    assert told.worst[1] == pytest.approx(max(lost.values()), rel=1e-4)
    flat = [torch.cat([part[name].double().flatten() for name in matrices]) for part in (before, after)]
    assert told.error == pytest.approx(((flat[1] - flat[0]).norm() / flat[0].norm()).item(), rel=1e-6)
    assert 0.002 < told.error < 0.01


def test_a_model_in_memory_gives_the_same_file(source: Path, small: Path, tmp_path: Path):
    model = PyramidionForConditionalGeneration.from_pretrained(source)
    folder = compact(model, str(tmp_path / "memory")).folder
    assert (folder / FILE).read_bytes() == (small / FILE).read_bytes()
    assert {path.name for path in folder.iterdir()} == {FILE, "config.json", "generation_config.json"}


def test_tables_that_a_file_has_twice_are_written_once(source: Path, small: Path, tmp_path: Path):
    weights = load_file(source / "model.safetensors")
    table = weights["model.shared.weight"]
    for name in ("lm_head.weight", "model.encoder.embed_tokens.weight"):
        weights[name] = table.clone()
    folder = tmp_path / "twice"
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    save_file(weights, folder / "model.safetensors")
    again = compact(folder, tmp_path / "once").folder
    assert expand(again / FILE).keys() == expand(small / FILE).keys()
    save_file({**weights, "lm_head.weight": table + 1}, folder / "model.safetensors")
    other = expand(compact(folder, tmp_path / "other").folder / FILE)
    assert other.keys() - expand(small / FILE).keys() == {"lm_head.weight"}, "this one is not the shared one"


def test_weights_in_several_files_are_found(source: Path, small: Path, tmp_path: Path):
    folder = tmp_path / "parts"
    PyramidionForConditionalGeneration.from_pretrained(source).save_pretrained(folder, max_shard_size="50KB")
    assert not (folder / "model.safetensors").exists()
    parts = expand(compact(folder, tmp_path / "joined").folder / FILE)
    whole = expand(small / FILE)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


# --------------------------------------------------------------------------------------------------------------------
# Loading
# --------------------------------------------------------------------------------------------------------------------


def test_a_loaded_model_has_the_rounded_weights(source: Path, small: Path):
    loaded, report = PyramidionForConditionalGeneration.from_pretrained(small, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = rounded(PyramidionForConditionalGeneration.from_pretrained(source))
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, rtol=1e-6, atol=0)
    assert not loaded.training
    assert not same_weights(loaded, PyramidionForConditionalGeneration.from_pretrained(source)), "it was rounded"


def test_every_tied_weight_is_tied(small: Path):
    model = PyramidionForConditionalGeneration.from_pretrained(small)
    inner = model.model
    tables = [inner.shared, inner.encoder.embed_tokens, inner.decoder.embed_tokens, model.lm_head]
    assert len({table.weight.data_ptr() for table in tables}) == 1
    with torch.no_grad():
        model.lm_head.weight[3, 3] = 99.0
    assert all(table.weight[3, 3] == 99.0 for table in tables)


def test_settings_are_those_of_the_folder(source: Path, small: Path):
    plain, loaded = (PyramidionForConditionalGeneration.from_pretrained(folder) for folder in (source, small))
    assert loaded.generation_config.to_dict() == plain.generation_config.to_dict()
    assert loaded.generation_config.num_beams == 2
    first, second = plain.config.to_dict(), loaded.config.to_dict()
    assert {name for name in first if first[name] != second[name]} <= {"_name_or_path"}
    assert loaded.name_or_path == loaded.config.name_or_path == str(small)


def test_a_folder_without_settings_for_writing_takes_them_from_its_configuration(source: Path, tmp_path: Path):
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    bare = compact(folder, tmp_path / "small").folder
    plain, loaded = (PyramidionForConditionalGeneration.from_pretrained(one) for one in (folder, bare))
    assert loaded.generation_config.to_dict() == plain.generation_config.to_dict()


@pytest.mark.parametrize("kind", [PyramidionModel, PyramidionEncoderModel, PyramidionForSequenceClassification])
def test_every_class_loads_it_as_it_loads_the_whole(source: Path, small: Path, kind: Any, caplog: Any):
    expected, told = kind.from_pretrained(source, output_loading_info=True)
    loaded, report = kind.from_pretrained(small, output_loading_info=True)
    assert report == told
    missing = set(told["missing_keys"])
    assert missing == ({"classifier.weight", "classifier.bias"} if "Classification" in kind.__name__ else set())
    after = loaded.state_dict()
    for name, weight in rounded(expected).state_dict().items():
        if name not in missing:
            torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=0)


def test_classifiers_and_encoders_are_compacted_too(tmp_path: Path):
    for kind in (PyramidionForSequenceClassification, PyramidionEncoderModel):
        model = kind(preset("tiny-pyramidion", hidden_size=32, num_labels=3)).eval()
        folder = compact(model, tmp_path / kind.__name__).folder
        loaded, report = kind.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        for name, weight in rounded(model).state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], weight, rtol=1e-6, atol=0)


def test_it_is_loaded_by_name_of_the_task_and_in_a_subfolder(small: Path):
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(small), PyramidionForConditionalGeneration)
    below = PyramidionForConditionalGeneration.from_pretrained(small.parent, subfolder=small.name)
    assert same_weights(below, PyramidionForConditionalGeneration.from_pretrained(str(small)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_another_precision_is_the_rounded_weights_in_it(small: Path, dtype: Any):
    exact = PyramidionForConditionalGeneration.from_pretrained(small)
    half = PyramidionForConditionalGeneration.from_pretrained(small, dtype=dtype)
    assert half.dtype == half.config.dtype == torch.bfloat16
    assert same_weights(half, exact.bfloat16())


def test_precision_may_be_left_to_the_folder(source: Path, small: Path):
    for folder in (source, small):
        model = PyramidionForConditionalGeneration.from_pretrained(folder, dtype="auto")
        assert model.dtype == model.config.dtype == torch.float32


def test_a_model_saved_in_half_precision_comes_back_in_it(source: Path, tmp_path: Path):
    model = PyramidionForConditionalGeneration.from_pretrained(source, dtype=torch.bfloat16)
    loaded = PyramidionForConditionalGeneration.from_pretrained(compact(model, tmp_path / "half").folder)
    assert loaded.dtype == torch.bfloat16
    names = [name for name, weight in model.named_parameters() if weight.ndim == 1]
    assert all(torch.equal(loaded.get_parameter(name), model.get_parameter(name)) for name in names)


def test_settings_can_be_changed_while_loading(source: Path, small: Path):
    changed = {"dropout": 0.25, "attn_implementation": "eager"}
    for folder in (source, small):
        model = PyramidionForConditionalGeneration.from_pretrained(folder, local_files_only=True, **changed)
        assert (model.config.dropout, model.config._attn_implementation) == (0.25, "eager")
    config = PyramidionConfig.from_pretrained(small, dropout=0.5)
    for given in (config, str(small)):
        model = PyramidionForConditionalGeneration.from_pretrained(small, config=given)
        assert model.config.dropout == (0.5 if given is config else 0.1)
    own = GenerationConfig(num_beams=7)
    assert (
        PyramidionForConditionalGeneration.from_pretrained(small, generation_config=own).generation_config.num_beams
        == 7
    )


def test_whole_weights_beside_it_come_first(source: Path, small: Path, tmp_path: Path):
    both = tmp_path / "both"
    both.mkdir()
    for path in (*small.iterdir(), source / "model.safetensors"):
        (both / path.name).write_bytes(path.read_bytes())
    assert find(both, {}) is None
    exact = PyramidionForConditionalGeneration.from_pretrained(source)
    assert same_weights(PyramidionForConditionalGeneration.from_pretrained(both), exact)
    assert find(small, {}) == small / FILE
    assert find(small, {"state_dict": {}}) is None
    assert find(None, {}) is None


def test_a_model_trained_on_in_its_folder_is_the_new_one(small: Path, tmp_path: Path):
    folder = tmp_path / "trained"
    folder.mkdir()
    for path in small.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    model = PyramidionForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(folder)
    assert same_weights(PyramidionForConditionalGeneration.from_pretrained(folder), model)


def test_missing_and_unexpected_weights_are_reported(small: Path, tmp_path: Path):
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.pop("model.decoder.norm.bias")
        tensors["model.decoder.other.weight"] = torch.zeros(3)

    folder = damaged(small, tmp_path, edit)
    _, report = PyramidionForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert set(report["missing_keys"]) == {"model.decoder.norm.bias"}
    assert set(report["unexpected_keys"]) == {"model.decoder.other.weight"}
    with pytest.raises(ValueError, match=r"no fewer and no others, got 'model\.decoder\.norm\.bias' wrong"):
        Summarizer.from_pretrained(folder, device="cpu")


# --------------------------------------------------------------------------------------------------------------------
# Damage
# --------------------------------------------------------------------------------------------------------------------

TABLE = "model.shared.weight"


def damaged(small: Path, tmp_path: Path, edit: Callable[[dict[str, Tensor]], Any], header: Any = HEADER) -> Path:
    """Copy a folder, with the tensors or the header of its weights changed."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in small.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(small / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE, metadata=header)
    return folder


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Change one tensor."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return edit


def filled(place: int, number: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor([place]), number)


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (put(f"{TABLE}.scale", filled(7, float("nan"))), "must hold finite numbers, got others in"),
        (put(f"{TABLE}.scale", filled(7, float("inf"))), "must hold finite numbers, got others in"),
        (put("model.decoder.norm.bias", filled(1, float("nan"))), "must hold finite numbers, got others in"),
        (put(f"{TABLE}.scale", filled(7, -0.5)), r"must hold scales that are not negative, got -0\.5 in"),
        (put(f"{TABLE}.scale", lambda scale: scale[:-1]), r"as float32 \[300\], got torch\.float32 \[299\]"),
        (put(f"{TABLE}.scale", lambda scale: scale[:, None]), r"as float32 \[300\], got torch\.float32 \[300, 1\]"),
        (put(f"{TABLE}.scale", lambda scale: scale.half()), r"as float32 \[300\], got torch\.float16"),
        (put(TABLE, lambda table: table[:, :-1]), r"with shape \[300, 32\] by its config\.json, got \[300, 31\]"),
        (put(TABLE, lambda table: table.int()), r"int8 alone, got torch\.int32 \[300, 32\]"),
        (put(TABLE, lambda table: table.flatten()), r"int8 alone, got torch\.int8 \[9600\]"),
        (put(TABLE, lambda table: table.float()), "must hold scales of matrices of int8 alone, got"),
        (put("model.decoder.norm.bias", lambda bias: bias[:-1]), r"'model\.decoder\.norm\.bias' with shape \[32\]"),
        (put("model.decoder.norm.bias", lambda bias: bias.long()), r"int8 alone, got torch\.int64 \[32\]"),
        (lambda tensors: tensors.pop(f"{TABLE}.scale"), "must hold a scale for each row of .*, got none"),
        (lambda tensors: tensors.pop(TABLE), "must hold scales of matrices of int8 alone, got"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_against_the_rules_are_refused(small: Path, tmp_path: Path, edit: Any, rule: str):
    folder = damaged(small, tmp_path, edit)
    with pytest.raises(ValueError, match=rule) as refused:
        PyramidionForConditionalGeneration.from_pretrained(folder)
    assert str(folder / FILE) in str(refused.value)


def test_other_shapes_may_be_asked_for(small: Path, tmp_path: Path):
    folder = damaged(small, tmp_path, put("model.decoder.norm.bias", lambda bias: bias[:-1]))
    model, report = PyramidionForConditionalGeneration.from_pretrained(
        folder, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert model.model.decoder.norm.bias.shape == (32,)
    assert [name for name, *_ in report["mismatched_keys"]] == ["model.decoder.norm.bias"]


@pytest.mark.parametrize(
    "header",
    [
        {"format": "pyramidion-int8-v2"},
        {"format": "pt"},
        {"other": "pyramidion-int8-v1"},
        None,
    ],
    ids=str,
)
def test_other_formats_and_versions_are_refused(small: Path, tmp_path: Path, header: dict[str, str] | None):
    folder = damaged(small, tmp_path, lambda tensors: None, header)
    said = (header or {}).get("format")
    with pytest.raises(
        ValueError, match=f"must say format 'pyramidion-int8-v1' in its header, got {said!r}"
    ) as refused:
        PyramidionForConditionalGeneration.from_pretrained(folder)
    assert str(folder / FILE) in str(refused.value)


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:4],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: flip(data, 0),
        lambda data: flip(data, 7),
        lambda data: flip(data, 8),
        lambda data: flip(data, 60),
        lambda data: struct.pack("<Q", 2**40) + data[8:],
    ],
    ids=["empty", "4", "100", "cut", "longer", "length", "long", "brace", "name", "huge"],
)
def test_a_damaged_file_is_refused_by_name(small: Path, tmp_path: Path, damage: Callable[[bytes], bytes]):
    folder = damaged(small, tmp_path, lambda tensors: None)
    (folder / FILE).write_bytes(damage((small / FILE).read_bytes()))
    with pytest.raises(ValueError, match="must be a whole file of weights") as refused:
        PyramidionForConditionalGeneration.from_pretrained(folder)
    assert str(folder / FILE) in str(refused.value)
    with pytest.raises(ValueError, match="must be a whole file of weights"):
        Summarizer.from_pretrained(folder, device="cpu")


def test_a_flipped_bit_of_the_header_is_refused_or_reported(small: Path, tmp_path: Path):
    """A name may become another name, which loading reports, or a space another space. All else is refused."""
    data, file = (small / FILE).read_bytes(), tmp_path / FILE
    names, refused = set(expand(small / FILE)), 0
    for place in range(0, 8 + struct.unpack("<Q", data[:8])[0], 67):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        said = trouble(file)
        assert said is None or str(file) in said
        refused += said is not None
        assert said or set(expand(file)) != names or data[place : place + 1] == b" ", data[place - 9 : place + 9]
    assert refused > 100


def trouble(file: Path) -> str | None:
    try:
        expand(file)
    except ValueError as error:
        return str(error)
    return None


# --------------------------------------------------------------------------------------------------------------------
# Writing whole
# --------------------------------------------------------------------------------------------------------------------


def test_an_output_with_something_in_it_is_refused(source: Path, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for wrong in (tmp_path / "full", tmp_path / "file", source):
        with pytest.raises(ValueError, match="`output` must be a new folder, or an empty one, got"):
            compact(source, wrong)
    assert (tmp_path / "full" / "note").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert (compact(source, tmp_path / "empty").folder / FILE).is_file()


def test_an_output_may_be_the_current_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert compact(source, "here").folder == tmp_path / "here"


def test_sources_that_are_no_models_are_refused(source: Path, small: Path, tmp_path: Path):
    target = tmp_path / "target"
    with pytest.raises(ValueError, match=r"must hold model\.safetensors, got .*, which is compact already"):
        compact(small, target)
    with pytest.raises(ValueError, match=r"must be a folder with a model's config\.json, got .*nowhere"):
        compact(tmp_path / "nowhere", target)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bart"}')
    with pytest.raises(ValueError, match="must be a pyramidion model, got one of type 'bart'"):
        compact(other, target)
    (other / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"must hold model\.safetensors, got '[^,]*'\."):
        compact(other, target)
    (other / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-5])
    with pytest.raises(ValueError, match="must be a whole file of weights, got"):
        compact(other, target)
    (other / "model.safetensors").unlink()
    (other / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="must say which file holds which weight"):
        compact(other, target)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_name_that_scales_would_have_is_refused(source: Path, tmp_path: Path):
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({"a": torch.zeros(2, 2), "a.scale": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"no weight with the name of another's scales, got 'a\.scale'"):
        compact(folder, tmp_path / "target")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(source: Path, tmp_path: Path, wrong: float):
    model = PyramidionForConditionalGeneration.from_pretrained(source)
    with torch.no_grad():
        model.model.decoder.norm.weight[3] = wrong
    with pytest.raises(ValueError, match=r"must have finite numbers for weights, got others in 'model\.decoder\.norm"):
        compact(model, tmp_path / "target")


def test_a_failure_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(room.shutil, "copyfile", fail)
    with pytest.raises(OSError, match="no space left"):
        compact(source, tmp_path / "target")
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, time
from pyramidion import compact as room
copy = room.shutil.copyfile
def slow(*given):
    copy(*given)
    print("copying", flush=True)
    time.sleep(60)
room.shutil.copyfile = slow
room.compact(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_no_half_folder(source: Path, tmp_path: Path):
    target = tmp_path / "target"
    command = [sys.executable, "-c", KILLED, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copying\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".target.partial"], "the kill came in the middle"
    assert (compact(source, target).folder / FILE).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["target"], "what was left is cleared away"


# --------------------------------------------------------------------------------------------------------------------
# Products
# --------------------------------------------------------------------------------------------------------------------

needs_bytes = pytest.mark.skipif(not room.products_are_exact(), reason="needs a processor that multiplies bytes")


def compact_matrix(out: int, width: int, seed: int = 0) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=drawn) * torch.logspace(-3, 3, out)[:, None]
    weight[out // 2] = 0.0
    return dequantize(*quantize(weight))


@needs_bytes
@pytest.mark.parametrize(("out", "width"), [(1, 1), (3, 5), (61, 24), (1031, 32), (2053, 97)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_products_are_within_the_bound_of_float64(out: int, width: int, rows: int):
    weight, x = compact_matrix(out, width), torch.randn(rows, width) * torch.logspace(-5, 5, rows)[:, None]
    matrix = ByteMatrix.of(weight)
    assert matrix is not None
    exact = x.double() @ weight.double().T
    bound = x.abs().amax(1, keepdim=True).double() / (127 * 254 * 2) * weight.double().abs().sum(1)
    rounding = 1e-5 * (x.double().abs() @ weight.double().abs().T)
    given = matrix(x)
    assert given.dtype == torch.float32
    assert ((given - exact).abs() <= 1.001 * bound + rounding).all()
    assert (given[:, out // 2] == 0).all()


@needs_bytes
def test_a_rows_product_does_not_depend_on_the_others():
    matrix, x = ByteMatrix.of(compact_matrix(131, 48)), torch.randn(9, 48)
    assert matrix is not None
    together = matrix(x)
    assert all(torch.equal(together[row], matrix(x[row : row + 1])[0]) for row in range(9))
    torch.testing.assert_close(matrix(x.new_zeros(2, 48)), x.new_zeros(2, 131), rtol=0, atol=0)
    x[3] = torch.nan
    assert matrix(x)[3].isnan().any()
    assert torch.equal(matrix(x)[[0, 8]], together[[0, 8]])


@needs_bytes
def test_only_what_loses_nothing_is_packed():
    weight = compact_matrix(2100, 16)
    assert ByteMatrix.of(weight) is not None
    assert ByteMatrix.of(weight.double()) is None
    assert ByteMatrix.of(weight.bfloat16()) is None
    assert ByteMatrix.of(torch.randn(2100, 16)) is None
    for row in (0, 1500, 2099):
        changed = weight.clone()
        changed[row] += 0.2 * quantize(weight)[1][row]
        changed[row, 0] = weight[row, 0]
        assert ByteMatrix.of(changed) is None, "a single row is off"


def test_processors_that_do_not_multiply_bytes_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    room.products_are_exact.cache_clear()
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False, raising=False)
    try:
        assert ByteMatrix.of(compact_matrix(5, 4)) is None
    finally:
        room.products_are_exact.cache_clear()


@pytest.mark.parametrize("wrong", ["inexact", "absent"])
def test_a_product_that_is_not_what_it_should_be_is_not_used(monkeypatch: pytest.MonkeyPatch, wrong: str):
    """As an older processor, whose sums of two products end at 32,767, or another version of torch."""

    def multiply(numbers: Tensor, packed: Tensor, *_: Any) -> Tensor:
        if wrong == "absent":
            raise AttributeError("no such operator")
        pairs = (numbers.float() - 128).unflatten(1, (-1, 2)) * torch.ones(2)
        return pairs.sum(-1).clamp(-32768, 32767).sum(1, keepdim=True).expand(-1, 3)

    room.products_are_exact.cache_clear()
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True, raising=False)
    monkeypatch.setattr(room, "_multiply", multiply)
    try:
        assert not room.products_are_exact()
    finally:
        room.products_are_exact.cache_clear()


@pytest.mark.parametrize("beams", [1, 2, 3, 4])
def test_the_loop_writes_the_same_with_any_layout(small: Path, beams: int):
    """Batches of 1 and 3 documents by `beams`: below, within and above the range in which weights lie by columns."""
    model = PyramidionForConditionalGeneration.from_pretrained(small)
    for b in (1, 3, 8):
        tokens = torch.randint(5, 300, (b, 90), generator=torch.Generator().manual_seed(b))
        settings = GenerationConfig(num_beams=beams, max_new_tokens=20, min_new_tokens=20, no_repeat_ngram_size=2)
        expected = engine.generate_plainly(model, tokens, torch.ones_like(tokens), settings)
        assert loop.decode(model, tokens, torch.ones_like(tokens), settings).tolist() == expected.tolist()


@torch.inference_mode()
def decoder_of(model: Any, rows: int) -> step.Decoder:
    """Make a decoder for so many texts, ready to write."""
    search = step.Search(loop.Rules(1, 9, 0), rows, model.config.vocab_size, torch.device("cpu"))
    decoder = step.Decoder(model, search, 5)
    decoder.read(model, PyramidionEncoderOutput(torch.randn(rows, 5, model.config.hidden_size)))
    return decoder


@pytest.mark.parametrize("rows", [1, 3, 4, 15, 16])
def test_weights_lie_by_columns_for_few_rows(source: Path, rows: int):
    model = PyramidionForConditionalGeneration.from_pretrained(source)
    with torch.inference_mode():
        decoder = decoder_of(model, rows)
        x = torch.randn(rows, 32)
        for block, plain in zip(decoder.layers, decoder.blocks, strict=True):
            for dense, other in zip(block.products(), plain.products(), strict=True):
                assert dense.weight.t().is_contiguous() == (4 <= rows <= 15)
                assert torch.equal(dense.weight, other.weight)
        project: Any = decoder.project
        assert project.keywords["weight"].t().is_contiguous() == (4 <= rows <= 15)
        torch.testing.assert_close(project(x), F.linear(x, model.lm_head.weight), rtol=1e-4, atol=1e-5)


@needs_bytes
def test_the_table_of_a_compact_model_stays_bytes_until_it_is_trained(small: Path):
    """The same decoder may be kept for the next call: what is packed is packed again."""
    model = PyramidionForConditionalGeneration.from_pretrained(small)
    x, decoder = torch.randn(5, 32), decoder_of(model, 5)
    for compacted in (True, False, False):
        with torch.inference_mode():
            decoder.refresh(model)
            decoder.read(model, PyramidionEncoderOutput(x[:, None]))
            assert isinstance(decoder.project, ByteMatrix) == compacted
            torch.testing.assert_close(decoder.project(x), F.linear(x, model.lm_head.weight), rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))


# --------------------------------------------------------------------------------------------------------------------
# In use
# --------------------------------------------------------------------------------------------------------------------


def test_a_summarizer_reads_it(source: Path, small: Path):
    whole, compacted = (Summarizer.from_pretrained(folder, device="cpu") for folder in (source, small))
    one_by_one = [compacted([text])[0] for text in TEXTS[:5]]
    assert compacted(TEXTS[:5], batch_size=3) == one_by_one
    reference = Summarizer(rounded(whole.model), whole.tokenizer)
    assert reference(TEXTS[:5]) == one_by_one
    assert fingerprint(small) != fingerprint(source)


def test_distance_is_that_of_logits_but_for_what_all_have_in_common(source: Path):
    first, second = (PyramidionForConditionalGeneration.from_pretrained(source) for _ in range(2))
    tokens = {"input_ids": torch.arange(5, 60)[None], "decoder_input_ids": torch.arange(9)[None]}
    assert distance(first, second, **tokens) == (0.0, 1.0)
    with torch.no_grad():
        second.lm_head.weight.mul_(1.25)
    assert second.model.shared.weight is second.lm_head.weight
    second.lm_head = torch.nn.Linear(32, 300)
    with torch.no_grad():
        second.model.shared.weight.div_(1.25)
        second.lm_head.weight.copy_(first.lm_head.weight * 1.25)
        second.lm_head.bias.fill_(3.0)
    far, same = distance(first, second, **tokens)
    assert far == pytest.approx(0.25, rel=1e-3)
    assert same == 1.0


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["compact", *map(str, arguments)])


def test_the_command_tells_sizes_errors_and_distance(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that was never trained keeps other tokens for the least change, and is farther off than a trained one."""
    monkeypatch.setattr(sys.modules["pyramidion.cli.compact"], "FARTHEST", 0.3)
    done = run(source, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["before", "after", "weights", "logits", "likeliest"]
    told = compact(source, tmp_path / "again")
    assert lines[0][1] == f"{told.before / 1e6:.2f}"
    assert lines[1][1] == f"{told.after / 1e6:.2f}"
    assert lines[2][1] == f"{told.error:.2%}"
    assert 0 < float(lines[3][1].rstrip("%")) < 30
    assert (tmp_path / "out" / FILE).is_file()


@pytest.mark.parametrize("kind", [PyramidionForSequenceClassification, PyramidionEncoderModel, PyramidionModel])
def test_the_command_takes_every_class_and_needs_no_tokenizer(kind: Any, tmp_path: Path):
    kind(preset("tiny-pyramidion", hidden_size=32)).save_pretrained(tmp_path / "model")
    done = run(tmp_path / "model", "--output", tmp_path / "out")
    assert done.exit_code in (0, 1), done.output
    assert "logits" in done.stdout


def test_the_command_minds_a_tokenizer_that_knows_more_than_the_model(tmp_path: Path):
    done = run(write_model(tmp_path / "model", vocab_size=270), "--output", tmp_path / "out")
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "logits" in done.stdout


def test_the_command_says_where_logits_are_too_far(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "dequantize", lambda numbers, scale: numbers.float() * scale.flip(0)[:, None])
    done = run(source, "--output", tmp_path / "out")
    assert done.exit_code == 1, done.output
    assert "at most 10% is expected" in done.stdout


def test_the_command_refuses_in_one_line(source: Path, small: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    for given, rule in (
        ((tmp_path / "nowhere", "--output", tmp_path / "out"), "must be a folder with a model's config.json"),
        ((small, "--output", tmp_path / "out"), "which is compact already"),
        ((source, "--output", tmp_path), "must be a new folder"),
    ):
        done = run(*given)
        assert done.exit_code == 2
        assert done.stderr.startswith("pyramidion: `")
        assert rule in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------------------
# The bundled model, and threads
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder, with a package whose assets are empty too."""
    (tmp_path / "package" / "assets").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(summarizer, "files", lambda package: {"pyramidion": tmp_path / "package"}[package])
    return tmp_path / "package" / "assets" / "default"


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("name", ["default", Path("default")])
def test_a_build_without_a_model_says_so(no_bundle: Path, name: str | Path):
    with pytest.raises(ValueError, match="this build of pyramidion has no bundled model 'default'"):
        Summarizer.from_pretrained(name)


@pytest.mark.parametrize("name", ["default", Path("default"), "./default"])
def test_default_is_the_bundled_model_unless_a_folder_is_called_so(no_bundle: Path, small: Path, name: str | Path):
    copy_folder(small, no_bundle)
    assert summarizer.model_folder(name) == no_bundle
    assert Summarizer.from_pretrained(name, device="cpu")([TEXTS[0]])[0].text
    Path("default").mkdir()
    assert summarizer.model_folder(name) == no_bundle, "a folder that holds no model is none"
    copy_folder(small, Path("default/nested"))
    for path in Path("default/nested").iterdir():
        path.rename(Path("default") / path.name)
    assert summarizer.model_folder(name) == Path("default")


def test_other_names_are_folders(no_bundle: Path, small: Path):
    copy_folder(small, no_bundle)
    for name in ("defaults", "other/default", ""):
        with pytest.raises(ValueError, match=r"must be a folder with a model's config\.json"):
            summarizer.model_folder(name)


def test_the_bundled_model_is_small_and_of_its_recipe():
    folder = summarizer.bundled_folder()
    assert folder == Path(room.__file__).parent / "assets" / "default"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 25_000_000
    names = {"README.md", "config.json", "generation_config.json", FILE, "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    recipe = read_recipe(Path(room.__file__).parents[2] / "recipes" / "default" / "summaries.yaml", {})
    saved, asked = PyramidionConfig.from_pretrained(folder).to_dict(), recipe.config(16384).to_dict()
    apart = {"dtype", "transformers_version", "architectures", "use_cache", "scorer"}  # `scorer` None is linear
    assert {k: v for k, v in saved.items() if k not in apart} == {k: v for k, v in asked.items() if k not in apart}


def test_the_command_line_writes_with_the_bundled_model(tmp_path: Path):
    from typer.testing import CliRunner

    from pyramidion.cli import main

    text = tmp_path / "text.txt"
    text.write_text("Neurons in the hippocampus fire where an animal is, and again while it sleeps. " * 6)
    options = ["--num-beams", "1", "--min-new-tokens", "5", "--max-new-tokens", "12", "--device", "cpu"]
    done = CliRunner().invoke(main, ["summarize", str(text), *options])
    assert done.exit_code == 0, done.output
    assert len(done.stdout.split()) > 3


def test_the_bundled_model_writes_without_a_network(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    bundled = Summarizer.from_pretrained("default", device="cpu")
    places = "Neurons of the hippocampus fire when a mouse is in one place of its cage. " * 30
    ions = "Proteins of the membrane let ions pass into the cell when the voltage rises. " * 30
    first, second = (bundled([text], num_beams=1, max_new_tokens=40)[0].text for text in (places, ions))
    assert "hippocamp" in first.lower()
    assert "hippocamp" not in second.lower()
    assert len(first.split()) > 10


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": ""}, None),
        ({}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "0\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, None),
    ],
    ids=str,
)
def test_what_a_container_may_use_is_read(tmp_path: Path, written: dict[str, str], allowed: int | None):
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert summarizer.allowed_processors(tmp_path) == allowed


@pytest.mark.parametrize(("allowed", "threads"), [(None, 3), (8, 3), (3, 3), (2, 2), (1, 1)])
def test_threads_are_only_ever_lowered(monkeypatch: pytest.MonkeyPatch, small: Path, allowed: int | None, threads: int):
    monkeypatch.setattr(summarizer, "allowed_processors", lambda: allowed)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Summarizer.from_pretrained(small, device="cpu")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
