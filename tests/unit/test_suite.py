"""Suites: what a file expands to, what is refused before anything runs, statistics, tables, the front page."""

import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from diffusion_policy.common import statistics as host_statistics
from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.scripts import eval as eval_script
from idp_workspace.suite import __main__ as command
from idp_workspace.suite import claims, grid, index, jobs, live, records, report, scheduler, statistics, tables
from tests.suite_runs import fabricate, write_suite
from tests.util import ROOT

SUITES = sorted((ROOT / "suites").glob("*.yaml"))
PUBLISHED = sorted((ROOT / "suites/published").glob("*.yaml"))


def load(tmp_path, **changes):
    return grid.load(write_suite(tmp_path / "suite.yaml", **changes), output=tmp_path / "runs")


# ---------------------------------------------------------------------- expanding
def test_a_grid_has_the_runs_of_its_first_seed_first(tmp_path):
    suite = load(tmp_path, backbones=["mlp", "unet"])
    assert [run.name for run in suite.runs][:5] == [
        "pusht_state-idp-mlp-0",
        "pusht_state-mip-mlp-0",
        "pusht_state-idp-unet-0",
        "pusht_state-mip-unet-0",
        "pusht_state-idp-mlp-1",
    ]
    assert len(suite.runs) == 8 and suite.full_name == "small"
    assert suite.runs[1].command == (
        "python train.py objective=mip backbone=mlp modality=lowdim task=pusht_state preset=debug training.seed=0"
    )
    assert suite.runs[0].evaluations == {"eval": ("--n_episodes", "3")}


def test_methods_have_settings_of_their_own(tmp_path):
    methods = {
        "idp": None,
        "few": {"overrides": "objective=idp policy.topk=8", "seeds": [1], "group": "neighbours", "reference": "idp"},
        "dp3": {"overrides": "train_simple_dp3 task.env_runner.n_envs=1", "seeds": [0]},
    }
    suite = load(tmp_path, methods=methods)
    names = ["pusht_state-idp-mlp-0", "pusht_state-dp3-mlp-0", "pusht_state-idp-mlp-1", "pusht_state-few-mlp-1"]
    assert [run.name for run in suite.runs] == names
    few, dp3 = suite.runs[3], suite.runs[1]
    assert few.group == "neighbours" and few.overrides[-2:] == ("policy.topk=8", "training.seed=1")
    assert dp3.arguments[:3] == ["train.py", "--config-name=train_simple_dp3", "task=pusht_state"]
    assert suite.references == {"few": "idp"} and tables.reference_of(suite, "idp") is None


def test_presets_add_overrides_select_methods_and_replace_the_rest(tmp_path):
    presets = {
        "cpu": {"overrides": ["training.num_epochs=1"], "methods": ["mip"], "seeds": [5]},
        "paper": {"eval": None},
    }
    file = write_suite(tmp_path / "suite.yaml", presets=presets, reference="-")
    cpu, paper = grid.load(file), grid.load(file, "paper")
    assert [run.name for run in cpu.runs] == ["pusht_state-mip-mlp-5"] and cpu.full_name == "small_cpu"
    assert cpu.runs[0].overrides[-3:] == ("preset=debug", "training.num_epochs=1", "training.seed=5")
    assert not paper.evaluates and paper.runs[0].evaluations == {} and len(paper.runs) == 4
    assert cpu.output != paper.output


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_expand_for_every_preset(path):
    presets = grid.read(path)["presets"]
    assert {"cpu", "paper"} <= presets.keys()
    for preset in presets:
        suite = grid.load(path, preset)
        assert suite.runs and f"preset={'paper' if preset == 'paper' else 'cpu'}" in suite.runs[0].overrides
        tables.published(suite.published)


def test_all_suites_are_there():
    names = "ablations adroit limitations metaworld pick_peach pusht_image pusht_state robomimic_image robomimic_state"
    assert [path.stem for path in SUITES] == names.split()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_studies_are_suites(path):
    suite = grid.load(path)
    assert suite.runs and all(run.config for run in suite.runs)
    assert len({run.name for run in suite.runs}) == len(suite.runs)


