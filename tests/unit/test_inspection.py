"""What inspect_data finds in recordings, and what it prints and writes."""

import re
import shlex

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks import recordings as make
from diffusion_policy.dataset.inspection import find, measure
from diffusion_policy.dataset.inspection.page import page
from diffusion_policy.dataset.inspection.text import GUESSED, printable, report, training_commands
from diffusion_policy.dataset.inspection.units import unit
from diffusion_policy.dataset.recordings import open_recordings
from diffusion_policy.scripts import inspect_data

FPS = 20


def motion(length=200, seed=0, dims=4):
    """Smooth motions over a range of about 2 without pauses."""
    rng = np.random.default_rng(seed)
    time = np.arange(length + 1)[:, None] / FPS
    state = np.sin(time * rng.uniform(1.5, 3, dims) + rng.uniform(0, 6, dims)).astype(np.float32)
    return {"state": state[:-1].copy(), "action": state[1:].copy()}


def findings(folder, episodes, fps=FPS):
    """The findings in these episodes, {title: level}."""
    folder.mkdir()
    for number, values in enumerate(episodes):
        times = {} if "timestamp" in values else {"timestamp": np.arange(len(values["action"])) / fps}
        np.savez(folder / f"take_{number}.npz", **values, **times, fps=fps)
    facts = measure(open_recordings(folder), quiet=True)
    return {finding.title: finding.level for finding in find(facts)}


def changed(change, count=4):
    episodes = [motion(seed=seed) for seed in range(count)]
    change(episodes)
    return episodes


def pause(episodes):
    for values in episodes:
        values["state"][60:140] = values["state"][60]


def pushed(key, value, where=slice(None)):
    def change(episodes):
        for values in episodes:
            values[key][where] = value

    return change


def at_limit(episodes):
    for values in episodes:
        values["action"][:, 2] = np.clip(values["action"][:, 2], -1, 0.3)


def jumping(episodes):
    episodes[2]["state"][100:, 1] += 9


def wrapping(episodes):
    for values in episodes:
        angle = np.arange(200) / 15
        values["state"][:, 3] = (angle + np.pi) % (2 * np.pi) - np.pi


def gripper(episodes):
    for values in episodes:
        values["action"][:, 3] = np.arange(200) % 100 > 60


def late(episodes):
    for values in episodes[:2]:
        values["timestamp"] = np.arange(200) / FPS * 1.05


def dropped(episodes):
    times = np.arange(201) / FPS
    episodes[0]["timestamp"] = np.delete(times, 50)


def deltas(episodes):
    for values in episodes:
        values["action"] = 3 * np.diff(values["state"], axis=0, append=values["state"][-1:])


def quaternion(episodes):
    for values in episodes:
        values["action"] /= np.linalg.norm(values["action"], axis=1, keepdims=True)


def commands(episodes):
    rng = np.random.default_rng(0)
    for values in episodes:
        values["action"] = np.cumsum(rng.normal(size=(200, 4)), axis=0)


