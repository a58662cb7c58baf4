"""A trace as a picture: for each rank a lane of computing and waiting, and a thin lane of transfers.

The upper panel shows the whole run, the lower one its first steps. Since a micro-step may be much shorter than a pixel, each
pixel column of a lane is filled from below with the colours of the kinds, by their shares of the column's time.
"""

import textwrap
from collections.abc import Sequence

import numpy as np

from .trace import RankTrace, Trace

EXACT, BANDED, WAITING, TRANSFERRING, IDLE = "#0B4F7D", "#56B4E9", "#D55E00", "#009E73", "#E9E9E9"
FETCHING = "#CC79A7"
"""The colours of Okabe and Ito, which colour-blind people can tell apart."""
BAND_SHADES = ("#A6D8F5", "#3D97D3")
"""Colours of the first and last band in the lower panel; the others are between them."""
INK, PALE = "#222222", "#6B6B6B"

WIDTH = 1600
"""Picture width at which the sizes below are pixels. Pictures of other widths are scaled, text too."""
LEFT, RIGHT, TOP, BOTTOM = 190, 216, 84, 62
AXIS, GAP = 26, 46  # heights of the axis under a panel, and between the panels
ROWS = ((64, 36, 8), (72, 42, 8))  # by panel: heights of a rank's row, of its lane, of its lane of transfers
ZOOM_STEPS, ZOOM_PIECES, ZOOM_SHARE = 24, 60, 0.6

Layer = tuple[np.ndarray, str]
"""(SPAN [n], colour). The spans of all layers of a lane do not overlap."""


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)], np.uint8)


def united(spans: np.ndarray) -> np.ndarray:
    """Spans without overlaps that cover the same time as these, which are sorted by start."""
    if not len(spans):
        return spans
    reached = np.maximum.accumulate(spans["stop"])
    first = np.concatenate(([True], spans["start"][1:] > reached[:-1]))
    out = spans[first]
    out["stop"] = reached[np.concatenate((np.flatnonzero(first)[1:] - 1, [len(spans) - 1]))]
    return out


