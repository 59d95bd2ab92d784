"""What a report says is what the files of the run say, and its page needs nothing but itself."""

import json
import math
import re
from base64 import b64decode
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from flowrl import charts, report, tables
from flowrl.evaluate import Scores, compare
from flowrl.registry import REGULARISERS
from flowrl.types import Prompt

NASTY = "<script>alert(\"1\")</script> & <img src=x onerror=y> 'quoted' {{ 7 * 7 }} /../../etc"
PROMPTS = [Prompt(7, NASTY), Prompt(9, "a red circle")]
NAMES = [
    "reward/shapes/mean", "reward/shapes/std", "reward/shapes/nan_frac", "credit/zero_std_frac", "train/loss",
    "train/grad_norm", "train/skipped", "train/ratio", "train/clip_frac", "train/moved", "train/velocity_kl",
    "train/v_norm_ratio", "time/ask", "time/act", "time/judge", "time/learn",
]  # fmt: skip
EVALUATED = ["eval/shapes_strict", "eval/shapes_partial"]  # not in every row


def scores(seed, side=64):
    generator = torch.Generator().manual_seed(seed)
    strict = torch.randint(2, (2, 3), generator=generator).float()
    images = torch.randint(256, (2, 3, 3, side, side), generator=generator, dtype=torch.uint8)
    return Scores({"shapes_strict": strict, "shapes_partial": strict * 0.5 + 0.4}, {}, images)


def evaluation():
    """Numbers of several sizes and signs; one reward without ceiling, one probe."""
    base = {"shapes_strict": 0.3517, "jpeg_size": -0.004321, "aesthetic": 5.4321}
    rewards = {name: {"base": b, "tuned": b * 1.3, "diff": b * 0.3, "ci95": sorted([b * 0.21, b * 0.38]), "n": 97,
                      "ceiling": None} for name, b in base.items()}  # fmt: skip
    gap = 0.9571 - base["shapes_strict"]
    rewards["shapes_strict"] |= {
        "ceiling": 0.9571,
        "closed": {"share": 0.3 * base["shapes_strict"] / gap, "ci95": [0.122, 0.2208]},
    }
    guided = {scale: {name: b * factor for name, b in base.items()} for scale, factor in (("1.5", 1.1), ("4", 0.9))}
    probes = {"sharpness": {"base": 20.345, "tuned": 21.0, "diff": 0.655, "ci95": [-0.1, 1.4], "n": 98}}
    return {"rewards": rewards, "probes": probes, "guided_base": guided, "prompts": 98, "seeds": 4}


def trained(run, names=("reward/shapes/mean", "reward/shapes/std"), steps=3):
    """The folder of a run that has trained and is not evaluated."""
    rng = np.random.default_rng(0)
    rows = [{"step": s, **dict(zip(names, rng.random(len(names)).tolist(), strict=True))} for s in range(steps)]
    for row in rows[4::5]:
        row |= dict(zip(EVALUATED, rng.random(2).tolist(), strict=True))
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.yaml").write_text(f"run: demo\nnote: {NASTY}\n", encoding="utf-8")
    (run / "environment.json").write_text(json.dumps({"torch": "2.14", "device": NASTY}))
    return run


def evaluated(run):
    (run / "evaluation.json").write_text(json.dumps(evaluation()))
    report.save_pictures(run / "pictures", PROMPTS, scores(0), scores(1))
    return run


@pytest.fixture
def bare(tmp_path):
    return trained(tmp_path / "demo")


@pytest.fixture
def run(bare):
    return evaluated(bare)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The page of a run with every metric, for tests that only read it."""
    return report.write(evaluated(trained(tmp_path_factory.mktemp("runs") / "demo", NAMES, steps=25)))


@pytest.fixture(scope="module")
def page(path):
    return Page(path)


class Page(HTMLParser):
    """The elements of a page: (tag, attributes), the cells of its table rows, and its text."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.rows, self.text, self.cell = [], [], "", False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self.cell:
            self.rows[-1][-1] += data

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def numbers(cell):
    """The numbers of a cell, each with half a unit of its last digit."""
    found = re.findall(r"[-+]?\d+(?:\.(\d+))?(%?)", cell)
    values = [float(text.rstrip("%")) for text in re.findall(r"[-+]?\d+(?:\.\d+)?%?", cell)]
    return [
        (value / 100, 0.005) if percent else (value, 0.5 * 10 ** -len(decimals))
        for value, (decimals, percent) in zip(values, found, strict=True)
    ]


def expected(row, guided):
    best = max(guided.items(), key=lambda item: item[1]) if guided else None
    closed = row.get("closed", {"share": None, "ci95": []})
    cells = [[row["base"]], [row["tuned"]], [row["diff"], *row["ci95"]]]
    if "ceiling" in row:
        cells += [[row["ceiling"]], [closed["share"], *closed["ci95"]], [best[1], float(best[0])]]
    return [[value for value in cell if value is not None] for cell in cells]


