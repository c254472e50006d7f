"""The short form of benchmarks/faults.py, and steps whose loss or gradient is not finite."""

import json
import logging
import math
import os
import signal

import numpy as np
import pytest
import torch

from benchmarks import faults
from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.errors import DivergedError, StorageError
from diffusion_policy.storage import atomic, checkpoint_io
from diffusion_policy.workspace.train_workspace import TrainWorkspace
from tests.util import equal, load_config, write_pusht


# ---------------------------------------------------------------------- kills, full disks, damage
@pytest.mark.parametrize(
    "scenario, kills",
    [("accumulation, dropout, EMA, cosine, ramp", 3), ("worker processes", 1), ("random crops of images", 1)],
    ids=["everything", "workers", "crops"],
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(scenario, kills, tmp_path):
    trials = faults.Trials(scenario, tmp_path, seed=1)
    trials.kill_at_points(kills)
    assert sum(count for what, count in trials.faults.items() if what.startswith("killed")) == kills
    if scenario.startswith("accumulation"):
        trials.fill_disk_at_points(3)
    assert trials.lost == []


def test_the_comparison_can_fail(tmp_path):
    """If it could not, the tests above would show nothing."""
    trials = faults.Trials("accumulation, dropout, EMA, cosine, ramp", tmp_path, seed=0)
    other = trials.cfg.copy()
    other.training.seed = 43
    assert faults.in_child(lambda: faults.train(other, tmp_path / "other"), trials.log) == 0
    wrong = faults.differences(tmp_path / "other", trials.reference)
    assert any("model" in text for text in wrong) and any("log of epochs" in text for text in wrong)
    (trials.reference / "checkpoints/.latest.ckpt.1.tmp").write_bytes(b"")
    assert any("left behind" in text for text in faults.differences(trials.reference, trials.reference))


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    path, before = tmp_path / "x.ckpt", tmp_path / "before.ckpt"
    atomic.write_atomically(path, lambda file: file.write(b"one"))

    def fail(file):
        file.write(b"half")
        faults.no_space()

    with pytest.raises(StorageError, match="disk is full"):
        atomic.write_atomically(path, fail)
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["x.ckpt"]
    atomic.write_atomically(path, lambda file: file.write(b"two"), previous=before)
    assert path.read_bytes() == b"two" and before.read_bytes() == b"one"


def test_without_hard_links_the_one_before_is_kept_all_the_same(tmp_path, monkeypatch):
    path, before = tmp_path / "x.ckpt", tmp_path / "before.ckpt"
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no hard links here")))
    for content in (b"one", b"two", b"three"):
        atomic.write_atomically(path, lambda file, content=content: file.write(content), previous=before)
    assert path.read_bytes() == b"three" and before.read_bytes() == b"two" and len(os.listdir(tmp_path)) == 2


class Noisy(torch.utils.data.Dataset):
    """Augments with every generator there is."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": torch.tensor([index + torch.rand(()).item(), np.random.rand()])}


def test_batches_of_worker_processes_do_not_depend_on_where_a_stream_starts():
    stream = BatchStream(Noisy(), batch_size=4, seed=3, num_workers=2)
    whole = stream.batches()
    batches = [next(whole)["x"] for _ in range(7)]
    resumed = stream.batches(start=4)
    assert all(torch.equal(next(resumed)["x"], batch) for batch in batches[4:])
    assert not torch.equal(batches[0], batches[3])


def test_a_worker_process_leaves_the_answer_to_ctrl_c_to_the_run():
    from diffusion_policy.workspace.signals import StopRequest

    with StopRequest() as stop:

        def child(number):
            pid = os.fork()
            if pid == 0:
                os.kill(os.getpid(), number)
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        assert child(signal.SIGINT) == 0 and child(signal.SIGTERM) == 1 and not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


# ---------------------------------------------------------------------- numbers that are not finite
class Spoiled:
    """Makes the loss, or only the gradient, of chosen steps NaN."""

    def __init__(self, workspace, steps, gradient):
        self.workspace, self.steps, self.gradient = workspace, steps, gradient
        self.original = workspace.model.compute_loss

    def __call__(self, batch):
        loss = self.original(batch)
        if self.workspace.model.training and self.workspace.global_step in self.steps:
            parameter = next(p for p in self.workspace.model.model.parameters() if p.requires_grad)
            # sqrt at 0 has the value 0 and the gradient infinity.
            return loss + (torch.sqrt(0 * parameter.abs().sum()) if self.gradient else math.nan)
        return loss


@pytest.fixture
def workspace(tmp_path):
    data = write_pusht(tmp_path / "pusht.zarr")

    def make(*overrides, folder="run"):
        cfg = load_config(
            "train_idp_mlp_lowdim",
            "preset=debug",
            f"task.dataset.zarr_path={data}",
            "size.mlp.p_drop=0.1",
            "training.steps_per_epoch=8",
            "training.num_epochs=2",
            "task.env_runner.n_test_vis=0",
            "task.env_runner.max_steps=8",
            *overrides,
        )
        return TrainWorkspace(cfg, output_dir=str(tmp_path / folder))

    return make


@pytest.mark.parametrize("clip, gradient", [("10", False), ("10", True), ("null", True)])  # a loss is not clipped
def test_a_step_that_is_not_finite_stops_the_run_and_can_be_repeated(workspace, tmp_path, gradient, clip):
    run = workspace("training.gradient_accumulate_every=2", f"training.grad_clip_norm={clip}")
    run.model.compute_loss = Spoiled(run, {11}, gradient)
    with pytest.raises(DivergedError, match="the gradient of step 11" if gradient else "the loss of step 11 is nan"):
        run.run()
    folder = tmp_path / "run/debug/step_11"
    report = json.loads((folder / "report.json").read_text())
    assert report["step"] == 11 and report["batches"] == [next(run.stream.indices(i)).tolist() for i in (22, 23)]
    assert bool(report["parameters_with_such_gradients"]) == gradient
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    # The state before the step: continued without the trouble, the run ends as one that never had it.
    again = workspace(
        "training.gradient_accumulate_every=2", f"training.grad_clip_norm={clip}", folder="run/debug/step_11"
    )
    again.run()
    undisturbed = workspace(
        "training.gradient_accumulate_every=2", f"training.grad_clip_norm={clip}", folder="undisturbed"
    )
    undisturbed.run()
    one, other = (checkpoint_io.load(w.get_checkpoint_path()) for w in (again, undisturbed))
    assert all(
        equal(one["state_dicts"][name], other["state_dicts"][name])
        for name in ("model", "ema_model", "optimizer", "random_state")
    )
    assert one["attributes"] == other["attributes"]


def test_a_bounded_number_of_such_steps_can_be_left_out(workspace, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    run = workspace("training.max_skipped_steps=2", "training.num_epochs=3")
    weights = {}
    run.model.compute_loss = spoiled = Spoiled(run, {3, 9, 20}, False)
    original = run.optimise

    def optimise(batches):
        before = [p.detach().clone() for p in run.model.parameters()]
        loss = original(batches)
        weights[run.global_step] = all(map(torch.equal, before, run.model.parameters()))
        assert (loss is None) == (run.global_step in spoiled.steps)
        return loss

    run.optimise = optimise
    with pytest.raises(DivergedError, match="step 20"):
        run.run()
    assert [step for step, same in weights.items() if same] == [
        3,
        9,
    ] and "skipped, number 2 of at most 2" in caplog.text
    logged = [json.loads(line) for line in (tmp_path / "run/logs.json.txt").read_text().splitlines()]
    assert logged[-1]["skipped_steps"] == 2 and all(
        math.isfinite(record["train_loss"]) for record in logged if "train_loss" in record
    )
    # The count survives a resume: a run cannot leave out more by being restarted.
    resumed = workspace("training.max_skipped_steps=2", "training.num_epochs=3")
    resumed.model.compute_loss = Spoiled(resumed, {20}, False)
    with pytest.raises(DivergedError):
        resumed.run()


def test_a_learning_rate_that_is_far_too_large(workspace):
    with pytest.raises(DivergedError, match="optimizer.lr"):
        workspace("learning_rate=1e30", "training.num_epochs=50", "training.grad_clip_norm=null").run()
