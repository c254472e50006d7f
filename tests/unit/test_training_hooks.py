"""The hooks that the training loop and eval.py call on a policy."""

import copy

import pytest
import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.policy.base_lowdim_policy import BaseLowdimPolicy
from diffusion_policy.policy.training_hooks import provide_hooks
from diffusion_policy.workspace.measurement import set_nfe
from diffusion_policy.workspace.train_workspace import TrainWorkspace
from tests.util import load_config, write_pusht


class Plain(torch.nn.Module):
    """A policy as upstream's interface asks for it: it inherits no hooks."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)
        self.n_obs_steps = 2

    def set_normalizer(self, normalizer):
        pass

    def compute_loss(self, batch):
        return self.layer(batch["obs"][:, 0]).square().mean()

    def predict_action(self, obs):
        action = self.layer(obs["obs"][:, :1]).expand(-1, 16, -1)
        return {"action": action[:, :8], "action_pred": action}


class Partial(Plain):
    """It defines one hook."""

    def metrics(self):
        return {"weight": self.layer.weight.sum().item()}


class Recorder(Plain, BaseLowdimPolicy):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_start(self):
        self.calls.append("start")

    def set_progress(self, fraction):
        self.calls.append(fraction)


def train(policy, tmp_path):
    cfg = load_config(
        "train_idp_mlp_lowdim",
        "preset=debug",
        f"task.dataset.zarr_path={write_pusht(tmp_path / 'pusht.zarr')}",
        "task.env_runner=null",
        "training.steps_per_epoch=2",
        "training.num_epochs=2",
        "training.log_every=1",
    )
    cfg.policy = {"_target_": f"{__name__}.{policy.__name__}"}
    workspace = TrainWorkspace(cfg, output_dir=str(tmp_path / "run"))
    workspace.run()
    return workspace


@pytest.mark.parametrize("policy", [Plain, Partial])
def test_a_policy_without_hooks_trains(policy, tmp_path):
    workspace = train(policy, tmp_path)
    log = (tmp_path / "run/logs.json.txt").read_text()
    assert workspace.global_step == 4 and ('"weight"' in log) == (policy is Partial)
    assert not any("nfe" in key for key in workspace.model.state_dict())


def test_the_loop_calls_the_hooks_of_both_policies(tmp_path):
    workspace = train(Recorder, tmp_path)
    assert workspace.model.calls == ["start", 0.0, 0.25, 0.5, 0.75]
    assert workspace.ema_model.calls == ["start", 0.5, 1.0]


def test_defaults_follow_a_copy():
    policy = Plain()
    provide_hooks(policy)
    other = copy.deepcopy(policy)
    assert other.metrics.__self__ is other and other.metrics() == {} and other.nfe == 0


def test_nfe_is_set_only_where_it_is_free():
    policy = Plain()
    provide_hooks(policy)
    with pytest.raises(ConfigError, match="fixed number"):
        set_nfe(policy, 2)
    policy.nfe = 1
    set_nfe(policy, 3)
    assert policy.nfe == 3
