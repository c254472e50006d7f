"""Figures of the expert geometry: the helpers against closed forms, the command from a training run to its files."""

import json
import math
import pathlib

import hydra
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from diffusion_policy.common.replay_buffer import ReplayBuffer
from idp_workspace import visualize
from idp_workspace.geometry import conditional_variance
from idp_workspace.geometry_variants import Geometry, neighbor_weights, variance_around_mean
from tests.util import command, train_here


# ---------------------------------------------------------------------- helpers
def batch(count=24, dim=3, seed=0):
    gen = torch.Generator().manual_seed(seed)
    w = torch.rand(count, count, generator=gen, dtype=torch.float64)
    return w / w.sum(1, keepdim=True), torch.randn(count, dim, generator=gen, dtype=torch.float64) + 5


@pytest.mark.parametrize("center", ["expert", "weighted_mean"])
def test_local_covariance_is_the_weighted_sum(center):
    w, a = batch()
    got = visualize.local_covariance(w, a, center)
    for i in range(len(a)):
        middle = a[i] if center == "expert" else (w[i, :, None] * a).sum(0)
        want = sum(w[i, j] * torch.outer(a[j] - middle, a[j] - middle) for j in range(len(a)))
        torch.testing.assert_close(got[i], want)


@pytest.mark.parametrize("center", ["expert", "weighted_mean"])
def test_its_diagonal_is_the_variance_that_the_policy_uses(center):
    w, a = batch()
    variance = conditional_variance if center == "expert" else variance_around_mean
    want = variance(w.float(), a.float())
    torch.testing.assert_close(
        torch.diagonal(visualize.local_covariance(w, a, center), dim1=1, dim2=2).float(), want, atol=1e-4, rtol=1e-4
    )


def test_global_covariance_is_the_population_covariance():
    _, a = batch()
    np.testing.assert_allclose(visualize.global_covariance(a).numpy(), np.cov(a.numpy().T, bias=True), rtol=1e-10)


def test_kappa_is_one_when_the_shapes_agree():
    sigma = torch.tensor([[2.0, 0.7], [0.7, 1.0]])
    kappa = visualize.anisotropy(torch.stack([sigma, 0.01 * sigma, 30 * sigma]), sigma, eps=0.0)
    torch.testing.assert_close(kappa, torch.ones(3, dtype=torch.float64))


def test_kappa_of_known_matrices():
    eye = torch.eye(2)
    local = torch.stack(
        [torch.diag(torch.tensor([9.0, 1.0])), torch.tensor([[2.5, 1.5], [1.5, 2.5]])]
    )  # eigenvalues 9 1; 4 1
    torch.testing.assert_close(visualize.anisotropy(local, eye, eps=0.0), torch.tensor([3.0, 2.0], dtype=torch.float64))
    # Against diag(9, 1) the first one is round, and a round one is three times as long across.
    reference = torch.diag(torch.tensor([9.0, 1.0]))
    kappa = visualize.anisotropy(torch.stack([reference, eye]), reference, eps=0.0)
    torch.testing.assert_close(kappa, torch.tensor([1.0, 3.0], dtype=torch.float64))


def test_kappa_does_not_depend_on_the_units():
    w, a = batch()
    units = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.2, 0.5], [0.0, 0.0, 7.0]], dtype=torch.float64)
    kappa = [
        visualize.anisotropy(visualize.local_covariance(w, x), visualize.global_covariance(x), eps=0.0)
        for x in (a, a @ units.T)
    ]
    torch.testing.assert_close(*kappa)


def test_kappa_with_a_coordinate_that_never_moves():
    w, a = batch(dim=2)
    a[:, 1] = 4.0
    kappa = visualize.anisotropy(visualize.local_covariance(w, a), visualize.global_covariance(a))
    assert kappa.isfinite().all()


def test_ellipse_points_lie_on_the_ellipse():
    center, covariance = np.array([3.0, -1.0]), np.array([[4.0, 1.0], [1.0, 2.0]])
    points = visualize.ellipse_points(center, covariance, deviations=2.0)
    distance = np.einsum("nd,de,ne->n", points - center, np.linalg.inv(covariance), points - center)
    np.testing.assert_allclose(distance, 4.0)
    np.testing.assert_allclose(points[0], points[-1])


def test_chosen_observations_go_from_low_to_high():
    values = np.random.default_rng(0).random(101)
    chosen = visualize.spread_over(values, 4)
    np.testing.assert_allclose(values[chosen], np.sort(values)[[5, 35, 65, 95]])
    assert sorted(visualize.spread_over(np.zeros(5), 5)) == [0, 1, 2, 3, 4]
    assert visualize.spread_over(np.arange(9.0), 1) == [4]


