"""Markup that escapes whatever is put into it, numbers as a person reads them, and the few shapes that figures are drawn from."""

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

WIDTH = 340.0  # of every figure: a telephone shows it at its own size, and two stand side by side on a desk
LETTER = 6.0  # about the width of a letter in the figures, which nothing but a browser can measure
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Markup(str):
    """A text that is HTML or SVG already; any other text is escaped on its way into an element."""


class Figure(NamedTuple):
    """A drawing, what it shows in a line, how it is to be read, and its file name without the ending."""

    name: str
    title: str
    caption: str
    svg: Markup


def escape(value: object) -> Markup:
    """Whatever it is as text that is safe between tags and in attributes, characters that XML forbids replaced."""
    return value if isinstance(value, Markup) else Markup(html.escape(NOT_XML.sub("\ufffd", str(value))))


def join(*parts: object) -> Markup:
    """The parts one after the other, those that are not markup escaped."""
    return Markup("".join(map(escape, parts)))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element; `class_` is class, `data_key` is data-key, an attribute that is None is left out.

    >>> tag("b", "1 < 2", tag("i", "!"), class_="x", data_key=None, width=2 / 3)
    '<b class="x" width="0.67">1 &lt; 2<i>!</i></b>'
    """
    named = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    opening = " ".join([name, *(f'{key}="{shortest(v) if isinstance(v, float) else escape(v)}"' for key, v in named)])
    return Markup(f"<{opening}>{join(*children)}" + ("" if name in ("meta", "link") else f"</{name}>"))


def shortest(x: float) -> str:
    """A coordinate with as few characters as a hundredth of a unit needs."""
    return f"{round(x, 2):g}"


def percent(x: float) -> str:
    return f"{100 * x:.1f}\u00a0%"


def size(n: float) -> str:
    """Bytes in powers of a thousand.

    >>> size(83_200).split()
    ['83.2', 'kB']
    """
    power = min(int(math.log10(n)) // 3, 4) if n >= 1 else 0
    return f"{n / 1000**power:.{1 if power else 0}f}\u00a0{('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def several(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def titled(title: str | None) -> Markup:
    """What a pointer that rests on the shape is told."""
    return tag("title", title) if title else Markup()


def rect(x: float, y: float, width: float, height: float, kind: str, title: str | None = None, **more: object) -> Markup:
    """A bar or a swatch; never of negative size."""
    return tag("rect", titled(title), x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=kind, **more)


def line(x1: float, y1: float, x2: float, y2: float, kind: str, **more: object) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind, **more)


def dot(x: float, y: float, radius: float, kind: str, title: str | None = None) -> Markup:
    return tag("circle", titled(title), cx=x, cy=y, r=radius, class_=kind)


def path(d: str, kind: str, title: str | None = None, **more: object) -> Markup:
    return tag("path", titled(title), d=d, class_=kind, **more)


def label(x: float, y: float, words: object, kind: str = "soft", anchor: str = "start", **more: object) -> Markup:
    return tag("text", words, x=x, y=y, class_=kind, text_anchor=None if anchor == "start" else anchor, **more)


def shorten(words: str, width: float) -> str:
    """As much of the words as has room in the width.

    >>> shorten("automobile", 30)
    'auto…'
    """
    room = max(int(width / LETTER), 1)
    return words if len(words) <= room else words[: room - 1] + "…"


def linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Where on the way from start to end a value between low and high lies; a range of one value begins at the start."""
    return lambda value: start + (value - low) / ((high - low) or 1.0) * (end - start)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from low to high, at most so many.

    >>> ticks(0, 37)
    [0, 10, 20, 30]
    """
    rough = (high - low) / most or 1.0
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    return [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def legend(entries: Iterable[tuple[str, str]], y: float, x: float = 0.0) -> tuple[Markup, float]:
    """Swatches with their words from left to right, on as many lines as they need, and the y under the last one."""
    drawn, at = Markup(), x
    for kind, words in entries:
        if at > x and at + 16 + len(words) * LETTER > WIDTH:
            at, y = x, y + 16
        swatch = line(at, y + 5, at + 10, y + 5, kind) if kind.startswith("line") else dot(at + 5, y + 5, 4.4, kind)
        drawn = join(drawn, swatch, label(at + 14, y + 8.8, shorten(words, WIDTH - at - 14)))
        at += 26 + len(words) * LETTER
    return drawn, y + 16


def cells(shade: Float[np.ndarray, "rows columns"], kind: str, x: float, y: float, size: float) -> Markup:
    """Squares of one colour, from not there at 0 to full at 1 and NaN left out: one path for each of twenty shades."""
    level = np.rint(np.nan_to_num(np.clip(shade, 0, 1)) * 20).astype(int)
    squares = {s: "".join(f"M{j} {i}h1v1h-1z" for i, j in np.argwhere(level == s)) for s in np.unique(level[level > 0])}
    drawn = (path(d, kind, fill_opacity=s / 20) for s, d in squares.items())
    return tag("g", *drawn, transform=f"translate({shortest(x)} {shortest(y)}) scale({size:.6g})", class_="crisp")


def hints(titles: Iterable[tuple[int, int, str]], x: float, y: float, size: float) -> Markup:
    """Nothing to see: what a pointer is told on square (row, column)."""
    return join(*(rect(x + j * size, y + i * size, size, size, "fill-none", title) for i, j, title in titles))


def names_below(names: Sequence[str], y: float, x: Callable[[float], float]) -> tuple[Markup, float]:
    """Names under columns, slanted where they are long, numbers of some where there are many; and the y under them."""
    step = x(1) - x(0)
    if max(map(len, names), default=0) * LETTER <= step - 2:
        return join(*(label(x(i + 0.5), y + 12, name, anchor="middle") for i, name in enumerate(names))), y + 16
    if step >= 13:
        ends = [(shorten(name, 60), shortest(x(i + 0.5) + 4), shortest(y + 8)) for i, name in enumerate(names)]
        slanted = (tag("text", name, class_="soft", text_anchor="end", transform=f"translate({a} {b}) rotate(-45)") for name, a, b in ends)
        return join(*slanted), y + 12 + max(len(name) for name, *_ in ends) * LETTER * 0.72
    numbered = (label(x(i + 0.5), y + 12, f"{i:g}", anchor="middle") for i in ticks(0, len(names) - 1, 10) if i == int(i))
    return join(*numbered), y + 16


def names_left(names: Sequence[str], x: float, y: Callable[[float], float]) -> Markup:
    """Names left of rows, ending at x; of every n-th row only, where rows are thin."""
    every = math.ceil(11 / (y(1) - y(0)))
    return join(*(label(x, y(i + 0.5) + 3.6, shorten(name, x), anchor="end") for i, name in enumerate(names) if i % every == 0))


def room_for(names: Iterable[str]) -> float:
    """How much the longest name needs left of its row, at most a fifth of the figure."""
    return min(max(map(len, names), default=0) * LETTER + 8, WIDTH / 5)


def draw(name: str, title: str, caption: str, alternative: str, height: float, *body: object) -> Figure:
    """A figure: the body on a canvas of the common width, with the text that stands for it where it cannot be seen."""
    box, told = f"0 0 {shortest(WIDTH)} {shortest(height)}", f"{title}. {alternative}"
    contents = join(tag("title", title), tag("desc", alternative), *body)
    svg = tag("svg", contents, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", aria_label=told)
    return Figure(name, title, caption, svg)


def standalone(figure: Figure, css: str) -> str:
    """The figure as the text of an SVG file, with its own style."""
    return figure.svg.replace(">", f"><style>{css}</style>", 1) + "\n"
