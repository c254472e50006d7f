"""Suites as commands: a runner and jobs that are killed, launchers, and the page in a browser."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from idp_workspace.suite import grid, jobs, launchers, records, report, scheduler
from tests.suite_runs import fabricate, video, write_suite
from tests.util import ROOT, wait_for, write_pusht

linux = pytest.mark.skipif(sys.platform != "linux", reason="kills processes and finds them in /proc")


def debug_suite(folder, **changes):
    """Runs of 200 steps on a few demonstrations, evaluated on two starts."""
    data = write_pusht(folder / "pusht.zarr")
    overrides = ["preset=debug", f"task.dataset.zarr_path={data}", "task.env_runner.max_steps=8"]
    overrides += ["task.env_runner.n_test=1", "training.steps_per_epoch=100", "training.log_every=1"]
    settings = {"overrides": overrides, "methods": ["idp", "mip"], "seeds": [0], "eval": ["--n_episodes", "2"]}
    return write_suite(folder / "suite.yaml", **settings | changes)


def start(file, output, *arguments):
    command = [sys.executable, "-m", "idp_workspace.suite", "run", str(file), "--output", str(output), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, **options)


def steps(folder):
    """The steps in the log of a run."""
    with contextlib.suppress(OSError):
        return [json.loads(line)["global_step"] for line in (folder / "logs.json.txt").read_text().splitlines()[:-1]]
    return []


@linux
def test_a_runner_that_is_killed_loses_nothing(tmp_path):
    methods = {"idp": None, "mip": None, "broken": "objective=idp policy.tau=-1"}
    file, output = debug_suite(tmp_path, methods=methods), tmp_path / "runs"
    idp, mip = output / "pusht_state-idp-mlp-0", output / "pusht_state-mip-mlp-0"
    process = start(file, output, "--jobs", "1")
    try:
        wait_for(lambda: len(steps(idp)) > 5, process)
        process.kill()  # the runner alone: its job goes on
        process.wait()
        worker = json.loads((idp / jobs.STATE).read_text())["pid"]
        assert jobs.is_locked(idp / jobs.LOCK) and not mip.exists()
        process = start(file, output, "--jobs", "1")  # takes the job over, and goes on with the other
        wait_for(lambda: len(steps(mip)) > 5, process)
        summary = (idp / "summary.json").stat()
        assert json.loads((idp / jobs.STATE).read_text()) | {"pid": worker, "attempts": 1} == records.state_of(idp)
        process.kill()
        os.kill(json.loads((mip / jobs.STATE).read_text())["pid"], signal.SIGKILL)  # and now its job, too
        process.wait()
        process = start(file, output, "--jobs", "2")
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1 and "2 of 3 done, 0 running, 1 failed" in out, out
    assert "failed pusht_state-broken-mlp-0: policy cannot be built: tau=-1 must be above 0" in out
    assert (idp / "summary.json").stat() == summary  # what was done was not repeated
    for run in (idp, mip):  # no step is missing or logged twice
        records_of = [json.loads(line)["global_step"] for line in (run / "logs.json.txt").read_text().splitlines()]
        assert records_of == list(range(200))
        assert len(records.scores_of(json.loads((run / "eval/eval_log.json").read_text()))) == 2
    assert records.state_of(mip)["attempts"] == 2 and (idp / "times.json").is_file() and (mip / "times.json").is_file()
    assert "resuming" in (mip / jobs.OUTPUT).read_text()
    page = report.write_report(grid.load(file, output=output))
    assert page.is_file()


@linux
def test_ctrl_c_stops_the_jobs_with_a_checkpoint(tmp_path):
    file, output = debug_suite(tmp_path, methods=["idp"]), tmp_path / "runs"
    run = output / "pusht_state-idp-mlp-0"
    process = start(file, output)
    try:
        wait_for(lambda: len(steps(run)) > 5, process)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "continue with" in out, out
    assert records.state_of(run)["status"] == "stopped" and not jobs.is_locked(run / jobs.LOCK)
    assert (run / "checkpoints/latest.ckpt").is_file() and not (run / "summary.json").exists()


@linux
def test_jobs_through_submitit(tmp_path):
    pytest.importorskip("submitit")
    overrides = [
        "preset=debug",
        f"task.dataset.zarr_path={write_pusht(tmp_path / 'pusht.zarr')}",
        "task.env_runner=null",
    ]
    file = write_suite(tmp_path / "suite.yaml", overrides=overrides, eval=None, methods=["idp"], seeds=[0])
    suite = grid.load(file, output=tmp_path / "runs")
    launch = launchers.launcher("submitit", suite.output, 1, {"timeout_min": "10"})
    made = scheduler.Scheduler(suite, suite.runs, slots=1, threads=1, memory_gb=1, launch=launch, local=False, made={})
    made.loop(lambda *_: None)
    (job,) = made.jobs
    assert job.status == "done", (job.error, (job.folder / jobs.OUTPUT).read_text())
    assert records.state_of(job.folder)["attempts"] == 1


# ---------------------------------------------------------------------- the page
@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of 100 fabricated runs -> (path of the page, seconds that it took)."""
    folder = tmp_path_factory.mktemp("page")
    methods = ["idp", "idp_m0", "mip", "regression", "naive_drifting"]
    tasks = {"pusht": "task=pusht_state", "lift_ph": "task=lift_ph_lowdim"}
    published = str(ROOT / "suites/published/2d_state.yaml")
    seeds = [0, 1, 2, 3, 4]
    file = write_suite(
        folder / "suite.yaml", methods=methods, tasks=tasks, backbones=["mlp", "unet"], seeds=seeds, published=published
    )
    suite = grid.load(file, output=folder / "runs")
    fabricate(suite, records_each=600, clip=video(folder / "clip.mp4"))
    started = time.process_time()
    return report.write_report(suite), time.process_time() - started