def test_windows_of_the_batch():
    windows = visualize.choose_windows(50, 20, [7, 3], seed=1)
    assert windows[:2].tolist() == [7, 3] and len(set(windows)) == 20
    np.testing.assert_array_equal(windows, visualize.choose_windows(50, 20, [7, 3], seed=1))
    assert len(visualize.choose_windows(10, 1024, [], seed=0)) == 10
    with pytest.raises(ValueError, match="0 to 49"):
        visualize.choose_windows(50, 20, [50], seed=0)
    with pytest.raises(ValueError, match="at least two"):
        visualize.choose_windows(50, 1, [], seed=0)


def test_log_is_read_up_to_a_line_that_is_being_written(tmp_path):
    log = tmp_path / "logs.json.txt"
    log.write_text(
        '{"global_step": 0, "train_loss": 1}\n{"global_step": 1, "m_mean": 0.5}\n'
        '{"global_step": 2, "m_mean": NaN}\n{"global_st'
    )
    assert visualize.read_log(log) == {"m_mean": ([1], [0.5])}
    assert visualize.read_log(tmp_path / "none") == {}


# ---------------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    """Episodes of a random agent, in the layout of the PushT demonstrations."""
    path = tmp_path_factory.mktemp("data") / "pusht.zarr"
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer.create_empty_numpy()
    for length in (30, 25, 28):
        agent = (rng.normal(size=(length, 2)).cumsum(0) * 8 + 250).clip(0, 512)
        block = (
            np.concatenate([rng.uniform(150, 350, 2), [rng.uniform(0, 6)]])
            + rng.normal(size=(length, 3)).cumsum(0) * 0.3
        )
        buffer.add_episode(
            {
                "state": np.concatenate([agent, block], axis=1).astype(np.float32),
                "keypoint": (block[:, None, :2] + rng.normal(size=(1, 9, 2)) * 30).astype(np.float32),
                "action": (agent + rng.normal(size=(length, 2)) * 5).astype(np.float32),
            }
        )
    buffer.save_to_path(str(path))
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> pathlib.Path:
    """The folder of a training run of a few steps."""
    folder = tmp_path_factory.mktemp("run")
    short = ("training.device=cpu", "task.env_runner.n_test=1", "task.env_runner.n_test_vis=0")
    train_here(folder, "train_idp_mlp_lowdim", "preset=debug", f"task.dataset.zarr_path={data}", *short)
    return folder


def fails(capsys, *arguments: str) -> str:
    """The message of a command that has to exit with 1."""
    with pytest.raises(SystemExit) as caught:
        visualize.main([*map(str, arguments)])
    # sys.exit(text) prints the text and exits with 1; an integer would be another code.
    assert isinstance(caught.value.code, str) and caught.value.code.startswith("error: ")
    return caught.value.code


def finite(value) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def check_images(folder: pathlib.Path) -> dict:
    from matplotlib.image import imread

    for name in ("geometry.png", "m_distribution.png"):
        image = imread(folder / name)
        height, width = image.shape[:2]
        assert 300 < height < 4000 and 700 < width < 4000
        assert image[..., :3].std() > 0.02  # not a blank page
    report = json.loads((folder / "geometry.json").read_text())
    assert finite(report)
    assert sorted(path.name for path in folder.iterdir()) == sorted(visualize.FILES)
    return report


def test_from_a_training_run_to_images(run, capsys):
    checkpoint = run / "checkpoints/latest.ckpt"
    done = command("idp_workspace.visualize", "-c", checkpoint, "--batch", 48, "--n", 3, "--device", "cpu")
    assert done.returncode == 0 and "kappa" in done.stdout, done.stdout + done.stderr
    report = check_images(run / "geometry")
    assert report["batch"] == 48 and report["step"] == 1 and report["global_step"] == 8 and report["geometry_in_loss"]
    assert set(report["training"]) == set(visualize.LOGGED)
    assert all(view["kappa"] >= 1 and 1 <= view["effective_neighbors"] <= 48 for view in report["observations"])
    means = [np.mean(view["m"]) for view in report["observations"]]
    assert means == sorted(means) and len(means) == 3

    assert "--overwrite" in fails(capsys, "-c", checkpoint)
    before = (run / "geometry/geometry.json").read_bytes()
    assert "steps 0 to 15" in fails(capsys, "-c", checkpoint, "--overwrite", "--step", 16)
    assert "two different" in fails(capsys, "-c", checkpoint, "--overwrite", "--dims", "0,0")
    assert (run / "geometry/geometry.json").read_bytes() == before  # a command that fails changes nothing


def test_observations_by_window(run, tmp_path):
    visualize.main(
        [
            "-c",
            str(run / "checkpoints/latest.ckpt"),
            "-o",
            str(tmp_path / "a"),
            "--observations",
            "5,40",
            "--batch",
            "32",
            "--step",
            "4",
            "--dims",
            "1,0",
        ]
    )
    report = check_images(tmp_path / "a")
    assert (
        [view["window"] for view in report["observations"]] == [5, 40]
        and report["step"] == 4
        and report["dims"] == [1, 0]
    )


