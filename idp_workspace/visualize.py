"""Images of the conditional expert geometry that a checkpoint sees (paper, Figure 3).

    python -m idp_workspace.visualize --checkpoint RUN/checkpoints/latest.ckpt

A batch of windows goes through the checkpoint's observation encoder once; nothing is trained and nothing of the run
is changed. Written:

    geometry.png        neighbours, local and global covariance around a few observations
    m_distribution.png  the excess m over the batch, the chunk and the training; the anisotropy kappa over the batch
    geometry.json       the numbers behind both

The geometry belongs to the data and to the encoder, so it can be drawn for any policy with a generator, also for one
trained without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Callable
from typing import Any

import hydra
import numpy as np
import torch
from hydra.errors import InstantiationException
from torch import Tensor
from torch.utils.data import default_collate

from diffusion_policy.common.pytorch_util import dict_apply
from idp_workspace.checkpoint import load_workspace
from idp_workspace.geometry import EPS, compute_excess
from idp_workspace.geometry_variants import (
    Geometry,
    conditional_covariance,
    effective_neighbors,
    neighbor_weights,
    reference_covariance,
)
from idp_workspace.policy.base import GeneratorPolicy

FILES = ("geometry.png", "m_distribution.png", "geometry.json")
PACKAGES = ("torch", "numpy", "matplotlib", "hydra-core", "implicit-drifting-policy")
#: What IDP logs about its geometry during training.
LOGGED = ("m_mean", "m_p99", "m_max", "m_positive", "effective_neighbors")

LOCAL, GLOBAL, QUERY = "#1f5fc4", "#7a7a7a", "#111111"


# ---------------------------------------------------------------------- the geometry, as pure functions
def local_covariance(w: Tensor, actions: Tensor, center: str = "expert") -> Tensor:
    """G (B, D, D) of actions (B, D), one chunk step."""
    return conditional_covariance(w, actions[:, None], center)[:, 0]


def global_covariance(actions: Tensor) -> Tensor:
    """Sigma (D, D) of actions (B, D), one chunk step."""
    return reference_covariance(actions[:, None])[0]


@torch.no_grad()
def anisotropy(local: Tensor, reference: Tensor, eps: float = EPS) -> Tensor:
    """kappa (B,) of local covariances G (B, D, D) against a reference Sigma (D, D).

        kappa_i = sqrt( lambda_max / lambda_min )   of the eigenvalues of  Sigma^-1/2 G_i Sigma^-1/2

    1 means that G_i has the shape of Sigma at any size; 2 that, in units of Sigma, experts vary twice as far along
    one direction as along another. It does not depend on the units of the actions. eps on both diagonals keeps a
    coordinate that never moves from dividing by zero: such a coordinate counts as equal in both.
    """
    floor = eps * torch.eye(reference.shape[-1], dtype=torch.float64, device=reference.device)
    chol = torch.linalg.cholesky(reference.double() + floor)
    # L^-1 G L^-T has the eigenvalues of Sigma^-1/2 G Sigma^-1/2 for any L L^T = Sigma.
    half = torch.linalg.solve_triangular(chol, local.double() + floor, upper=False)
    white = torch.linalg.solve_triangular(chol, half.mT, upper=False)
    values = torch.linalg.eigvalsh((white + white.mT) / 2)
    return (values[..., -1] / values[..., 0].clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def ellipse_points(center: np.ndarray, covariance: np.ndarray, deviations: float = 1.0, count: int = 181) -> np.ndarray:
    """(count, 2): the closed curve of points x with (x - center)^T covariance^-1 (x - center) = deviations^2."""
    values, vectors = np.linalg.eigh(covariance)
    angle = np.linspace(0, 2 * np.pi, count)
    circle = np.stack([np.cos(angle), np.sin(angle)])  # (2, count)
    return center + deviations * (vectors @ (np.sqrt(values.clip(min=0))[:, None] * circle)).T


def spread_over(values: np.ndarray, count: int) -> list[int]:
    """Return the positions of `count` entries of values (B,), evenly spaced in rank from the 5th to 95th percentile."""
    ranks = np.linspace(0.05, 0.95, count) if count > 1 else np.array([0.5])
    order = np.argsort(values, kind="stable")
    # Few values can round two ranks to one position; the ranks of all of them are then further apart than the
    # percentiles.
    positions = np.round(ranks * (len(values) - 1)).astype(int)
    if len(set(positions)) < count:
        positions = np.round(np.linspace(0, len(values) - 1, count)).astype(int)
    return order[positions].tolist()


# ---------------------------------------------------------------------- from a checkpoint to numbers
@dataclasses.dataclass
class Scene:
    """What is drawn: B windows, H chunk steps, D action dimensions, of which a pair is drawn at chunk step `step`."""

    windows: np.ndarray  # (B,) which windows of the dataset
    points: np.ndarray  # (B, 2) expert actions, in the dataset's units
    weights: np.ndarray  # (B, B) neighbour weights w
    centers: np.ndarray  # (B, 2) centres of the local covariances, in the dataset's units
    local: np.ndarray  # (B, 2, 2) local covariances, in the dataset's units
    reference: np.ndarray  # (2, 2) global covariance, in the dataset's units
    m: np.ndarray  # (B, H, D) excess, or the diagonal of its matrix
    kappa: np.ndarray  # (B, H) anisotropy of the pair of dimensions
    neighbors: np.ndarray  # (B,) effective number of neighbours
    switches: dict[str, Any]
    step: int
    dims: tuple[int, int]
    executed: range  # chunk steps that the policy executes


def load(path: str, trust: bool) -> tuple[Any, GeneratorPolicy, Any]:
    """Return the workspace of a checkpoint, the policy with the weights that act, and the dataset."""
    try:
        workspace = load_workspace(path, trust)
        averaged = getattr(workspace, "ema_model", None)  # None unless training.use_ema
        policy = workspace.model if averaged is None else averaged
        if not hasattr(policy, "generator"):
            raise ValueError(
                f"{path} holds a {type(policy).__name__}, which has no generator whose observation features could be "
                "compared; draw an IDPPolicy or a NaiveDriftingPolicy"
            )
        return workspace, policy.eval(), hydra.utils.instantiate(workspace.cfg.task.dataset)
    except (InstantiationException, ImportError, RuntimeError, OSError) as error:
        raise ValueError(reason(error)) from error


def reason(error: BaseException) -> str:
    """The message of what went wrong, below Hydra's account of what it was building."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def pick_device(name: str) -> torch.device:
    """`auto` is cuda, then mps, then cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {error}") from error


def choose_windows(total: int, batch: int, first: list[int], seed: int) -> np.ndarray:
    """Return (B,) windows of a dataset of `total`: those in `first`, then others at random, without repetition."""
    outside = [window for window in first if not 0 <= window < total]
    if outside:
        raise ValueError(f"--observations {outside[0]}: the dataset has windows 0 to {total - 1}")
    if batch < max(2, len(first)) or total < 2:
        raise ValueError(
            f"a neighbourhood needs at least two windows, and room for each of --observations: --batch {batch}, "
            f"{total} windows in the dataset"
        )
    rest = np.setdiff1d(np.arange(total), first)
    count = min(batch, total) - len(first)
    return np.concatenate([np.array(first, dtype=int), np.random.default_rng(seed).permutation(rest)[:count]])


@torch.no_grad()
def compute(
    policy: GeneratorPolicy,
    dataset: Any,
    windows: np.ndarray,
    step: int | None,
    dims: tuple[int, int],
    seed: int,
    device: torch.device,
) -> Scene:
    """Pass `windows` through the encoder once, and compute the geometry of its features."""
    generator = policy.generator
    dim, horizon = generator.action_dim, generator.horizon
    if dim < 2:
        raise ValueError(
            "the actions have one dimension: there is no covariance to draw, and m compares dimensions with each other"
        )
    if len(set(dims)) != 2 or not all(0 <= d < dim for d in dims):
        raise ValueError(
            f"--dims {','.join(map(str, dims))}: two different action dimensions from 0 to {dim - 1} are needed"
        )
    first = 0 if policy.pred_action_steps_only else policy.n_obs_steps - (1 if policy.oa_step_convention else 0)
    step = first if step is None else step
    if not 0 <= step < horizon:
        raise ValueError(f"--step {step}: the action chunk has steps 0 to {horizon - 1}")

    batch = dict_apply(default_collate([dataset[int(i)] for i in windows]), lambda x: x.to(device))
    policy.to(device)
    features = generator.embedding(generator.encode(policy.normalise_observation(batch["obs"]))).cpu()
    if not features.isfinite().all():
        raise ValueError(
            "the encoder returns features that are not finite: the run has diverged, take an earlier checkpoint"
        )
    chunk = slice(generator.start, generator.start + horizon)
    actions = policy.normalizer["action"].normalize(batch["action"])[:, chunk].cpu()  # (B, H, D), normalised
    points = batch["action"][:, chunk][:, step, list(dims)].cpu()  # (B, 2), in the dataset's units

    switches = policy.options if isinstance(policy.options, Geometry) else Geometry()
    v_ref = dict(policy.named_buffers()).get("reference_variance")
    v_ref = None if v_ref is None else v_ref.cpu()
    # Shuffled neighbourhoods are drawn at random: the same seed twice makes the weights shown those that m was
    # computed with.
    torch.manual_seed(seed)
    m = compute_excess(features, actions, switches, v_ref)
    torch.manual_seed(seed)
    w = neighbor_weights(features, switches)
    if m.ndim == 4:
        m = torch.diagonal(m, dim1=-2, dim2=-1)

    center = switches.center
    pairs = actions[..., list(dims)]
    kappa = torch.stack(
        [anisotropy(local_covariance(w, a, center), global_covariance(a)) for a in pairs.unbind(dim=1)], dim=1
    )
    return Scene(
        windows=windows,
        points=points.numpy(),
        weights=w.numpy(),
        local=local_covariance(w, points, center).numpy(),
        centers=(points if center == "expert" else w @ points).numpy(),
        reference=global_covariance(points).numpy(),
        m=m.float().numpy(),
        kappa=kappa.numpy(),
        neighbors=effective_neighbors(w).numpy(),
        switches=switches.subset(Geometry),
        step=step,
        dims=(dims[0], dims[1]),
        executed=range(first, first + policy.n_action_steps),
    )


def read_log(path: pathlib.Path) -> dict[str, tuple[list[int], list[float]]]:
    """{name: (steps, values)} of the statistics in LOGGED that a run's log holds; empty without a log."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that is still writing, or was killed
        for name in LOGGED:
            if math.isfinite(record.get(name, math.nan)):
                steps, values = series.setdefault(name, ([], []))
                steps.append(record["global_step"])
                values.append(record[name])
    return series


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Mean and quantiles of an array of any shape, as plain numbers."""
    levels = {"min": 0, "p05": 5, "median": 50, "p95": 95, "p99": 99, "max": 100}
    return {"mean": float(values.mean())} | {
        name: float(np.percentile(values, level)) for name, level in levels.items()
    }


def numbers(scene: Scene, chosen: list[int]) -> dict[str, Any]:
    """The content of geometry.json that comes from the scene."""
    return {
        "batch": len(scene.windows),
        "step": scene.step,
        "dims": list(scene.dims),
        "switches": scene.switches,
        "observations": [
            {
                "window": int(scene.windows[i]),
                "action": scene.points[i].tolist(),
                "kappa": float(scene.kappa[i, scene.step]),
                "effective_neighbors": float(scene.neighbors[i]),
                "m": scene.m[i, scene.step].tolist(),
                "local_covariance": scene.local[i].tolist(),
            }
            for i in chosen
        ],
        "global_covariance": scene.reference.tolist(),
        "kappa": quantiles(scene.kappa[:, scene.step]),
        "kappa_all_steps": quantiles(scene.kappa),
        "kappa_median_by_step": np.median(scene.kappa, axis=0).tolist(),
        "m": quantiles(scene.m) | {"positive": float((scene.m > 0).mean())},
        "m_mean_by_dim": scene.m.mean(axis=(0, 1)).tolist(),
        "m_mean_by_step": scene.m.mean(axis=(0, 2)).tolist(),
        "effective_neighbors": quantiles(scene.neighbors),
    }


# ---------------------------------------------------------------------- images
def new_figure(width: float, height: float) -> Any:
    """A figure with a canvas of its own: nothing global, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_geometry(scene: Scene, chosen: list[int], title: str) -> Any:
    """Figure 3 of the paper: one panel for each of the chosen positions in the batch."""
    from matplotlib.lines import Line2D

    rows = math.ceil(len(chosen) / 4)
    columns = math.ceil(len(chosen) / rows)
    relative = scene.weights * len(scene.windows)  # 1 is the weight of every sample in a uniform neighbourhood
    top = max(1.0, float(np.percentile(relative[chosen], 99)))
    middle = scene.points.mean(axis=0)
    around = ellipse_points(middle, scene.reference)
    curves = [ellipse_points(scene.centers[i], scene.local[i]) for i in chosen]
    span = np.ptp(np.concatenate([scene.points, around, *curves]), axis=0)
    shape = float(span[1] / max(span[0], 1e-12))
    same_scale = 1 / 3 < shape < 3  # then angles are drawn true; otherwise the units are too different for it
    figure = new_figure(max(7.0, 3.6 * columns + 1.2), rows * (3.3 * (shape if same_scale else 1) + 0.9) + 1.0)
    figure.get_layout_engine().set(h_pad=0.09)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, i, curve in zip(panels, chosen, curves):
        order = np.argsort(relative[i])  # heavy neighbours on top of light ones
        dots = axis.scatter(
            *scene.points[order].T,
            c=relative[i, order],
            cmap="YlOrRd",
            vmin=0,
            vmax=top,
            s=11,
            linewidths=0.2,
            edgecolors="#9c8a6a",
            zorder=1,
        )
        axis.plot(
            *around.T, color="white", linewidth=3.6, zorder=2
        )  # a light rim keeps the curves apart from the points
        axis.plot(*around.T, color=GLOBAL, linewidth=2, zorder=3)
        axis.plot(*middle, marker="+", color=GLOBAL, markersize=9, markeredgewidth=2, zorder=5)
        axis.fill(*curve.T, color=LOCAL, alpha=0.12, linewidth=0, zorder=2)
        axis.plot(*curve.T, color="white", linewidth=3.6, zorder=3)
        axis.plot(*curve.T, color=LOCAL, linewidth=2, zorder=4)
        axis.plot(
            *scene.points[i],
            marker="*",
            color=QUERY,
            markersize=14,
            markeredgecolor="white",
            linestyle="none",
            zorder=6,
        )
        excess = ", ".join(f"{scene.m[i, scene.step, d]:.2f}" for d in scene.dims)
        axis.set_title(
            f"window {scene.windows[i]}: κ = {scene.kappa[i, scene.step]:.2f}\n"
            f"m = ({excess}), {scene.neighbors[i]:.0f} effective neighbours",
            fontsize=10,
        )
        if same_scale:
            axis.set_aspect("equal")
        axis.tick_params(labelbottom=True)
    for axis in panels[len(chosen) :]:
        axis.remove()
    for position, axis in enumerate(panels[: len(chosen)]):
        if position + columns >= len(chosen):
            axis.set_xlabel(f"action dimension {scene.dims[0]} (dataset units)")
        if position % columns == 0:
            axis.set_ylabel(f"action dimension {scene.dims[1]} (dataset units)")
    bar = figure.colorbar(dots, ax=panels[: len(chosen)].tolist(), extend="max", fraction=0.05, aspect=25, pad=0.015)
    bar.set_label("neighbour weight × batch size  (1 = uniform)")
    spot = "the query's expert action" if scene.switches["center"] == "expert" else "the neighbourhood's mean"
    figure.legend(
        handles=[
            Line2D([], [], marker="o", color="#e8663a", linestyle="none", label="expert actions of the batch"),
            Line2D([], [], marker="*", color=QUERY, markersize=12, linestyle="none", label="the query's expert action"),
            Line2D([], [], color=LOCAL, linewidth=2, label=f"local covariance around {spot}, 1 sd"),
            Line2D([], [], color=GLOBAL, linewidth=2, marker="+", label="global covariance, 1 sd"),
        ],
        loc="outside lower center",
        ncols=4 if columns >= 4 else 2,
        frameon=False,
    )
    figure.suptitle(title)
    return figure


