"""Models in a quarter of the space: each row of a matrix as whole numbers of 8 bits, with one scale.

`compact(model, folder)` writes a folder like any other, but for its weights: `model.int8.safetensors` holds each matrix
NAME as int8 [out in] and its scales NAME.scale as float32 [out], and whatever is no matrix as it was. Its header says
`format`, version included. `from_pretrained` of every class of the family reads it: there is nothing else to call.

A row is divided by its largest magnitude / 127. Clipping each row where the squared error is least was tried: it lowers
the error of weights by half a percent of it, that of logits not at all, so the plain scale stays.
"""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from pyramidion.disk import sync_folder

FILE = "model.int8.safetensors"
FORMAT = "pyramidion-int8-v1"  # in the header; of a file that is laid out otherwise, another
SCALE = ".scale"  # behind the name of a matrix
LARGEST = 127
ROUNDING = 1e-4  # of a scale: what whole numbers times a scale may be off in float32
CHUNK = 1024  # rows that a processor keeps at hand

PLAIN, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")  # not copied
MANIFEST = "manifest.json"  # lists files that are not all there any more


# --------------------------------------------------------------------------------------------------------------------
# Rows of whole numbers
# --------------------------------------------------------------------------------------------------------------------


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [out in] to whole numbers from -127 to 127, int8 [out in], times a scale a row, float32 [out]."""
    weight = weight.float()
    scale = weight.abs().amax(1) / LARGEST if weight.shape[1] else weight.new_zeros(len(weight))
    return _numbers(weight, scale).to(torch.int8), scale


def _numbers(weight: Tensor, scale: Tensor) -> Tensor:
    """Count how often the scales [out] go into the rows [out in]; a row of zeros has the scale 0, and stays."""
    return (weight / scale.where(scale > 0, 1).unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)


def dequantize(numbers: Tensor, scale: Tensor) -> Tensor:
    """Give back the matrix [out in] in float32."""
    return numbers.float() * scale.unsqueeze(1)


# --------------------------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compaction:
    """What became of a model.

    before, after  bytes of its weights
    error          of all matrices together: the length of the difference by that of the weights
    worst          the matrix whose own is largest, and that
    """

    folder: Path
    before: int
    after: int
    error: float
    worst: tuple[str, float]


def compact(model: Any, output: str | Path) -> Compaction:
    """Write a model, or what is in a model's folder, into a new folder in a quarter of the space.

    The folder appears when it is whole. It has every other file that the model's has (tokenizer, settings, README),
    without subfolders; a model that is no folder has only its settings.
    """
    target = Path(output).absolute()
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ValueError(f"`output` must be a new folder, or an empty one, got {str(output)!r}.")
    if isinstance(model, str | Path):
        return _compact(_source(Path(model)), target)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _compact(Path(folder), target)


def _source(folder: Path) -> Path:
    """Check that a folder holds a model of the family, with weights that are not compact."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"`model` must be a folder with a model's config.json, got {str(folder)!r}.") from error
    if kind != "pyramidion":
        raise ValueError(f"`model` must be a pyramidion model, got one of type {kind!r} in {str(folder)!r}.")
    if not _weight_files(folder):
        reason = ", which is compact already" if (folder / FILE).is_file() else ""
        raise ValueError(f"`model` must hold {PLAIN}, got {str(folder)!r}{reason}.")
    return folder


def _weight_files(folder: Path) -> list[Path]:
    """List the files of a folder's weights: one, or those that an index names."""
    if (folder / PLAIN).is_file():
        return [folder / PLAIN]
    if not (folder / INDEX).is_file():
        return []
    try:
        parts = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`{INDEX}` must say which file holds which weight, got {str(folder / INDEX)!r}.") from error
    return [folder / name for name in sorted(set(parts))]


def _compact(source: Path, target: Path) -> Compaction:
    """Write everything into a folder beside the target, then rename it."""
    files = _weight_files(source)
    tensors, error, worst = _pack(_untied(_read(files)))
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    try:
        (staged / FILE).write_bytes(save(tensors, metadata={"format": FORMAT}))
        for path in _others(source):
            shutil.copyfile(path, staged / path.name)
        for path in (*staged.iterdir(), staged):
            sync_folder(path)  # a file is synced in the same way
        staged.replace(target)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    sync_folder(target.parent)
    before, after = sum(path.stat().st_size for path in files), (target / FILE).stat().st_size
    return Compaction(target, before, after, error, worst)


