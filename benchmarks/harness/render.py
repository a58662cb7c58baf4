"""Writes build/benchmarks.md and its plots, from the newest result of each kind; nothing is measured.

python -m benchmarks.harness.render
python -m benchmarks.harness.render --results elsewhere --page page.md --images images
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.speed.two_ranks import XDIT

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]

COLOURS = {"others": "#9aa0a6", "one": "#5f6368", "ours": "#1a73e8"}
INTRO = """# Benchmarks

Made by `python -m benchmarks.harness.render` from the newest files in `benchmarks/results`, which `bash
scripts/benchmark` and the commands of docs/results.md write. Every round runs each case once, in
turn; figures are medians over the rounds with the smallest and largest in brackets, and ratios are taken within a
round. CPU seconds are those of each rank's process inside
the loop; "by CPU s" is the plain loop's over the busiest rank's, a speed-up without waiting. Unless a section says otherwise
only the transformer and the sampler loop are timed."""

PEERS = """diffusers' context parallelism and xDiT do not start on a CPU as shipped; what is changed from outside is in
`benchmarks/rivals/diffusers_cpu.py` and `benchmarks/rivals/xdit_peer.py`. All read the same weights and start from the same
noise. The difference is that of the sample from one rank's, relative; below 1e-4 it is rounding."""

WORTH_SAYING = 0.02
"""Share of the cores' time."""


def newest(results: Path) -> dict[str, tuple[Path, Result]]:
    """By what was measured (and on what machine): the newest of the suite's results."""
    found: dict[str, tuple[Path, Result]] = {}
    for path in sorted(results.glob("*.json"), key=lambda path: path.stem.rsplit("_", 1)[-1]):
        result = json.loads(path.read_text())
        if isinstance(result, dict) and "what" in result:
            found[path.stem.rsplit("_", 1)[0]] = path, result
    return found


def table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join('' if cell is None else str(cell) for cell in line)} |" for line in lines)


def span(figure: dict | None, digits: int = 2, unit: str = "") -> str | None:
    """1.81x [1.79, 1.84]"""
    if not figure:
        return None
    text = f"{figure['median']:.{digits}f}{unit}"
    rounds = figure["rounds"]
    return text if len(rounds) == 1 else f"{text} [{min(rounds):.{digits}f}, {max(rounds):.{digits}f}]"


def numbers(values: list[float] | None, digits: int = 1) -> str | None:
    return None if not values else ", ".join(f"{value:.{digits}f}" for value in values)


def about(result: Result, path: Path, page: Path) -> str:
    link = os.path.relpath(path, page.parent)
    lines = [f"Model: {result['model']}.", f"Scope: {result['scope']}."]
    lines.append(f"{result['hardware']}; {result['rounds']} round(s), {result['date']} ([{path.name}]({link})).")
    if result.get("stolen", 0) >= WORTH_SAYING:
        lines.append(f"The machine is virtual, and its host took {result['stolen']:.0%} of its cores' time for others.")
    return "\n".join(lines)