CASES = {
    "pauses": (pause, "stands still in 40%|stands still in 3", "warning"),
    "nan": (
        lambda episodes: pushed("action", np.nan, (7, 1))(episodes[1:2]),
        "action has NaN .* 1 episodes",
        "problem",
    ),
    "constant": (pushed("state", 0.5, (slice(None), 1)), r"dimensions that never change: state\[1\]$", "note"),
    "saturated": (at_limit, r"dimensions at their limit: action\[2\]", "note"),
    "jumps": (jumping, r"1 jumps within one step: state\[1\]", "warning"),
    "wrapped": (wrapping, r"angles wrap around, \d+ times: state\[3\]", "warning"),
    "binary": (gripper, r"two values, like a gripper: action\[3\]", "note"),
    "drift": (late, "time stamps of 2 episodes drift", "warning"),
    "dropped": (dropped, "1 steps in 1 episodes are too long", "warning"),
    "copies": (lambda episodes: episodes.append(episodes[1]), "1 episodes are copies", "warning"),
    "short": (lambda episodes: episodes.append(motion(8)), "1 episodes have fewer than 16", "warning"),
    "same": (lambda episodes: [v.update(action=v["state"]) for v in episodes], "action = state at the same", "warning"),
    "delta": (deltas, "action = change of state", "note"),
    "quaternion": (quaternion, r"unit quaternions: action\[0:4\]$", "note"),
    "neither": (commands, "neither state nor its change", "note"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_found(tmp_path, case):
    change, title, level = CASES[case]
    clean = findings(tmp_path / "clean", changed(lambda episodes: None))
    assert not any(re.search(title, text) for text in clean)
    found = findings(tmp_path / "changed", changed(change))
    assert [found[text] for text in found if re.search(title, text)] == [level], found


def test_clean_data_have_one_note(tmp_path):
    assert findings(tmp_path / "a", changed(lambda episodes: None)) == {
        "action = state 1 steps later (explains 100.0%)": "note"
    }


@pytest.mark.parametrize(
    "name, low, high, expected",
    [
        ("elbow_deg", -1, 1, "deg"),
        ("x [mm]", -1, 1, "mm"),
        ("kLeftElbow", 0.9, 1.3, "rad?"),
        ("shoulder_pan.pos", -80, 95, "deg?"),
        ("observation.qpos", -3, 3, "rad?"),
        ("elbow_vel", -1, 1, ""),
        ("kRightHandThumbRotation", 0, 1, "0..1?"),
        ("gripper.pos", 0, 99, "%?"),
        ("ee.x", -0.2, 0.6, "m?"),
        ("y", 120, 480, "mm?"),
        ("foo", 0, 1, ""),
        ("yaw", 0, 5000, ""),  # counts of an encoder
    ],
)
def test_units_are_read_or_guessed(name, low, high, expected):
    assert unit(name, low, high) == expected


def test_units_are_shown(tmp_path):
    folder = tmp_path / "pose"
    folder.mkdir()
    turned = np.random.default_rng(0).normal(size=(40, 4))
    turned /= np.linalg.norm(turned, axis=1, keepdims=True)
    steps = np.concatenate([motion(40)["state"][:, :3], turned, motion(40)["state"][:, 3:]], axis=1)
    np.savez(folder / "a.npz", state=steps, qpos=steps[:, :2], action=steps[:, :3])
    facts = measure(open_recordings(folder), quiet=True)
    text, html = report(facts, find(facts)), page(facts, find(facts), [])
    assert facts.vectors["state"].quaternions == [3] and text.count(" quat ") == 4 and text.count(" rad? ") == 2
    assert GUESSED in text and html.count(GUESSED) == 1 and html.count(">quat<") == 4
    assert "'task.rotations={state: [{start: 3, from: quaternion}]}'" in text.replace("\n    ", " ")
    (folder / "a.npz").unlink()
    np.savez(folder / "a.npz", state=steps[:, :2], action=steps[:, :3])
    assert GUESSED not in report(measure(open_recordings(folder), quiet=True), [])


def test_missing_images_and_wrong_videos(tmp_path):
    folder = make.write_lerobot_v2(tmp_path / "set")
    videos = folder / f"videos/chunk-000/{make.CAMERA}"
    (videos / "episode_000000.mp4").unlink()
    make.write_video(videos / "episode_000001.mp4", make.images(4, 0))
    facts = measure(open_recordings(folder), quiet=True)
    titles = [(finding.level, finding.title) for finding in find(facts)]
    assert ("warning", f"camera {make.CAMERA}: 1 of 3 episodes have no images") in titles
    assert ("problem", f"camera {make.CAMERA}: 1 videos do not have one frame per step") in titles
    assert facts.whole == [1, 2]


def test_names_cannot_change_the_page_or_the_terminal(tmp_path):
    folder = make.write_lerobot_v2(tmp_path / "<img src=x>")
    info = (folder / "meta/info.json").read_text()
    assert '"x"' in info
    (folder / "meta/info.json").write_text(info.replace('"x"', '"<script>alert(1)</script>\\u001b[2J"'))
    facts = measure(open_recordings(folder), quiet=True)
    found = find(facts)
    html = page(facts, found, training_commands(facts))
    assert "<script" not in html and "&lt;script&gt;" in html and "<img src=x>" not in html
    text = printable(report(facts, found))
    assert "\x1b" not in text and "?[2J" in text
    assert html.count("<img ") == 9 and html.count("<svg") == 2 + 2 * 8  # 6 and 3 images; 4 dimensions twice


def test_the_command(tmp_path, capsys, monkeypatch):
    folder = make.write_lerobot_v2(tmp_path / "my set")
    (folder / "data/chunk-000/episode_000001.parquet").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["inspect_data", "my set"])
    with pytest.raises(SystemExit) as ended:
        inspect_data.main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and errors.startswith("error: episode 1: there is no") and errors.count("\n") == 1
    monkeypatch.setattr("sys.argv", ["inspect_data", "my set", "--skip-broken"])
    inspect_data.main()
    out = capsys.readouterr().out
    for words in ("lerobot v2.1", "episodes   2", "20 Hz", "task 0", "32 x 48, in 2 of 2", "grip", "left out"):
        assert words in out
    assert (tmp_path / "data/outputs/inspection/my set.html").stat().st_size > 5000
    numbers, images = out.strip().splitlines()[-2:]
    common = ["task=my_data", f'task.path="{folder}"', "preset=cpu", "task.relative_actions=true"]
    assert shlex.split(numbers) == [
        *("python", "train.py", "--config-name=train_idp_mlp_lowdim", *common, "task.skip_broken=true")
    ]
    assert shlex.split(images)[2:] == [
        *("--config-name=train_idp_unet_lowdim", *common, f"task.cameras=[{make.CAMERA}]", "task.skip_broken=true")
    ]


def test_relative_actions_are_suggested_for_position_control(tmp_path):
    facts = measure(open_recordings(make.write_npz(tmp_path / "arm", (40, 30))), quiet=True)
    assert facts.relation.is_position_control and "task.relative_actions=true" in training_commands(facts)[0]
    facts.relation.lag, facts.relation.position = 0, 1.0  # the observation itself
    assert "task.relative_actions" not in training_commands(facts)[0]
    facts.relation.position = 0.1  # a velocity, or a torque
    assert "task.relative_actions" not in training_commands(facts)[0]
    facts.relation = None
    assert "task.relative_actions" not in training_commands(facts)[0]


def test_the_command_for_images(tmp_path):
    """Hydra reads back whatever a camera is called; videos that are missing are left out."""
    folder = make.write_lerobot_v2(tmp_path / "set")
    recordings = open_recordings(folder)
    facts = measure(recordings, quiet=True)
    for name in (make.CAMERA, "it's \\ [my], camera"):
        recordings.cameras = {name: recordings.cameras.popitem()[1]}
        facts.missing = {name: []}
        override = shlex.split(training_commands(facts)[1])[-1]
        assert OverridesParser.create().parse_override(override).value() == [name]
    facts.missing[name] = [1]
    assert "task.skip_broken=true" in training_commands(facts)[1] and "skip" not in training_commands(facts)[0]
    facts.missing[name] = [0, 1, 2]
    assert len(training_commands(facts)) == 1


def test_the_g1_recording(g1_recording, tmp_path, capsys):
    facts = measure(open_recordings(g1_recording), quiet=True)
    titles = "\n".join(finding.title for finding in find(facts))
    for words in ("76 of 100 episodes have no images", "action = observation.state 6 steps later (explains 99.0%)"):
        assert words in titles
    assert "jumps" not in titles and "NaN" not in titles and "copies" not in titles
