"""Policies that observe images: every objective and backbone, what they accept and refuse; the images of PushT and
where they come from.
"""

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn

from diffusion_policy.common.normalize_util import get_image_range_normalizer
from diffusion_policy.dataset import pusht_image_dataset
from diffusion_policy.dataset.pusht_image_dataset import PushTImageDataset
from diffusion_policy.env.pusht.pusht_image_env import PushTImageEnv
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.model.diffusion.mip_networks import ChiTransformer, ChiUnet, ResidualMLP
from diffusion_policy.model.vision.mip_image_encoder import ImageEncoder
from diffusion_policy.model.vision.model_getter import get_resnet
from diffusion_policy.model.vision.multi_image_obs_encoder import MultiImageObsEncoder
from diffusion_policy.policy.base_image_policy import BaseImagePolicy
from idp_workspace import policy as policies
from idp_workspace.policy import DDPMPolicy, EDMTeacherPolicy, IDPPolicy, RegressionPolicy
from tests.util import write_pusht

H, D, TO, TA, E = 8, 2, 2, 4, 8
META = {
    "obs": {"image": {"shape": [3, 20, 20], "type": "rgb"}, "pos": {"shape": [2], "type": "low_dim"}},
    "action": {"shape": [D]},
}
SIZES = dict(shape_meta=META, horizon=H, n_obs_steps=TO, n_action_steps=TA)
STUDENTS = {"ConsistencyPolicy": EDMTeacherPolicy, "OneStepDiffusionPolicy": DDPMPolicy}
OBJECTIVES = sorted(policies.__all__)
BACKBONES = ("transformer", "unet", "mlp")


def encoder(form="mip", crop=(16, 16)):
    if form == "mip":
        return ImageEncoder(META, emb_dim=E, crop_shape=crop, width=4)
    return MultiImageObsEncoder(META, get_resnet("resnet18", width=4), crop_shape=crop, use_group_norm=True)


def network(backbone):
    if backbone == "transformer":
        return dict(model=ChiTransformer(D, D, H, TO, n_layer=2, n_head=2, n_emb=E, p_drop_attn=0.0), obs_as_cond=True)
    if backbone == "unet":
        return dict(model=ChiUnet(D, TO * E, E, E, (8, 16)), obs_as_global_cond=True)
    return dict(model=ResidualMLP(D, D, H, TO, n_layer=2, n_emb=E, p_drop=0.0), obs_as_cond=True)


def scheduler():
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    return DDPMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")


def normalizer():
    out = LinearNormalizer()
    out.fit({key: torch.tensor([[-1.0], [1.0]]).expand(2, 2) for key in ("pos", "action")})
    out["image"] = get_image_range_normalizer()
    return out


def make(kind=IDPPolicy, backbone="mlp", seed=0, fitted=True, **options):
    torch.manual_seed(seed)
    if kind in (DDPMPolicy, policies.OneStepDiffusionPolicy):
        options = {"noise_scheduler": scheduler(), **options}
    policy = kind(**{**SIZES, "obs_encoder": encoder(), **network(backbone), **options})
    if fitted:
        policy.set_normalizer(normalizer())
    return policy


def batch(b=4, seed=0, steps=TO, dtype=torch.uint8):
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (b, steps, 3, 20, 20), generator=g, dtype=torch.uint8)
    return {
        "obs": {
            "image": image if dtype == torch.uint8 else image.to(dtype) / 255,
            "pos": torch.rand(b, steps, 2, generator=g) * 2 - 1,
        },
        "action": torch.rand(b, H, D, generator=g) * 2 - 1,
    }


