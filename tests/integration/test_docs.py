"""README and docs: links resolve, command lines parse, and the blocks marked quick run.

A block is marked quick by the comment `<!-- quick -->` on the line before its fence. The examples are run by
test_examples.py.
"""

import argparse
import ast
import dataclasses
import itertools
import pathlib
import re
import runpy
import shlex
import sys
import tomllib

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from diffusion_policy.common import config_util
from idp_workspace.policy import IDPPolicy
from tests import util
from tests.util import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "examples/README.md"])
LINKED = [*PAGES, *sorted((ROOT / "results").glob("*/README.md"))]
FENCE = re.compile(r"(?P<quick><!-- quick -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```", re.M | re.S)
INLINE = re.compile(r"`((?:python|make|idp-train|idp-eval) [^`]+)`")
PLACEHOLDER = re.compile(r"\.\.\.|<|\bFILE\b|\bPATH\b")
CONFIG_GROUPS = ("objective", "backbone", "modality", "task", "preset", "ablation")


def name(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> list[str]:
    """Command lines of a shell block, without comments and with continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    parts = (part.strip() for line in lines for part in line.split(" # ")[0].split("&&"))
    return [part for part in parts if part and not part.startswith("#")]


def collect() -> tuple[list, list]:
    every, quick = {}, []
    for page in PAGES:
        text = page.read_text()
        for block in FENCE.finditer(text):
            if block["language"] == "bash":
                found = commands(block["body"])
                every |= {(name(page), command): None for command in found}
                if block["quick"]:
                    quick.append(pytest.param(found, id=f"{name(page)}: {found[0]}"))
        for command in INLINE.findall(FENCE.sub("", text)):
            if not PLACEHOLDER.search(command):
                every[name(page), " ".join(command.split())] = None
    return [pytest.param(command, id=f"{page}: {command}") for page, command in every], quick


COMMANDS, QUICK = collect()


# ---------------------------------------------------------------------- links
def anchors(page: pathlib.Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and MkDocs make them."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings]
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_resolve(page):
    text = FENCE.sub("", page.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]^]+\]: (\S+)$", text, re.M)
    used, defined = re.findall(r"\]\[(\w+)\]", text), re.findall(r"^\[(\w+)\]: ", text, re.M)
    assert set(used) <= set(defined), f"references without a target: {set(used) - set(defined)}"
    for link in links:
        if re.match(r"\w+://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading, there are {sorted(anchors(target))}"


def test_pages_are_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in navigation]
    assert not missing


#: Text that people write: ruff checks the lines of Python.
TEXTS = [
    *PAGES,
    *(path for folder in ("config", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.yaml")),
    *(ROOT / file for file in ("Makefile", "pyproject.toml", "mkdocs.yml")),
]


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_lines_are_short(page):
    long = [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > 120]
    assert not long, f"lines over 120 characters: {long}"


# ---------------------------------------------------------------------- commands
def expand(overrides: list[str]) -> list[list[str]]:
    """Overrides of each run of a multirun."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [override.input_line]
        for override in parsed
    ]
    return [list(combination) for combination in itertools.product(*choices)]


def check_training(arguments: list[str]) -> None:
    """Compose and resolve the configuration of a `train.py` command."""
    if arguments == ["--help"]:
        return
    options = argparse.ArgumentParser(exit_on_error=False)
    options.add_argument("--config-name", default="train")
    options.add_argument("--config-dir")
    options.add_argument("--multirun", action="store_true")
    options, overrides = options.parse_known_args(arguments)
    assert not [override for override in overrides if override.startswith("-")]
    config_util.register_resolvers()
    if hasattr(config_util, "register_configs"):
        config_util.register_configs()
    search = [f"hydra.searchpath=[file://{ROOT / options.config_dir}]"] if options.config_dir else []
    runs = expand(overrides)
    assert len(runs) > 1 or not options.multirun
    for run in runs:
        with initialize_config_dir(str(ROOT / "config"), version_base=None):
            cfg = compose(options.config_name, overrides=[*run, *search])
        OmegaConf.resolve(cfg)
        assert "_target_" in cfg and "policy" in cfg


