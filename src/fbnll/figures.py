"""The figures of a report, each a function of plain data that returns a drawing with its caption and text alternative."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.cluster.hierarchy import leaves_list
from scipy.optimize import linear_sum_assignment

from fbnll.svg import (
    WIDTH,
    Figure,
    Markup,
    Number,
    cells,
    dot,
    draw,
    hints,
    join,
    label,
    legend,
    line,
    linear,
    names_below,
    names_left,
    path,
    percent,
    rect,
    room_for,
    several,
    shorten,
    size,
    ticks,
)

Json = dict[str, Any]
Counts = Float[np.ndarray, "C C"]


def comparison_bars(rows: list[Json], own: str) -> Figure:
    """Mean accuracy of each method as a bar, one standard deviation as a whisker; the run's own method stands out."""
    x, body = linear(0, 1, 0, WIDTH), []
    for y, row in zip(range(0, 34 * len(rows), 34), rows):
        mean, std, kind = row.get("mean"), row.get("std") or 0.0, "strong" if row["method"] == own else ""
        body += [label(0, y + 11, shorten(row["label"], WIDTH - 70), kind), rect(0, y + 16, WIDTH, 11, "fill-track", rx=2)]
        body += [label(WIDTH, y + 11, "not scored" if mean is None else percent(mean), kind, "end")]
        if mean is not None:
            low, high = x(max(mean - std, 0)), x(min(mean + std, 1))
            body += [rect(0, y + 16, x(mean), 11, "fill-accent" if kind else "fill-mute", rx=2)]
            body += [path(f"M{low:.1f} {y + 18}v7m0-3.5H{high:.1f}m0-3.5v7", "line-ink")] if std else []
    words = "; ".join(f"{row['label']} {'not scored' if row.get('mean') is None else percent(row['mean'])}" for row in rows)
    caption = "Mean over users, each on the test samples of its own task; the whisker is one standard deviation."
    return draw("comparison", "Accuracy of each method", caption, words, 34 * len(rows) - 5, *body)


def colours(clusters: Sequence[int], tasks: Sequence[int | None]) -> dict[int, int]:
    """The colour of every cluster: that of the true task it stands for, one to one, so that equal colours are agreement.

    >>> colours([1, 1, 0, 2, -1], [0, 0, 1, 1, 0])
    {0: 1, 1: 0, 2: 2}
    """
    pairs = [(m, t) for m, t in zip(clusters, tasks) if m >= 0 and t is not None]
    M, T = max(clusters, default=-1) + 1, max((t for t in tasks if t is not None), default=-1) + 1
    together = np.zeros((M, T + M))  # the last M colours are for clusters that stand for no task
    for pair in pairs:
        together[pair] += 1
    return dict(zip(range(M), map(int, linear_sum_assignment(-together)[1])))


def heat_map(
    R: Float[np.ndarray, "K K"], links: list[list[float]], present: list[int], clusters: Sequence[int], tasks: Sequence[int | None]
) -> Figure:
    """R of at least two users in dendrogram order under its dendrogram, with true tasks and clusters as strips on two sides."""
    order = [present[i] for i in leaves_list(np.array(links, float))]
    n, left, top = len(order), 58.0, 100.0
    cell, S, hue = (WIDTH - left) / n, R[np.ix_(order, order)], colours(clusters, tasks)
    between = S[~np.eye(n, dtype=bool)]
    low, high, known = float(between.min()), float(between.max()), any(t is not None for t in tasks)
    body = [tree(links, present, order, [hue.get(m) for m in clusters], linear(0, n, left, WIDTH), top - 25)]
    strips = {"task": [tasks[k] for k in order]} if known else {}
    for at, (name, codes) in zip((21.0, 11.0), {**strips, "cluster": [hue.get(clusters[k]) for k in order]}.items()):
        body.append(label(left - 25, top - at + 6.5, name, "soft small", "end"))
        for first, length, code in stretches(codes):
            kind, long = "fill-pale" if code is None else f"fill-c{code % 10}", length * cell - 0.8
            body += [rect(left + first * cell, top - at, long, 7, kind), rect(left - at, top + first * cell, 7, long, kind)]
    body.append(cells(0.04 + 0.96 * (S - low) / ((high - low) or 1.0), "fill-heat", left, top, cell))
    if cell > 8:
        body.append(names_left([str(k) for k in order], left - 25, linear(0, n, top, WIDTH - left + top)))
    if n <= 40:
        body.append(hints(((i, j, f"users {order[i]} and {order[j]}: R = {S[i, j]:.3f}") for i, j in np.ndindex(n, n)), left, top, cell))
    y = top + n * cell + 12
    body += [label(left + 64, y + 7, f"R = {low:.2f}", "soft small", "end"), label(left + 216, y + 7, f"{high:.2f} and more", "soft small")]
    body += [cells(np.linspace(0.04, 1, 20)[None], "fill-heat", left + 70, y, 7)]
    strip = "Strips: the true task of each user, and the cluster it was put in." if known else "The strips are the clusters."
    caption = f"R(k, j) of {several(n, 'user')}. {strip} The lower two branches of the dendrogram meet, the more alike they are."
    words = f"A heat map of {several(n, 'user')}; between two users R lies between {low:.2f} and {high:.2f}."
    return draw("similarity", "Similarity of users", caption, words, y + 12, *body)