def _others(source: Path) -> Iterator[Path]:
    """List the files of a folder that go along: no weights, and nothing hidden."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(".") and not _is_weight(path):
            yield path


def _is_weight(path: Path) -> bool:
    return path.name.endswith(WEIGHTS)


def _read(files: list[Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            found |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"`{path.name}` must be a whole file of weights, got {str(path)!r}: {error}.") from error
    return found


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out what is the shared table once more, under another name."""
    table = next((value for name, value in weights.items() if name.endswith("shared.weight")), None)
    tied = ("lm_head.weight", "embed_tokens.weight")
    return {
        name: value
        for name, value in weights.items()
        if table is None or not name.endswith(tied) or not torch.equal(value, table)
    }


def _pack(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], float, tuple[str, float]]:
    """Quantise the matrices; measure by how much they changed, all together and the worst by itself."""
    packed, lost, length = {}, 0.0, 0.0
    worst = ("", 0.0)
    for name, weight in weights.items():
        if not weight.is_floating_point() or not weight.isfinite().all():
            raise ValueError(f"`model` must have finite numbers for weights, got others in {name!r}.")
        if name.endswith(SCALE):
            raise ValueError(f"`model` must have no weight with the name of another's scales, got {name!r}.")
        if weight.ndim != 2:
            packed[name] = weight
            continue
        packed[name], packed[name + SCALE] = quantize(weight)
        change = (dequantize(packed[name], packed[name + SCALE]).double() - weight.double()).square().sum().item()
        size = weight.double().square().sum().item()
        lost, length = lost + change, length + size
        worst = max(worst, (name, _ratio(change, size)), key=lambda one: one[1])
    return packed, _ratio(lost, length), worst


def _ratio(change: float, size: float) -> float:
    return (change / size) ** 0.5 if size else 0.0


# --------------------------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------------------------


def find(path: Any, options: dict[str, Any]) -> Path | None:
    """Find the compact weights that a call of `from_pretrained` asks for; None where transformers finds others."""
    if path is None or any(options.get(name) is not None for name in ("state_dict", "gguf_file", "variant")):
        return None
    folder = Path(path) / (options.get("subfolder") or "")
    others = (PLAIN, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
    if any((folder / name).is_file() for name in others):
        return None
    return folder / FILE if (folder / FILE).is_file() else None


def load(file: Path, kind: Any, through: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Load a model of class `kind` from compact weights, through transformers' own `from_pretrained`.

    It takes weights in memory only without a folder, so that the settings are read here.
    """
    weights, folder = expand(file), file.parent
    told, lenient = options.pop("output_loading_info", False), options.pop("ignore_mismatched_sizes", False)
    chosen = _settings(folder, kind, options)
    checks = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = through(None, *args, state_dict=weights, **chosen, **checks)
    for name, found, needed in report["mismatched_keys"]:
        if not lenient:
            shapes = f"{list(needed)} by its config.json, got {list(found)}"
            raise ValueError(f"{str(file)!r} must hold {name!r} with shape {shapes}.")
    model.config.name_or_path = model.name_or_path = str(folder)
    return (model, report) if told else model


def _settings(folder: Path, kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Turn options for a folder into those for weights in memory: read its settings, and change what is given."""
    options.pop("subfolder", None)
    kept: dict[str, Any] = {name: options.pop(name) for name in ("dtype", "torch_dtype") if name in options}
    config = options.pop("config", None)
    if not isinstance(config, PreTrainedConfig):
        place = folder if config is None else config
        config, options = kind.config_class.from_pretrained(place, return_unused_kwargs=True, **options)
    if kind.can_generate() and options.get("generation_config") is None:
        saved = (folder / "generation_config.json").is_file()
        source = {} if saved else {"config_file_name": "config.json", "_from_model_config": True}
        options["generation_config"] = GenerationConfig.from_pretrained(folder, **source)
    return {**options, **kept, "config": config}


def expand(file: str | Path) -> dict[str, Tensor]:
    """Read compact weights: matrices in float32, the others as they were."""
    path = Path(file)
    try:
        with safe_open(path, framework="pt") as opened:
            header = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no dict
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(path)!r} must be a whole file of weights: {error}.") from error
    for rule in _broken(header, tensors):
        raise ValueError(f"{str(path)!r} must {rule}.")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(SCALE)}
    for name, scale in scales.items():
        tensors[name.removesuffix(SCALE)] = dequantize(tensors[name.removesuffix(SCALE)], scale)
    return tensors


def _broken(header: dict[str, str], tensors: dict[str, Tensor]) -> Iterator[str]:
    """Name every rule of the format that a file breaks, and the value."""
    if header.get("format") != FORMAT:
        yield f"say format {FORMAT!r} in its header, got {header.get('format')!r}"
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8 and tensor.ndim == 2:
            if name + SCALE not in tensors:
                yield f"hold a scale for each row of {name!r}, got none"
        elif not tensor.is_floating_point():
            yield f"hold whole numbers in matrices of int8 alone, got {tensor.dtype} {list(tensor.shape)} for {name!r}"
        elif not tensor.isfinite().all():
            yield f"hold finite numbers, got others in {name!r}"
        elif name.endswith(SCALE):
            yield from _wrong_scale(name, tensor, tensors.get(name.removesuffix(SCALE)))


