"""Overrides of a configuration, as on the command line of train.py, up to the point where training would start."""

from __future__ import annotations

import pathlib
import traceback

from hydra.errors import HydraException
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.fuzz import Finding
from benchmarks.fuzz_targets.mutate import StrategyTarget
from benchmarks.fuzz_targets.small import config, small_config, workspace_of
from diffusion_policy.common.errors import ConfigError, UserError

CONFIGS = (
    "train_idp_mlp_lowdim",
    "train_naive_drifting_unet_lowdim",
    "train_diffusion_transformer_lowdim_pusht_workspace",
)
#: Either small or absurd: values in between would only build a large network.
NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "0.5",
    "-0.0",
    "1e-30",
    "1e308",
    "nan",
    "inf",
    "-inf",
    "2147483648",
    "9223372036854775807",
    "100000000000000000000000000000",
    "-9223372036854775809",
    "1_0",
    "0x10",
    "1e5000",
)
WORDS = (
    "null",
    "true",
    "false",
    "''",
    "[]",
    "{}",
    "[1,2]",
    "[0]",
    "{a:1}",
    "[[]]",
    "auto",
    "cpu",
    "cuda:99",
    "mps",
    "none",
    "cosine",
    "constant",
    "softmax",
    "???",
    "${policy}",
    "${nothing}",
    "${training.seed}",
    "${eval:'1+1'}",
    "${eval:'9**9**9'}",
    "${eval:'1/0'}",
    "${oc.env:HOME}",
    "${oc.env:NOTHING}",
    "${now:%Y}",
    "${project:x}",
    "${oc.select:a}",
    "${.}",
    "${..seed}",
    "${policy.horizon}",
    "/nowhere",
    "data",
    "é",
    "\u202e",
    "'\\x00'",
    "a=b",
    "a,b",
    "1,2",
    "range(1,3)",
    "glob(*)",
    "choice(1,2)",
    "x" * 3000,
)
TARGETS = (
    "os.getcwd",
    "builtins.dict",
    "builtins.list",
    "math.sqrt",
    "idp_workspace.policy.Nothing",
    "idp_workspace.policy",
    "nothing.at.all",
    "a..b",
    ".",
    "",
    "torch.nn.Linear",
    "idp_workspace.policy.NaiveDriftingPolicy",
    "idp_workspace.policy.IDPPolicy",
    "diffusion_policy.dataset.pusht_dataset.PushTStateDataset",
    "diffusion_policy.dataset.pusht_dataset.PushTLowdimDataset",
    "diffusion_policy.dataset.base_dataset.BaseLowdimDataset",
    "torch.optim.SGD",
    "torch.optim.AdamW",
)
GROUPS = (
    "preset=cpu",
    "preset=nothing",
    "task=pusht_lowdim",
    "task=pusht_state",
    "ablation=shuffled_neighbors",
    "backbone=unet",
    "backbone=mlp",
    "objective=flow",
    "~task",
    "~preset",
    "+task=pusht_lowdim",
    "task@policy=pusht_lowdim",
)


def strategy(canary: pathlib.Path) -> st.SearchStrategy:
    keys = sorted({key for name in CONFIGS for key in flat(OmegaConf.to_container(config(name, ["preset=debug"])))})
    likely = [
        key
        for key in keys
        if key.startswith(
            ("policy.", "training.", "optimizer.", "dataloader.", "task.dataset.", "ema.", "size.", "horizon", "n_")
        )
    ]
    odd_key = st.one_of(
        st.sampled_from(keys),
        st.text(max_size=8),
        st.sampled_from(likely).map(lambda key: key + ".x"),
        st.sampled_from(keys).map(lambda key: key[:-1]),
    )
    program = f'${{eval:\'open("{canary}", "w")\'}}', f"${{eval:__import__(os).system('touch {canary}')}}"
    number = st.one_of(st.sampled_from(NUMBERS), st.integers().map(str), st.floats().map(repr))
    odd_value = st.one_of(st.sampled_from(WORDS), st.text(max_size=12), st.sampled_from(program))
    holder = st.sampled_from(
        ["", "policy.", "policy.model.", "task.dataset.", "optimizer.", "ema.", "+policy.noise_scheduler."]
    )
    one = st.one_of(
        *[st.builds("{}={}".format, st.sampled_from(likely), number)] * 4,
        *[st.builds("{}={}".format, st.sampled_from(likely), st.sampled_from(WORDS))] * 2,
        st.builds("{}{}={}".format, st.sampled_from(["", "+", "++"]), odd_key, st.one_of(number, odd_value)),
        st.builds("++{}={}".format, st.sampled_from(likely), odd_value),
        st.builds("~{}".format, st.sampled_from(keys)),
        st.builds("{}_target_={}".format, holder, st.sampled_from(TARGETS)),
        st.sampled_from(GROUPS),
        st.text(max_size=15),
    )
    return st.tuples(st.sampled_from(CONFIGS), st.lists(one, min_size=1, max_size=2))


def flat(value, prefix: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [prefix]
    children = [key for name, child in value.items() for key in flat(child, f"{prefix}.{name}" if prefix else name)]
    return [prefix, *children] if prefix else children


class OverrideTarget(StrategyTarget):
    """Correct results: a workspace ready to train, a project error, or a config error of Hydra or OmegaConf."""

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        self.folder, self.strategy = folder, strategy(canary)

    def check(self, value) -> str:
        if value is None:
            return "read"
        name, overrides = value
        try:
            cfg = small_config(self.folder, name, tuple(overrides))
        except (HydraException, OmegaConfBaseException):
            return "hydra's own error"
        except ConfigError:  # of the project's resolvers
            return "ConfigError"
        except (ValueError, AssertionError) as error:
            place = traceback.extract_tb(error.__traceback__)[-1].filename
            if "hydra" not in place and "omegaconf" not in place:
                raise
            return "hydra's own error"
        if "_target_" not in cfg:
            return "no _target_"  # train.py then lists the choices
        try:
            workspace = workspace_of(cfg, self.folder)
            workspace.prepare()
        except UserError as error:
            if len(str(error)) < 15:
                raise
            return type(error).__name__
        except OmegaConfBaseException:
            return "hydra's own error"
        if not hasattr(workspace.policy, "predict_action"):
            raise Finding(f"built a {type(workspace.policy).__name__} where a policy belongs")
        return "read"