def test_the_example_of_the_documentation_is_a_suite(tmp_path):
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/suites.md").read_text(), re.S)[1]
    (tmp_path / "mine.yaml").write_text(text.replace("published/", f"{ROOT}/suites/published/"))
    suite = grid.load(tmp_path / "mine.yaml")
    assert [suite.axis(axis) for axis in ("method", "backbone")] == [["idp", "sharp", "few", "dp"], ["mlp", "unet"]]
    grid.check(suite, suite.runs)
    assert [run.method for run in grid.load(tmp_path / "mine.yaml", "paper").runs] == ["idp"] * 6


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["idp", "idpp"]}, "run pusht_state-idpp-mlp-0: objective 'idpp' does not exist; nearest: idp"),
        ({"overrides": ["preset=debug", "policy.taw=1"]}, "policy.taw is not a setting .* nearest: policy.tau"),
        ({"overrides": ["preset=debug", "task.dataset.zarr_path=no.zarr"]}, "its dataset no.zarr does not exist"),
        ({"backbones": ["mlpp"]}, "backbone 'mlpp' does not exist"),
        ({"tasks": ["pusht_stat"]}, "task 'pusht_stat' does not exist; nearest: pusht_state"),
    ],
)
def test_runs_that_cannot_be_made_are_refused(tmp_path, changes, message):
    suite = load(tmp_path, **changes)
    with pytest.raises((ConfigError, DataNotFoundError), match=message):
        grid.check(suite, suite.runs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": ["idp"]}, "key 'method' does not exist; nearest: methods"),
        ({"reference": "idpp"}, "reference 'idpp' does not exist; nearest: idp"),
        ({"methods": "-"}, "it needs methods, runs or grid"),
        ({"title": "-"}, "it needs title"),
        ({"seeds": ["0"]}, "seed must be a whole number of at least 0, not '0'"),
        ({"seeds": []}, "seeds must be a list"),
        ({"form": "best"}, "form 'best' does not exist"),
        ({"published": "no.yaml"}, "there is no file"),
        ({"methods": {"idp": {"override": "x"}}}, "method idp: key 'override' does not exist; nearest: overrides"),
        ({"methods": {"idp": {"tasks": ["x"]}}}, "method idp: tasks 'x' does not exist"),
        ({"claims": [{"method": "idp"}]}, "a claim needs text"),
        ({"claims": [{"text": "x", "method": "idpp"}]}, "claim: method 'idpp' does not exist; nearest: idp"),
        ({"name": "a/b"}, "must be a folder's name"),
        ({"overrides": [1]}, "overrides must be a text or a list"),
        ({"runs": [{"name": "a", "config": "x"}, {"name": "a", "config": "y"}]}, "two runs have the same name: a 0"),
        ({"runs": [{"name": "a"}]}, "a run needs name and config"),
        ({"presets": {"cpu": {"method": []}}}, "preset cpu: key 'method' does not exist"),
    ],
)
def test_a_suite_with_a_mistake_is_one_line(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        load(tmp_path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods: {idp: a, idp: b}", "'idp' appears twice (line 1)"),
        ("- a", "is not a suite"),
        ("a: [", "cannot be read as a suite"),
    ],
)
def test_a_file_that_is_not_a_suite(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        grid.load(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        grid.load(tmp_path / "missing.yaml")


def test_the_command_ends_with_one_line_and_2(tmp_path, capsys):
    pytest.importorskip("submitit")
    file = write_suite(tmp_path / "suite.yaml", eval=["--n_episode", "x"])
    for arguments, message in (
        (["run", str(file), "--preset", "cpu"], "has no preset 'cpu'; there are none"),
        (["run", str(file), "--only", "flow"], "--only flow: no run of"),
        (["run", str(file), "--jobs", "0"], "argument --jobs: '0' is not a whole number of at least 1"),
        (["run", str(file), "--launcher", "slurm"], "there is no Slurm on this machine"),
        (["run", str(file), "--output", str(tmp_path)], "'x' is not a whole number of at least 1"),
        (["report", str(file), "--output", str(tmp_path / "no")], "no run in"),
        (["run", str(file), "--set", "x"], "'x' is not KEY=VALUE"),
        (["index", "--results", str(tmp_path / "no")], "is not a folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == 2 and message in (found := capsys.readouterr().err), (arguments, found)
        assert found.count("\n") == 1


def test_half_written_and_changed_results_are_refused_and_set_aside(tmp_path, capsys):
    suite = load(tmp_path)
    fabricate(suite, records_each=6)
    first = suite.output / "pusht_state-idp-mlp-0"
    assert [records.status(suite.output / run.name, run) for run in suite.runs] == ["done"] * 4
    whole = (first / "summary.json").read_text()
    (first / "summary.json").write_text(whole[:20])
    with pytest.raises(DataError, match=r"summary.json is half-written or damaged .* delete it"):
        records.status(first, suite.runs[0])
    (first / "summary.json").write_text(whole)
    changed = load(tmp_path, overrides=["preset=debug", "policy.tau=2"], methods=["idp"], reference="-")
    with pytest.raises(DataError, match=r"other settings \(nothing then, policy.tau=2 now\)"):
        records.status(first, changed.runs[0])
    command.set_aside(changed, changed.runs)
    assert records.status(first, changed.runs[0]) == "waiting"
    assert (suite.output / "pusht_state-idp-mlp-0.1/summary.json").is_file()
    assert "moved aside" in capsys.readouterr().out


# ---------------------------------------------------------------------- statistics
def rows(method, values, task="t", backbone="b", key="scores"):
    return [
        {"method": method, "task": task, "backbone": backbone, "seed": seed, "score": float(np.mean(line)), "name": ""}
        | {key: {f"s{start}": float(value) for start, value in enumerate(line)}}
        for seed, line in enumerate(values)
    ]


def test_wilson_is_the_closed_form():
    z, n, p = stats.norm.ppf(0.975), 50, 0.9
    centre, half = (p + z * z / (2 * n)), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)
    assert statistics.wilson(45, 50) == pytest.approx((low, high), abs=1e-9)
    one = np.zeros((1, 50))
    one[0, :45] = 1
    assert statistics.interval(one) == pytest.approx((low, high), abs=1e-9)
    assert statistics.interval(np.ones((3, 50))) == statistics.wilson(150, 150)  # a bootstrap would be a point


def test_the_interval_covers_the_mean_as_often_as_it_says():
    random, covered = np.random.default_rng(0), 0
    for _ in range(60):
        values = (
            0.5 + 0.1 * random.normal(size=(8, 1)) + 0.1 * random.normal(size=(1, 60)) + random.normal(size=(8, 60))
        )
        low, high = statistics.interval(values)
        covered += low <= 0.5 <= high
    assert 0.85 <= covered / 60 <= 1.0


def test_paired_differences_are_those_of_common_seeds_and_starts():
    random = np.random.default_rng(0)
    base = random.random((3, 40))
    first, second = rows("a", base + 0.1), rows("b", base)
    found = statistics.paired(first, second)
    assert found["difference"] == pytest.approx(0.1) and found["interval_95"] == pytest.approx([0.1, 0.1])
    assert found["p"] < 0.01 and found["seeds"] == 3 and found["starts"] == 40
    assert statistics.paired(first[:1], second[1:]) is None  # no common seed
    same = statistics.paired(first, first)
    assert same["difference"] == 0 and same["p"] == 1.0


def test_mcnemar_and_permutation():
    a, b = np.zeros(30), np.zeros(30)
    a[:12], b[10:14] = 1, 1  # a alone on 10, b alone on 2
    test, p = host_statistics.paired_test(a, b)
    assert test == "McNemar" and p == pytest.approx(stats.binomtest(2, 12).pvalue)
    found = host_statistics.compare(a, b)
    assert (found["wins"], found["losses"], found["ties"]) == (10, 2, 18)
    few = np.array([0.1, 0.2, 0.3, 0.4])
    test, p = host_statistics.paired_test(few, np.zeros(4))
    assert test == "permutation" and p == pytest.approx(2 / 16)  # all signs: exact


def test_interquartile_mean_and_improvement():
    samples = [np.array([0.0, 0.4, 0.6, 1.0]), np.array([0.0, 0.4, 0.6, 1.0])]
    value, (low, high) = statistics.interquartile_mean(samples)
    assert value == pytest.approx(0.5) and low < 0.5 < high
    assert statistics.interquartile_mean([np.array([0.3])]) == (pytest.approx(0.3), None)
    chance, _ = statistics.improvement([np.array([1.0, 0.5])], [np.array([0.5, 0.0])])
    assert chance == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    above, around = statistics.improvement([np.array([2.0, 3.0])] * 2, [np.array([0.0, 1.0])] * 2)
    assert above == 1 and around == [1, 1]


# ---------------------------------------------------------------------- published numbers
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_numbers_are_rates(path):
    found = tables.published(str(path))
    values = [
        x for methods in found.values.values() for cells in methods.values() for pair in cells.values() for x in pair
    ]
    assert values and all(0 <= value <= 1 for value in values) and found.notes
    assert all(name in found.names for methods in found.values.values() for name in methods)


@pytest.mark.parametrize("name", ["2d_state", "2d_image"])
def test_published_averages_are_those_of_the_architectures(name):
    found = tables.published(str(ROOT / f"suites/published/{name}.yaml")).values
    for method, cells in found["average"].items():
        for task, pair in cells.items():
            both = [found[backbone][method][task] for backbone in ("transformer", "unet")]
            assert pair == pytest.approx(np.mean(both, axis=0), abs=0.00501), (method, task)
    overall = grid.read(ROOT / f"suites/published/{name}.yaml")["mean_over_tasks"]
    for method, pair in overall.items():
        assert pair == pytest.approx(np.mean(list(found["average"][method].values()), axis=0), abs=0.00501), method


def test_published_3d_averages_and_the_one_that_does_not_agree():
    files = {name: grid.read(ROOT / f"suites/published/{name}.yaml") for name in ("adroit", "dexart", "metaworld")}
    summary = grid.read(ROOT / "suites/published/3d_summary.yaml")
    for method, printed in summary["mean_over_tasks"]["average"].items():
        cells = [value for data in files.values() for value in data["values"]["average"][method]]
        assert len(cells) == 56 and np.mean(cells) == pytest.approx(printed, abs=0.101)
        levels = files["metaworld"]["levels"]
        by_task = dict(zip(files["metaworld"]["tasks"], files["metaworld"]["values"]["average"][method]))
        for level, value in zip(levels, summary["values"]["average"][method][7:]):
            assert np.mean([by_task[task] for task in levels[level]]) == pytest.approx(value, abs=0.051)
    experts = [value for data in files.values() for value in data["values"]["average"]["expert"]]
    assert np.mean(experts) == pytest.approx(96.7, abs=0.05) and "98.5" in " ".join(files["adroit"]["notes"])


def test_the_ablation_notes_54_5_against_64_5():
    data = grid.read(ROOT / "suites/published/ablation.yaml")
    assert data["values"]["average"]["without_reference"] == [[78.0, 54.5]]
    assert "54.5" in data["notes"][0] and "64.5" in data["notes"][0]


# ---------------------------------------------------------------------- tables and claims
@pytest.fixture
def made(tmp_path):
    suite = load(
        tmp_path,
        backbones=["transformer", "unet"],
        tasks={"pusht": "task=pusht_state", "lift_ph": "task=lift_ph_lowdim"},
        published=str(ROOT / "suites/published/2d_state.yaml"),
        claims=[
            {"text": "IDP beats MIP on PushT", "method": "idp", "minus": "mip", "task": "pusht"},
            {"text": "IDP's score", "method": "idp"},
        ],
    )
    fabricate(suite, records_each=12)
    return suite, records.rows_of(suite, curves=True)


def test_tables_in_the_papers_form(made):
    suite, found = made
    one, _, both = tables.paper_tables(suite, found)
    assert one.title == "best / mean of last 5, transformer" and one.head == [
        "method",
        "calls",
        "pusht",
        "lift_ph",
        "mean",
    ]
    mine = [row for row in found if (row["method"], row["task"], row["backbone"]) == ("idp", "pusht", "transformer")]
    best, last = (np.mean([row[key] for row in mine]) for key in ("best_evaluation", "mean_of_last"))
    assert one.lines[0][:3] == ["idp", "1", f"{best:.2f} / {last:.2f}"]
    assert one.lines[1] == ["*IDP, published*", "", "0.97 / 0.92", "1.00 / 1.00", "0.98 / 0.96"]
    assert one.runs[0, 2] == [row["folder"] for row in mine] and len(both.runs[0, 2]) == 4
    assert both.lines[1][2] == "0.97 / 0.92" and "2 seeds" in both.note
    assert "| idp | 1 |" in one.markdown() and r"idp & 1 &" in one.latex() and r"lift\_ph" in one.latex()


def test_a_mean_is_not_taken_over_other_cells(made):
    suite, found = made
    missing = [row for row in found if (row["method"], row["task"], row["backbone"]) != ("idp", "pusht", "unet")]
    both = tables.paper_tables(suite, missing)[-1]
    assert both.lines[0][2] == "-" and both.lines[0][-1] == "-" and both.lines[0][3] != "-"


def test_scores_and_claims(made):
    suite, found = made
    table = tables.score_table(suite, found)
    assert len(table.lines) == 8 and table.lines[0][0] == "pusht"
    summary = tables.summary_table(suite, found)
    assert [line[0] for line in summary.lines] == ["idp", "mip"] and summary.lines[1][5] == "idp"
    first, second = claims.of_suite(suite, found, "make it")
    groups = {
        name: [row for row in found if row["method"] == name and row["task"] == "pusht"] for name in ("idp", "mip")
    }
    assert first["number"] == pytest.approx(
        np.mean([row["score"] for row in groups["idp"]]) - np.mean([row["score"] for row in groups["mip"]])
    )
    assert first["interval_95"][0] < first["number"] < first["interval_95"][1] and first["stated"]
    assert second["number"] == pytest.approx(np.mean([row["score"] for row in found if row["method"] == "idp"]))
    assert second["interval_95"][0] < second["number"] < second["interval_95"][1] and second["runs"] == 8


def test_methods_of_a_group_stand_together(tmp_path):
    methods = {name: {"overrides": "objective=idp", "group": group} for name, group in zip("abcd", "xyxy")}
    suite = load(tmp_path, methods=methods, reference="a")
    fabricate(suite, records_each=6)
    table = tables.score_table(suite, records.rows_of(suite))
    assert table.head[:2] == ["group", "method"] and [line[:2] for line in table.lines] == [
        ["x", "a"],
        ["x", "c"],
        ["y", "b"],
        ["y", "d"],
    ]


def test_the_report_and_the_front_page(made, monkeypatch, capsys):
    pytest.importorskip("plotly")
    suite, _ = made
    results = suite.output.parent / "results"
    monkeypatch.setattr(report, "ROOT", results.parent)
    page = report.write_report(suite, publish=True)
    data = json.loads((page.parent / "results.json").read_text())
    assert len(data["rows"]) == data["runs_of_suite"] == 16 and "curves" not in data["rows"][0]
    text = (results / "small/README.md").read_text()
    assert "Notes on the published numbers" in text and "## best / mean of last 5, transformer" in text
    assert "\\begin{tabular}" in (results / "small/tables.tex").read_text()
    (results / "speed").mkdir()
    benchmark = {
        "command": "python -m benchmarks",
        "rows": [{"name": "step", "value": 2.0, "unit": "ms", "target": "<= 3"}],
    }
    (results / "speed/bench.json").write_text(json.dumps(benchmark))
    capsys.readouterr()
    front = index.write_index(results).read_text()
    claim = data["claims"][0]
    low, high = claim["interval_95"]
    assert f"| {claim['claim']} | {claim['number']:.3f} | {low:.3f} to {high:.3f} | [small](small/README.md) |" in front
    assert data["command"] in front and "| step | 2 ms | <= 3 |" in front


def test_the_front_page_of_this_repository_is_up_to_date(monkeypatch):
    written = []
    monkeypatch.setattr(index.atomic, "write_text", lambda path, text: written.append(text))
    page = index.write_index(ROOT / "results")
    assert written == [page.read_text()], "run: python -m idp_workspace.suite index"
    for link in re.findall(r"\]\(([^)]+)\)", written[0]):
        assert (page.parent / link).exists(), link


# ---------------------------------------------------------------------- eval.py --compare
def test_compare_two_evaluations(tmp_path, capsys):
    logs = {"a": {100: 1.0, 101: 1.0, 102: 0.0}, "b": {100: 0.0, 101: 1.0, 103: 1.0}, "c": {7: 1.0}}
    for name, scores in logs.items():
        (tmp_path / name).mkdir()
        log = {f"{records.SCORE}{seed}": score for seed, score in scores.items()}
        (tmp_path / name / "eval_log.json").write_text(json.dumps(log))
    eval_script.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b/eval_log.json")])
    out = capsys.readouterr().out
    assert "2 in common; 2 that only one" in out and "A - B      +0.500" in out and "McNemar" in out
    assert "A is better on 1, worse on 0, equal on 1" in out
    (tmp_path / "bad.json").write_text("{")
    for paths, message in (
        (("a", "c"), "no start in common"),
        (("a", "none"), "cannot be read"),
        (("bad.json", "a"), "is not an eval_log.json"),
    ):
        with pytest.raises(SystemExit) as ended:
            eval_script.main(["--compare", *(str(tmp_path / path) for path in paths)])
        assert ended.value.code == 2 and message in capsys.readouterr().err


# ---------------------------------------------------------------------- the scheduler, with jobs that take no time
class Instant:
    """A job that ends at the third look, with results or without."""

    def __init__(self, folder, fails=False):
        self.folder, self.fails, self.looks = folder, fails, 0

    def alive(self):
        self.looks += 1
        if self.looks == 3:
            name = json.loads((self.folder / jobs.JOB).read_text())["name"]
            jobs.write_json(
                self.folder / jobs.STATE, {"status": "failed" if self.fails else "done", "error": "no luck"}
            )
            if not self.fails:
                (self.folder / "eval").mkdir(exist_ok=True)
                jobs.write_json(self.folder / "summary.json", {"name": name})
                jobs.write_json(self.folder / "eval/eval_log.json", {})
                jobs.write_json(self.folder / jobs.COST, {"seconds": 10.0, "peak_gb": 1.5})
        return self.looks < 3

    def stop(self):
        self.looks = 3


def scheduled(suite, launch, **changes):
    options = dict(slots=2, threads=1, memory_gb=1.0, launch=launch, made={})
    return scheduler.Scheduler(suite, suite.runs, **options | changes)


def test_slots_are_filled_and_failures_do_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "INTERVAL", 0)
    suite, most = load(tmp_path), []
    made = scheduled(suite, lambda folder: Instant(folder, fails="mip-mlp-0" in folder.name), gpus=2)

    def view(scheduler, changed):
        most.append(len(scheduler.having("running")))
        assert live.headline(scheduler).startswith(f"{len(scheduler.having('done'))} of 4 done")
        assert all(len(line) < 200 for line in live.table(scheduler, 20))

    made.loop(view)
    assert max(most) == 2 and [job.status for job in made.jobs] == ["done", "failed", "done", "done"]
    assert made.jobs[1].error == "no luck"
    devices = [
        json.loads((job.folder / jobs.JOB).read_text())["environment"]["CUDA_VISIBLE_DEVICES"] for job in made.jobs
    ]
    assert devices[:2] == ["0", "1"]
    again = scheduled(suite, Instant)
    assert [job.status for job in again.jobs] == ["done", "waiting", "done", "done"] and again.eta() == 5.0


def test_a_job_waits_for_memory(tmp_path, monkeypatch):
    suite = load(tmp_path)
    free = {"gb": 1.5}
    monkeypatch.setattr(scheduler, "available_bytes", lambda: free["gb"] * 2**30)
    made = scheduled(suite, Instant, slots=4)
    made.step()
    assert len(made.having("running")) == 1  # the first has not taken its memory yet
    free["gb"] = 100
    made.step()
    assert len(made.having("running")) == 4
    monkeypatch.setattr(scheduler, "cores", lambda: 8)
    assert scheduler.default_slots(2, 2.0) == 4 and scheduler.default_slots(2, 60.0) == 1


def test_one_scheduler_at_a_time(tmp_path):
    suite = load(tmp_path)
    suite.output.mkdir()
    code = "f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); time.sleep(60)"
    holder = f"import fcntl, sys, time; {code}"
    process = subprocess.Popen([sys.executable, "-c", holder, suite.output / ".lock"], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        with pytest.raises(ConfigError, match="another process runs this suite"):
            scheduled(suite, Instant).loop(lambda *_: None)
        assert jobs.is_locked(suite.output / ".lock")
    finally:
        process.kill()
        process.wait()
    assert not jobs.is_locked(suite.output / ".lock")


def test_the_table_is_drawn_over_itself_on_a_terminal(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    suite = load(tmp_path)
    made, stream = scheduled(suite, Instant), Terminal()
    view = live.View(stream)
    view(made, made.step())
    view(made, made.step())
    first, second = stream.getvalue().split("\x1b[5F")
    assert first.count("\n") == second.count("\n") == 5 and "2 waiting, next pusht_state-idp-mlp-1" in second
    assert live.duration(3723) == "1:02:03" and live.duration(None) == "-"


def test_progress_is_read_from_the_end_of_the_log(tmp_path):
    (tmp_path / jobs.OUTPUT).write_text("training X on 10 windows of t, 600 steps of batch 16 on cpu\n")
    (tmp_path / "logs.json.txt").write_text('{"global_step": 1, "train_loss": 0.5}\n{"global_step": 2, "test/mean')
    progress = records.Progress()
    progress.update(tmp_path)
    assert (progress.step, progress.total, progress.loss, progress.score) == (2, 600, 0.5, None)
    assert progress.remaining() is None
    progress.first = (progress.first[0] - 10, 1)
    assert progress.remaining() == pytest.approx(10 * 598, rel=0.1)
