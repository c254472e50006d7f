"""A suite: a YAML file of methods x tasks x backbones x seeds, or a list of runs; expanded, and checked beforehand."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.command_line import nearest, shell_command
from diffusion_policy.common.config_errors import COMPOSING, explain
from diffusion_policy.common.config_util import PACKAGE, config_dir, grid, register_configs, register_resolvers
from diffusion_policy.common.errors import ConfigError, DataNotFoundError
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.scripts.train import check_arguments, with_cameras

ROOT = PACKAGE.parent
#: What a preset may set besides its own overrides, which are added to those of the suite.
PER_PRESET = (
    *("overrides", "methods", "tasks", "backbones", "seeds", "eval", "also", "modality", "form", "description"),
    *("threads", "memory_gb", "reference", "claims"),
)
KEYS = (*PER_PRESET, "name", "title", "notes", "presets", "preset", "published", "runs", "grid", "paper")
METHOD_KEYS = ("overrides", "config", "group", "backbones", "tasks", "seeds", "eval", "label", "reference")
AXES = ("method", "task", "backbone")
#: The two readings of training-time evaluations: the paper's for 2D, and DP3's.
FORMS = ("best / mean of last 5", "mean of best 5 / last")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training with its evaluations."""

    name: str
    method: str
    task: str
    backbone: str
    seed: int | None
    config: str | None
    overrides: tuple[str, ...]
    evaluations: dict[str, tuple[str, ...]]  # options of eval.py by the folder of the evaluation
    group: str = ""

    @property
    def arguments(self) -> list[str]:
        """What follows `python`."""
        return ["train.py", *([f"--config-name={self.config}"] if self.config else []), *self.overrides]

    @property
    def command(self) -> str:
        return shell_command("python", *self.arguments)


@dataclasses.dataclass(frozen=True)
class Suite:
    """An expanded suite: what is run, and how it is reported."""

    name: str
    title: str
    description: str
    path: pathlib.Path
    preset: str | None
    runs: tuple[Run, ...]
    evaluates: bool
    also: tuple[str, ...]
    reference: str | None
    references: dict[str, str]  # of methods with their own
    form: str
    notes: str
    published: str | None
    claims: tuple[dict[str, Any], ...]
    threads: int
    memory_gb: float
    output: pathlib.Path
    paper: dict[str, Any]

    @property
    def full_name(self) -> str:
        return f"{self.name}_{self.preset}" if self.preset else self.name

    def axis(self, name: str) -> list[str]:
        """The methods, tasks or backbones, in their order."""
        return list(dict.fromkeys(getattr(run, name) for run in self.runs))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which a key may appear once: PyYAML would drop the first of two methods of one name."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"{key!r} appears twice (line {key_node.start_mark.line + 1})")
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