def histogram(R: Float[np.ndarray, "K K"], present: list[int], clusters: Sequence[int]) -> Figure:
    """How R is spread over pairs of users of one cluster, and over pairs of different ones; at least one pair."""
    a, b = (np.array(present)[side] for side in np.tril_indices(len(present), -1))
    r, together = R[a, b], np.array(clusters)[a] == np.array(clusters)[b]
    kinds = {"fill-right": ("of one cluster", r[together]), "fill-mute": ("of different clusters", r[~together])}
    edges = np.histogram_bin_edges(r, 30)
    counts = np.stack([np.histogram(values, edges)[0] for _, values in kinds.values()])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    keys, top = legend([(kind, words) for kind, (words, _) in kinds.items()], 0)
    x, y, body = linear(edges[0], edges[-1], 0, WIDTH), linear(0, shares.sum(0).max() or 1.0, top + 130, top + 8), [keys]
    for i in range(30):
        for kind, n, share, height in zip(kinds, counts[:, i].tolist(), shares[:, i], np.cumsum(shares[:, i])):
            told = f"R from {edges[i]:.3f} to {edges[i + 1]:.3f}: {several(n, 'pair')} {kinds[kind][0]}"
            body += [rect(x(edges[i]) + 0.5, y(height), WIDTH / 30 - 1, y(0) - y(share), kind, told)] if n else []
    body.append(line(0, y(0), WIDTH, y(0), "line-grid"))
    body += [label(x(t), y(0) + 13, f"{t:g}", "soft small", "middle") for t in ticks(edges[0], edges[-1], 6) if 8 < x(t) < WIDTH - 8]
    caption = f"{several(len(r), 'pair')}."
    if counts.any(1).all():
        least, most = r[together].min(), r[~together].max()
        caption = f"The least alike pair of one cluster has R = {least:.2f}, the most alike pair of different ones {most:.2f}."
        caption += " Bars are shares of each kind."
    return draw("pairs", "R of every pair of users", caption, caption, top + 148, *body)


def stretches(codes: Sequence[int | None]) -> Iterator[tuple[int, int, int | None]]:
    """Where each stretch of one code begins, how long it is, and the code.

    >>> list(stretches([1, 1, None]))
    [(0, 2, 1), (2, 1, None)]
    """
    first = 0
    for code, same in groupby(codes):
        length = len(list(same))
        yield first, length, code
        first += length