def assert_says(row, name, result):
    """The cells of a table's row are the numbers of the result."""
    part = "rewards" if name in result["rewards"] else "probes"
    guided = {scale: some[name] for scale, some in result["guided_base"].items() if name in some}
    for cell, values in zip(row[1:], expected(result[part][name], guided), strict=True):
        said = numbers(cell)
        assert len(said) == len(values), cell
        for (number, half), value in zip(said, values, strict=True):
            assert abs(number - value) <= half * 1.001, (cell, value)


def cells(text):
    """{first cell: row} of a table in text, rows that were broken over lines put together."""
    rows = []
    for line in text.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[0] or len(row) == 1:
            rows.append(row)
        else:
            rows[-1] = [f"{above} {below}".strip() for above, below in zip(rows[-1], row, strict=True)]
    return {row[0]: row for row in rows}


MEASURED = ["shapes_strict", "jpeg_size", "aesthetic", "sharpness"]


@pytest.mark.parametrize("name", MEASURED)
def test_the_table_has_the_numbers_of_the_evaluation(name):
    assert_says(cells(report.table(evaluation()))[name], name, evaluation())


@pytest.mark.parametrize("name", MEASURED)
def test_the_page_has_the_numbers_of_the_evaluation(page, name):
    row = next(row for row in page.rows if row[0] == name)
    assert_says(row, name, evaluation())


def test_the_page_has_the_scores_of_each_guidance_scale(page):
    rows = page.rows[page.rows.index(["base at guidance scale", "1.5", "4"]) :]
    for (name, *cells), wanted in zip(rows[1:4], evaluation()["rewards"], strict=True):
        assert name == wanted
        for cell, scale in zip(cells, evaluation()["guided_base"].values(), strict=True):
            ((number, half),) = numbers(cell)
            assert abs(number - scale[name]) <= half * 1.001


@pytest.mark.parametrize(
    ("mean", "decimals"),
    [(0.004321, 5), (0.3517, 3), (5.4321, 3), (20.345, 2), (1234.5, 2), (0.0, 3), (-0.004321, 5), (1e-12, 6)],
)
def test_decimals_show_three_digits(mean, decimals):
    assert tables.places({"base": mean, "tuned": mean / 2}) == decimals


def test_the_table_is_plain_and_narrow():
    text = report.table(evaluation())
    assert text.isascii() and max(map(len, text.splitlines())) <= 100
    assert "98 prompts x 4 seeds" in text


def test_a_long_name_of_a_reward_keeps_the_table_narrow():
    result = evaluation()
    result["rewards"] = {"rewards/my_own_file.py:" + "x" * 60: result["rewards"]["jpeg_size"]}
    result["guided_base"] = {}
    text = report.table(result)
    assert max(map(len, text.splitlines())) <= 100 and text.replace("\n", "").count("x" * 5) >= 5


def test_guidance_that_was_not_measured_is_not_shown(run):
    (run / "evaluation.json").write_text(json.dumps({**evaluation(), "guided_base": {}}))
    assert "base at guidance scale" not in Page(report.write(run)).text


@pytest.mark.parametrize("name", NAMES + EVALUATED)
def test_the_page_shows_every_metric(page, name):
    assert name in page.text


@pytest.mark.parametrize("name", [*NAMES, *EVALUATED, *(f"train/{name}" for name in REGULARISERS.names())])
def test_every_metric_is_explained(name):
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    generic = re.sub(r"^(reward|eval)/[^/]+", r"\1/<name>", name)
    assert f"| `{generic}` |" in text


def test_the_page_needs_nothing_but_itself(path, page):
    assert not re.search(r"https?:", path.read_text(encoding="utf-8"))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        assert attributes.get("src", "data:").startswith("data:")
        assert attributes.get("xlink:href", "#").startswith("#") and "href" not in attributes
        assert not any(name.startswith("on") for name in attributes)


def test_text_of_the_user_is_escaped(path, page):
    text = path.read_text(encoding="utf-8")
    assert "<script>" not in text and "<img src=x" not in text
    assert page.text.count(NASTY) == 3  # the prompt, the config, the environment
    assert all(attributes["alt"].endswith((NASTY, "a red circle")) for attributes in page.of("img"))


def test_pictures_come_back_as_they_were(page):
    saved = {"base": scores(0).images, "tuned": scores(1).images}
    wanted = torch.stack([saved[side][i, k] for i in range(2) for side in ("base", "tuned") for k in range(3)])
    uris = [attributes["src"] for attributes in page.of("img")]
    shown = [Image.open(BytesIO(b64decode(uri.partition("base64,")[2]))) for uri in uris]
    assert_close(torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in shown]), wanted)


def test_pictures_carry_their_scores(run):
    rows = json.loads((run / "pictures/prompts.json").read_text(encoding="utf-8"))
    assert [row["text"] for row in rows] == [prompt.text for prompt in PROMPTS]
    for side, seed in (("base", 0), ("tuned", 1)):
        for name, values in scores(seed).rewards.items():
            assert_close(torch.tensor([row[side][name] for row in rows]), values)


def test_a_full_score_is_marked(page):
    full = sum(int(scores(seed).rewards["shapes_strict"].sum()) for seed in (0, 1))
    marked = [a for a in page.of("div") if a.get("class") == "picture full"]
    assert len(marked) == full > 0


