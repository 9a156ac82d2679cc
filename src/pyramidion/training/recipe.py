"""The recipe of a run: every setting of training, from a YAML file or from the command line, none of them unknown."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.data.objectives import OBJECTIVES, Corruption
from pyramidion.presets import find, preset

ON_NAN = ("stop", "skip")
METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum", "loss")
SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "muon")
SUMMARIES, *PRETRAINING = OBJECTIVES
USES = {  # settings that only some objectives have a use for
    "generation": (SUMMARIES,),
    "span_length": ("spans", "gap-sentences"),
    "span_density": ("spans", "gap-sentences"),
    "gap_density": ("gap-sentences",),
    "gap_choice": ("gap-sentences",),
}


@dataclass(frozen=True)
class Recipe:
    """Say how a model is trained. The defaults are the paper's (appendix, tables of hyperparameters).

    preset, model           a model by name, with single settings changed; or `init_from`, a folder to go on from
    objective               what is learnt: to write `summaries`, or first, from the documents alone, what was taken out
                            of them: `spans` or `gap-sentences`. A run on summaries then goes on from it by `init_from`
    span_length, span_density, gap_density, gap_choice    how much is taken out and what; see `Corruption`
    max_source, max_target  tokens a document and its summary are cut to; by default what the model is for, and 512
    batch_size              documents in one step of the optimizer, over all processes and accumulated parts
    device_batch            documents computed at once in one process, at most
    epochs, max_steps       how long; steps win where both are given
    learning_rate, warmup_steps, schedule   the rate, the steps in which it rises from 0, and what it does then: it
                            stays (`constant`) or falls to 0 by the end (`linear`, `cosine`)
    optimizer               `adamw`, or `muon`: that for all matrices in the layers, and AdamW for the rest
    weight_decay, adam_beta2, max_grad_norm, label_smoothing    of both and of the loss
    evaluate_every, evaluate_limit, evaluate_first    epochs between validations, parts of one too; documents used in
                            each; whether the untrained model is validated too
    metric, patience        what counts (`loss` where no summaries are written), and validations without progress in it
                            before the end
    generation              options of `generate` in validations, over the paper's
    save_every, keep        steps between checkpoints, and how many stay
    on_nan                  `stop` when loss or gradients are not finite, or `skip` that step
    compile                 trace the model into one graph for all lengths
    capture                 on one GPU, record a step of each shape and replay it: small models are otherwise bound by
                            the host, which starts thousands of kernels a step
    """

    preset: str = "deep-pyramidion"
    model: dict[str, Any] | None = None
    init_from: str | None = None
    objective: str = SUMMARIES
    span_length: float = Corruption.span_length
    span_density: float = Corruption.span_density
    gap_density: float = Corruption.gap_density
    gap_choice: str = Corruption.gap_choice
    max_source: int | None = None
    max_target: int = 512
    batch_size: int = 256
    device_batch: int = 4
    epochs: float = 100.0
    max_steps: int | None = None
    learning_rate: float = 5e-4
    warmup_steps: int = 5000
    schedule: str = "constant"
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.0
    seed: int = 0
    evaluate_every: float = 3.0
    evaluate_limit: int | None = None
    evaluate_first: bool = False
    patience: int = 7
    metric: str = "rouge1"
    generation: dict[str, Any] | None = None
    log_every: int = 10
    save_every: int = 500
    keep: int = 2
    on_nan: str = "stop"
    bf16: bool = False
    compile: bool = False
    capture: bool = False
    gradient_checkpointing: bool = False
    fsdp: bool = False
    tensorboard: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_target", "batch_size", "device_batch", "patience", "log_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("save_every", "keep", "max_source", "max_steps", "evaluate_limit"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "seed", "weight_decay", "max_grad_norm", "label_smoothing"):
            _at_least(name, getattr(self, name), 0)
        for name in ("learning_rate", "epochs", "evaluate_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)}.")
        choices = {"on_nan": ON_NAN, "metric": METRICS, "schedule": SCHEDULES, "optimizer": OPTIMIZERS}
        for name, allowed in {**choices, "device": ("auto", "cpu", "cuda")}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.optimizer == "muon" and self.fsdp:
            raise ValueError("`optimizer` must be adamw with `fsdp`, got 'muon': it needs whole matrices, not shards.")
        for name in ("compile", "gradient_checkpointing", "fsdp"):
            if self.capture and getattr(self, name):
                raise ValueError(f"`capture` must be off with `{name}`, got both: a recorded step cannot hold it.")
        self._check_objective()
        find(self.preset)

    def _check_objective(self) -> None:
        if self.objective not in OBJECTIVES:
            near = difflib.get_close_matches(self.objective, OBJECTIVES, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"`objective` must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}.{hint}")
        if self.objective in PRETRAINING and self.metric != "loss":
            raise ValueError(
                f"`metric` must be loss with the objective {self.objective!r}, got {self.metric!r}: "
                "ROUGE is of summaries that are written."
            )
        for name, objectives in USES.items():
            value = getattr(self, name)
            if self.objective not in objectives and value != DEFAULTS[name]:
                raise ValueError(
                    f"`{name}` must be left out with the objective {self.objective!r}, which has no use for it, "
                    f"got {value!r}."
                )
        self.corruption()  # refuses what is out of range

    def corruption(self) -> Corruption:
        """Say how much is taken out of a document, and what."""
        return Corruption(**{field.name: getattr(self, field.name) for field in fields(Corruption)})

    def config(self, vocabulary: int) -> PyramidionConfig:
        """Make the configuration of the model, for a vocabulary of that size."""
        return preset(self.preset, **{"vocab_size": vocabulary, **(self.model or {})})

    def split(self, world: int) -> tuple[int, int]:
        """Split a batch among `world` processes: the equal parts each computes one by one, and the documents in one."""
        share, rest = divmod(self.batch_size, world)
        if rest or not share:
            raise ValueError(
                f"`batch_size` must be a multiple of the number of processes, got {self.batch_size} and {world}."
            )
        fewest = range(math.ceil(share / self.device_batch), share + 1)
        parts = next(parts for parts in fewest if share % parts == 0)
        return parts, share // parts

    def to_dict(self) -> dict[str, Any]:
        """Give every setting, ready for YAML or JSON."""
        return asdict(self)


def default_recipe(name: str, objective: str = SUMMARIES) -> Recipe:
    """Give a preset's own recipe: the paper's, with warm-up for the deep models, and a light one for the small."""
    recipe = Recipe(preset=name, objective=objective, metric="loss" if objective in PRETRAINING else Recipe.metric)
    if find(name).paper is None:  # small ones, for a CPU
        light = replace(recipe, learning_rate=2e-3, batch_size=16, device_batch=8, warmup_steps=100, max_target=256)
        return replace(light, evaluate_every=1.0, save_every=100)
    return recipe if name.startswith("deep") else replace(recipe, warmup_steps=0)


def read_recipe(path: Path | None, given: Mapping[str, Any]) -> Recipe:
    """Read a YAML file, put what was `given` over it, and both over the preset's own recipe.

    `model.pooling` and the like change one entry of a setting that has several, and leave its others as they are.
    """
    settings = _load(path) if path else {}
    for name, value in given.items():
        outer, dot, inner = name.partition(".")
        before = settings.get(outer)
        settings[outer] = {**(before if isinstance(before, dict) else {}), inner: value} if dot else value
    checked = _checked(settings, path)
    base = default_recipe(checked.get("preset", Recipe.preset), checked.get("objective", SUMMARIES))
    return replace(base, **checked)


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"The recipe must be a file that exists, got {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"The recipe {str(path)!r} must be YAML: {' '.join(str(error).split())}.") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ValueError(f"The recipe {str(path)!r} must be settings with values, got {type(loaded).__name__}.")
    return loaded


def _checked(settings: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Refuse unknown settings and wrong types, and read numbers that YAML takes for text, like 5e-4."""
    kinds = get_type_hints(Recipe)
    where = f" in {str(path)!r}" if path else ""
    checked = {}
    for name, value in settings.items():
        if name not in kinds:
            near = difflib.get_close_matches(str(name), list(kinds), 1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(f"`{name}` is not a setting of a recipe{where}, got {value!r}.{hint}")
        checked[name] = _convert(name, value, kinds[name])
    return checked


def _convert(name: str, value: Any, kind: Any) -> Any:
    allowed = tuple(getattr(option, "__origin__", option) for option in (get_args(kind) or (kind,)))
    if float in allowed and not isinstance(value, bool):
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
        elif isinstance(value, int):
            return float(value)
    if (isinstance(value, bool) and bool not in allowed) or not isinstance(value, allowed):
        wanted = " or ".join("nothing" if option is type(None) else option.__name__ for option in allowed)
        raise ValueError(f"`{name}` must be of type {wanted}, got {value!r}.")
    return value


def _at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")


SETTINGS = tuple(field.name for field in fields(Recipe))
DEFAULTS = {field.name: field.default for field in fields(Recipe)}