def read(path: pathlib.Path) -> dict[str, Any]:
    """The mapping in a YAML file; ConfigError if it cannot be read."""
    try:
        data = yaml.load(path.read_text(), _Loader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a suite: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a suite: it must be a mapping with name, title, and methods, runs or grid")
    return data


def load(path: pathlib.Path, preset: str | None = None, output: pathlib.Path | None = None) -> Suite:
    """The suite in a file, expanded for one of its presets; ConfigError for the first thing that is wrong."""
    data = read(path)
    known(f"{path}: ", data, KEYS)
    presets = data.get("presets", {})
    require(isinstance(presets, dict), f"{path}: presets must be a mapping of names")
    parts = [data, *(part for part in presets.values() if isinstance(part, dict))]
    whole_file = {axis: {name for part in parts for name in mapping(part.get(f"{axis}s") or {})} for axis in AXES}
    chosen = preset or data.get("preset") or next(iter(presets), None)
    if chosen is not None and chosen not in presets:
        raise ConfigError(
            f"{path} has no preset {chosen!r}; there {'are' if presets else 'are none'}: {words(presets)}"
        )
    if chosen is not None:
        change = presets[chosen] or {}
        require(isinstance(change, dict), f"{path}: preset {chosen} must be a mapping")
        known(f"{path}: preset {chosen}: ", change, PER_PRESET)
        data = merged(data, change, path)
    for key in ("name", "title"):
        require(isinstance(data.get(key), str), f"{path} is not a suite: it needs {key}")
    require(bool(re.fullmatch(r"\w[\w.-]*", data["name"])), f"{path}: name {data['name']!r} must be a folder's name")
    runs = expand(data, path)
    names = [folder_name(run.name) for run in runs]
    if twice := sorted({run.name for run in runs if names.count(folder_name(run.name)) > 1}):
        raise ConfigError(f"{path}: two runs have the same name: {', '.join(twice[:3])}")
    methods = {run.method for run in runs}
    # A preset may leave out a method, task or backbone that a claim or the reference names.
    known_names = {axis: {getattr(run, axis) for run in runs} | whole_file[axis] for axis in AXES}
    reference = data.get("reference")
    references = {
        name: spec["reference"]
        for name, spec in mapping(data.get("methods", {})).items()
        if isinstance(spec, dict) and "reference" in spec and name in methods
    }
    for name in (reference, *references.values()):
        if name is not None:
            one_of(f"{path}: reference", name, known_names["method"])
    form = data.get("form", FORMS[0])
    one_of(f"{path}: form", form, FORMS)
    claims = data.get("claims", [])
    for claim in claims:
        require(isinstance(claim, dict) and "text" in claim, f"{path}: a claim needs text, method and, if any, minus")
        known(f"{path}: claim: ", claim, ("text", "method", "minus", "task", "backbone"))
        for key in claim.keys() - {"text"}:
            one_of(f"{path}: claim: {key}", claim[key], known_names["method" if key == "minus" else key])
    full_name = f"{data['name']}_{chosen}" if chosen else data["name"]
    published = data.get("published")
    if published is not None and not (path.parent / published).is_file():
        raise ConfigError(f"{path}: published: there is no file {path.parent / published}")
    return Suite(
        name=data["name"],
        title=data["title"],
        description=str(data.get("description", "")).strip(),
        path=path,
        preset=chosen,
        runs=tuple(runs),
        evaluates=data.get("eval", []) is not None,
        also=tuple(data.get("also") or {}),
        reference=reference,
        references=references,
        form=form,
        notes=str(data.get("notes", "")).strip(),
        published=str(path.parent / published) if published else None,
        claims=tuple(claims),
        threads=whole(f"{path}: threads", data.get("threads", 1)),
        memory_gb=float(data.get("memory_gb", 2)),
        output=(output or ROOT / "data/suites" / full_name).absolute(),
        paper=mapping(data.get("paper", {})),
    )


def merged(data: dict[str, Any], change: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The suite with a preset: overrides are added, a list of methods or tasks selects, other keys replace."""
    out = data | {key: value for key, value in change.items() if key != "overrides"}
    out["overrides"] = [*overrides_of(data.get("overrides")), *overrides_of(change.get("overrides"))]
    for key in ("methods", "tasks"):
        if isinstance(change.get(key), list) and isinstance(data.get(key), dict):
            for name in change[key]:
                one_of(f"{path}: {key}", name, data[key])
            out[key] = {name: data[key][name] for name in change[key]}
    return out


# ---------------------------------------------------------------------- expanding
def expand(data: dict[str, Any], path: pathlib.Path) -> list[Run]:
    """All runs, those of the first seed first, so that there is an early comparison."""
    if "runs" in data:
        return listed(data, path)
    if "grid" in data:
        return of_study_grid(data)
    require(bool(data.get("methods")), f"{path} is not a suite: it needs methods, runs or grid")
    methods, tasks = mapping(data["methods"]), mapping(data.get("tasks", {"pusht_state": None}))
    backbones = data.get("backbones", ["transformer"])
    require(isinstance(backbones, list) and bool(backbones), f"{path}: backbones must be a list")
    seeds = data.get("seeds", [0])
    require(isinstance(seeds, list) and bool(seeds), f"{path}: seeds must be a list")
    modality, common = data.get("modality", "lowdim"), overrides_of(data.get("overrides"))
    specs = {name: specification(f"{path}: method {name}", name, spec, "objective") for name, spec in methods.items()}
    places = {name: specification(f"{path}: task {name}", name, spec, "task") for name, spec in tasks.items()}
    for name, spec in specs.items():
        for key, allowed in (("tasks", tasks), ("backbones", backbones)):
            for value in spec.get(key, ()):
                one_of(f"{path}: method {name}: {key}", value, allowed)
    runs = []
    for seed in dict.fromkeys([*seeds, *(seed for spec in specs.values() for seed in spec.get("seeds", ()))]):
        whole(f"{path}: seed", seed, 0)
        for task, place in places.items():
            for backbone in backbones:
                for name, spec in specs.items():
                    if (
                        seed not in spec.get("seeds", seeds)
                        or backbone not in spec.get("backbones", backbones)
                        or task not in spec.get("tasks", tasks)
                    ):
                        continue
                    grid_part = [] if spec.get("config") else [f"backbone={backbone}", f"modality={modality}"]
                    runs.append(
                        Run(
                            name=f"{task}-{name}-{backbone}-{seed}",
                            method=name,
                            task=task,
                            backbone=backbone,
                            seed=seed,
                            config=spec.get("config"),
                            overrides=(
                                *(word for word in spec["overrides"] if word.startswith("objective=")),
                                *grid_part,
                                *place["overrides"],
                                *common,
                                *(word for word in spec["overrides"] if not word.startswith("objective=")),
                                f"training.seed={seed}",
                            ),
                            evaluations=evaluations(data, [*place.get("eval", []), *spec.get("eval", [])]),
                            group=spec.get("group", ""),
                        )
                    )
    return runs


def specification(where: str, name: str, spec: Any, group: str) -> dict[str, Any]:
    """Of a method or task: its overrides as a list of words, and its own settings."""
    if spec is None:
        return {"overrides": [f"{group}={name}"]}
    out = dict(spec) if isinstance(spec, dict) else {"overrides": spec}
    known(f"{where}: ", out, METHOD_KEYS)
    found = overrides_of(out.get("overrides", [f"{group}={name}"]))
    if found and "=" not in found[0]:
        out["config"], found = found[0], found[1:]
    return out | {"overrides": found}


def listed(data: dict[str, Any], path: pathlib.Path) -> list[Run]:
    """The runs of a list, each with each seed if there are seeds."""
    require(isinstance(data["runs"], list) and bool(data["runs"]), f"{path}: runs must be a list")
    out = []
    for seed in data.get("seeds", [None]):
        for entry in data["runs"]:
            require(
                isinstance(entry, dict) and {"name", "config"} <= entry.keys(), f"{path}: a run needs name and config"
            )
            known(f"{path}: run {entry['name']}: ", entry, ("name", "config", "overrides", "eval", "seeds", "group"))
            if seed is not None and seed not in entry.get("seeds", data["seeds"]):
                continue
            config, own = entry["config"], overrides_of(entry.get("overrides"))
            out.append(
                Run(
                    name=entry["name"] if seed is None else f"{entry['name']} {seed}",
                    method=entry["name"],
                    task=data["name"],
                    backbone=backbone_of(config),
                    seed=seed,
                    config=config,
                    overrides=(
                        *overrides_of(data.get("overrides")),
                        *own,
                        *([] if seed is None else [f"training.seed={seed}"]),
                    ),
                    evaluations=evaluations(data, entry.get("eval", [])),
                    group=entry.get("group", ""),
                )
            )
    return out


def of_study_grid(data: dict[str, Any]) -> list[Run]:
    """The runs of a study's grid: tasks by name (`task.name=`), methods (a config and overrides), seeds."""
    found = data["grid"]
    return [
        Run(
            name=f"{task} {method} {seed}",
            method=method,
            task=task,
            backbone=backbone_of(config.split()[0]),
            seed=seed,
            config=config.split()[0],
            overrides=(
                *overrides_of(data.get("overrides")),
                f"task.name={task}",
                f"training.seed={seed}",
                *config.split()[1:],
            ),
            evaluations=evaluations(data, []),
        )
        for seed in found["seeds"]
        for task in found["tasks"]
        for method, config in found["methods"].items()
    ]


def backbone_of(config: str) -> str:
    """The backbone of a config of the grid, else the config itself."""
    chosen = grid().get(config)
    return chosen[1] if chosen else config.removeprefix("train_")


def evaluations(data: Mapping[str, Any], own: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """Options of eval.py by the folder of each evaluation: the one that tables rank by, and those of `also`."""
    if data.get("eval", []) is None:
        return {}
    also = {f"eval_{name}": tuple(map(str, options)) for name, options in (data.get("also") or {}).items()}
    return {"eval": tuple(map(str, [*data.get("eval", []), *own]))} | also


def folder_name(name: str) -> str:
    """The folder of a run with this name. Spaces stay, as studies have them."""
    return re.sub(r"[^\w .+=-]", "_", name)


# ---------------------------------------------------------------------- checking
def check(suite: Suite, runs: Iterable[Run]) -> None:
    """Raise a UserError for the first run that could not be made: names, settings, options of eval.py, datasets.

    Every command is checked for its names. Composing takes half a second, so each combination of method and backbone is
    composed with its first task, and each task with its first method.
    """
    runs = list(runs)
    register_resolvers()
    register_configs()
    for run in runs:
        try:
            check_arguments(run.config, run.overrides, ())
        except ConfigError as error:
            raise ConfigError(f"{suite.path}: run {run.name}: {error}") from error
    for options in {options for run in runs for options in run.evaluations.values()}:
        parsed = eval_script.parser().parse_args(["--checkpoint", "latest.ckpt", *options])  # exits with one line
        if parsed.shard is not None or parsed.output_dir:
            raise ConfigError(f"{suite.path}: eval cannot set --shard or --output_dir: {' '.join(options)}")
    seen: set[tuple[str, ...]] = set()
    for run in runs:
        keys = {(run.method, run.backbone), ("", run.task)}
        if not keys <= seen:
            seen |= keys
            check_data(composed(suite, run), run)


def composed(suite: Suite, run: Run) -> DictConfig:
    """The config of a run; ConfigError if it cannot be composed."""
    GlobalHydra.instance().clear()
    arguments = with_cameras([*([f"--config-name={run.config}"] if run.config else []), *run.overrides], run.config)
    name = next((word.partition("=")[2] for word in arguments if word.startswith("--config-name=")), "train")
    try:
        with initialize_config_dir(str(config_dir()), version_base=None):
            cfg = compose(name, overrides=[word for word in arguments if not word.startswith("--")])
        # Some tasks read sizes from their data later; what is there must resolve.
        if OmegaConf.select(cfg, "task.from_data") is None:
            OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except COMPOSING as error:
        raise ConfigError(f"{suite.path}: run {run.name}: {explain(error)}") from error
    return cfg


def check_data(cfg: DictConfig, run: Run) -> None:
    """Raise DataNotFoundError if a file of the run's dataset is missing."""
    dataset = cfg.task.dataset
    for key in ("zarr_path", "dataset_path", "path", "dataset_dir", "data_path"):
        value = OmegaConf.select(dataset, key, default=None)
        if isinstance(value, str) and value != "auto" and not (ROOT / value).exists():
            pages = "docs/training.md, docs/robomimic.md and docs/point_clouds.md tell how to get or make it"
            how = str(OmegaConf.select(dataset, "how", default=None) or pages).rstrip(".")
            raise DataNotFoundError(
                f"run {run.name}: its dataset {value} does not exist; {how}; --only leaves the run out"
            )


def known(where: str, data: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise ConfigError for the first key that is not known."""
    for key in data:
        one_of(f"{where}key", key, keys)


def one_of(what: str, name: Any, names: Iterable[str]) -> None:
    """Raise ConfigError with the nearest names if `name` is not among them."""
    if name not in (names := list(names)):
        close = nearest(str(name), names)
        raise ConfigError(
            f"{what} {name!r} does not exist; " + (f"nearest: {', '.join(close)}" if close else words(names))
        )


def words(names: Iterable[str]) -> str:
    return f"there are: {', '.join(names)}" if (names := list(names)) else "none"


def require(true: bool, message: str) -> None:
    if not true:
        raise ConfigError(message)


def whole(what: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, not {value!r}")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """A list of names, or a mapping, as a mapping."""
    if isinstance(value, list):
        return dict.fromkeys(map(str, value))
    if not isinstance(value, dict):
        raise ConfigError(f"{value!r} must be a list of names, or a mapping")
    return {str(key): entry for key, entry in value.items()}


def overrides_of(value: Any) -> list[str]:
    """Overrides as a list: a text is split at its spaces."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"overrides must be a text or a list of key=value, not {value!r}")
    return list(value)