# ---------------------------------------------------------------------- every objective, every backbone
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_learns_and_acts_from_images(name, backbone, monkeypatch):
    kind = getattr(policies, name)
    if name in STUDENTS:
        teacher = make(STUDENTS[name], backbone).eval().requires_grad_(False)
        monkeypatch.setattr("idp_workspace.policy.distilled.load_teacher", lambda *_: teacher)
    options = {"freeze_encoder": False} if name == "ConsistencyPolicy" else {}
    policy = make(kind, backbone, **options)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    before = copy.deepcopy(policy.state_dict())
    for _ in range(2):  # in its first step, a student that equals its teacher has nothing to learn
        loss = policy.compute_loss(batch())
        loss.backward()
        assert loss.ndim == 0 and loss.isfinite()
        optimizer.step()
    changed = {key.split(".")[0] for key, value in policy.state_dict().items() if not torch.equal(value, before[key])}
    assert {"model", "obs_encoder"} <= changed
    own = {"target_model", "target_obs_encoder", "score_model", "updates", "_dummy_variable", "codes", "head"}
    assert {key.split(".")[0] for key in before} - own == {"model", "obs_encoder", "normalizer"}
    out = policy.eval().predict_action(batch(3)["obs"])
    assert (
        out["action"].shape == (3, TA, D) and out["action_pred"].shape == (3, H, D) and out["action"].isfinite().all()
    )