def tree(
    links: list[list[float]], present: list[int], order: list[int], hue: Sequence[int | None], x: Callable[[Number], Number], height: Number
) -> Markup:
    """The dendrogram; a merge inside one cluster has the cluster's colour."""
    y, place = linear(0, max(merged for _, _, merged, *_ in links), height, 2), {k: i for i, k in enumerate(order)}
    at = {i: (x(place[k] + 0.5), 0.0, {hue[k]}) for i, k in enumerate(present)}
    drawn = []
    for i, (a, b, merged, *_) in enumerate(links, start=len(present)):
        (xa, ya, ha), (xb, yb, hb) = at[int(a)], at[int(b)]
        at[i] = ((xa + xb) / 2, merged, ha | hb)
        code = next(iter(ha)) if len(ha | hb) == 1 else None
        drawn.append(path(f"M{xa:.2f} {y(ya):.2f}V{y(merged):.2f}H{xb:.2f}V{y(yb):.2f}", "line" if code is None else f"line-c{code % 10}"))
    return join(*drawn)


def noise_panel(name: str, counts: Counts, classes: list[str], most: Number, own: bool) -> Figure:
    """Labels of one user by class, wrong ones on top of right ones; a line where the true number is. `own`: this run has such noise."""
    given, true, right = counts.sum(0), counts.sum(1), np.diag(counts)
    keys, top = legend([("fill-right", "right label"), ("fill-wrong", "wrong label"), ("line-ink", "true number")], 0, 26)
    x, y = linear(0, len(counts), 26, WIDTH), linear(0, most or 1.0, top + 124, top + 8)
    wide, body = 0.72 * (x(1) - x(0)), [keys]
    for tick in ticks(0, most or 1.0, 4):
        body += [line(26, y(tick), WIDTH, y(tick), "line-grid"), label(21, y(tick) + 3.5, f"{tick:g}", "soft small", "end")]
    for c, who in enumerate(classes):
        at, words = x(c + 0.14), f"{who}: {right[c]:g} right, {given[c] - right[c]:g} wrong, {true[c]:g} in truth"
        body += [rect(at, y(right[c]), wide, y(0) - y(right[c]), "fill-right", words)]
        body += [rect(at, y(given[c]), wide, y(right[c]) - y(given[c]), "fill-wrong", words)]
        body += [line(at - 1.5, y(true[c]), at + wide + 1.5, y(true[c]), "line-ink")] if true[c] else []
    names, bottom = names_below(classes, y(0), x)
    title = name.replace("_", "-").capitalize() + (" labels" if name == "clean" else " noise") + (", as in this run" if own else "")
    wrong, total = int(given.sum() - right.sum()), int(given.sum())
    caption = f"{wrong:,} of {several(total, 'label')} {'is' if wrong == 1 else 'are'} wrong ({percent(wrong / (total or 1))})."
    if not wrong:
        caption = f"All {several(total, 'label')} are right." + (
            "" if name == "clean" else " This model spares some users, and this one too."
        )
    words = "; ".join(f"{who} {right[c]:g} right and {given[c] - right[c]:g} wrong" for c, who in enumerate(classes) if given[c])
    return draw("noise_" + re.sub(r"\W", "_", name), title, caption, words, bottom, *body, names)