class Parsed(Exception):
    pass


def check_module(module: str, arguments: list[str], monkeypatch) -> None:
    """Start a script, and end it once it has parsed its command line without an error."""
    original = argparse.ArgumentParser.parse_args

    def parse(parser, args=None, namespace=None):
        original(parser, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, module, raising=False)  # it is run as a script, from its beginning
    try:
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0 and "--help" in arguments


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command, monkeypatch):
    words = shlex.split(command)
    words = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=\S*", word), words))
    match words:
        case ["python", "train.py", *arguments] | ["idp-train", *arguments]:
            check_training(arguments)
        case ["torchrun" | "accelerate", *arguments]:
            check_training(arguments[arguments.index("train.py") + 1 :])
        case ["python", "eval.py", *arguments] | ["idp-eval", *arguments]:
            check_module("diffusion_policy.scripts.eval", arguments, monkeypatch)
        case ["python", "-m", "http.server", *_] | ["python3.12", "-m", "venv", *_]:
            pass
        case ["lerobot-train" | "lerobot-eval" | "lerobot-rollout", *_]:
            pass  # LeRobot's; the plugin's tests check the settings
        case ["python", "-m", module, *_] if module.startswith("lerobot"):
            package, _, name = module.partition(".")
            assert package == "lerobot" or (ROOT / f"plugins/{package}/src/{package}/{name}.py").is_file()
        case ["python", "-m", module, *arguments]:
            check_module(module, arguments, monkeypatch)
        case ["python", script, *_]:
            assert (ROOT / script).is_file()
        case ["make", *targets]:
            assert targets
            makefile = (ROOT / "Makefile").read_text()
            known = {word for line in re.findall(r"^([a-z][\w -]*):", makefile, re.M) for word in line.split()}
            assert set(targets) <= known, f"the Makefile has {sorted(known)}"
        case ["pip", "install", *arguments]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert all(extra in extras for word in arguments for extra in re.findall(r"^\.\[(\w+)\]$", word))
        case [".", path]:
            assert path in (".venv/bin/activate", ".venv-lerobot/bin/activate")
        case ["conda", "env", "create", "-f", path]:
            assert (ROOT / path).is_file()
        case ["conda" | "apt-get" | "pip" | "git", *_]:
            pass
        case _:
            pytest.fail(f"no rule to check this command: {command}")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_import_what_exists(page):
    for block in FENCE.finditer(page.read_text()):
        if block["language"] == "python":
            tree = ast.parse(block["body"])
            imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(imports, type_ignores=[]), str(page), "exec"), {})


def test_commands_were_found():
    assert len(COMMANDS) > 30 and len(QUICK) >= 2


@pytest.mark.parametrize("block", QUICK)
def test_quick_block_runs(block, tmp_path):
    for entry in ("train.py", "eval.py", "examples", "config"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    for line in block:
        python, *words = shlex.split(line)
        assert python == "python"
        done = util.command(*words[words[0] == "-m" :], cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_options_of_the_policy_are_documented():
    """The table of switches names every option of IDP."""
    text = (ROOT / "docs/training.md").read_text()
    missing = [field.name for field in dataclasses.fields(IDPPolicy.Options) if f"`{field.name}" not in text]
    assert not missing


@pytest.mark.parametrize("group", CONFIG_GROUPS)
def test_values_of_config_groups_are_documented(group):
    """Every value that a user chooses is named; robomimic's tasks are described by their pattern."""
    text = (ROOT / "docs/training.md").read_text()
    pattern = re.compile(r"(lift|can|square|transport|tool_hang)_(ph|mh)_(lowdim|image)|(simple_)?dp3.*|edm_teacher")
    values = [path.stem for path in (ROOT / "config" / group).glob("*.yaml")]
    assert not [value for value in values if f"`{value}`" not in text and not pattern.fullmatch(value)]
