"""The page of a run: its figures and numbers in one HTML file, drawn from what lies in the run folder and nothing else."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fbnll import figures
from fbnll.folder import write_atomically
from fbnll.svg import Figure, Markup, Number, join, percent, several, size, standalone, tag

Json = dict[str, Any]
Show = Callable[[Any], str]
# A picture of two clusters: without one, a browser asks for it.
ICON = "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 2 2'%3E%3Cpath fill='%234a83c5' d='M0 0h1v1H0zM1 1h1v1H1z'/%3E%3C/svg%3E"


class Run(NamedTuple):
    """What a run folder says."""

    config: Json
    result: Json
    figures: Json
    history: list[Json]


class Section(NamedTuple):
    """A part of the page: its heading, a sentence or two, its figures and tables."""

    heading: str
    intro: Markup
    parts: Sequence[Figure | Markup]


def write_report(folder: Path) -> Path:
    """Draws a run folder's `report.html` and `figures/*.svg`; each file appears whole or not at all."""
    run, css = read_run(folder), files("fbnll").joinpath("report.css").read_text(encoding="utf-8")
    sections = [section for part in SECTIONS if (section := part(run))]
    for figure in (part for section in sections for part in section.parts if isinstance(part, Figure)):
        write_atomically(folder / "figures" / f"{figure.name}.svg", standalone(figure, css))
    write_atomically(folder / "report.html", page(run, sections, css))
    return folder / "report.html"


def read_run(folder: Path) -> Run:
    """The files of a run folder, of which only the result must be there; a number that is not finite reads as null."""
    if not (folder / "result.json").is_file():
        raise ValueError(f"A report is drawn from a folder that holds a result.json, but {folder} holds none")
    config, result, drawn = (parse(read(folder / name, "{}"), folder / name) for name in ("config.json", "result.json", "figures.json"))
    if not isinstance(result.get("method"), str):
        raise ValueError(f"{folder / 'result.json'} must be the result of a run, with its method, but it is not")
    lines = read(folder / "history.jsonl", "").split("\n")
    return Run(config, result, drawn, [parse(text, folder / "history.jsonl") for text in lines if text])


def read(file: Path, otherwise: str) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else otherwise


def parse(text: str, file: Path) -> Json:
    try:
        value = json.loads(text, parse_constant=lambda name: None)
    except ValueError as error:
        raise ValueError(f"{file} must hold JSON, but it does not: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold JSON objects, but it holds {text[:40]}")
    return value


# Values of the result, with the key under which it holds them


def look_up(result: Any, key: str) -> Any:
    """The value under a dotted key, or None where the way to it ends early.

    >>> look_up({"tasks": [{"mean": 0.5}]}, "tasks.0.mean")
    0.5
    """
    for step in key.split("."):
        if isinstance(result, list):
            result = dict(enumerate(result)).get(int(step))
        else:
            result = result.get(step) if isinstance(result, dict) else None
    return result


def number(run: Run, key: str, show: Show = "{:,}".format) -> Markup:
    """What a person reads of a number, with its key and its exact value in the result; a dash where it does not apply."""
    return shown(key, look_up(run.result, key), show)


def shown(key: str, value: object, show: Show) -> Markup:
    if value is None:
        return tag("span", "–", title="does not apply")
    return tag("span", show(value), data_key=key, data_value=json.dumps(value))


def ratio(x: Number) -> str:
    return f"{x:.2f}"


def seconds(t: Number) -> str:
    return f"{t:.{2 if t < 1 else 1}f}\u00a0s" if t < 120 else f"{t / 60:.0f}\u00a0min"


def spread(values: Collection[Number], show: Show = "{:,}".format) -> str:
    """The least and the largest of some numbers, one where they read alike.

    >>> spread([3, 1, 2]), spread([4, 4])
    ('1 to 3', '4')
    """
    least, most = (show(best(values)) for best in (min, max))
    return least if least == most else f"{least} to {most}"