def fates(labels: Json, n: int) -> Figure:
    """What became of right and of wrong labels, as bands from the labels given to the labels corrected; none where there are none."""
    broken, repaired, missed, mistaken, wrong = (labels[name] for name in ("broken", "repaired", "missed", "mistaken", "wrong_before"))
    bands = [  # from right (0) or wrong (1) to right or wrong
        ("stayed right", 0, 0, n - wrong - broken, "fill-right"),
        ("repaired", 1, 0, repaired, "fill-fixed"),
        ("broken", 0, 1, broken, "fill-wrong"),
        ("changed, still wrong", 1, 1, mistaken, "fill-wrong"),
        ("left wrong", 1, 1, missed, "fill-wrong"),
    ]
    x1, x2, scale, gap, top = 86.0, 216.0, 216 / n, 24.0, 26.0
    out, into, lowest = [top, top + (n - wrong) * scale + gap], [top, top + (n - wrong - broken + repaired) * scale + gap], top - 10
    body = [label(x1, 12, "given", "strong", "end"), label(x2 + 14, 12, "corrected", "strong")]
    for words, count, y, kind in (("right labels", n - wrong, out[0], "fill-right"), ("wrong labels", wrong, out[1], "fill-wrong")):
        body += [rect(x1, y, 8, count * scale, kind), label(x1 - 7, y + count * scale / 2 - 1, f"{count:,}", "strong", "end")]
        body += [label(x1 - 7, y + count * scale / 2 + 10, words, "soft small", "end")]
    for words, a, b, count, kind in (band for band in bands if band[3]):
        ya, yb, thick = out[a], into[b], count * scale
        out[a], into[b], lowest = ya + thick, yb + thick, max(yb + thick / 2, lowest + 27)
        edges = f"M94 {ya:.2f}C150 {ya:.2f} 160 {yb:.2f} {x2} {yb:.2f}v{thick:.2f}"
        edges += f"C160 {into[b]:.2f} 150 {out[a]:.2f} 94 {out[a]:.2f}z"
        body += [path(edges, kind, f"{words}: {count:,}", fill_opacity=0.45), rect(x2, yb, 8, thick, kind)]
        body += [label(x2 + 14, lowest - 1, f"{count:,}", "strong"), label(x2 + 14, lowest + 10, words, "soft small")]
    told = "; ".join(f"{count:,} {words}" for words, _, _, count, _ in bands)
    caption = "How right and wrong labels came out of the correction."
    return draw("fates", "What became of the labels", caption, f"{told}.", max(out[1] + 12, into[1], lowest + 14) + 4, *body)


def matrix(name: str, title: str, counts: Counts, classes: list[str]) -> Figure:
    """Counts as squares whose shade is their share of the row, with the numbers where there is room for them."""
    rows, columns = name.split("_")
    n, left = len(counts), room_for(classes)
    cell, on = (WIDTH - left) / n, np.eye(n, dtype=bool)
    numbers = cell > 16
    share = np.cbrt(counts / np.maximum(counts.sum(1, keepdims=True), 1)) * (0.5 if numbers else 1.0)  # half, so that ink is legible on it
    x, y, top = linear(0, n, left, WIDTH), linear(0, n, 6, WIDTH - left + 6), 6.0
    body = [rect(left, top, WIDTH - left - 0.5, WIDTH - left, "line-grid")]
    off_diagonal = "fill-mute" if rows == "given" else "fill-wrong"
    body += [cells(np.where(on, share, 0), "fill-right", left, top, cell), cells(np.where(on, 0, share), off_diagonal, left, top, cell)]
    filled = np.argwhere(counts > 0)
    body += [label(x(j + 0.5), y(i + 0.5) + 3.2, short_count(counts[i, j]), "small", "middle") for i, j in filled if numbers]
    if n <= 40:
        told = ((i, j, f"{rows} {classes[i]}, {columns} {classes[j]}: {counts[i, j]:,.0f}") for i, j in filled)
        body.append(hints(told, left, top, cell))
    under, bottom = names_below(classes, y(n), x)
    off, total = int(counts.sum() - np.trace(counts)), int(counts.sum())
    words = f"{off:,} of {several(total, 'label')} ({percent(off / (total or 1))}) {'were changed' if rows == 'given' else 'are wrong'}"
    caption = f"Rows are {rows} labels, columns {columns} ones; off the diagonal, {words}."
    return draw(f"labels_{name}", title, caption, caption, bottom, *body, names_left(classes, left - 5, y), under)


def short_count(n: Number) -> str:
    """A count in at most four characters.

    >>> short_count(950), short_count(1_230), short_count(12_300)
    ('950', '1.2k', '12k')
    """
    return f"{n:.0f}" if n < 1000 else f"{n / 1000:.1f}k" if n < 9950 else f"{n / 1000:.0f}k"