def draw_distribution(
    scene: Scene,
    series: dict[str, tuple[list[int], list[float]]],
    train_batch: int | None,
    checkpoint_step: int | None,
    title: str,
) -> Any:
    """Draw m over the batch and the chunk, kappa over the batch, and the logged statistics of m over training."""
    import matplotlib

    rows = 2 if series else 1
    figure = new_figure(14, 4.0 * rows + 0.6)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)
    axes = figure.subplots(rows, 3, squeeze=False)
    batch, horizon, dim = scene.m.shape
    colors = matplotlib.colormaps["tab10" if dim <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    many = {"fontsize": 9, "ncols": 1 + (dim - 1) // 8}

    axis = axes[0, 0]
    bins = np.linspace(0, max(float(np.percentile(scene.m, 99.8)), 1e-3), 41)
    for d in range(dim):
        values = scene.m[..., d].flatten()
        positive = values[values > 0]
        axis.hist(
            positive.clip(max=bins[-1]),
            bins=bins,
            weights=np.full(len(positive), 1 / len(values)),
            histtype="step",
            linewidth=1.8,
            color=colors[d % len(colors)],
            label=f"dimension {d} ({np.mean(values == 0):.0%} are zero)",
        )
    axis.set(
        xlabel="excess m, where positive (last bin: and above)",
        ylabel="share of samples",
        title=f"m over {batch} windows × {horizon} steps",
    )
    axis.legend(**many)

    axis = axes[0, 1]
    axis.axvspan(scene.executed.start - 0.5, scene.executed.stop - 0.5, color="0.93", zorder=0, label="executed")
    for d in range(dim):
        axis.plot(
            scene.m[..., d].mean(axis=0),
            marker="o",
            markersize=4,
            color=colors[d % len(colors)],
            label=f"dimension {d}",
        )
    axis.set(xlabel="chunk step", ylabel="mean m over the batch", title="m along the action chunk")
    axis.set_ylim(bottom=0, top=None)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(**many)

    axis = axes[0, 2]
    now = scene.kappa[:, scene.step]
    bins = np.linspace(1, max(float(np.percentile(scene.kappa, 99.8)), 1.1), 41)
    for values, look in (
        (now, dict(color=LOCAL, alpha=0.35, label=f"step {scene.step}")),
        (scene.kappa.flatten(), dict(color=GLOBAL, histtype="step", linewidth=1.8, label=f"all {horizon} steps")),
    ):
        axis.hist(values.clip(max=bins[-1]), bins=bins, weights=np.full(len(values), 1 / len(values)), **look)
    low, middle, high = np.percentile(now, [5, 50, 95])
    axis.axvline(middle, color=LOCAL, linestyle="--", linewidth=1.5, label=f"median of step {scene.step}")
    axis.set(
        xlabel=f"κ of dimensions {scene.dims[0]} and {scene.dims[1]} (last bin: and above)",
        ylabel="share of windows",
        title=f"κ: median {middle:.2f}, 5–95 % {low:.2f} to {high:.2f}",
    )
    axis.legend(fontsize=9)

    if series:
        _draw_training(axes[1], series, train_batch, checkpoint_step)
    figure.suptitle(title)
    return figure


def _draw_training(
    axes: Any, series: dict[str, tuple[list[int], list[float]]], train_batch: int | None, checkpoint_step: int | None
) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    size = f"training batches of {train_batch}" if train_batch else "training batches"
    plots = (
        (("m_mean", "m_p99", "m_max"), "excess m", f"m over training ({size})"),
        (("m_positive",), "share of m > 0", "positive excess over training"),
        (
            ("effective_neighbors",),
            "effective neighbours" + (f" of {train_batch}" if train_batch else ""),
            "neighbourhoods over training",
        ),
    )
    for axis, (names, label, title) in zip(axes, plots):
        for name, color in zip(names, (LOCAL, "#e08214", "#b2182b")):
            if name in series:
                axis.plot(
                    *series[name],
                    color=color,
                    linewidth=1.2,
                    marker="." if len(series[name][0]) < 30 else None,
                    label=name,
                )
        if checkpoint_step:
            axis.axvline(checkpoint_step, color="0.4", linestyle=":", linewidth=1.3, label="this checkpoint")
        axis.set(xlabel="training step", ylabel=label, title=title)
        axis.locator_params(axis="x", nbins=6)
        axis.legend(fontsize=9, loc="best" if len(names) == 1 else "center right")
    if all(min(series[name][1]) > 0 for name in plots[0][0] if name in series):
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[1].set_ylim(0, 1)
    axes[2].set_ylim(bottom=0)


# ---------------------------------------------------------------------- the command
def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 0,1") from None


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m idp_workspace.visualize", description="Draw the conditional expert geometry of a checkpoint."
    )
    out.add_argument(
        "-c", "--checkpoint", required=True, help="a .ckpt file of a run with a generator (IDP or Naive Drifting)"
    )
    out.add_argument("-o", "--output", help=f"folder for {', '.join(FILES)} (default: `geometry` in the run's folder)")
    which = out.add_mutually_exclusive_group()
    which.add_argument(
        "--observations",
        type=integers,
        metavar="I,J,K",
        help="windows of the dataset to draw (default: --n of them, from low to high excess m)",
    )
    which.add_argument("--n", type=int, default=4, help="how many observations to draw (default: %(default)s)")
    out.add_argument(
        "--step", type=int, help="step of the action chunk that is drawn (default: the first that is executed)"
    )
    out.add_argument(
        "--dims",
        type=integers,
        default=[0, 1],
        metavar="X,Y",
        help="the two action dimensions that are drawn (default: 0,1)",
    )
    out.add_argument(
        "--batch",
        type=int,
        default=1024,
        help="how many windows are compared with each other; all, if the dataset has fewer (default: %(default)s)",
    )
    out.add_argument("--seed", type=int, default=0, help="chooses the windows of the batch (default: %(default)s)")
    out.add_argument(
        "-d", "--device", default="auto", help="where the encoder runs: auto (default), cpu, cuda, cuda:1, mps"
    )
    out.add_argument(
        "--trust-checkpoint", action="store_true", help="open a pickled checkpoint, which runs code from the file"
    )
    out.add_argument("--overwrite", action="store_true", help="replace existing images")
    return out


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    try:
        visualize(options, command=shlex.join(["python", "-m", "idp_workspace.visualize", *arguments]))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def visualize(options: argparse.Namespace, command: str = "") -> dict[str, Any]:
    """Draw and write everything; returns the content of geometry.json."""
    checkpoint = pathlib.Path(options.checkpoint)
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    output = pathlib.Path(options.output) if options.output else run / "geometry"
    if not options.overwrite and any((output / name).exists() for name in FILES):
        raise ValueError(f"{output} already holds images: choose another --output, or pass --overwrite")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file, not a folder")
    device = pick_device(options.device)
    workspace, policy, dataset = load(options.checkpoint, options.trust_checkpoint)

    wanted = list(dict.fromkeys(options.observations or []))
    windows = choose_windows(len(dataset), options.batch, wanted, options.seed)
    scene = compute(policy, dataset, windows, options.step, options.dims, options.seed, device)
    if not wanted and not 1 <= options.n <= len(windows):
        raise ValueError(f"--n {options.n}: between 1 and {len(windows)} observations of the batch can be drawn")
    chosen = list(range(len(wanted))) if wanted else spread_over(scene.m[:, scene.step].mean(axis=-1), options.n)

    step, cfg = getattr(workspace, "global_step", None), workspace.cfg
    series = read_log(run / "logs.json.txt")
    weighted = bool(getattr(policy.options, "geometry", False))  # whether m was part of this policy's loss
    note = "" if weighted else " (trained without m)"
    about = f"{cfg.task.get('name', 'task')}, {type(policy).__name__} at training step {step}{note}"
    report = {
        "checkpoint": str(checkpoint),
        "policy": type(policy).__name__,
        "geometry_in_loss": weighted,
        "global_step": step,
        "seed": options.seed,
        "device": str(device),
        **numbers(scene, chosen),
        "training": {
            name: {"first": values[0], "last": values[-1], "records": len(values)}
            for name, (_, values) in series.items()
        },
        "command": command,
        "versions": versions(),
    }
    images = {
        "geometry.png": draw_geometry(
            scene, chosen, f"Observation-conditioned expert geometry: {about}, chunk step {scene.step}"
        ),
        "m_distribution.png": draw_distribution(
            scene, series, cfg.get("dataloader", {}).get("batch_size"), step, f"Local geometry excess: {about}"
        ),
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in images.items():
        write(output / name, functools.partial(figure.savefig, format="png", dpi=130))
    write(output / "geometry.json", lambda file: file.write(json.dumps(report, indent=2).encode()))
    kappa, m = report["kappa"], report["m"]
    print(
        f"kappa  median {kappa['median']:.2f}, 5 to 95 % {kappa['p05']:.2f} to {kappa['p95']:.2f}, "
        f"at chunk step {scene.step}"
    )
    print(
        f"m      mean {m['mean']:.3f}, p99 {m['p99']:.3f}, max {m['max']:.3f}, positive {m['positive']:.0%}; "
        f"{report['effective_neighbors']['mean']:.0f} effective neighbours of {len(windows)}"
    )
    print(f"written to {output}: {', '.join(FILES)}")
    return report


def write(path: pathlib.Path, save: Callable[[Any], Any]) -> None:
    """save(file) under a temporary name, then rename: `path` is complete or as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            save(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


if __name__ == "__main__":
    main()
