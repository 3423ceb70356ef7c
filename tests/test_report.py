"""The page of a run: true to its files, safe whatever they hold, and fit to be looked at in a browser."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from fbnll.clustering import merge_tree
from fbnll.report import write_report
from fbnll.runner import Result
from fbnll.summary import told

DIGITS = [str(c) for c in range(10)]
CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
]
HOSTILE = "<script>alert(1)</script>\"'&\x00\ud800"


def confusion(a: np.ndarray, b: np.ndarray, C: int) -> list[list[int]]:
    counts = np.zeros((C, C), int)
    np.add.at(counts, (a, b), 1)
    return counts.tolist()


def fate(k: int, y: np.ndarray, given: np.ndarray, corrected: np.ndarray) -> dict[str, Any]:
    """What became of user k's labels, y being the true ones."""
    changed, wrong, wrong_after = given != corrected, given != y, corrected != y
    counts = {
        "repaired": wrong & ~wrong_after,
        "broken": ~wrong & wrong_after,
        "missed": wrong & ~changed,
        "mistaken": wrong & changed & wrong_after,
    }
    shares = {"before": float(wrong.mean()), "after": float(wrong_after.mean())}
    return {"user": k, "n": len(y), **shares, **{name: int(which.sum()) for name, which in counts.items()}}


def a_run(K: int = 20, classes: list[str] = DIGITS, M: int = 2, rounds: int = 12, n: int = 65) -> dict[str, Any]:
    """The files of a run of K users with M tasks: labels and R are drawn, every number is counted from them."""
    rng, C = np.random.default_rng(0), len(classes)
    splits, tasks = [list(range(t, C, M)) for t in range(M)], [k % M for k in range(K)]
    true = [rng.choice(splits[t], n) for t in tasks]
    given = [np.where(rng.random(n) < 0.25 * (k % 7 > 0), (y + 1 + k) % C, y) for k, y in enumerate(true)]
    corrected = [np.where(rng.random(n) < 0.85, y, np.where(rng.random(n) < 0.3, rng.integers(0, C, n), g)) for y, g in zip(true, given)]
    per_user = [fate(k, *labels) for k, labels in enumerate(zip(true, given, corrected))]
    totals = {name: sum(user[name] for user in per_user) for name in ("repaired", "broken", "missed", "mistaken")}
    y, g, c = (np.concatenate(labels) for labels in (true, given, corrected))
    wobble = rng.normal(0, 0.03, (K, K))
    R = np.where(np.equal.outer(tasks, tasks), 0.55, 0.15) + (wobble + wobble.T) / 2
    np.fill_diagonal(R, 1.0)
    accuracy = rng.uniform(0.9, 0.95, K).tolist()
    mean, per_task = float(np.mean(accuracy)), [float(np.mean(accuracy[t::M])) for t in range(M)]
    methods = {
        "clean": ("True tasks, clean labels", 0.964),
        "fb_nll": ("FB-NLL", mean),
        "fedavg": ("One global model", 0.693),
        "local": ("Alone", None),
    }
    asks = {"up": 51_840, "down": 2_140, "asks": K}
    result = {
        "method": "fb_nll",
        "label": "FB-NLL",
        "dataset": "digits",
        "seed": 0,
        "users": K,
        "tasks": splits,
        "classes": classes,
        "clustering": {"ari": 1.0, "matched": 1.0, "clusters": [(t + 1) % M for t in tasks], "tasks": tasks, "without_cluster": []},
        "labels": {
            "noise_before": float(np.mean([user["before"] for user in per_user])),
            "noise_after": float(np.mean([user["after"] for user in per_user])),
            "wrong_before": int((y != g).sum()),
            **totals,
            "per_user": per_user,
        },
        "accuracy": {
            "mean": mean,
            "std": float(np.std(accuracy)),
            "users_scored": K,
            "per_task": [{"task": t, "classes": splits[t], "mean": per_task[t], "users": tasks.count(t)} for t in range(M)],
            "per_user": accuracy,
        },
        "bytes": {
            "up": 48_210_334,
            "down": 51_004_128,
            "per_job": {"fbnll.methods.fb_nll:top_eigenvectors": asks, "fbnll.methods.fedavg:train": {**asks, "asks": K * rounds}},
            "clustering": 83_213,
            "one_model_exchange": 4_316_800,
            "evaluation": {"up": 2_312, "down": 2_158_400},
        },
        "seconds": {
            "data": 0.21,
            "features": 0.03,
            "clustering": 0.4,
            "correction": 1.2,
            "training": 14.8,
            "evaluation": 1.1,
            "total": 17.7,
        },
        "missing": [{"round": 3, "job": "fbnll.methods.fedavg:train", "users": [4, 5, 6, 9]}],
        "comparison": [
            {"method": name, "label": words, "mean": score, "std": score and 0.012, "per_task": [score] * M}
            for name, (words, score) in methods.items()
        ],
    }
    one, target = true[-1], splits[0][1]
    noisy = {
        "clean": one,
        "class_independent": np.where(rng.random(n) < 0.25, target, one),
        "class_dependent": np.where(one == one[0], target, one),
        "uniform": np.where(rng.random(n) < 0.4, rng.integers(0, C, n), one),
    }
    decided = rng.multinomial(K, [0.5, 0.2, 0.2, 0.1], C)
    decisions = ("phase1_kept", "phase1_relabelled", "phase2", "absent")
    figures = {
        "R": R.tolist(),
        "linkage": merge_tree(R)[0].tolist(),
        "present": list(range(K)),
        "noise_example": {"user": K - 1, "models": {name: confusion(one, labels, C) for name, labels in noisy.items()}},
        "flow": {"true_given": confusion(y, g, C), "true_corrected": confusion(y, c, C), "given_corrected": confusion(g, c, C)},
        "phases": {
            "per_class": [{"class": i, **dict(zip(decisions, map(int, row)))} for i, row in enumerate(decided)],
            "repaired": {"phase1": totals["repaired"] - 9, "phase2": 9},
            "broken": {"phase1": 3, "phase2": totals["broken"] - 3},
        },
    }
    curve = [0.1 + 0.83 * (1 - math.exp(-t / 3)) for t in range(rounds + 1)]
    scores = [{"mean": a, "per_task": [a * (1 + 0.05 * math.sin(m + t)) for m in range(M)]} for t, a in enumerate(curve)]
    history = [
        {"round": t, "accuracy": None if t == 3 else score, "missing": [], "bytes_up": 1, "seconds": 1.2} for t, score in enumerate(scores)
    ]
    experiment = {
        "dataset": "digits",
        "users": K,
        "noise": "class_dependent",
        "alpha": 0.25,
        "rounds": rounds,
        "tasks": splits,
        "data_dir": None,
    }
    config = {
        "experiment": experiment,
        "seed": 0,
        "device": "cpu",
        "versions": {"fbnll": "0.1.0"},
        "command": "fbnll run --dataset digits --out 'a b'",
    }
    return {"config.json": config, "result.json": result, "figures.json": figures, "history.jsonl": history}