def covered(spans: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[columns]: the share of each column [edges[i], edges[i + 1]) that these spans, without overlaps, cover."""
    if not len(spans):
        return np.zeros(len(edges) - 1)
    times = np.stack((spans["start"], spans["stop"]), 1).reshape(-1)
    length = np.cumsum(spans["stop"] - spans["start"])
    seconds = np.stack((np.concatenate(([0.0], length[:-1])), length), 1).reshape(-1)
    return np.diff(np.interp(edges, times, seconds)) / np.diff(edges)


def lane(layers: Sequence[Layer], edges: np.ndarray, height: int) -> np.ndarray:
    """Pixels [height, columns, 3] uint8. The first layer is lowest; IDLE is above the last layer."""
    tops = np.cumsum([covered(spans, edges) for spans, _ in layers], axis=0)
    rows = (np.arange(height)[::-1] + 0.5) / height
    layer = (rows[:, None, None] > tops.T[None]).sum(-1)
    return np.stack([*(rgb(colour) for _, colour in layers), rgb(IDLE)])[layer]


def shade(band: int, bands: int) -> str:
    first, last = (rgb(colour).astype(float) for colour in BAND_SHADES)
    mixed = first + (last - first) * (band / max(1, bands - 1))
    return "#" + "".join(f"{round(value):02X}" for value in mixed)


def zoom_stop(trace: Trace) -> float | None:
    """End of the lower panel in seconds. None: the run is so short that it has no lower panel."""
    stops = []
    for rank in trace.ranks:
        if len(rank.work) > 1:
            pieces = int(np.searchsorted(rank.work["stop"], rank.computing["stop"][:ZOOM_PIECES][-1]))
            stops.append(float(rank.work["stop"][min(max(1, pieces), ZOOM_STEPS, len(rank.work) - 1)]))
    stop = max(stops, default=trace.seconds)
    return stop if stop < ZOOM_SHARE * trace.seconds else None


def draw(trace: Trace, width: int = WIDTH) -> np.ndarray:
    """The picture, [height, width, 3] uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stop = zoom_stop(trace)
    spans = [(0.0, trace.seconds)] if stop is None else [(0.0, trace.seconds), (0.0, stop)]
    heights = [len(trace.ranks) * row for row, _, _ in ROWS[: len(spans)]]
    height = TOP + sum(heights) + AXIS * len(spans) + GAP * (len(spans) - 1) + BOTTOM
    scale = width / WIDTH
    figure = Figure((WIDTH / 100, round(height * scale) / scale / 100), dpi=100 * scale, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    _title(figure, trace, height)
    top, panels = TOP, []
    for index, (time, panel_height) in enumerate(zip(spans, heights, strict=True)):
        panels.append(_panel(figure, trace, time, top, panel_height, height, scale, zoomed=index == 1))
        top += panel_height + AXIS + GAP
    if stop is not None:
        _funnel(figure, panels, stop)
    _legend(figure, trace, height)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _title(figure, trace: Trace, height: int) -> None:
    figure.text(24 / WIDTH, 1 - 30 / height, trace.title, size=15, weight="bold", color=INK, va="center")
    figures = [f"{trace.seconds:.2f} s", f"{max(len(rank.work) for rank in trace.ranks)} micro-steps per rank"]
    if trace.hidden is not None:
        figures.append(f"{100 * trace.hidden:.0f} % of the transfers' time hidden behind computing")
    if any(rank.lost for rank in trace.ranks):
        figures.append("the first part of this long run was not kept")
    figure.text(24 / WIDTH, 1 - 58 / height, "  ·  ".join(figures), size=12, color=PALE, va="center")


def _panel(figure, trace: Trace, time: tuple[float, float], top: int, panel: int, height: int, scale: float, zoomed: bool):
    """Draw the panel for the times `time`, with a row for each rank. `top`, `panel`, `height`: pixels at WIDTH."""
    row, tall, thin = ROWS[zoomed]
    wide = WIDTH - LEFT - RIGHT
    axes = figure.add_axes((LEFT / WIDTH, 1 - (top + panel) / height, wide / WIDTH, panel / height))
    edges = np.linspace(*time, round(wide * scale) + 1)
    for place, rank in enumerate(trace.ranks):
        upper = place * row + 4
        for layers, start, size in (
            (_layers(trace, rank, zoomed), upper, tall),
            ([(united(rank.transfers), TRANSFERRING)], upper + tall + 3, thin),
        ):
            pixels = lane(layers, edges, max(1, round(size * scale)))
            axes.imshow(pixels, extent=(*time, start + size, start), aspect="auto", interpolation="nearest")
        _name(axes, trace, rank, place * row, row, figures=not zoomed)
        if zoomed:
            _marks(axes, trace, rank, time, upper, tall, wide)
    axes.set(xlim=time, ylim=(panel, 0), yticks=[])
    unit, factor = ("ms", 1000) if time[1] < 2 else ("s", 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * factor:g} {unit}" if value else f"0 {unit}")
    axes.tick_params(axis="x", labelsize=11, colors=PALE, length=4)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    if zoomed:
        axes.set_title("the first steps", size=12, color=PALE, loc="left", pad=7)
    return axes


def _layers(trace: Trace, rank: RankTrace, zoomed: bool) -> list[Layer]:
    bands = trace.band(rank.computing)
    layers = [(rank.computing[bands < 0], EXACT)]
    if not zoomed:
        layers.append((rank.computing[bands >= 0], BANDED))
    else:
        count = len(trace.bands)
        layers += [(rank.computing[bands == band], shade(band, count) if count > 1 else BANDED) for band in range(count)]
    return [*layers, (rank.waits, WAITING), (rank.fetches, FETCHING)]


def _name(axes, trace: Trace, rank: RankTrace, top: int, row: int, figures: bool) -> None:
    """Write the rank's name at the left of its row and, with `figures`, its shares of time at the right."""
    at = axes.get_yaxis_transform()  # x in parts of the panel, y in its pixels
    wide = WIDTH - LEFT - RIGHT
    left = (24 - LEFT) / wide
    # No-break spaces keep an axis with its number. Text beyond two lines is left out; the trace's text has all of it.
    where = rank.where.replace(" of ", "/").replace(" ", "\u00a0").replace(",\u00a0", ", ")
    lines = textwrap.wrap(where, 22)[:2]
    axes.text(left, top + 15, f"rank {rank.rank}", transform=at, size=13, weight="bold", color=INK, va="center")
    for index, line in enumerate(lines):
        axes.text(left, top + 32 + 15 * index, line, transform=at, size=10, color=PALE, va="center")
    if not figures:
        return
    waits = np.concatenate((rank.waits, rank.fetches))
    computing, waiting = (float((spans["stop"] - spans["start"]).sum()) / trace.seconds for spans in (rank.computing, waits))
    shares = [(f"computing {100 * computing:.0f} %", INK, 12)]
    shares.append((f"waiting {100 * waiting:.0f} %, idle {100 * max(0.0, 1 - computing - waiting):.0f} %", PALE, 10))
    shares.append(("no transfers" if rank.hidden is None else f"{100 * rank.hidden:.0f} % of transfers hidden", PALE, 10))
    for index, (text, colour, size) in enumerate(shares):
        axes.text(1 + 14 / wide, top + 14 + 17 * index, text, transform=at, size=size, color=colour, va="center")


def _marks(axes, trace: Trace, rank: RankTrace, time: tuple[float, float], top: int, tall: int, wide: int) -> None:
    """Draw lines between micro-steps and write their bands' numbers, if the micro-steps are wide enough."""
    shown = rank.work[rank.work["start"] < time[1]]
    per_pixel = (time[1] - time[0]) / wide
    if not len(shown) or float(np.median(shown["stop"] - shown["start"])) < 5 * per_pixel:
        return
    axes.vlines(shown["start"], top, top + tall, colors="white", linewidth=0.8)
    bands = trace.band(shown)
    for span, band in zip(shown, bands, strict=True):
        parts = rank.computing[rank.computing["step"] == span["step"]]
        part = parts[np.argmax(parts["stop"] - parts["start"])]
        text = "exact" if band < 0 else str(band + 1)
        if band >= 0 and len(trace.bands) == 1:
            continue
        middle = (part["start"] + part["stop"]) / 2
        if part["stop"] - part["start"] > (12 + 8 * len(text)) * per_pixel and middle < time[1]:
            dark = band >= 0 and band < len(trace.bands) * 0.7
            colour = INK if dark else "white"
            axes.text(middle, top + tall / 2, text, size=10, color=colour, ha="center", va="center", clip_on=True)


def _funnel(figure, panels, stop: float) -> None:
    """Connect the lower panel with the part of the upper panel that it enlarges."""
    from matplotlib.patches import Polygon

    upper, lower = (axes.get_position() for axes in panels)
    end = upper.x0 + stop / panels[0].get_xlim()[1] * upper.width
    corners = [(upper.x0, upper.y0), (end, upper.y0), (lower.x1, lower.y1), (lower.x0, lower.y1)]
    figure.add_artist(Polygon(corners, facecolor="#F4F4F4", edgecolor="none", zorder=-1))
    panels[0].axvspan(0, stop, facecolor="none", edgecolor=PALE, linewidth=1, linestyle=(0, (3, 2)))


def _legend(figure, trace: Trace, height: int) -> None:
    from matplotlib.patches import Patch

    banded = "displaced patches, keys a step old" if trace.degrees.displaced else "band, other bands' keys a step old"
    entries = {
        EXACT: "naive patch" if trace.degrees.naive else "exact step",
        BANDED: banded if len(trace.bands) else None,
        WAITING: "waiting for a transfer",
        FETCHING: "waiting for weights" if any(len(rank.fetches) for rank in trace.ranks) else None,
        TRANSFERRING: "transfer under way",
        IDLE: "nothing to do",
    }
    handles = [Patch(color=colour, label=text) for colour, text in entries.items() if text is not None]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(16 / WIDTH, 6 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=12,
        labelcolor=INK,
        handlelength=1.2,
        handleheight=1.0,
        columnspacing=1.8,
    )