def _wrong_scale(name: str, scale: Tensor, numbers: Tensor | None) -> Iterator[str]:
    if numbers is None or numbers.dtype != torch.int8:
        yield f"hold scales of matrices of int8 alone, got {name!r}"
    elif scale.shape != numbers.shape[:1] or scale.dtype != torch.float32:
        yield f"hold {name!r} as float32 {[len(numbers)]}, got {scale.dtype} {list(scale.shape)}"
    elif not (scale >= 0).all():
        yield f"hold scales that are not negative, got {scale.min().item()} in {name!r}"


# --------------------------------------------------------------------------------------------------------------------
# Products
# --------------------------------------------------------------------------------------------------------------------


class ByteMatrix:
    """Multiply by a matrix [v d] whose rows are whole numbers times a scale, and read a quarter of the memory.

    Its numbers stay as they are. Each row of x is taken as two numbers of 8 bits, one of them coarse and one for what
    it leaves, so that a product is off by no more than max|x| / (127 · 254 · 2) · sum|row|. Products of whole numbers
    are exact: what comes of a row of x does not depend on the others.
    """

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.scale, self.zeros = scale, torch.zeros(len(scale), dtype=torch.long)
        self.packed = torch.ops.onednn.qlinear_prepack(numbers, None)

    @classmethod
    def of(cls, weight: Tensor) -> "ByteMatrix | None":
        """Pack a matrix, if nothing is lost by it and this processor has the instructions; otherwise give None."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not products_are_exact():
            return None
        parts = []
        for rows in weight.split(CHUNK):
            numbers, scale = quantize(rows)
            if not ((dequantize(numbers, scale) - rows).abs() <= ROUNDING * scale.unsqueeze(1)).all():
                return None
            parts.append((numbers, scale))
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def __call__(self, x: Tensor) -> Tensor:
        """Give the products of x [r d] with every row: [r v]."""
        step = (x.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=torch.finfo(x.dtype).tiny)  # [r 1]
        ratio = x / step
        coarse = ratio.round()  # [r d] from -127 to 127
        fine = ratio.sub_(coarse).mul_(2 * LARGEST).round_()  # so is this
        numbers = torch.cat([coarse, fine]).add_(LARGEST + 1).to(torch.uint8)  # [2r d]
        coarse, fine = _multiply(numbers, self.packed, self.scale, self.zeros).chunk(2)  # [r v]
        return coarse.add_(fine, alpha=0.5 / LARGEST).mul_(step)


def _multiply(numbers: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """Multiply uint8 [r d], of which 128 are taken away, by a packed int8 matrix and its scales: float32 [r v]."""
    multiply = torch.ops.onednn.qlinear_pointwise
    result: Tensor = multiply(
        numbers, 1.0, LARGEST + 1, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return result


@functools.cache
def products_are_exact() -> bool:
    """Tell whether this processor multiplies bytes fast and exactly: older ones cut off sums of two products."""
    if not getattr(torch.cpu, "_is_vnni_supported", lambda: False)():
        return False
    numbers = torch.tensor([[255, 255, 0, 128] * 8, [0, 0, 255, 255] * 8], dtype=torch.uint8)
    matrix = torch.tensor([[127, 127, 127, -127] * 8, [-127, -127, 1, 2] * 8, [127, 0, -1, 5] * 8], dtype=torch.int8)
    with suppress(RuntimeError, AttributeError, TypeError, NotImplementedError):
        packed = torch.ops.onednn.qlinear_prepack(matrix, None)
        result = _multiply(numbers, packed, torch.ones(3), torch.zeros(3, dtype=torch.long))
        return torch.equal(result, (numbers.float() - 128) @ matrix.float().T)
    return False


# --------------------------------------------------------------------------------------------------------------------
# Comparing
# --------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def distance(first: Any, second: Any, **inputs: Tensor) -> tuple[float, float]:
    """Compare the logits of two models: their relative distance, and how often the likeliest is the same.

    What is added to all logits of a place changes nothing, so it is taken away first. Models without logits are
    compared by their representations.
    """
    found = [model.eval()(**inputs) for model in (first, second)]
    one, other = (result.get("logits", result.get("last_hidden_state")).float() for result in found)
    one, other = (values - values.mean(-1, keepdim=True) for values in (one, other))
    same = (one.argmax(-1) == other.argmax(-1)).float().mean().item()
    return ((other - one).norm() / one.norm()).item(), same


__all__ = ["ByteMatrix", "Compaction", "compact", "dequantize", "distance", "expand", "find", "load", "quantize"]
