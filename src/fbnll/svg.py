"""Markup that escapes whatever is put into it, numbers as a person reads them, and the few shapes that figures are drawn from."""

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Number = float | int  # numpy.float64 is a float, numpy.int64 is not an int
WIDTH = 340.0  # of every figure: a telephone shows it at its own size, and two stand side by side on a desk
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


def shortest(x: Number) -> str:
    """A coordinate with as few characters as a hundredth of a unit needs."""
    return f"{round(x, 2):g}"


def percent(x: Number) -> str:
    return f"{100 * x:.1f}\u00a0%"


def size(n: Number) -> str:
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


def rect(x: Number, y: Number, width: Number, height: Number, kind: str, title: str | None = None, **more: object) -> Markup:
    """A bar or a swatch; never of negative size."""
    return tag("rect", titled(title), x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=kind, **more)


def line(x1: Number, y1: Number, x2: Number, y2: Number, kind: str, **more: object) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind, **more)


def dot(x: Number, y: Number, radius: Number, kind: str, title: str | None = None) -> Markup:
    return tag("circle", titled(title), cx=x, cy=y, r=radius, class_=kind)


def path(d: str, kind: str, title: str | None = None, **more: object) -> Markup:
    return tag("path", titled(title), d=d, class_=kind, **more)


def label(x: Number, y: Number, words: object, kind: str = "soft", anchor: str = "start", **more: object) -> Markup:
    return tag("text", words, x=x, y=y, class_=kind, text_anchor=None if anchor == "start" else anchor, **more)


def wide(words: str) -> float:
    """About how wide words are in a figure, which nothing but a browser can measure."""
    return sum(3.3 if c in " fijlrtI.,:;-'()" else 6.0 if c < "\u2e80" and not c.isupper() and c not in "mw%" else 8.3 for c in words)


def shorten(words: str, room: Number) -> str:
    """As much of the words as has room.

    >>> shorten("automobile", 30)
    'auto…'
    """
    if wide(words) <= room:
        return words
    fitting = sum(end <= room for end in accumulate(map(wide, words), initial=wide("…")))
    return words[: max(fitting - 1, 0)] + "…"


def linear(low: Number, high: Number, start: Number, end: Number) -> Callable[[Number], Number]:
    """Where on the way from start to end a value between low and high lies; a range of one value begins at the start."""
    return lambda value: start + (value - low) / ((high - low) or 1.0) * (end - start)


def ticks(low: Number, high: Number, most: int = 5) -> list[Number]:
    """Round numbers from low to high, at most so many.

    >>> ticks(0, 37)
    [0, 10, 20, 30]
    """
    rough = (high - low) / most or 1.0
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    return [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def legend(entries: Iterable[tuple[str, str]], y: Number, x: Number = 0.0) -> tuple[Markup, Number]:
    """Swatches with their words from left to right, on as many lines as they need, and the y under the last one."""
    drawn, at = Markup(), x
    for kind, words in entries:
        if at > x and at + 16 + wide(words) > WIDTH:
            at, y = x, y + 16
        swatch = line(at, y + 5, at + 10, y + 5, kind) if kind.startswith("line") else dot(at + 5, y + 5, 4.4, kind)
        drawn = join(drawn, swatch, label(at + 14, y + 8.8, shorten(words, WIDTH - at - 14)))
        at += 28 + wide(words)
    return drawn, y + 16


def cells(shade: Float[np.ndarray, "rows columns"], kind: str, x: Number, y: Number, size: Number) -> Markup:
    """Squares of one colour, from not there at 0 to full at 1 and NaN left out: one path for each of twenty shades."""
    level = np.rint(np.nan_to_num(np.clip(shade, 0, 1)) * 20).astype(int)
    squares = {s: "".join(f"M{j} {i}h1v1h-1z" for i, j in np.argwhere(level == s)) for s in np.unique(level[level > 0])}
    drawn = (path(d, kind, fill_opacity=s / 20) for s, d in squares.items())
    return tag("g", *drawn, transform=f"translate({shortest(x)} {shortest(y)}) scale({size:.6g})", class_="crisp")


def hints(titles: Iterable[tuple[int, int, str]], x: Number, y: Number, size: Number) -> Markup:
    """Nothing to see: what a pointer is told on square (row, column)."""
    return join(*(rect(x + j * size, y + i * size, size, size, "fill-none", title) for i, j, title in titles))


def names_below(names: Sequence[str], y: Number, x: Callable[[Number], Number]) -> tuple[Markup, Number]:
    """Names under columns, slanted where they are long, numbers of some where there are many; and the y under them."""
    step = x(1) - x(0)
    if max(map(wide, names), default=0.0) <= step - 2:
        return join(*(label(x(i + 0.5), y + 12, name, anchor="middle") for i, name in enumerate(names))), y + 16
    if step >= 13:
        ends = [(shorten(name, 60), shortest(x(i + 0.5) + 4), shortest(y + 8)) for i, name in enumerate(names)]
        slanted = (tag("text", name, class_="soft", text_anchor="end", transform=f"translate({a} {b}) rotate(-45)") for name, a, b in ends)
        return join(*slanted), y + 12 + max(wide(name) for name, *_ in ends) * 0.72
    numbered = (label(x(i + 0.5), y + 12, f"{i:g}", anchor="middle") for i in ticks(0, len(names) - 1, 10) if i == int(i))
    return join(*numbered), y + 16


def names_left(names: Sequence[str], x: Number, y: Callable[[Number], Number]) -> Markup:
    """Names left of rows, ending at x; of every n-th row only, where rows are thin."""
    every = math.ceil(11 / (y(1) - y(0)))
    return join(*(label(x, y(i + 0.5) + 3.6, shorten(name, x), anchor="end") for i, name in enumerate(names) if i % every == 0))


def room_for(names: Iterable[str]) -> Number:
    """How much the longest name needs left of its row, at most a fifth of the figure."""
    return min(max(map(wide, names), default=0.0) + 8, WIDTH / 5)


def draw(name: str, title: str, caption: str, alternative: str, height: Number, *body: object) -> Figure:
    """A figure: the body on a canvas of the common width, with the text that stands for it where it cannot be seen."""
    box, told = f"0 0 {shortest(WIDTH)} {shortest(height)}", f"{title}. {alternative}"
    contents = join(tag("title", title), tag("desc", alternative), *body)
    svg = tag("svg", contents, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", aria_label=told)
    return Figure(name, title, caption, svg)


def standalone(figure: Figure, css: str) -> str:
    """The figure as the text of an SVG file, with its own style."""
    return figure.svg.replace(">", f"><style>{css}</style>", 1) + "\n"