def test_checkpoints_that_are_none(tmp_path, capsys):
    assert "no checkpoint at" in fails(capsys, "-c", tmp_path / "none.ckpt")
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    assert "not a checkpoint" in fails(capsys, "-c", tmp_path / "text.ckpt")
    assert not (tmp_path / "geometry").exists()


def untrained(name: str, data: pathlib.Path, folder: pathlib.Path, root: pathlib.Path, *overrides: str) -> str:
    """A checkpoint of a run that has not begun."""
    with hydra.initialize_config_dir(str(root / "config"), version_base=None):
        cfg = hydra.compose(name, ["preset=debug", f"task.dataset.zarr_path={data}", *overrides])
    # Hydra's ${now:...} has no meaning outside a run.
    OmegaConf.register_new_resolver("now", lambda pattern: "now", replace=True)
    workspace = hydra.utils.get_class(cfg._target_)(cfg, output_dir=str(folder))
    for policy in filter(None, (workspace.model, workspace.ema_model)):
        policy.set_normalizer(hydra.utils.instantiate(cfg.task.dataset).get_normalizer())
    return workspace.save_checkpoint(path=str(folder / "checkpoints/untrained.ckpt"))


def test_naive_drifting_has_a_geometry_too(data, repo_root, tmp_path):
    checkpoint = untrained("train_naive_drifting_mlp_lowdim", data, tmp_path, repo_root)
    visualize.main(["-c", checkpoint, "--n", "1", "--batch", "40"])
    report = check_images(tmp_path / "geometry")
    assert report["policy"] == "NaiveDriftingPolicy" and not report["geometry_in_loss"] and report["training"] == {}
    assert report["switches"]["tau"] == 1.0 and report["switches"]["reference"] == "batch"


def test_switches_of_the_policy_are_those_drawn(data, repo_root, tmp_path):
    """The excess is the policy's own, for switches that change its shape, its randomness and its state."""
    checkpoint = untrained(
        "train_idp_mlp_lowdim",
        data,
        tmp_path,
        repo_root,
        "policy.matrix=full",
        "policy.weights=shuffled",
        "policy.reference=dataset",
        "policy.center=weighted_mean",
        "+policy.pred_action_steps_only=true",
        "policy.model.horizon=8",
    )
    workspace, policy, dataset = visualize.load(checkpoint, trust=False)
    windows = visualize.choose_windows(len(dataset), 40, [], seed=3)
    scene = visualize.compute(policy, dataset, windows, None, (0, 1), seed=3, device=torch.device("cpu"))
    assert scene.step == 0 and scene.m.shape == (40, 8, 2)  # the chunk begins with the first executed step
    rows = torch.utils.data.default_collate([dataset[int(i)] for i in windows])
    normalised = policy.normalizer.normalize(rows)
    torch.manual_seed(3)
    m = policy.excess(policy.generator.encode(normalised["obs"]), normalised["action"][:, 1:9])
    np.testing.assert_allclose(scene.m, torch.diagonal(m, dim1=-2, dim2=-1).numpy(), rtol=1e-5)
    torch.manual_seed(3)
    phi = policy.generator.embedding(policy.generator.encode(normalised["obs"]))
    w = neighbor_weights(phi, Geometry(weights="shuffled"))
    np.testing.assert_allclose(scene.weights, w.numpy(), rtol=1e-5)
    np.testing.assert_allclose(scene.points, rows["action"][:, 1].numpy())
    np.testing.assert_allclose(scene.centers, scene.weights @ scene.points, rtol=1e-4)


def test_policy_without_a_generator(data, repo_root, tmp_path, capsys):
    checkpoint = untrained("train_diffusion_unet_lowdim_workspace", data, tmp_path, repo_root)
    assert "has no generator" in fails(capsys, "-c", checkpoint)


def test_data_that_has_moved(run, data, tmp_path, capsys):
    payload = torch.load(run / "checkpoints/latest.ckpt", weights_only=True)
    payload["cfg"]["task"]["dataset"]["zarr_path"] = str(tmp_path / "gone.zarr")
    torch.save(payload, tmp_path / "moved.ckpt")
    assert "no PushT dataset" in fails(capsys, "-c", tmp_path / "moved.ckpt")


def test_one_action_dimension_is_reported(data, repo_root, tmp_path):
    _, policy, dataset = visualize.load(untrained("train_idp_mlp_lowdim", data, tmp_path, repo_root), trust=False)
    policy.generator.action_dim = 1
    with pytest.raises(ValueError, match="one dimension"):
        visualize.compute(policy, dataset, np.arange(8), None, (0, 1), 0, torch.device("cpu"))