def phase_per_class(per_class: list[Json], classes: list[str]) -> Figure:
    """For each given class, how many users had it kept, relabelled, left to phase 2, or did not have it."""
    kinds = {
        "phase1_kept": ("fill-right", "phase 1 kept it"),
        "phase1_relabelled": ("fill-fixed", "phase 1 relabelled it"),
        "phase2": ("fill-c4", "phase 2 decided each sample"),
        "absent": ("fill-track", "no sample has it"),
    }
    keys, top = legend(kinds.values(), 0)
    names = [classes[entry["class"]] for entry in per_class]
    row, left = min(max(420 / len(names), 5.0), 22.0), room_for(names)
    most = max(sum(entry[kind] for kind in kinds) for entry in per_class)
    x, y = linear(0, most, left, WIDTH), linear(0, 1, top + 8, top + 8 + row)
    bottom, body = y(len(names)), [keys, names_left(names, left - 5, y)]
    for i, entry in enumerate(per_class):
        ends = list(accumulate((entry[kind] for kind in kinds), initial=0))
        for (colour, words), a, b in zip(kinds.values(), ends, ends[1:]):
            hint = f"{names[i]}, {words}: {several(b - a, 'user')}"
            body += [rect(x(a), y(i + 0.12), x(b) - x(a), row * 0.76, colour, hint)] if b > a else []
    body += [label(x(t), bottom + 12, f"{t:g}", "soft small", "end" if t == most else "middle") for t in ticks(0, most) if t == int(t)]
    told = "; ".join(f"{words} {sum(entry[kind] for entry in per_class):,} times" for kind, (_, words) in kinds.items())
    caption = "A bar is a given class, its parts are numbers of users: of how many which phase decided on the samples that carry it."
    return draw("phases", "Who decided, class by class", caption, f"Over all users and classes: {told}.", bottom + 16, *body)


def repaired_and_broken(repaired: Json, broken: Json) -> Figure:
    """What each phase did to the labels it decided."""
    keys, top = legend([("fill-fixed", "repaired: wrong before, right after"), ("fill-wrong", "broken: right before, wrong after")], 0)
    numbers = {f"Phase {i}": (repaired.get(f"phase{i}") or 0, broken.get(f"phase{i}") or 0) for i in (1, 2)}
    x, body = linear(0, max(1, *(n for pair in numbers.values() for n in pair)), 0, WIDTH - 50), [keys]
    for y, (phase, pair) in zip((top + 10, top + 74), numbers.items()):
        body.append(label(0, y + 10, phase, "strong"))
        for at, n, kind in zip((y + 17, y + 35), pair, ("fill-fixed", "fill-wrong")):
            body += [rect(0, at, max(x(n), 1.5), 14, kind, rx=2), label(max(x(n), 1.5) + 6, at + 11, f"{n:,}", "")]
    told = "; ".join(f"{phase} repaired {a:,} and broke {b:,}" for phase, (a, b) in numbers.items())
    return draw("repaired", "Labels each phase repaired and broke", f"{told}.", f"{told}.", top + 126, *body)


def noise_of_users(users: list[Json], corrected: bool) -> Figure:
    """Each user's share of wrong labels, the noisiest on top; before and after where labels were corrected."""
    users = sorted(users, key=lambda user: (-user["before"], user["user"]))
    worse, better = (sum(sign * user["after"] > sign * user["before"] for user in users) for sign in (1, -1))
    row, most = min(max(460 / len(users), 5.0), 19.0), max(user[when] for user in users for when in ("before", "after"))
    entries = [("ring", "before"), ("fill-fixed", "after")] + [("line-wrong", "more than before")] * (worse > 0)
    keys, top = legend(entries if corrected else [("ring", "wrong labels")], 0)
    x, y, radius = linear(0, most, 58, WIDTH - 12), linear(0, 1, top + 6, top + 6 + row), min(3.6, row / 2.6)
    body, bottom = [keys], y(len(users))
    for tick in ticks(0, most):
        words = f"{100 * tick:g}\u00a0%"
        body += [line(x(tick), top + 4, x(tick), bottom, "line-grid"), label(x(tick), bottom + 13, words, "soft small", "middle")]
    for i, user in enumerate(users):
        before, after, middle = user["before"], user["after"] if corrected else 0.0, y(i + 0.5)
        told = f"user {user['user']}: {percent(before)}" + (f" before, {percent(after)} after" if corrected else "")
        body.append(line(x(before), middle, x(after), middle, "line-fixed" if corrected and after <= before else "line-wrong"))
        body += [dot(x(after), middle, radius, "fill-fixed", told)] if corrected else []
        body.append(dot(x(before), middle, radius, "ring", told))
    body.append(names_left([f"user {user['user']}" for user in users], 49, y))
    caption = "The noisiest user is on top."
    if corrected:
        caption += f" {better} of {several(len(users), 'user')} have fewer wrong labels than before, {worse} have more."
    return draw("users", "Share of wrong labels", caption, caption, bottom + 18, *body)