def spans(users: Sequence[int]) -> str:
    """The numbers of users, those in a row as a span.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7, 8'
    """
    runs = [[user for _, user in group] for _, group in groupby(enumerate(sorted(users)), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def clusters_and_tasks(run: Run) -> tuple[list[int], list[int | None]]:
    """Every user's cluster, -1 without one, and its true task, None where it is not known."""
    clusters, tasks = (
        look_up(run.result, f"clustering.{name}") or [None] * (run.result.get("users") or 0) for name in ("clusters", "tasks")
    )
    return [-1 if m is None else m for m in clusters], list(tasks)


def classes_of(run: Run) -> list[str]:
    return [str(name) for name in run.result.get("classes") or []]


def clustered(run: Run) -> bool:
    """Whether clusters are the method's own doing: one global model, or one for each user, says nothing about users."""
    signs = (look_up(run.result, key) is not None for key in ("clustering.ari", "bytes.clustering"))
    return bool(look_up(run.result, "clustering.clusters")) and any(signs)


def corrected(run: Run) -> bool:
    return any(look_up(run.result, f"labels.{outcome}") for outcome in ("repaired", "broken", "mistaken"))


# The parts of the page


def title_of(run: Run) -> str:
    """The method and the dataset."""
    label, dataset = run.result.get("label") or run.result.get("method"), run.result.get("dataset")
    return f"{label} on {'users’ own data' if dataset in (None, 'users') else dataset}"


def headline(run: Run) -> Markup:
    """What ran and what came of it in a few sentences, and the key figures."""
    kicker = tag("p", "Federated learning with noisy labels", class_="kicker")
    said = [tag("p", text, class_="lead") for text in (what_ran(run), join(*what_came_of_it(run))) if text]
    return tag("header", kicker, tag("h1", title_of(run)), *said, tag("dl", *key_figures(run), class_="stats"))


def what_ran(run: Run) -> str:
    experiment, tasks = run.config.get("experiment") or {}, run.result.get("tasks")
    rounds, noise = experiment.get("rounds"), str(experiment.get("noise", "")).replace("_", "-")
    said = several(run.result.get("users") or 0, "user")
    said += f" with {several(len(tasks), 'task')}" if tasks else ""
    said += f" on {several(len(classes_of(run)), 'class', 'classes')}"
    if noise and run.result.get("labels"):  # of users' own labels nobody knows which are wrong
        said += ", clean labels" if noise == "none" else f", {noise.replace('none', 'no').replace(',', ' and ')} label noise"
    return said + ("." if rounds is None else f", {several(rounds, 'round')} of training." if rounds else ", no training.")


def what_came_of_it(run: Run) -> Iterator[Markup]:
    """A sentence for each thing that happened."""
    ari, wrong = look_up(run.result, "clustering.ari"), look_up(run.result, "labels.wrong_before")
    n = sum(user["n"] for user in look_up(run.result, "labels.per_user") or [])
    if ari is not None:
        yield join(f"The clusters are {'exactly' if ari == 1 else 'not quite'} the true tasks. ")
    if corrected(run):
        repaired = join("Of ", number(run, "labels.wrong_before"), " wrong labels ", number(run, "labels.repaired"), " were repaired")
        broken = join(f"; of {n - wrong:,} right ones ", number(run, "labels.broken"), " were broken. ")
        yield join(repaired if wrong else "No label was wrong", broken)
    elif wrong:
        yield join("Of ", several(n, "label"), " ", number(run, "labels.wrong_before"), " are wrong, and none was changed. ")
    if look_up(run.result, "accuracy.mean") is not None:
        yield join("The models are right about ", number(run, "accuracy.mean", percent), " of the test samples of their users’ tasks.")


def key_figures(run: Run) -> Iterator[Markup]:
    """Clusters, noise, accuracy and bytes, each as far as it applies."""
    if clustered(run):
        (clusters, _), tasks = clusters_and_tasks(run), run.result.get("tasks")
        sizes = Counter(m for m in clusters if m >= 0).values()
        each = f"{spread(sizes)} users each"
        agreement = join(each, "; agreement with the tasks (ARI) ", number(run, "clustering.ari", ratio)) if tasks else each
        yield key_figure("Clusters", f"{len(sizes)} for {several(len(tasks), 'task')}" if tasks else len(sizes), agreement)
    if look_up(run.result, "labels.noise_before") is not None:
        before, after = (number(run, f"labels.noise_{when}", percent) for when in ("before", "after"))
        changed = join(before, " → ", after), "mean of users, before and after correction"
        yield key_figure("Wrong labels", *(changed if corrected(run) else (before, "mean of users; none was changed")))
    if look_up(run.result, "accuracy.mean") is not None:
        std, scored = number(run, "accuracy.std", percent), number(run, "accuracy.users_scored")
        spent = join("± ", std, " over ", scored, " users, each on its own task")
        yield key_figure("Accuracy", number(run, "accuracy.mean", percent), spent)
    once, exchange = (look_up(run.result, f"bytes.{name}") for name in ("clustering", "one_model_exchange"))
    if once:
        model = join("once; one exchange of models is ", number(run, "bytes.one_model_exchange", size)) if exchange else "once"
        yield key_figure("Sent for clustering", number(run, "bytes.clustering", size), model)
    elif run.result.get("bytes"):
        yield key_figure("Sent by users", number(run, "bytes.up", size), join("and ", number(run, "bytes.down", size), " to them"))


def key_figure(name: str, value: object, note: object) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, class_="big"), tag("dd", note, class_="note"))