def test_a_report_of_100_runs_is_fast(page):
    path, seconds = page
    assert len(json.loads((path.parent / "results.json").read_text())["rows"]) == 100
    assert seconds < 30
    text = path.read_text()
    assert "http://" not in text.split("<script>")[0] and "src=" not in text.split("<script>")[0]


def chromium():
    """The browser that is installed, if any."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """Headless Chromium through the WebDriver protocol of chromedriver."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [shutil.which("chromedriver"), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        line = next(line for line in self.process.stdout if "successfully on port" in line)
        self.base = f"http://127.0.0.1:{line.rstrip().rstrip('.').rpartition(' ')[2]}/session"
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,2400", "--mute-audio"]
        words += [f"--user-data-dir={folder}", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"]
        options = {"binary": chromium(), "args": words}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self.base += "/" + self.call("", {"capabilities": capabilities})["sessionId"]

    def call(self, path, data=None):
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.base + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def run(self, script):
        """Return the value of a script in the page."""
        return self.call("/execute/sync", {"script": script, "args": []})

    def until(self, script, seconds=120):
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, script
            time.sleep(0.1)
        return found

    def close(self):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(self.base, method="DELETE"), timeout=20)
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="module")
def browser(page, tmp_path_factory):
    if not (chromium() and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    found = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        found.call("/url", {"url": page[0].as_uri()})
        found.until("return document.body.dataset.ready === 'true'")
        yield found
    finally:
        found.close()


SHOWN = "[...document.querySelectorAll('#run-table tbody tr')].filter(row => !row.hidden)"


def test_the_page_loads_without_an_error(browser):
    assert [entry for entry in browser.call("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"] == []
    assert browser.run(f"return {SHOWN}.length") == 100
    assert browser.run("return document.querySelectorAll('table.sortable').length") == 6
    for figure in ("curve", "cost", "start", "geometry"):
        points = f"return document.querySelectorAll('#{figure}-figure .trace').length"
        assert browser.until(points) > 0, figure
    names = browser.run(
        "return [...document.querySelectorAll('#cost-figure .legendtext')].map(text => text.textContent)"
    )
    assert "idp mlp" in names and "mip mlp, by calls" in names and "idp mlp, by calls" not in names
    assert "100 of 100 runs" in browser.run("return document.body.textContent")


def test_the_runs_are_sorted(browser):
    column = "[...document.querySelectorAll('#run-table th')].findIndex(head => head.textContent === 'score')"
    scores = f"const i = {column}; return {SHOWN}.map(row => parseFloat(row.cells[i].textContent))"
    browser.run(f"document.querySelectorAll('#run-table th')[{column}].click()")
    down = browser.run(scores)
    assert down == sorted(down, reverse=True) and down[0] > down[-1]
    browser.run(f"document.querySelectorAll('#run-table th')[{column}].click()")
    assert browser.run(scores) == sorted(down)
    browser.run("document.querySelectorAll('#run-table th')[0].click()")
    names = browser.run(f"return {SHOWN}.map(row => row.cells[0].textContent)")
    assert names == sorted(names)


def test_the_runs_are_filtered(browser):
    browser.run(
        "const field = document.getElementById('filter'); field.value = 'pusht unet';"
        "field.dispatchEvent(new Event('input'))"
    )
    names = browser.run(f"return {SHOWN}.map(row => row.cells[0].textContent)")
    assert len(names) == 25 and all("pusht" in name and "unet" in name for name in names)
    browser.run(
        "const choice = document.querySelectorAll('select.choice')[1]; choice.value = 'idp';"
        "choice.dispatchEvent(new Event('change'))"
    )
    assert browser.run(f"return {SHOWN}.length") == 5 and browser.run("return shown.textContent") == "5 of 100 runs"


def test_numbers_lead_to_the_folders_of_their_runs(browser, page):
    links = browser.run("return [...document.querySelectorAll('td a')].map(link => link.href)")
    assert len(links) > 1000
    for link in set(links):
        assert link.startswith("file://") and (pathlib.Path(link.removeprefix("file://")) / "summary.json").is_file()


def test_two_methods_are_compared_start_by_start(browser):
    browser.run(
        "const y = document.getElementById('start-y'); y.value = 'mip mlp'; y.dispatchEvent(new Event('change'))"
    )
    text = browser.run("return document.getElementById('start-text').textContent")
    better, worse, equal = map(int, re.search(r"better on (\d+), worse on (\d+), equal on (\d+)", text).groups())
    assert text.startswith("50 starts") and better + worse + equal == 50


def test_rollouts_play_side_by_side(browser):
    assert browser.run("return document.querySelectorAll('video').length") == 2
    browser.until("return [...document.querySelectorAll('video')].every(video => video.readyState >= 2)")
    browser.run("document.getElementById('play').click()")
    browser.until(
        "return [...document.querySelectorAll('video')].every(video => video.currentTime > 0 && !video.paused)"
    )