def plot(path: Path, size: tuple[float, float], draw: Callable[[Any], None], panels: int = 1) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, panels)
    draw(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _bars(axes: Any, values: dict[str, dict], bounds: dict[str, float], label: str) -> None:
    names = list(values)[::-1]
    medians = [values[name]["median"] for name in names]
    spread = [[m - min(values[n]["rounds"]) for n, m in zip(names, medians, strict=True)]]
    spread.append([max(values[n]["rounds"]) - m for n, m in zip(names, medians, strict=True)])
    kinds = ["others" if name in XDIT or name.startswith("diffusers") else "ours" for name in names]
    kinds = ["one" if name.startswith("one rank") else kind for name, kind in zip(names, kinds, strict=True)]
    axes.barh(names, medians, xerr=spread, color=[COLOURS[kind] for kind in kinds], height=0.7)
    for place, name in enumerate(names):
        if name in bounds:
            axes.plot([bounds[name]] * 2, [place - 0.42, place + 0.42], color="black", linewidth=1.2)
    axes.axvline(1, color="grey", linewidth=0.6)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


REST = ("MB sent a step", "peak MB", "difference")


def two_ranks(result: Result, image: Path) -> str:
    cases = result["cases"]
    over = "speed_up_over_plain_loop"
    values = {name: case[over] for name, case in cases.items() if over in case}
    if values:
        bounds = {name: cases[name]["bound"] for name in values if "bound" in cases[name]}
        draw = lambda axes: _bars(axes, values, bounds, "speed over one plain diffusers loop (line: bound)")  # noqa: E731
        plot(image, (8, 0.32 * len(values) + 1), draw)
    rows = [
        [
            name,
            span(case["seconds"]),
            numbers(case.get("cpu_seconds_by_rank")),
            span(case.get(over), unit="x"),
            f"{case['share_of_bound']:.1%} of {case['bound']:.2f}" if "bound" in case else None,
            f"{by_cpu:.2f}x" if (by_cpu := case.get("speed_up_by_cpu_seconds")) else None,
            ", ".join(f"{axis} {mb:g}" for axis, mb in case.get("sent_MB_per_step", {}).items()),
            numbers(case.get("peak_MB_by_rank"), 0),
            f"{case['relative_difference']:.1g}" if "relative_difference" in case else None,
        ]
        for name, case in cases.items()
    ]
    columns = ["case", "seconds", "CPU s by rank", "speed-up", "share of bound", "by CPU s", *REST]
    compared = [[name, span(figure, 3)] for name, figure in result["comparisons"].items()]
    lines = [table(columns, rows), *(["", table(["compared", "ratio"], compared)] if compared else [])]
    missing = [f"- left out: {name}: {why}" for name, why in result["left_out"].items()]
    xdit = [f"xDiT (xfuser) {result['xdit']}."] if result["xdit"] else []
    return "\n".join([PEERS, *xdit, "", *lines, *([""] if missing else []), *missing])


def overheads(result: Result, image: Path) -> str:
    rows = [
        [name, f"{row['median_ms']:.3f}", f"{row['p90_ms']:.3f}", f"{row['limit_ms']:g}", "yes" if row["within"] else "no"]
        for name, row in result["overheads"].items()
    ]
    return table(["overhead", "median ms", "90 % below, ms", "wanted, ms", "kept"], rows)


GROWN = {"tokens": "image tokens", "steps": "steps", "ranks": "ranks"}


def growth(result: Result, image: Path) -> str:
    curves = result["curves"]

    def draw(axes: Any) -> None:
        for panel, (name, label) in zip(axes, GROWN.items(), strict=True):
            for mode, points in curves[name].items():
                at = [point[name] for point in points]
                if name == "ranks":
                    cost = [max(point["cpu_seconds_by_rank"]) for point in points]
                    one = curves["ranks"]["one rank"][0]
                    if mode != "one rank":
                        at, cost = [1, *at], [max(one["cpu_seconds_by_rank"]), *cost]
                else:
                    cost = [point["seconds"]["median"] for point in points]
                panel.plot(at, cost, marker="o", markersize=4, label=mode)
            panel.set_xlabel(label)
            panel.set_ylabel("CPU seconds of the busiest rank" if name == "ranks" else "seconds")
            panel.set_title(result[f"over_{name}"], fontsize=9)
            panel.legend(fontsize=8)
            panel.spines[["top", "right"]].set_visible(False)
            if name != "steps":
                panel.set_xscale("log", base=2)
                panel.set_xticks(at, [f"{tick:,}" for tick in at])
                panel.minorticks_off()

    plot(image, (12, 3.8), draw, panels=3)
    rows = [
        [label, point[name], mode, span(point["seconds"]), numbers(point["cpu_seconds_by_rank"], 2)]
        for name, label in GROWN.items()
        for mode, points in curves[name].items()
        for point in points
    ]
    return table(["grows", "to", "mode", "seconds", "CPU s by rank"], rows)


def first_picture(result: Result, image: Path) -> str:
    parts = list(next(iter(result["cases"].values())))
    rows = [[name, *(span(case[part]) for part in parts)] for name, case in result["cases"].items()]
    return table(["case", *(f"{part}, s" for part in parts)], rows)


def one_device(result: Result, image: Path) -> str:
    rows = [
        [
            size["tokens"],
            *(span(figure, 4) for figure in size["seconds"].values()),
            *(span(figure, 3) for figure in size["ratios"].values()),
        ]
        for size in result["sizes"]
    ]
    first = result["sizes"][0]
    wanted = ", ".join(f"{name} at most {limit}" for name, limit in first["limits"].items())
    columns = ["image tokens", *(f"{name}, s" for name in first["seconds"]), *first["ratios"]]
    compiled = "diffusers' blocks are compiled. " if result["compiled"] else ""
    return f"{compiled}Wanted: {wanted}.\n\n{table(columns, rows)}"


def one_rank_native(result: Result, image: Path) -> str:
    rows = [
        [
            name,
            span(case["native_seconds"], 3),
            span(case["rank_seconds"], 3),
            span(case["ratio"], 3),
            span(case["cpu_ratio"], 3),
            f"{case['relative_difference']:.1g}",
        ]
        for name, case in result["cases"].items()
    ]
    columns = ["file", "ComfyUI's own, s a step", "one rank, s a step", "ratio", "ratio of CPU s", "difference"]
    return f"Wanted: a ratio of at most {result['limit']}. Beside it ran: {result['beside']}.\n\n{table(columns, rows)}"


MARKERS = {"diffusers": "x", "xDiT": "+"}
"""First word of a peer's case -> its marker. The rest of the name is our case that does the same, whose colour it gets."""
SECONDS = (0.3, 0.4, 0.5, 0.7, 1, 1.5, 2, 3)


def links_plot(result: Result, image: Path) -> None:
    """Measured points, crosses for peers', and lines through what the planner says of the same modes."""
    found = sorted(result["links"].items(), key=lambda item: item[1]["MB_per_second"])
    speeds = [link["MB_per_second"] for _, link in found]

    def draw(axes: Any) -> None:
        colours: dict[str, str] = {}
        for mode in found[0][1]["cases"]:
            cases = [link["cases"][mode] for _, link in found]
            measured = [case["seconds_per_step"]["median"] for case in cases]
            peer, _, same = mode.partition(" ")
            look = {"marker": MARKERS[peer], "color": colours[same]} if peer in MARKERS else {"marker": "o"}
            (points,) = axes.plot(speeds, measured, markersize=5, linestyle="none", label=mode, **look)
            colours[mode] = points.get_color()
            if "planned_seconds_per_step" in cases[0]:
                planned = [case["planned_seconds_per_step"]["median"] for case in cases]
                axes.plot(speeds, planned, linewidth=1, color=points.get_color())
        axes.axhline(result["one_rank_seconds_per_step"]["median"], color=COLOURS["one"], linestyle="--", label="one rank")
        axes.set_xscale("log")
        axes.set_yscale("log")
        labels = [f"{name}\n{speed:.0f} MB/s" for (name, _), speed in zip(found, speeds, strict=True)]
        axes.set_xticks(speeds, labels, fontsize=6, rotation=30, ha="right")
        axes.set_yticks(SECONDS, [f"{seconds:g}" for seconds in SECONDS])
        axes.minorticks_off()
        axes.set_ylabel("seconds a step; lines: the planner's")
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        axes.spines[["top", "right"]].set_visible(False)

    plot(image, (9, 5), draw)


AUTO = (
    "\n\nWhat `degrees` auto takes in each round, without PipeFusion and with it; the fastest of what it may take, by "
    "medians; and the first over the second.\n\n"
)


def links(result: Result, image: Path) -> str:
    links_plot(result, image)
    found = result["links"]
    one = result["one_rank_seconds_per_step"]
    said = [
        [
            name,
            f"{link['real_GB_per_second']:g}",
            link["real_latency_us"],
            f"{link['gpu']}, {link['gpu_operations_per_second'] / 1e12:g}",
            f"{link['MB_per_second']:.1f}",
            link["latency_us"],
        ]
        for name, link in found.items()
    ]
    modes = next(iter(found.values()))["cases"]

    def auto(link: dict, which: str) -> list[str]:
        choice = link["auto"][which]
        over = ", ".join(f"{ratio:.2f}" for ratio in dict.fromkeys(choice["over_fastest"]))
        return [", ".join(dict.fromkeys(choice["chosen"])), choice["fastest"], over]

    chosen = [[name, *auto(link, "exact"), *auto(link, "pipelined")] for name, link in found.items() if link["auto"]]

    def cell(case: dict) -> str:
        ratio = case.get("planned_over_measured")
        return span(case["seconds_per_step"], 3) + (f"; {ratio:.2f}" if ratio else "")

    rows = [[mode, *(cell(link["cases"][mode]) for link in found.values())] for mode in modes]
    beside = f" Beside it: {result['beside']}." if "beside" in result else ""
    return (
        f"{result['ranks']} ranks over {result['queue']}.{beside} A link is as slow here as the real one is beside "
        f"{result['stands_for']} on the GPU named (`benchmarks/speed/links.py` has the formula); PipeFusion's transfers are "
        f"so too large a part of a step, since this model has fewer blocks. One rank takes {span(one, 3)} s a step.\n\n"
        + table(["link", "real, GB/s", "us", "GPU, 1e12 operations/s", "here, MB/s", "us"], said)
        + "\n\nSeconds a step"
        + ", then the planner's prediction over what was measured" * bool(chosen)
        + ".\n\n"
        + table(["mode", *found], rows)
        + (AUTO + table(["link", "auto, exact", "fastest", "over it", "auto, pipelined", "fastest", "over it"], chosen))
        * bool(chosen)
    )


SECTIONS: dict[str, tuple[str, Callable[[Result, Path], str]]] = {
    "two_ranks": ("Two ranks", two_ranks),
    "links": ("Links", links),
    "overheads": ("Overheads", overheads),
    "growth": ("How cost grows", growth),
    "first_picture": ("From nothing to the first picture", first_picture),
    "one_device": ("One device", one_device),
    "one_rank_native": ("One rank against ComfyUI's own model", one_rank_native),
}
"""By how a result's `what` begins, in the page's order."""


def render(results: Path, page: Path, images: Path) -> None:
    """Write the page and the plots that it shows. Both are made anew from the results alone."""
    page.parent.mkdir(parents=True, exist_ok=True)
    parts = [INTRO]
    found = newest(results)
    for kind, (title, section) in SECTIONS.items():
        for stem, (path, result) in sorted(found.items()):
            if not result["what"].startswith(kind):
                continue
            image = images / f"benchmark_{stem}.png"
            image.unlink(missing_ok=True)
            body = section(result, image)
            shown = f"\n![{title}]({os.path.relpath(image, page.parent)})\n" if image.exists() else ""
            model = result["model"].split(",")[0]
            if kind == "links" and result["ranks"] != 2:
                model += f", {result['ranks']} ranks"
            parts.append(f"## {title}: {model}\n{about(result, path, page)}\n{shown}\n{body}")
    page.write_text("\n\n".join(parts) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options.add_argument("--page", type=Path, default=ROOT / "build" / "benchmarks.md")
    options.add_argument("--images", type=Path, default=ROOT / "build" / "images")
    given = options.parse_args()
    render(given.results, given.page, given.images)


if __name__ == "__main__":
    main()