def accuracy_lines(scored: list[tuple[int, Json]]) -> Figure:
    """A line for each task, grey if they are many, and a strong one for the mean of users; a round not scored is passed over."""
    tasks = max(len(accuracy.get("per_task") or []) for _, accuracy in scored)
    few = tasks <= 10
    curves = {("line-mean", "mean of users"): [(t, accuracy["mean"]) for t, accuracy in scored]}
    for task in range(tasks):
        values = ((t, (accuracy.get("per_task") or [])[task : task + 1]) for t, accuracy in scored)
        curves[f"line-c{task}" if few else "line", f"task {task}"] = [
            (t, value[0]) for t, value in values if value and value[0] is not None
        ]
    low = min(math.floor(10 * value) / 10 for curve in curves.values() for _, value in curve)
    low, first, last = min(low, 0.9), scored[0][0], scored[-1][0]
    keys, top = legend(curves if few else [*[*curves][:1], ("line", "each task")], 0, 34)
    x, y = linear(first, last, 38, WIDTH - 8), linear(low, 1, top + 196, top + 8)
    body = [keys]
    for tick in ticks(low, 1):
        body += [line(34, y(tick), WIDTH, y(tick), "line-grid"), label(29, y(tick) + 3.5, f"{100 * tick:g}\u00a0%", "soft small", "end")]
    body += [label(x(t), y(low) + 15, f"{t:g}", "soft small", "middle") for t in ticks(first, last, 8) if t == int(t)]
    body.append(label(WIDTH, y(low) + 29, "round", "soft small", "end"))
    for (kind, name), curve in reversed(curves.items()):
        body += [path("M" + "L".join(f"{x(t):.2f} {y(value):.2f}" for t, value in curve), kind)] if curve else []
        dots = curve if len(curve) <= 15 else []
        body += [dot(x(t), y(value), 2.4, kind.replace("line", "fill"), f"{name}, round {t}: {percent(value)}") for t, value in dots]
    start = f"{percent(scored[0][1]['mean'])} after round {first}, " if len(scored) > 1 else ""
    caption = f"Mean of users: {start}{percent(scored[-1][1]['mean'])} after round {last}."
    return draw("rounds", "Accuracy after each round", caption, caption, top + 228, *body)


def byte_bars(bars: list[tuple[str, int]]) -> Figure:
    """Positive numbers of bytes on a scale of powers of ten; the first one stands out."""
    low = max(math.floor(math.log10(min(n for _, n in bars))) - 1, 0)
    high = max(math.ceil(math.log10(max(n for _, n in bars))), low + 2)
    x, height, body = linear(low, high, 0, WIDTH), 34 * len(bars), []
    for y, (words, n) in zip(range(0, height, 34), bars):
        kind, colour = ("", "fill-mute") if y else ("strong", "fill-accent")
        body += [label(0, y + 11, words, kind), label(WIDTH, y + 11, size(n), kind, "end")]
        body += [rect(0, y + 16, WIDTH, 11, "fill-track", rx=2), rect(0, y + 16, x(math.log10(n)), 11, colour, rx=2)]
    for power in range(low, high + 1, math.ceil((high - low) / 6)):
        anchor, tick = "start" if power == low else "end" if power == high else "middle", min(max(x(power), 0.5), WIDTH - 0.5)
        words = size(10.0**power).replace(".0", "")
        body += [line(tick, height, tick, height + 4, "line"), label(x(power), height + 15, words, "soft small", anchor)]
    told = "; ".join(f"{words} {size(n)}" for words, n in bars)
    return draw("bytes", "Bytes sent", "On a scale of powers of ten: from mark to mark it is ten times as much.", told, height + 19, *body)