def test_only_the_asked_prompts_are_kept_and_old_pictures_go(run):
    report.save_pictures(run / "pictures", PROMPTS[:1], scores(2), scores(3))
    assert len(Page(report.write(run)).of("img")) == len(list((run / "pictures").glob("*.png"))) == 6


def test_names_of_files_do_not_come_from_prompts(tmp_path):
    for folder, texts in (("a", ["x", "y"]), ("b", [NASTY, "../../up"])):
        report.save_pictures(tmp_path / folder, [Prompt(i, t) for i, t in enumerate(texts)], scores(0), scores(1))
    a, b = (sorted(p.relative_to(tmp_path / f) for p in (tmp_path / f).rglob("*")) for f in "ab")
    assert a == b and len(a) == 13


def test_large_pictures_are_made_smaller_in_the_page(bare):
    large = scores(0, side=600)
    report.save_pictures(bare / "pictures", PROMPTS[:1], large, large)
    uri = Page(report.write(bare)).of("img")[0]["src"]
    assert Image.open(BytesIO(b64decode(uri.partition("base64,")[2]))).size == (256, 256)
    assert Image.open(next((bare / "pictures").glob("*.png"))).size == (600, 600)


def test_a_run_that_is_not_evaluated_says_how(bare):
    page = Page(report.write(bare))
    assert page.text.count(f"flowrl eval {bare}") == 2
    assert not page.of("img") and "In training, shapes went from" in page.text


def test_a_run_that_has_only_begun(bare):
    (bare / "metrics.jsonl").unlink()
    (bare / "environment.json").unlink()
    assert "No step is on record yet" in Page(report.write(bare)).text


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))} is no run.*runs/demo"):
        report.write(tmp_path)


def test_the_same_run_gives_the_same_page(run):
    assert report.write(run).read_bytes() == report.write(run).read_bytes()


@pytest.mark.parametrize(
    ("ci95", "verb"),
    [([0.01, 0.2], "rose"), ([-0.2, -0.01], "fell"), ([-0.1, 0.1], "did not change measurably")],
    ids=["up", "down", "neither"],
)
def test_the_headline_follows_the_interval(run, ci95, verb):
    result = evaluation()
    result["rewards"]["shapes_strict"]["ci95"] = ci95
    (run / "evaluation.json").write_text(json.dumps(result))
    assert f"shapes_strict {verb}: 0.352 before, 0.457 after" in Page(report.write(run)).text


def test_an_evaluation_without_a_verdict_claims_nothing(run):
    result, nan = evaluation(), math.nan
    result["rewards"]["shapes_strict"] = {
        "base": nan, "tuned": nan, "diff": nan, "ci95": [nan, nan], "n": 0, "ceiling": None
    }  # fmt: skip
    (run / "evaluation.json").write_text(json.dumps(result))
    assert "shapes_strict has no verdict on any prompt." in Page(report.write(run)).text


def test_shares_of_time_are_of_the_medians(bare):
    rows = [{"step": s, "time/act": act, "time/learn": 3.0} for s, act in enumerate([1.0, 1.0, 50.0])]
    (bare / "metrics.jsonl").write_text("".join(json.dumps({**row, "reward/a/mean": 0, "reward/a/std": 0}) + "\n"
                                                for row in rows))  # fmt: skip
    shown = Page(report.write(bare)).rows
    assert ["time/act", "1.000", "25%"] in shown and ["time/learn", "3.000", "75%"] in shown


def line(svg):
    """[[x, y], ...] of each stroke of a chart's line."""
    d = re.search(r'<path d="([^"]*)"[^>]*stroke: var\(--accent\)', svg).group(1)
    return [np.array([float(n) for n in re.findall(r"-?[\d.]+", part)]).reshape(-1, 2) for part in d.split("M")[1:]]


def test_a_curve_is_its_data():
    """A chart is an affine map of its points, up where they go up."""
    rows = [{"step": s, "train/loss": y} for s, y in enumerate([0.0, 1.0, 4.0, 9.0, 7.0])]
    (points,) = line(charts.curve(rows, "train/loss"))
    x, y = points.T
    assert np.polyfit(range(5), x, 1, full=True)[1][0] < 1e-6
    slope, _ = np.polyfit([0, 1, 4, 9, 7], y, 1)
    assert slope < 0 and np.polyfit([0, 1, 4, 9, 7], y, 1, full=True)[1][0] < 1e-6


def test_a_step_without_a_value_leaves_a_gap():
    rows = [{"step": s, "train/loss": math.nan if s == 3 else s} for s in range(8)]
    assert [len(part) for part in line(charts.curve(rows, "train/loss"))] == [3, 4]


def test_a_metric_of_some_steps_is_drawn_at_those():
    rows = [{"step": s, **({"eval/a": s * 2.0} if s % 2 else {})} for s in range(6)]
    assert charts.series(rows, "eval/a") == ([1, 3, 5], [2.0, 6.0, 10.0])


def test_cells_take_what_compare_gives():
    row = compare(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    assert tables.compared("a", row) == ("a", "0.250", "0.750", "+0.500 [0.500, 0.500]")
