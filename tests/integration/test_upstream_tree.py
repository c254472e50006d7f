"""The plugin inside upstream's tree: a host with upstream's modules and none of ours.

Upstream itself is not at hand. The host here has the modules that the plugin imports: networks and normaliser as they
are here, and base classes and a workspace that behave as upstream's do (pickled checkpoints, a create_from_checkpoint
that knows its own class only, a loop that tells a policy nothing but its batches).
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.util import ROOT

COPIED = (
    "common/errors.py",
    "common/pytorch_util.py",
    "model/common/dict_of_tensor_mixin.py",
    "model/common/module_attr_mixin.py",
    "model/common/normalizer.py",
    "model/diffusion/conditional_unet1d.py",
    "model/diffusion/conv1d_components.py",
    "model/diffusion/positional_embedding.py",
)
WRITTEN = {
    "__init__.py": "",  # upstream has none; here it keeps an installed host out of the namespace
    "policy/base_lowdim_policy.py": """
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin
class BaseLowdimPolicy(ModuleAttrMixin):
    def reset(self):
        pass
""",
    "policy/base_image_policy.py": """
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin
class BaseImagePolicy(ModuleAttrMixin):
    def reset(self):
        pass
""",
    "workspace/base_workspace.py": """
import dill, torch
class BaseWorkspace:
    def __init__(self, cfg, output_dir=None):
        self.cfg = cfg
    def save_checkpoint(self, path):
        states = {name: getattr(self, name).state_dict() for name in ("model", "ema_model", "optimizer")}
        pickles = {"global_step": dill.dumps(self.global_step)}
        torch.save({"cfg": self.cfg, "state_dicts": states, "pickles": pickles}, path, pickle_module=dill)
    def load_payload(self, payload, exclude_keys=None, include_keys=None, **kwargs):
        for name, state in payload["state_dicts"].items():
            self.__dict__[name].load_state_dict(state)
        for name, value in payload["pickles"].items():
            self.__dict__[name] = dill.loads(value)
    @classmethod
    def create_from_checkpoint(cls, path, exclude_keys=None, include_keys=None, **kwargs):
        payload = torch.load(open(path, "rb"), pickle_module=dill, weights_only=False, **kwargs)
        instance = cls(payload["cfg"])
        instance.load_payload(payload)
        return instance
""",
    "workspace/train_diffusion_unet_lowdim_workspace.py": """
import copy, hydra, torch
from diffusion_policy.workspace.base_workspace import BaseWorkspace
class TrainDiffusionUnetLowdimWorkspace(BaseWorkspace):
    def __init__(self, cfg, output_dir=None):
        super().__init__(cfg, output_dir)
        self.model = hydra.utils.instantiate(cfg.policy)
        self.ema_model = copy.deepcopy(self.model)
        self.optimizer = hydra.utils.instantiate(cfg.optimizer, params=self.model.parameters())
        self.global_step = 0
    def run(self):
        dataset = hydra.utils.instantiate(self.cfg.task.dataset)
        for policy in (self.model, self.ema_model):
            policy.set_normalizer(dataset.get_normalizer())
        for batch in torch.utils.data.DataLoader(dataset, batch_size=8):
            self.model.compute_loss(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_step += 1
""",
    "dataset/random_dataset.py": """
import torch
from diffusion_policy.model.common.normalizer import LinearNormalizer
class RandomDataset(torch.utils.data.Dataset):
    def __init__(self):
        self.obs, self.action = torch.rand(16, 8, 5), torch.rand(16, 8, 2)
    def get_normalizer(self):
        normalizer = LinearNormalizer()
        normalizer.fit({"obs": self.obs, "action": self.action})
        return normalizer
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return {"obs": self.obs[i], "action": self.action[i]}
""",
}
SETUP = """
import importlib.util, sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]  # an editable install of ours
assert importlib.util.find_spec("diffusion_policy.storage") is None  # the host is not ours
from omegaconf import OmegaConf
from idp_workspace.workspace.train_lowdim_workspace import TrainLowdimWorkspace
UNET = {
    "_target_": "diffusion_policy.model.diffusion.conditional_unet1d.ConditionalUnet1D",
    "input_dim": 2, "global_cond_dim": 10, "diffusion_step_embed_dim": 16, "down_dims": [8, 16],
}
def workspace(target, **options):
    policy = {
        "_target_": f"idp_workspace.policy.{target}", "model": UNET, "horizon": 8, "n_obs_steps": 2,
        "n_action_steps": 4, "obs_dim": 5, "action_dim": 2, "obs_as_global_cond": True, **options,
    }
    return TrainLowdimWorkspace(OmegaConf.create({
        "_target_": "idp_workspace.workspace.train_lowdim_workspace.TrainLowdimWorkspace",
        "policy": policy,
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
        "task": {"name": "random", "dataset": {"_target_": "diffusion_policy.dataset.random_dataset.RandomDataset"}},
    }))
"""
PROGRAM = (
    SETUP
    + """
# A ramp: upstream's loop never tells the progress.
run = workspace("IDPPolicy", lambda_schedule="ramp")
run.run()
assert run.global_step == 2 and abs(run.model.current_lambda() - 81) < 1e-9
run.save_checkpoint("idp.ckpt")

from idp_workspace import visualize
visualize.main(["--checkpoint", "idp.ckpt", "--output", "images", "--batch", "12", "--n", "2", "--device", "cpu"])

# A student loads its teacher at its first loss.
scheduler = {"_target_": "diffusers.schedulers.scheduling_ddpm.DDPMScheduler", "num_train_timesteps": 100}
teacher = workspace("DDPMPolicy", noise_scheduler=scheduler)
teacher.run()
teacher.save_checkpoint("teacher.ckpt")
student = workspace("OneStepDiffusionPolicy", noise_scheduler=scheduler, teacher_checkpoint="teacher.ckpt")
student.run()
assert type(student.model.teacher).__name__ == "DDPMPolicy" and student.global_step == 2

from idp_workspace.checkpoint import load_workspace
loaded = load_workspace("idp.ckpt")
assert type(loaded) is TrainLowdimWorkspace and loaded.global_step == 2
open("broken.ckpt", "wb").write(b"no checkpoint")
try:
    load_workspace("broken.ckpt")
except RuntimeError as error:
    assert "broken.ckpt cannot be loaded" in str(error)
else:
    raise AssertionError
"""
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upstream")
    shutil.copytree(ROOT / "idp_workspace", folder / "idp_workspace", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*COPIED, *WRITTEN):
        file = folder / "diffusion_policy" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(WRITTEN[name] if name in WRITTEN else (ROOT / "diffusion_policy" / name).read_text())
    return folder


def run(program, tree, cwd):
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # -P: this folder of the tests must not precede the tree
    return subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


def test_training_teachers_and_images_need_nothing_of_our_host(tree, tmp_path):
    done = run(PROGRAM, tree, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "images/geometry.png").stat().st_size > 0
    assert (tmp_path / "images/geometry.json").stat().st_size > 0
