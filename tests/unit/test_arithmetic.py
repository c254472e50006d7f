"""Half precision, compiled losses, and an update that does not wait for the device."""

import hydra
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_policy.common.errors import ConfigError, DivergedError
from diffusion_policy.workspace.settings import TrainingSettings
from diffusion_policy.workspace.update import DeviceUpdate, fuse
from idp_workspace.geometry_variants import without_tf32
from tests.util import load_config, unit_normalizer, write_pusht


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("data") / "pusht.zarr")


@pytest.fixture
def run(tmp_path, data):
    def make(*overrides, name="train_idp_mlp_lowdim"):
        cfg = load_config(name, "preset=debug", f"task.dataset.zarr_path={data}", *overrides)
        run = hydra.utils.get_class(cfg._target_)(cfg, output_dir=str(tmp_path))
        run.prepare()
        return run

    return make


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_with_a_geometry_in_float32(run, precision, caplog):
    full = run()
    expected = [full.optimise(iter([full.stream.batch(i)])) for i in range(3)]
    half = run(f"training.precision={precision}")
    assert "slower than fp32" in caplog.text
    before = weights(half)
    if half.scaler is not None:  # it would begin with a large factor, and skip the steps in which that overflows
        half.scaler.load_state_dict(half.scaler.state_dict() | {"scale": 8.0})
    losses = [half.optimise(iter([half.stream.batch(i)])) for i in range(3)]
    assert losses == pytest.approx(expected, rel=0.01) and losses != expected
    assert all(p.dtype == torch.float32 for p in half.model.parameters()) and half.model._last[1].dtype == torch.float32
    assert not torch.equal(weights(half), before)
    assert ("scaler" in half.__dict__ and half.scaler is not None) == (precision == "fp16")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="training.precision='fp8' is not one of fp32, bf16, fp16"):
        TrainingSettings(precision="fp8")


class NoRead(TorchDispatchMode):
    """Fails if the host reads a number from a tensor, for which it would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def on_device(run):
    """The update that runs on a GPU use."""
    fuse(run.optimizer)
    run.update = DeviceUpdate(run)
    return run


def test_a_step_does_not_wait_for_the_device(run):
    one = on_device(run())
    for i in range(3):
        batch = one.stream.batch(i)
        with NoRead():
            assert one.optimise(iter([batch])) is None
        one.global_step += 1
    other = run()
    losses = [other.optimise(iter([other.stream.batch(i)])) for i in range(3)]
    assert one.update.settle() == pytest.approx(losses, rel=1e-5) and one.update.settle() == []
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-4, atol=1e-6)


def test_the_device_skips_a_step_that_is_not_finite_and_the_host_learns_of_it(run, tmp_path):
    run = on_device(run("training.max_skipped_steps=1"))
    original = run.model.compute_loss
    for run.global_step in range(4):
        before = weights(run)
        run.model.compute_loss = lambda batch: original(batch) * (torch.nan if run.global_step in (1, 3) else 1)
        run.optimise(iter([run.stream.batch(run.global_step)]))
        assert torch.equal(weights(run), before) == (run.global_step in (1, 3)) and weights(run).isfinite().all()
        if run.global_step == 2:
            run.global_step += 1
            assert len(run.update.settle()) == 2 and run.skipped_steps == 1
            assert (tmp_path / "debug/step_1/report.json").is_file()
            run.global_step -= 1
    run.global_step = 4
    with pytest.raises(
        DivergedError, match="the loss of step 3 is nan; the device skipped it, and the run has reached"
    ):
        run.update.settle()
    assert (tmp_path / "debug/step_3/checkpoints/latest.ckpt").is_file()


@pytest.mark.parametrize("backbone", ["mlp", "transformer", "unet"])
@pytest.mark.parametrize("method", ["idp", "naive_drifting", "mip", "flow"])
def test_a_loss_is_one_graph_that_progress_does_not_change(method, backbone):
    policy = hydra.utils.instantiate(load_config(f"train_{method}_{backbone}_lowdim", "preset=debug").policy)
    policy.set_normalizer(unit_normalizer(policy.obs_dim, policy.action_dim))
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    loss = torch.compile(policy.train().compute_loss, fullgraph=True, backend=count)
    batch = {name: torch.rand(4, policy.horizon, getattr(policy, f"{name}_dim")) for name in ("obs", "action")}
    for step in range(4):
        policy.set_progress(step / 4)
        loss(batch).backward()
    assert len(graphs) <= 2  # a number that changes becomes an input of the second one


def test_the_geometry_turns_tf32_off_and_on_again(monkeypatch):
    precision = ["high"]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision[-1])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    with without_tf32(torch.device("cuda")):
        assert precision == ["high", "highest"]
    with without_tf32(torch.device("cpu")):
        pass
    assert precision == ["high", "highest", "high"]