def comparison(run: Run) -> Section | None:
    rows = run.result.get("comparison") or []
    if all(row.get("mean") is None for row in rows):
        return None
    tasks = max(len(row.get("per_task") or []) for row in rows)
    keys = {"Mean": "mean", "Std": "std"}
    keys |= {f"Task {t}": f"per_task.{t}" for t in range(tasks)} if tasks <= 3 else {}  # more have no room beside the figure
    keys |= {"Wrong labels": "noise_after"} if any(row.get("noise_after") is not None for row in rows) else {}
    numbers = [[row["label"], *(number(run, f"comparison.{i}.{key}", percent) for key in keys.values())] for i, row in enumerate(rows)]
    drawn = figures.comparison_bars(rows, str(run.result.get("method")))
    intro = join("Other ways to learn, on the same users with the same given labels.")
    return Section("Against the alternatives", intro, [drawn, table("In numbers", ["Method", *keys], numbers, 1)])


def similarity(run: Run) -> Section | None:
    R, present = np.array(run.figures.get("R") or np.zeros((0, 0)), float), run.figures.get("present") or []
    if len(present) < 2:
        return None
    clusters, tasks = clusters_and_tasks(run)
    drawn = [figures.heat_map(R, run.figures["linkage"], present, clusters, tasks), figures.histogram(R, present, clusters)]
    intro = ["Users with the same task see the same kind of data, so the spectra of their features are alike, whatever their labels say. "]
    if look_up(run.result, "clustering.matched") is not None:
        intro.append(join(number(run, "clustering.matched", percent), " of users are in the cluster that stands for their true task. "))
    without = look_up(run.result, "clustering.without_cluster")
    intro.append(f"In no cluster: {'user' if len(without) == 1 else 'users'} {spans(without)}." if without else "")
    return Section("Who resembles whom", join(*intro), [*drawn, table_of_clusters(clusters, tasks)])


def table_of_clusters(clusters: Sequence[int], tasks: Sequence[int | None]) -> Markup:
    hue, rows = figures.colours(clusters, tasks), []
    for m in sorted({*clusters} - {-1}):
        users = [k for k, cluster in enumerate(clusters) if cluster == m]
        wanted = Counter(t for k in users if (t := tasks[k]) is not None)
        of_task = ", ".join(f"{n} × task {t}" for t, n in sorted(wanted.items())) or "not known"
        rows.append([join(swatch(hue[m]), m), of_task, spans(users), len(users)])
    return table("The clusters", ["Cluster", "True tasks", "Users", "Number"], rows, 3)


def noise_of_one_user(run: Run) -> Section | None:
    example = run.figures.get("noise_example") or {}
    models = {name: np.array(counts, float) for name, counts in (example.get("models") or {}).items() if counts}
    if not models:
        return None
    most = max(float(counts.sum(axis).max()) for counts in models.values() for axis in (0, 1))
    own = str((run.config.get("experiment") or {}).get("noise")).replace("none", "clean").split(",")
    drawn = [figures.noise_panel(name, counts, classes_of(run), most, name in own) for name, counts in models.items()]
    intro = f"User {example.get('user')} under each model of noise: how many samples carry a label, and how many of them wrongly."
    return Section("What noise does to a user", join(intro), drawn)