def untouched() -> dict[str, Any]:
    """A run of a method that neither clusters nor corrects, with no rounds."""
    run = a_run(K=3, M=1)
    zeros = dict.fromkeys(("repaired", "broken", "mistaken"), 0)
    per_user = [{"user": k, "n": 50, "before": 0.2, "after": 0.2, "missed": 10, **zeros} for k in range(3)]
    run["result.json"] |= {
        "clustering": {"ari": None, "matched": None, "clusters": [0, 0, 0], "tasks": [0, 0, 0], "without_cluster": []},
        "labels": {"noise_before": 0.2, "noise_after": 0.2, "wrong_before": 30, "missed": 30, **zeros, "per_user": per_user},
        "accuracy": {"mean": None, "std": None, "users_scored": 0, "per_task": [], "per_user": []},
        "bytes": {"up": 0, "down": 0, "per_job": {}, "clustering": None, "one_model_exchange": None, "evaluation": {"up": 0, "down": 0}},
        "missing": [],
    }
    del run["result.json"]["comparison"]
    given = confusion(np.repeat(range(10), 15), (np.repeat(range(10), 15) + np.tile(range(15), 10) // 12) % 10, 10)
    flow = {"true_given": given, "true_corrected": given, "given_corrected": np.diag(np.sum(given, axis=0)).tolist()}
    run["figures.json"] = {"R": None, "linkage": None, "present": None, "noise_example": None, "flow": flow, "phases": None}
    run["history.jsonl"] = [{"round": 0, "accuracy": None, "missing": []}]
    return run


def of_own_users() -> dict[str, Any]:
    """A run on users that somebody has, one of them without samples: neither true labels nor true tasks are known."""
    run = without_user_2(a_run(K=5))
    run["result.json"] |= {
        "dataset": "users",
        "tasks": None,
        "labels": None,
        "accuracy": {"mean": None, "std": None, "users_scored": 0, "per_task": [], "per_user": []},
    }
    run["result.json"]["clustering"] |= {"ari": None, "matched": None, "tasks": None}
    del run["result.json"]["comparison"]
    run["figures.json"] |= {"noise_example": None, "flow": None, "phases": None}
    run["history.jsonl"] = [{"round": t, "accuracy": None, "missing": []} for t in range(4)]
    return run


def without_user_2(run: dict[str, Any]) -> dict[str, Any]:
    R = np.array(run["figures.json"]["R"])
    R[2], R[:, 2] = np.nan, np.nan
    tree, present = merge_tree(R)
    run["figures.json"] |= {"R": R.tolist(), "present": present.tolist(), "linkage": tree.tolist()}
    run["result.json"]["clustering"]["clusters"][2] = -1
    run["result.json"]["clustering"]["without_cluster"] = [2]
    return run


def renamed(value: Any) -> Any:
    """The same, every text in it followed by something that must not reach a browser as it is."""
    if isinstance(value, dict):
        return {key: renamed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [renamed(inner) for inner in value]
    return value + HOSTILE if isinstance(value, str) else value


RUNS = {
    "digits": a_run,
    "named classes, a user absent": lambda: without_user_2(a_run(classes=CIFAR, M=3)),
    "many users and classes": lambda: a_run(K=100, classes=[f"kind {c}" for c in range(100)], M=20, rounds=200, n=40),
    "nothing but noise": untouched,
    "users of one's own": of_own_users,
    "hostile": lambda: renamed(a_run(K=4)),
    "one user": lambda: a_run(K=1, M=1, classes=DIGITS) | {"history.jsonl": []},
}


def lay_down(folder: Path, run: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in run.items():
        (folder / name).write_text("\n".join(map(json.dumps, value)) + "\n" if name.endswith("l") else json.dumps(value))
    return folder


@pytest.fixture(scope="module", params=RUNS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with its page."""
    return write_report(lay_down(tmp_path_factory.mktemp("run"), RUNS[request.param]())).parent


class Elements(HTMLParser):
    """Every element of a page as its name and attributes, and its text, that of the styles left out."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((name, {key: value or "" for key, value in attributes}))

    def handle_data(self, data: str) -> None:
        self.text += data if self.found and self.found[-1][0] != "style" else ""


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Every number of the result under its dotted key."""
    if not isinstance(value, dict | list):
        return {key: value}
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return {long: number for name, part in inner for long, number in flat(part, f"{key}.{name}" if key else str(name)).items()}


def test_every_number_on_the_page_is_the_one_in_the_result(folder: Path) -> None:
    result = flat(json.loads((folder / "result.json").read_text()))
    numbers = [(a["data-key"], a["data-value"]) for _, a in Elements(folder / "report.html").found if "data-key" in a]
    assert numbers
    for key, value in numbers:
        assert json.loads(value) == result[key]


def test_the_page_holds_the_numbers_that_matter(tmp_path: Path) -> None:
    run = a_run()
    shown = {a.get("data-key") for _, a in Elements(write_report(lay_down(tmp_path, run))).found}
    users = {f"labels.per_user.{k}.{name}" for k in range(20) for name in ("before", "after", "repaired", "broken")}
    means = {"accuracy.mean", "accuracy.std", "accuracy.per_task.0.mean", "accuracy.per_user.19", "comparison.1.mean", "clustering.ari"}
    labels = {"labels.noise_before", "labels.noise_after", *(f"labels.{name}" for name in ("repaired", "broken", "missed", "mistaken"))}
    sent = {"bytes.up", "bytes.down", "bytes.clustering", "bytes.one_model_exchange", "bytes.per_job.fbnll.methods.fedavg:train.asks"}
    assert users | means | labels | sent | {"seconds.training"} <= shown


def test_the_page_asks_for_nothing_outside_itself(folder: Path) -> None:
    for name, attributes in Elements(folder / "report.html").found:
        assert name not in ("script", "img", "iframe", "object", "embed")
        assert not attributes.keys() & {"src", "xlink:href", "action"}
        assert not any(key.startswith("on") for key in attributes)
        assert attributes.get("href", "data:").startswith("data:")
    assert not re.search(r"url\(|@import", (folder / "report.html").read_text())


def test_texts_of_the_files_stay_texts(tmp_path: Path) -> None:
    run = renamed(a_run())
    run["figures.json"]["noise_example"]["models"] = {"../../outside": run["figures.json"]["noise_example"]["models"]["uniform"]}
    page = Elements(write_report(lay_down(tmp_path / "a" / "b", run)))
    assert "script" not in dict(page.found)
    assert "<script>alert(1)</script>\"'&\ufffd\ufffd" in page.text
    assert {path.parent for path in tmp_path.rglob("*.svg")} == {tmp_path / "a" / "b" / "figures"}


def test_every_figure_is_also_a_file_that_stands_alone(folder: Path) -> None:
    drawn = [attributes["aria-label"] for name, attributes in Elements(folder / "report.html").found if name == "svg"]
    trees = [ElementTree.parse(path).getroot() for path in (folder / "figures").iterdir()]
    assert sorted(tree.attrib["aria-label"] for tree in trees) == sorted(drawn)
    for tree in trees:
        assert [child.tag.split("}")[1] for child in tree][:3] == ["style", "title", "desc"]
        assert all(child.text for child in tree[:3])


def test_a_method_that_neither_clusters_nor_corrects_says_nothing_of_clusters_and_corrections(tmp_path: Path) -> None:
    page = Elements(write_report(lay_down(tmp_path, untouched()))).text
    assert "Of 150 labels 30 are wrong, and none was changed." in page
    assert "20.0\u00a0%mean of users; none was changed" in page
    for word in ("nan", "cluster", "correct", "before", "phase", "Accuracy", "Against the alternatives", "What noise does"):
        assert word not in page.split("Details")[0], word


def test_of_users_whose_truth_is_unknown_the_page_claims_nothing_about_it(tmp_path: Path) -> None:
    page = Elements(write_report(lay_down(tmp_path, of_own_users()))).text
    assert "on users’ own data" in page
    assert "2 users each" in page
    assert "In no cluster: user 2." in page
    for word in ("noise", "wrong", "ARI", "true task of", "Accuracy"):
        assert word not in page.split("Details")[0].replace("noisy labels", ""), word


@pytest.mark.parametrize(
    "gone", [("config.json",), ("figures.json",), ("history.jsonl",), ("config.json", "figures.json", "history.jsonl")]
)
def test_a_result_alone_makes_a_page(tmp_path: Path, gone: tuple[str, ...]) -> None:
    lay_down(tmp_path, {name: value for name, value in a_run().items() if name not in gone})
    assert "FB-NLL on digits" in Elements(write_report(tmp_path)).text


@pytest.mark.parametrize("part", ["clustering", "labels", "accuracy", "bytes", "seconds", "missing", "tasks", "comparison", "seed"])
@pytest.mark.parametrize("absent", [True, False])
def test_any_part_of_the_result_may_be_null_or_absent(tmp_path: Path, part: str, absent: bool) -> None:
    run = a_run(K=4)
    run["result.json"][part] = None
    if absent:
        del run["result.json"][part]
    assert write_report(lay_down(tmp_path, run)).is_file()


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds a result\.json, but .* holds none"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match=r"holds none"):
        write_report(tmp_path / "nowhere")
    assert not any(tmp_path.iterdir())


DAMAGED = [(name, text) for name in ("result.json", "figures.json", "history.jsonl") for text in ("{", "[1]", '{"users":')]


@pytest.mark.parametrize(("name", "text"), [("result.json", ""), *DAMAGED])
def test_a_damaged_file_is_named_and_nothing_is_written(tmp_path: Path, name: str, text: str) -> None:
    (lay_down(tmp_path, a_run()) / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} must hold JSON"):
        write_report(tmp_path)
    assert not list(tmp_path.rglob("*.html")) + list(tmp_path.rglob("*.svg"))


def test_a_full_disk_leaves_the_old_page_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = write_report(lay_down(tmp_path, a_run()))
    before, files = page.read_text(), set(tmp_path.rglob("*"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    lay_down(tmp_path, a_run(K=6))
    monkeypatch.setattr("fbnll.folder.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(tmp_path)
    assert page.read_text() == before
    assert set(tmp_path.rglob("*")) == files


def test_equal_files_make_equal_pages(tmp_path: Path) -> None:
    pages = [write_report(lay_down(tmp_path / name, a_run())).read_bytes() for name in "ab"]
    assert pages[0] == pages[1]


def test_the_terminal_tells_the_same_in_a_few_lines() -> None:
    labels, rows = (a_run()["result.json"][part] for part in ("labels", "comparison"))
    said = said_of(a_run())
    assert "clusters   2, 10 users each; 100% of users are in that of their true task" in said
    assert f"{labels['repaired']} of {labels['wrong_before']} wrong ones repaired" in said
    assert "  Alone" not in said
    assert all(f"  {row['label']:<24}{row['mean']:8.1%}{row['per_task'][0]:8.1%}" in said for row in rows if row["mean"])
    assert "method fb_nll, seed 0, 17.7 seconds\nlabels     20.0% wrong, none changed" in said_of(untouched())
    assert said_of(of_own_users()).endswith("clusters   2, 2 users each\n           users without a cluster: 2")


def said_of(run: dict[str, Any]) -> str:
    return told(Result(run["result.json"], {}, np.zeros(0), [], [], None))


# In a browser

# Of every piece of text that is drawn: its words, and its contrast to what is painted behind it.
CONTRASTS = """() => {
  const rgba = text => { const v = text.match(/[\\d.]+/g).map(Number); return [v[0], v[1], v[2], v.length > 3 ? v[3] : 1] }
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]))
  const luminance = c => c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                          .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0)
  const ground = element => {
    const layers = []
    for (let e = element; e; e = e.parentElement) layers.unshift(rgba(getComputedStyle(e).backgroundColor))
    return layers.reduce((under, top) => over(top, under), [255, 255, 255])
  }
  const painted = (element, x, y) => document.elementsFromPoint(x, y).reverse()
    .filter(e => e !== element && e.closest('svg') === element.closest('svg') && e instanceof SVGGeometryElement)
    .map(e => getComputedStyle(e)).filter(style => style.fill !== 'none')
    .map(style => { const c = rgba(style.fill); return [...c.slice(0, 3), c[3] * style.fillOpacity] })
  const seen = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, box = element.getBoundingClientRect()
    if (!walk.currentNode.data.trim() || ['title', 'desc', 'style'].includes(element.tagName.toLowerCase()) || !box.width) continue
    const style = getComputedStyle(element), svg = element.closest('svg')
    let under = ground(element)
    if (svg) under = painted(element, box.x + box.width / 2, box.y + box.height / 2).reduce((u, top) => over(top, u), under)
    const a = luminance(over(rgba(svg ? style.fill : style.color), under)), b = luminance(under)
    seen.push([walk.currentNode.data, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)])
  }
  return seen
}"""
FIGURES = """() => [...document.querySelectorAll('svg, img, figure, canvas')].map(e => {
  const box = e.getBoundingClientRect()
  return [e.tagName, box.width, box.height, box.left, box.right, e.checkVisibility({opacityProperty: true, visibilityProperty: true})]
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("the page is looked at in Chromium, which is not installed here")
    playwright = pytest.importorskip("playwright.sync_api", reason="Chromium is driven by playwright, which is not installed here")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=[f"--{flag}" for flag in QUIET])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tab(browser: Any, folder: Path) -> Iterator[Any]:
    """The page in a tab, and in `tab.heard` what it said on the console and asked the network for."""
    tab, heard = browser.new_page(viewport={"width": 375, "height": 800}), []
    tab.on("console", lambda message: heard.append(message.text))
    tab.on("pageerror", lambda error: heard.append(str(error)))
    tab.on("request", lambda request: heard.append(request.url))
    tab.goto((folder / "report.html").as_uri())
    tab.heard = heard
    yield tab
    tab.close()


def test_it_opens_in_silence(tab: Any) -> None:
    tab.wait_for_load_state("networkidle")
    assert [heard for heard in tab.heard if not heard.startswith("data:")] == [tab.url]


@pytest.mark.parametrize("width", [320, 375, 1280])
def test_it_never_scrolls_sideways_and_all_figures_are_seen(tab: Any, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 800})
    assert tab.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)") <= width
    for name, wide, high, left, right, visible in tab.evaluate(FIGURES):
        assert visible, name
        assert wide > 200, name
        assert high > 40, name
        assert left >= 0, name
        assert right <= width, name


def test_every_figure_has_words_that_stand_for_it(tab: Any) -> None:
    count = tab.locator("svg").count()
    assert tab.get_by_role("img").count() == count
    assert all(len(words) > 20 for words in tab.eval_on_selector_all("svg", "all => all.map(e => e.ariaLabel)"))
    assert tab.locator("figure > figcaption").count() == count


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(tab: Any, scheme: str) -> None:
    tab.emulate_media(color_scheme=scheme)
    tab.set_viewport_size({"width": 1280, "height": tab.evaluate("document.documentElement.scrollHeight")})
    contrasts = tab.evaluate(CONTRASTS)
    assert len(contrasts) > 50
    assert [(words, contrast) for words, contrast in contrasts if contrast < 4.5] == []
