"""What a run found, in a few lines that a person understands."""

from fbnll.payload import Payload
from fbnll.report import spread
from fbnll.runner import Result


def told(result: Result) -> str:
    s = result.summary
    source = "" if s["dataset"] == "users" else f" of {s['dataset']}"
    seconds = s["seconds"]["total"] + s["seconds"].get("comparison", 0)
    lines = [f"{s['users']} users{source}, method {s['method']}, seed {s['seed']}, {max(seconds, 0.1):.1f} seconds"]
    lines += _clusters(s) + _labels(s["labels"]) + _accuracy(s)
    return "\n".join([*lines, f"page       {result.folder / 'report.html'}"] if result.folder else lines)


def _clusters(s: Payload) -> list[str]:
    """Nothing of a method that does not cluster: one global model, or one for each user."""
    clustering = s["clustering"]
    if clustering["ari"] is None and s["bytes"]["clustering"] is None:
        return []
    sizes = [clustering["clusters"].count(m) for m in set(clustering["clusters"]) - {-1}]
    text = f"clusters   {len(sizes)}, {spread(sizes)} users each"
    if clustering["matched"] is not None:
        text += f"; {clustering['matched']:.0%} of users are in that of their true task (ARI {clustering['ari']:.2f}, 1 is perfect)"
    lost = clustering["without_cluster"]
    return [text, f"           users without a cluster: {', '.join(map(str, lost))}"] if lost else [text]


def _labels(labels: Payload | None) -> list[str]:
    if not labels:
        return []
    if not (labels["repaired"] or labels["broken"] or labels["mistaken"]):
        return [f"labels     {labels['noise_before']:.1%} wrong, none changed"]
    n = sum(user["n"] for user in labels["per_user"])
    before, after = f"{labels['noise_before']:.1%} wrong before", f"{labels['noise_after']:.1%} after"
    repaired = f"{labels['repaired']} of {labels['wrong_before']} wrong ones repaired, " if labels["wrong_before"] else ""
    return [f"labels     {before}, {after}: {repaired}{labels['broken']} of {n - labels['wrong_before']} right ones broken"]


def _accuracy(s: Payload) -> list[str]:
    """A row for every method, a column for every task while they are few."""
    own = {"label": s["label"], **s["accuracy"], "per_task": [task["mean"] for task in s["accuracy"]["per_task"]]}
    rows = [row for row in s.get("comparison") or [own] if row["mean"] is not None]
    if not rows:
        return []
    tasks = len(s["tasks"]) if len(s["tasks"]) <= 6 else 0
    lines = [f"accuracy                     mean{''.join(f'  task {t}' for t in range(tasks))}   on test samples of each user's own task"]
    for row in rows:
        means = [row["mean"], *row["per_task"][:tasks]]
        lines.append(f"  {row['label']:<24}{''.join('       –' if mean is None else f'{mean:8.1%}' for mean in means)}".rstrip())
    return lines