def correction(run: Run) -> Section | None:
    """Bands and matrices; a matrix that has nothing off its diagonal, or was shown before, says nothing."""
    labels, parts = run.result.get("labels") or {}, []
    if corrected(run):
        parts.append(figures.fates(labels, sum(user["n"] for user in labels.get("per_user") or [])))
    flow: dict[str, np.ndarray] = {}
    for name, title in {"true_given": "Given labels", "given_corrected": "What was changed", "true_corrected": "Corrected labels"}.items():
        counts = np.array((run.figures.get("flow") or {}).get(name) or np.zeros((0, 0)), float)
        if counts.sum() > np.trace(counts) and not any(np.array_equal(counts, other) for other in flow.values()):
            flow[name] = counts
            parts.append(figures.matrix(name, title, counts, classes_of(run)))
    intro = join("All users together. ")
    if corrected(run) and (labels["missed"] or labels["mistaken"]):
        intro = join(intro, "Of the wrong labels ", number(run, "labels.missed"), " were left as they were, ")
        intro = join(intro, number(run, "labels.mistaken"), " got another wrong one.")
    return Section("From given to corrected labels" if corrected(run) else "Which labels are wrong", intro, parts) if parts else None


def phases(run: Run) -> Section | None:
    decided = run.figures.get("phases")
    if not decided:
        return None
    parts = [figures.phase_per_class(decided["per_class"], classes_of(run))]
    if "repaired" in decided:
        parts.append(figures.repaired_and_broken(decided["repaired"], decided["broken"]))
    intro = "Phase 1 looks at all samples of a user with one given label: if their spectrum resembles that of exactly one clean class, "
    intro += "they all get its label. Where it does not, phase 2 decides sample by sample."
    return Section("Which phase decided", join(intro), parts)


def users(run: Run) -> Section | None:
    per_user = look_up(run.result, "labels.per_user") or []
    noisy = [user for user in per_user if user["n"]]
    if not noisy:
        return None
    columns: dict[str, tuple[str, Show]] = {"Before" if corrected(run) else "Wrong": ("labels.per_user.{i}.before", percent)}
    if corrected(run):
        columns["After"] = "labels.per_user.{i}.after", percent
        columns |= {name: (f"labels.per_user.{{i}}.{name.lower()}", "{:,}".format) for name in ("Repaired", "Broken")}
    if look_up(run.result, "accuracy.mean") is not None:
        columns["Accuracy"] = "accuracy.per_user.{k}", percent
    rows = []
    for i, k in enumerate(user["user"] for user in per_user):
        rows.append([k, *(number(run, key.format(i=i, k=k), show) for key, show in columns.values())])
    drawn = [figures.noise_of_users(noisy, corrected(run))] if any(user["before"] or user["after"] for user in noisy) else []
    share = spread([user["before"] for user in noisy], percent)
    intro = f"Of a user’s labels {share} were given wrongly." if any(user["before"] for user in noisy) else "No label was given wrongly."
    return Section("User by user", join(intro), [*drawn, table("In numbers", ["User", *columns], rows, 1)])


def rounds(run: Run) -> Section | None:
    scored = [(row["round"], row["accuracy"]) for row in run.history if look_up(row, "accuracy.mean") is not None]
    per_task, names = look_up(run.result, "accuracy.per_task") or [], classes_of(run)
    rows = []
    for t, task in enumerate(per_task):
        score, scored_users = number(run, f"accuracy.per_task.{t}.mean", percent), number(run, f"accuracy.per_task.{t}.users")
        rows.append([join(swatch(task["task"]), task["task"]), ", ".join(names[c] for c in task["classes"]), scored_users, score])
    parts: list[Figure | Markup] = [figures.accuracy_lines(scored)] if scored else []
    parts += [table("Each task after the last round", ["Task", "Classes", "Users", "Accuracy"], rows, 2)] if rows else []
    return Section("Accuracy, round by round", join("On clean test samples of each user’s own task."), parts) if parts else None


def traffic(run: Run) -> Section | None:
    sent = run.result.get("bytes")
    if not sent:
        return None
    names = {
        "clustering": "Clustering, once",
        "one_model_exchange": "One exchange of models",
        "up": "Whole run, up",
        "down": "Whole run, down",
    }
    bars = [(words, sent[key]) for key, words in names.items() if sent.get(key)]
    columns: dict[str, Show] = {"asks": "{:,}".format, "up": size, "down": size}
    rows: list[list[object]] = []
    for job, asked in sent["per_job"].items():
        if job.startswith("fbnll.evaluation:"):
            continue  # counted apart
        rows.append([job_name(job), *(shown(f"bytes.per_job.{job}.{key}", asked.get(key), show) for key, show in columns.items())])
    for name, key in {"The whole run": "bytes", "Evaluation, counted apart": "bytes.evaluation"}.items():
        rows.append([name, "", *(number(run, f"{key}.{way}", size) for way in ("up", "down"))])
    parts: list[Figure | Markup] = [figures.byte_bars(bars)] if bars else []
    parts.append(table("Job by job", ["Job", *map(str.capitalize, columns)], rows, 1))
    intro = join("Up is from users to the server, down from the server to users. ")
    if sent.get("clustering") and sent.get("one_model_exchange"):
        times = sent["one_model_exchange"] / sent["clustering"]
        once, exchange = number(run, "bytes.clustering", size), number(run, "bytes.one_model_exchange", size)
        factor = f", {times:,.{0 if times > 10 else 1}f} times as much."
        intro = join(intro, "Clustering sends ", once, " once; one exchange of models is ", exchange, factor)
    return Section("What was sent", intro, parts)


