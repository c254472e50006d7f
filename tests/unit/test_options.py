"""Options as validated dataclasses."""

import dataclasses
import itertools
import json
from typing import Annotated, Literal

import hydra
import numpy as np
import pytest
from omegaconf import OmegaConf

from diffusion_policy.common.config_util import choices
from idp_workspace.drifting import Field
from idp_workspace.geometry_variants import Geometry
from idp_workspace.options import Above, AtLeast, Between, Options, split_options, unknown_argument
from idp_workspace.policy.idp_options import IDPOptions
from tests.util import load_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(Options):
    kernel: Literal["laplace", "gaussian"] = "laplace"
    tau: Annotated[float, Above(0)] = 1.0
    topk: Annotated[int | None, AtLeast(1)] = None
    share: Annotated[float, Between(0, 1)] = 0.5
    inside: Annotated[float, Between(0, 1, open=True)] = 0.5
    on: bool = True


@pytest.mark.parametrize(
    "values, message",
    [
        ({"kernel": "box"}, "kernel='box' is not one of laplace, gaussian"),
        ({"tau": 0}, "tau=0 must be above 0"),
        ({"tau": "x"}, "tau='x' must be a number"),
        ({"tau": True}, "tau=True must be a number"),
        ({"topk": 0}, "topk=0 must be at least 1"),
        ({"topk": 1.5}, "topk=1.5 must be a whole number"),
        ({"share": 1}, r"share=1 must be in \[0, 1\)"),
        ({"inside": 0}, r"inside=0 must be in \(0, 1\)"),
        ({"on": 1}, "on=1 must be true or false"),
    ],
)
def test_a_value_that_does_not_fit_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        Example(**values)


def test_values_that_fit():
    example = Example(tau=2, topk=np.int64(3), share=0, kernel="gaussian")
    assert (example.tau, example.topk, example.share) == (2, 3, 0)
    assert Example().topk is None


def test_a_subset_is_the_keywords_of_a_base():
    assert Geometry(**IDPOptions(tau=0.5, t_star=0.8).subset(Geometry)) == Geometry(tau=0.5)
    assert IDPOptions().is_paper and not IDPOptions(topk=3).is_paper


def test_arguments_are_split_and_unknown_ones_get_the_nearest_name():
    options, rest = split_options(Field, {"kernel": "gaussian", "horizon": 16})
    assert options.kernel == "gaussian" and rest == {"horizon": 16}
    assert "did you mean 'horizon'" in str(unknown_argument("horzion", ["horizon", "model"], "X"))
    assert "it takes: horizon, model" in str(unknown_argument("zzz", ["model", "horizon"], "X"))


def test_every_option_of_idp_is_documented():
    """Each field has a docstring, which becomes the API reference."""
    import ast
    import inspect

    for kind in (Geometry, IDPOptions):
        body = ast.parse(inspect.getsource(kind)).body[0].body
        for field, after in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), field.target.id


#: Objectives that cannot be built without an object, such as a noise scheduler.
NO_DEFAULT = ("diffusion", "one_step_diffusion", "dp3")


@pytest.mark.parametrize("objective", sorted(set(choices("objective")) - set(NO_DEFAULT)))
def test_the_config_of_an_objective_has_the_defaults_of_its_options(objective):
    """The dataclass and the config both show a reader the paper's values; they must not drift apart."""
    policy = OmegaConf.to_container(load_config("train", f"objective={objective}", "backbone=unet").policy)
    defaults = dataclasses.asdict(hydra.utils.get_class(policy["_target_"]).Options())
    defaults = json.loads(json.dumps(defaults))  # tuples as lists
    changed = {key for key, value in policy.items() if key in defaults and value != defaults[key]}
    assert changed == ({"geometry"} if objective == "idp_m0" else set())