def test_it_learns_to_see():
    """The action is the image's brightness: only an encoder that is trained can tell."""
    policy = make(RegressionPolicy, "mlp", obs_encoder=encoder(crop=None))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    level = torch.linspace(0, 1, 16)
    data = {
        "obs": {
            "image": (level * 255).byte()[:, None, None, None, None].expand(16, TO, 3, 20, 20),
            "pos": torch.zeros(16, TO, 2),
        },
        "action": (2 * level - 1)[:, None, None].expand(16, H, D),
    }
    first = policy.compute_loss(data).item()
    for _ in range(100):
        loss = policy.compute_loss(data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * first


# ---------------------------------------------------------------------- forms of encoders, networks and arguments
def test_what_upstream_s_image_policy_accepts():
    """A per-frame encoder, no model: a ConditionalUnet1D on the flattened features of the observation steps."""
    torch.manual_seed(0)
    policy = IDPPolicy(
        shape_meta=META,
        noise_scheduler=scheduler(),
        obs_encoder=encoder("frame"),
        horizon=H,
        n_action_steps=TA,
        n_obs_steps=TO,
        num_inference_steps=100,
        obs_as_global_cond=True,
        diffusion_step_embed_dim=16,
        down_dims=[8, 16],
        kernel_size=3,
        n_groups=4,
        cond_predict_scale=False,
    )
    policy.set_normalizer(normalizer())
    features = 32 + 2
    reference = ConditionalUnet1D(
        D, global_cond_dim=TO * features, diffusion_step_embed_dim=16, down_dims=[8, 16], kernel_size=3, n_groups=4
    )
    assert {k: v.shape for k, v in policy.model.state_dict().items()} == {
        k: v.shape for k, v in reference.state_dict().items()
    }
    assert policy.generator.per_frame and isinstance(policy, BaseImagePolicy) and policy.obs_dim is None
    policy.eval()
    obs = policy.normalise_observation(batch(3)["obs"])
    cond = policy.generator.encode(obs)
    assert cond.shape == (3, TO, features)
    torch.testing.assert_close(cond[:, 1], policy.obs_encoder({key: value[:, 1] for key, value in obs.items()}))
    assert policy.predict_action(batch(3)["obs"])["action"].shape == (3, TA, D)
    policy.train().compute_loss(batch()).backward()


class Mixing(nn.Module):
    """An encoder that needs all observation steps at once."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(TO * (3 + 2), TO * E)

    def forward(self, obs):
        pixels = obs["image"].mean(dim=(-1, -2))
        return self.net(torch.cat([pixels.flatten(1), obs["pos"].flatten(1)], dim=1)).view(-1, TO, E)


def test_forms_of_encoders_are_recognised():
    assert not make(obs_encoder=Mixing()).generator.per_frame
    assert not make().generator.per_frame
    assert make(
        model=ResidualMLP(D, D, H, TO, cond_dim=34, n_layer=1, n_emb=E), obs_encoder=encoder("frame")
    ).generator.per_frame
    with pytest.raises(ValueError, match=r"obs_encoder must turn image, pos .* returns \(2,\)"):
        make(
            obs_encoder=type(
                "Flat", (nn.Module,), {"forward": lambda self, obs: obs["pos"].flatten(1).sum(1).expand(2)}
            )()
        )


def test_building_leaves_modes_and_random_numbers_alone():
    net, enc = network("mlp"), encoder()
    enc.frame.key_model_map.eval()
    state = torch.get_rng_state()
    policy = IDPPolicy(**SIZES, **net, obs_encoder=enc)
    assert torch.equal(torch.get_rng_state(), state)
    assert policy.obs_encoder.training and not policy.obs_encoder.frame.key_model_map["image"].training


@pytest.mark.parametrize(
    "change, message",
    [
        ({"obs_dim": 5}, "remove both"),
        ({"action_dim": 3}, "action of size 2"),
        ({"obs_encoder": None}, "obs_encoder"),
        ({"down_dims": [8, 16]}, "only to build"),
        ({"down_dimz": [8, 16]}, "down_dims"),
        ({"obs_as_cond": False}, "exactly one"),
        ({"shape_meta": {**META, "obs": {"image": {"shape": [3, 20, 20], "type": "rbg"}}}}, "rbg.*rgb, low_dim"),
        ({"shape_meta": {**META, "action": {"shape": [2, 2]}}}, "one-dimensional"),
        ({"model": ResidualMLP(D, D, H, TO, n_layer=1, n_emb=E + 1)}, "does not fit"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        IDPPolicy(**{**SIZES, **network("mlp"), "obs_encoder": encoder(), **change})


def test_phi_is_the_encoder_s_output():
    policy = make().eval()
    obs = policy.normalise_observation(batch()["obs"])
    phi = policy.generator.embedding(policy.generator.encode(obs))
    assert phi.shape == (4, TO * E) and not phi.requires_grad
    assert torch.equal(phi, policy.obs_encoder(obs).detach().flatten(1))
    policy.train().compute_loss(batch())
    assert policy.metrics()["effective_neighbors"] > 1


# ---------------------------------------------------------------------- observations
def test_bytes_and_floats_are_the_same_image():
    policy = make().eval()
    as_bytes = policy.predict_action(batch()["obs"])["action"]
    for dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(
            policy.predict_action(batch(dtype=dtype)["obs"])["action"], as_bytes, rtol=0, atol=1e-6
        )
    assert torch.equal(policy.predict_action(batch(dtype=torch.float32)["obs"])["action"], as_bytes)
    image = policy.normalise_observation(batch()["obs"])["image"]
    assert image.dtype == torch.float32 and image.min() >= -1 and image.max() <= 1 and image.max() - image.min() > 1.9


def test_only_the_first_steps_are_seen_and_other_keys_are_ignored():
    policy = make().eval()
    long = batch(steps=5)["obs"]
    expected = policy.predict_action({key: value[:, :TO] for key, value in long.items()})["action"]
    assert torch.equal(
        policy.predict_action({**long, "past_action": torch.full((4, 1, D), float("nan"))})["action"], expected
    )
    later = {key: value.clone() for key, value in batch(steps=5, dtype=torch.float32)["obs"].items()}
    later["image"][:, TO:] = float("nan")
    policy.predict_action(later)


def spoiled(key, value):
    obs = {name: entry.clone() for name, entry in batch(dtype=torch.float32)["obs"].items()}
    obs[key].view(-1)[3] = value
    return obs


GOOD = batch()["obs"]


@pytest.mark.parametrize(
    "obs, message",
    [
        ({"image": GOOD["image"]}, "no entry 'pos' .it has: image"),
        (GOOD["image"], "must be a dictionary with the entries image, pos, got Tensor"),
        ({**GOOD, "pos": GOOD["pos"].numpy()}, "pos must be a tensor .*2 numbers.*got ndarray"),
        (
            {**GOOD, "pos": GOOD["pos"][:, :1]},
            r"pos must have shape \(batch, at least 2 steps, 2 numbers\), got \(4, 1, 2\)",
        ),
        ({**GOOD, "pos": GOOD["pos"][..., :1]}, r"pos must have shape .*got \(4, 2, 1\)"),
        (
            {**GOOD, "image": GOOD["image"].movedim(2, -1)},
            r"image must have shape \(batch, at least 2 steps, 3, 20, 20\), got \(4, 2, 20, 20, 3\)",
        ),
        ({**GOOD, "image": GOOD["image"][0]}, "image must have shape"),
        (
            {key: value[:0] for key, value in GOOD.items()},
            r"image must hold at least one sample.*empty batch \(0, 2, 3, 20, 20\)",
        ),
        ({**GOOD, "pos": GOOD["pos"][:3]}, "one batch size, got .*'image': 4, 'pos': 3"),
        ({**GOOD, "pos": GOOD["pos"].bool()}, "pos must be real numbers, got torch.bool"),
        ({**GOOD, "pos": GOOD["pos"].to(torch.complex64)}, "pos must be real numbers, got torch.complex64"),
        ({**GOOD, "image": GOOD["image"].long()}, "image must be uint8 .*or floats .*got torch.int64"),
        (spoiled("pos", float("nan")), "pos must be finite, got 1 NaN or infinite of 16"),
        (spoiled("image", float("-inf")), "image must be finite"),
    ],
)
def test_wrong_observations_are_named(obs, message):
    policy = make()
    with pytest.raises(ValueError, match=message):
        policy.predict_action(obs)
    if "finite" in message:  # in training, the loop checks that the loss is finite
        assert not policy.compute_loss({**batch(), "obs": obs}).isfinite()
        return
    with pytest.raises(ValueError, match=message):
        policy.compute_loss({**batch(), "obs": obs})


def lowdim_policy():
    from tests.unit import test_idp_policy as lowdim

    return lowdim.make().eval(), lowdim.batch()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda obs: obs[:0], "obs must hold at least one sample.*empty batch"),
        (lambda obs: obs.bool(), "obs must be real numbers, got torch.bool"),
        (lambda obs: obs.to(torch.complex64), "got torch.complex64"),
        (lambda obs: obs.masked_fill(obs == obs[0, 0, 0], float("inf")), "obs must be finite"),
        (lambda obs: obs.numpy(), "obs must be a tensor .*got ndarray"),
    ],
)
def test_wrong_vectors_are_named(change, message):
    policy, data = lowdim_policy()
    with pytest.raises(ValueError, match=message):
        policy.predict_action({"obs": change(data["obs"])})
    if "finite" not in message:  # in training, the loop checks that the loss is finite
        with pytest.raises(ValueError, match=message):
            policy.compute_loss({**data, "obs": change(data["obs"])})
    with pytest.raises(ValueError, match="no entry 'obs'"):
        policy.compute_loss({"action": data["action"]})


def test_whole_and_double_numbers_are_converted():
    policy, data = lowdim_policy()
    whole = (data["obs"] * 3).round()
    expected = policy.predict_action({"obs": whole})["action"]
    for dtype in (torch.int64, torch.uint8, torch.float64):
        obs = whole.abs() if dtype == torch.uint8 else whole
        out = policy.predict_action({"obs": obs.to(dtype)})["action"]
        assert out.dtype == torch.float32 and torch.equal(
            out, expected if dtype != torch.uint8 else policy.predict_action({"obs": obs})["action"]
        )
    huge = torch.full_like(data["obs"], 3e38)  # their sum overflows, but each is finite
    policy.normalise_observation(huge)


def test_an_action_that_is_not_finite_is_an_error():
    for policy, data in (lowdim_policy(), (make().eval(), batch())):
        with torch.no_grad():
            policy.model.net[-1].bias.fill_(float("nan"))
        with pytest.raises(ValueError, match="IDPPolicy predicted non-finite actions"):
            policy.predict_action(data["obs"] if isinstance(data["obs"], dict) else {"obs": data["obs"]})


# ---------------------------------------------------------------------- images of PushT
WINDOW = dict(horizon=16, pad_before=1, pad_after=7)


@pytest.fixture(scope="module")
def states_only(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("data") / "pusht.zarr", episodes=3, length=20)


def test_missing_images_are_drawn_once_as_the_environment_shows_them(states_only, monkeypatch, caplog):
    dataset = PushTImageDataset(states_only, **WINDOW, n_obs_steps=2)
    files = list(states_only.parent.glob("pusht.zarr.img96-*.npy"))
    assert len(files) == 1 and np.load(files[0]).shape == (60, 96, 96, 3)
    env = PushTImageEnv()
    data = dataset.get_batch([0, 7, len(dataset) - 1])
    assert (
        data["obs"]["image"].dtype == torch.uint8
        and data["obs"]["image"].shape == (3, 2, 3, 96, 96)
        and data["action"].shape == (3, 16, 2)
    )
    for i, window in enumerate((0, 7, len(dataset) - 1)):
        for k in range(2):
            row = int(dataset.index_table[window, k])
            obs, _ = env.reset(options={"state": dataset.replay_buffer["state"][row]})
            np.testing.assert_array_equal(data["obs"]["image"][i, k] / 255, obs["image"])
            np.testing.assert_allclose(data["obs"]["agent_pos"][i, k], dataset.replay_buffer["state"][row, :2])

    drawn = []
    real = pusht_image_dataset.draw
    monkeypatch.setattr(pusht_image_dataset, "draw", lambda states: drawn.append(len(states)) or real(states))
    again = PushTImageDataset(states_only, **WINDOW)
    assert drawn == [2]  # the two that are compared with the file
    assert torch.equal(again.get_batch([5])["obs"]["image"][:, :2], dataset.get_batch([5])["obs"]["image"])
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"\7")
    with caplog.at_level(logging.WARNING):
        PushTImageDataset(states_only, **WINDOW)
    assert drawn == [2, 2, 60] and "rebuilding it" in caplog.text


def test_frames_of_a_rollout_are_drawn_from_its_states():
    env, rng = PushTImageEnv(), np.random.default_rng(0)
    _, info = env.reset(seed=3)
    states, frames = [], []
    for _ in range(25):
        obs, _, _, _, info = env.step(
            info["block_pose"][:2] + rng.uniform(-30, 30, 2) if states else rng.uniform(100, 400, 2)
        )
        states.append([*info["pos_agent"], *info["block_pose"]])
        frames.append(np.round(np.moveaxis(obs["image"], 0, -1) * 255).astype(np.uint8))
    drawn = np.stack(list(pusht_image_dataset.draw(np.float32(states))))
    assert (
        np.mean(drawn != np.stack(frames)) < 1e-3
    )  # but for pixels where the block was being pushed or float32 rounds
    assert np.mean([np.array_equal(a, b) for a, b in zip(drawn, frames)]) > 0.7


def test_only_episodes_in_use_are_drawn_and_other_states_are_drawn_anew(tmp_path):
    path = write_pusht(tmp_path / "pusht.zarr", episodes=4, length=20)
    dataset = PushTImageDataset(path, **WINDOW, max_train_episodes=1, val_ratio=0.25)
    assert len(dataset.frames) == 40 and len(list(tmp_path.glob("*.npy"))) == 1
    whole = PushTImageDataset(path, **WINDOW)
    assert len(list(tmp_path.glob("*.npy"))) == 2
    for part in (dataset, dataset.get_validation_dataset()):
        rows = part.index_table[2]
        assert torch.equal(
            part.get_batch([2])["obs"]["image"][0], whole.frames.take(rows).view(-1, 96, 96, 3).movedim(-1, -3)
        )


def test_without_a_place_to_write_the_images_stay_in_memory(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr("diffusion_policy.storage.frame_cache.write_atomically", refuse)
    with caplog.at_level(logging.WARNING):
        dataset = PushTImageDataset(write_pusht(tmp_path / "pusht.zarr", episodes=1, length=20), **WINDOW)
    assert len(dataset.frames) == 20 and "kept in memory" in caplog.text and not list(tmp_path.glob("*.npy"))
