"""What a run found, in a few lines that a person understands."""

from fbnll.payload import Payload
from fbnll.runner import Result


def told(result: Result) -> str:
    s = result.summary
    lines = [f"{s['users']} users of {s['dataset']}, method {s['method']}, seed {s['seed']}, {s['seconds']['total']:.0f} seconds"]
    lines += _clusters(s["clustering"], s["tasks"])
    lines += _labels(s["labels"])
    lines += _accuracy(s)
    if result.folder:
        lines.append(f"page       {result.folder / 'report.html'}")
    return "\n".join(lines)


def _clusters(clustering: Payload, tasks: list[list[int]] | None) -> list[str]:
    sizes = {m: clustering["clusters"].count(m) for m in sorted(set(clustering["clusters"]) - {-1})}
    text = f"clusters   {len(sizes)} of {', '.join(map(str, sizes.values()))} users"
    if clustering["matched"] is not None:
        text += f"; {clustering['matched']:.0%} of users are with their true task (ARI {clustering['ari']:.2f}, 1 is perfect)"
    lost = clustering["without_cluster"]
    return [text, f"           users without a cluster: {', '.join(map(str, lost))}"] if lost else [text]


def _labels(labels: Payload | None) -> list[str]:
    if not labels:
        return []
    text = f"labels     {labels['noise_before']:.1%} wrong before, {labels['noise_after']:.1%} after"
    if labels["repaired"] or labels["broken"]:
        text += f": {labels['repaired']} repaired, {labels['broken']} right ones broken, {labels['missed']} wrong ones missed"
    return [text]


def _accuracy(s: Payload) -> list[str]:
    rows = s.get("comparison") or ([{"label": s["method"], **s["accuracy"]}] if s["accuracy"]["mean"] is not None else [])
    if not rows:
        return []
    lines = ["accuracy   mean over users, then each task's model on the test data of that task"]
    for row in rows:
        if row["mean"] is None:
            continue
        per_task = [task["mean"] if isinstance(task, dict) else task for task in row["per_task"]]
        shown = "  ".join("  –  " if mean is None else f"{mean:.1%}" for mean in per_task)
        lines.append(f"  {row['label']:<18} {row['mean']:.1%}   {shown}")
    return lines
