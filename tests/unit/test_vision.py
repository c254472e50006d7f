"""Image networks: crops, ResNet, encoders; their sizes, names and what they refuse."""

import subprocess
import sys
import types

import pytest
import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.mip.image_encoder import ImageEncoder
from diffusion_policy.model.vision.crop_randomizer import CenterCrop, CropRandomizer
from diffusion_policy.model.vision.model_getter import get_resnet
from diffusion_policy.model.vision.multi_image_obs_encoder import MultiImageObsEncoder, Resize, Standardize
from tests import golden


def meta(size=20, cameras=("image",), action=2):
    obs = {camera: {"shape": [3, size, size], "type": "rgb"} for camera in cameras}
    return {
        "obs": {**obs, "pos": {"shape": [2]}, "grip": {"shape": [2, 2], "type": "low_dim"}},
        "action": {"shape": [action]},
    }


def frames(shape_meta, *lead, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {key: torch.rand(*lead, *entry["shape"], generator=g) for key, entry in shape_meta["obs"].items()}


def small(cameras=("image",), **options):
    torch.manual_seed(0)
    return MultiImageObsEncoder(meta(cameras=cameras), get_resnet("resnet18", width=4), **options)


# ---------------------------------------------------------------------- crops
def test_a_random_crop_is_the_window_at_the_drawn_corner():
    images = torch.rand(6, 3, 20, 17)
    crop = CropRandomizer((3, 20, 17), 12, 9)
    torch.manual_seed(3)
    out = crop(images)
    torch.manual_seed(3)
    tops = (torch.rand(6, 1) * 8).long().flatten()  # height before width
    lefts = (torch.rand(6, 1) * 8).long().flatten()
    assert out.shape == (6, 3, 12, 9) and len(set(zip(tops.tolist(), lefts.tolist(), strict=False))) > 1
    for image, top, left, seen in zip(images, tops, lefts, out, strict=False):
        assert torch.equal(seen, image[:, top : top + 12, left : left + 9])


def test_evaluation_takes_the_centre_and_draws_nothing():
    images = torch.rand(2, 3, 96, 96)
    before = torch.get_rng_state()
    assert torch.equal(CropRandomizer((3, 96, 96), 84, 84).eval()(images), images[:, :, 6:90, 6:90])
    assert torch.equal(CenterCrop((3, 96, 96), 84, 84).train()(images), images[:, :, 6:90, 6:90])
    assert torch.equal(
        CropRandomizer((3, 96, 96), 85, 83).eval()(images), images[:, :, 6:91, 6:89]
    )  # 5.5 and 6.5 round to even
    assert torch.equal(torch.get_rng_state(), before)


def test_several_crops_and_positions():
    images = torch.rand(2, 3, 10, 12)
    crop = CropRandomizer((3, 10, 12), 4, 6, num_crops=3, pos_enc=True)
    out = crop(images)
    assert out.shape == (6, *crop.output_shape_in()) == (6, 5, 4, 6)
    rows, columns = (out[:, 3] * 10).round().long(), (out[:, 4] * 12).round().long()
    for i in range(6):
        assert torch.equal(out[i, :3], images[i // 3][:, rows[i], columns[i]])
    assert torch.equal(crop.forward_out(torch.tensor([[1.0], [2], [6], [0], [0], [3]])), torch.tensor([[3.0], [1.0]]))
    assert crop.eval()(images)[:3].unique(dim=0).shape[0] == 1


def test_wrong_crops_are_reported():
    with pytest.raises(ConfigError, match="20 x 8 must be smaller than the image, 20 x 20"):
        CropRandomizer((3, 20, 20), 20, 8)
    with pytest.raises(ValueError, match=r"\(3, 20, 20\).*\(3, 20, 21\)"):
        CropRandomizer((3, 20, 20), 8, 8)(torch.rand(1, 3, 20, 21))


# ---------------------------------------------------------------------- ResNet
def test_resnet_sizes_and_names():
    full = get_resnet("resnet18")
    assert sum(p.numel() for p in full.parameters()) == 11_176_512 and isinstance(full.fc, nn.Identity)
    assert sum(p.numel() for p in get_resnet("resnet34").parameters()) == 21_284_672
    assert get_resnet("resnet18", width=8).eval()(torch.rand(2, 3, 40, 50)).shape == (2, 64)
    names = list(full.state_dict())
    assert names[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert {
        "layer2.0.downsample.0.weight",
        "layer2.0.downsample.1.running_var",
        "layer4.1.bn2.num_batches_tracked",
    } <= set(names)
    assert "layer1.0.downsample.0.weight" not in names and len(names) == 120


def test_weights_by_name_come_from_torchvision(monkeypatch):
    """torchvision itself is not a requirement; this stands for it. The layout of its networks is in tests/golden."""
    from diffusion_policy.model.vision.resnet import ResNet

    source = ResNet((2, 2, 2, 2))

    def get_model(name, weights):
        assert (name, weights) == ("resnet18", "IMAGENET1K_V1")
        return source

    monkeypatch.setitem(
        sys.modules, "torchvision", types.SimpleNamespace(models=types.SimpleNamespace(get_model=get_model))
    )
    loaded = get_resnet("resnet18", weights="IMAGENET1K_V1")
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in loaded.state_dict().items())
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="pip install torchvision, or, .* write a file with python -c") as error:
        get_resnet("resnet18", weights="IMAGENET1K_V1")
    assert "weights=resnet18.pt" in str(error.value) and "\n" not in str(error.value)


def test_a_frozen_encoder_keeps_its_batch_statistics():
    encoder = MultiImageObsEncoder(meta(), get_resnet("resnet18", width=4), crop_shape=(16, 16), share_rgb_model=True)
    before = encoder.key_model_map["rgb"].bn1.running_mean.clone()
    encoder.requires_grad_(False)
    encoder.train()(frames(meta(), 3))
    assert torch.equal(encoder.key_model_map["rgb"].bn1.running_mean, before) and encoder.key_transform_map.training
    encoder.requires_grad_(True)
    encoder.train()(frames(meta(), 3))
    assert not torch.equal(encoder.key_model_map["rgb"].bn1.running_mean, before)


def test_weights_come_from_a_file(tmp_path):
    from diffusion_policy.model.vision.resnet import ResNet

    source = ResNet((2, 2, 2, 2), width=4)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    loaded = get_resnet("resnet18", weights=str(tmp_path / "weights.pt"), width=4)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in loaded.state_dict().items())
    (tmp_path / "bad.pt").write_bytes(b"no weights")
    for weights, words in (
        ("no/such/file.pt", "is not a file"),
        (str(tmp_path / "bad.pt"), "not a state dict"),
    ):
        with pytest.raises(ConfigError, match=words):
            get_resnet("resnet18", weights=weights)
    with pytest.raises(ConfigError, match="not a state dict of torchvision's resnet34"):
        get_resnet("resnet34", weights=str(tmp_path / "weights.pt"), width=4)
    with pytest.raises(ConfigError, match="resnet18, resnet34"):
        get_resnet("resnet50")


# ---------------------------------------------------------------------- the encoder of one frame
def test_features_are_sorted_images_then_sorted_numbers():
    encoder = small(cameras=("wrist", "front")).eval()
    obs = frames(meta(cameras=("wrist", "front")), 3)
    out = encoder(obs)
    assert out.shape == (3, *encoder.output_shape()) == (3, 2 * 32 + 4 + 2)
    assert torch.equal(out[:, :32], encoder.key_model_map["front"](obs["front"]))
    assert torch.equal(out[:, 32:64], encoder.key_model_map["wrist"](obs["wrist"]))
    assert torch.equal(out[:, 64:], torch.cat([obs["grip"].flatten(1), obs["pos"]], dim=1))
    fronts = [encoder.key_model_map[key].conv1.weight for key in ("front", "wrist")]
    assert torch.equal(*fronts) and fronts[0] is not fronts[1]  # copies that start equal


def test_random_crop_false_crops_the_centre():
    obs = frames(meta(), 2)
    random, fixed = small(crop_shape=[12, 12]), small(crop_shape=[12, 12], random_crop=False)
    for encoder in (random, fixed):
        encoder.key_model_map.eval()
    fixed.key_transform_map.train()
    torch.manual_seed(0)
    assert not torch.equal(random(obs), fixed(obs))
    assert torch.equal(random.eval()(obs), fixed(obs))


def test_transforms_by_key_and_their_order():
    encoder = small(
        cameras=("a", "b"),
        resize_shape={"a": [16, 18], "b": [20, 20]},
        crop_shape={"a": [10, 11], "b": [12, 13]},
        imagenet_norm=True,
    )
    steps = encoder.key_transform_map["a"]
    assert [type(step) for step in steps] == [Resize, CropRandomizer, Standardize] and steps[1].input_shape == (
        3,
        16,
        18,
    )
    assert steps(torch.rand(2, 3, 20, 20)).shape == (2, 3, 10, 11)
    assert encoder.key_transform_map["b"](torch.rand(2, 3, 20, 20)).shape == (2, 3, 12, 13)
    torch.testing.assert_close(
        Standardize((0.5, 0.4, 0.3), (0.1, 0.2, 0.5))(torch.ones(1, 3, 1, 1)).flatten(), torch.tensor([5.0, 3.0, 1.4])
    )
    assert not any(key.startswith("key_transform_map") for key in encoder.state_dict())


def test_group_norm_and_sharing():
    torch.manual_seed(0)
    norms = [
        m
        for m in MultiImageObsEncoder(meta(), get_resnet("resnet18", width=64), use_group_norm=True).modules()
        if isinstance(m, nn.GroupNorm)
    ]
    assert (
        sorted({(m.num_channels, m.num_groups) for m in norms}) == [(64, 4), (128, 8), (256, 16), (512, 32)]
        and len(norms) == 20
    )
    shared = small(cameras=("a", "b"), share_rgb_model=True, use_group_norm=True).eval()
    assert list(shared.key_model_map) == ["rgb"] and any(isinstance(m, nn.BatchNorm2d) for m in shared.modules())
    obs = frames(meta(cameras=("a", "b")), 3)
    torch.testing.assert_close(shared(obs)[:, 32:64], shared.key_model_map["rgb"](obs["b"]))


def test_wrong_observations_of_an_encoder_are_reported():
    with pytest.raises(ValueError, match=r"'image' must have shape \(batch, 3, 20, 20\), got \(2, 3, 21, 20\)"):
        small()({**frames(meta(), 2), "image": torch.zeros(2, 3, 21, 20)})
    with pytest.raises(ConfigError, match="type must be rgb or low_dim, not 'depth'"):
        MultiImageObsEncoder({"obs": {"d": {"shape": [1, 8, 8], "type": "depth"}}}, nn.Identity())


@pytest.mark.parametrize("name", ["", "|task=pusht_image,policy.obs_encoder.crop_shape=[84,84]"])
def test_state_dict_is_upstream_s(name):
    layout = golden.read("state_dict_layouts_image")["train_diffusion_unet_image_workspace" + name]
    theirs = {
        key.removeprefix("obs_encoder."): tuple(shape)
        for key, (shape, _) in layout["policy_state_dict"].items()
        if key.startswith("obs_encoder.")
    }
    pusht = "pusht" in name
    shapes = (
        {"image": [3, 96, 96], "agent_pos": [2]}
        if pusht
        else {
            "agentview_image": [3, 84, 84],
            "robot0_eye_in_hand_image": [3, 84, 84],
            "robot0_eef_pos": [3],
            "robot0_eef_quat": [4],
            "robot0_gripper_qpos": [2],
        }
    )
    shape_meta = {
        "obs": {key: {"shape": shape, "type": "rgb" if len(shape) == 3 else "low_dim"} for key, shape in shapes.items()}
    }
    encoder = MultiImageObsEncoder(
        shape_meta,
        get_resnet("resnet18"),
        crop_shape=[84, 84] if pusht else [76, 76],
        use_group_norm=True,
        imagenet_norm=True,
    )
    assert {key: tuple(value.shape) for key, value in encoder.state_dict().items()} == theirs
    assert list(encoder.state_dict()) == list(theirs)
    assert encoder.output_shape() == (layout["obs_feature_dim"],)


# ---------------------------------------------------------------------- MIP's encoder
@pytest.mark.parametrize("emb_dim, count", [(384, 11_522_112), (256, 11_374_144), (512, 11_702_848)])
def test_mip_encoder_has_the_protocol_s_size(emb_dim, count):
    shape_meta = {"obs": {"image": {"shape": [3, 96, 96], "type": "rgb"}, "agent_pos": {"shape": [2]}}}
    with torch.device("meta"):
        assert sum(p.numel() for p in ImageEncoder(shape_meta, emb_dim, [84, 84]).parameters()) == count


def test_mip_encoder_takes_each_frame_for_itself():
    torch.manual_seed(0)
    encoder = ImageEncoder(meta(), emb_dim=8, crop_shape=[12, 12], width=4).eval()
    obs = frames(meta(), 3, 2)
    out = encoder(obs)
    assert out.shape == (3, 2, 8)
    changed = {key: torch.cat([value[:, :1], torch.rand_like(value[:, 1:])], dim=1) for key, value in obs.items()}
    assert torch.allclose(encoder(changed)[:, 0], out[:, 0], atol=1e-6) and not torch.allclose(
        encoder(changed)[:, 1], out[:, 1], atol=1e-3
    )
    assert not torch.equal(encoder.train()(obs), encoder(obs))  # random crops
    encoder(obs).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters() if p.numel())


def test_torchvision_is_not_needed():
    code = (
        "import sys; sys.modules['torchvision'] = None\n"
        "import diffusion_policy.model.mip.image_encoder, diffusion_policy.dataset.pusht_image_dataset"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