def details(run: Run) -> Section:
    config, parts = run.config, []
    if config.get("command"):
        parts.append(card(tag("h3", "To run it again"), tag("pre", tag("code", config["command"]))))
    spent = {stage: t for stage, t in (run.result.get("seconds") or {}).items() if t is not None}
    if spent:
        longest = max(spent.values()) or 1.0
        rows = [[stage, meter(t / longest), number(run, f"seconds.{stage}", seconds)] for stage, t in spent.items()]
        parts.append(table("Time", ["Stage", "Share", "Seconds"], rows, 2))
    missing = [[job_name(ask["job"]), spans(ask["users"]), ask["round"]] for ask in run.result.get("missing") or []]
    everybody = card(tag("h3", "Users who did not answer"), tag("p", "None: every user answered every ask."))
    parts.append(table("Users who did not answer", ["Job", "Users", "Round"], missing, 2) if missing else everybody)
    ran = {"seed": config.get("seed"), "device": config.get("device"), **(config.get("versions") or {})}
    for title, values in (("Where it ran", ran), ("Configuration", config.get("experiment") or {})):
        rows = [[tag("code", name), written(value)] for name, value in values.items()]
        parts += [table(title, ["Name", "Value"], rows)] if rows else []
    return Section("Details", join("What it takes to run it again, and what it took."), parts)


SECTIONS = (comparison, similarity, noise_of_one_user, correction, phases, users, rounds, traffic, details)


# How parts become HTML


def page(run: Run, sections: Sequence[Section], css: str) -> str:
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title_of(run)),
        tag("link", rel="icon", href="data:image/svg+xml," + ICON),
        tag("style", Markup(css)),
    ]
    footer = tag("footer", "Drawn by fbnll from the files of the run. Each figure also lies in figures/, as a file of its own.")
    body = tag("main", headline(run), *map(section_markup, sections), footer)
    return "<!doctype html>\n" + tag("html", tag("head", *head), tag("body", body), lang="en") + "\n"


def section_markup(section: Section) -> Markup:
    parts = (figure_markup(part) if isinstance(part, Figure) else part for part in section.parts)
    return tag("section", tag("h2", section.heading), tag("p", section.intro, class_="soft"), tag("div", *parts, class_="grid"))


def figure_markup(figure: Figure) -> Markup:
    return tag("figure", tag("figcaption", tag("strong", figure.title), figure.caption), figure.svg)


def card(*children: object) -> Markup:
    return tag("div", *children, class_="card")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], numbers: int | None = None) -> Markup:
    """A table on a card, which scrolls by itself where it is larger; its first column names the row, from `numbers` on it holds numbers."""
    kinds = ["number" if numbers is not None and i >= numbers else None for i in range(len(header))]
    head = tag("thead", tag("tr", *(tag("th", words, scope="col", class_=kind) for words, kind in zip(header, kinds))))
    cells = ((first, (tag("td", cell, class_=kind) for cell, kind in zip(rest, kinds[1:]))) for first, *rest in rows)
    lines = (tag("tr", tag("th", first, scope="row"), *rest) for first, rest in cells)
    whole = tag("table", tag("caption", title), head, tag("tbody", *lines))
    return card(tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=title))


def job_name(job: str) -> Markup:
    return tag("code", job.rpartition(":")[2], title=job)


def swatch(hue: int) -> Markup:
    return tag("span", class_="swatch", style=f"background: var(--c{hue % 10})", aria_hidden="true")


def meter(share: Number) -> Markup:
    return tag("span", tag("span", style=f"width: {100 * share:.1f}%"), class_="meter")


def written(value: object) -> str:
    return value if isinstance(value, str) else "–" if value is None else json.dumps(value, ensure_ascii=False)
