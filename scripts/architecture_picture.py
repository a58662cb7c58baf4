"""docs/images/architecture.svg: the rooms of the code on their floors, and who imports whom, from the import graph.

    python scripts/architecture_picture.py           draws the picture
    python scripts/architecture_picture.py --check   exits with 1 if the committed picture is not the one of this code

Floors are those of the layers contract in pyproject.toml. An arrow is an import that no other arrow implies; a box names the
further rooms that are imported directly. Needs grimp, which import-linter brings.
"""

import argparse
import ast
import itertools
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
BACKEND = "parallel_backend"
NODES = "nodes"

WIDTH, BOX_WIDTH, BETWEEN, MARGIN = 1120, 236, 58, 24
"""Pixels: the picture, a box, the height between floors, the rim."""
TIP, LANE, LINE = 8, 14, 13
"""Pixels: an arrow's tip, from arrow to arrow in one gap, and from line to line of text."""
LETTERS = 40
"""Letters in a line of a box, at 11 pixels a letter's height."""
CLIENT, RANK, BOTH = "#dbe9fb", "#fde5cc", "#e6efe0"
TALK = ("processes", "rank")
"""Rooms that exchange messages and import nothing of each other: `processes` starts ranks by the name of their entry."""
LEGEND = (
    (CLIENT, "runs in ComfyUI's process"),
    (RANK, "runs on ranks"),
    (BOTH, "runs in both"),
)

Arrow = tuple[str, str]
Edges = frozenset[Arrow]


@dataclass(frozen=True)
class Box:
    """Where a room is drawn. `x`, `y`: the upper left corner, in pixels."""

    x: int
    y: int
    width: int
    height: int

    @property
    def centre(self) -> int:
        return self.x + self.width // 2


def room_of(module: str) -> str:
    """`parallel_backend.wire.tcp` -> `wire`; `nodes.model.patches.reach` -> `nodes`."""
    package, *inner = module.split(".")
    return inner[0] if package == BACKEND and inner else package


def imports_between_rooms() -> Edges:
    """(importing room, imported room) for every direct import of one room by another."""
    graph = grimp.build_graph(BACKEND, NODES, cache_dir=None)
    pairs = (
        (room_of(module), room_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )
    return frozenset((one, other) for one, other in pairs if one != other)


def floors() -> list[list[str]]:
    """Rooms by floor, from the top: the nodes, then the layers of import-linter's contract."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (c["layers"] for c in settings["contracts"] if c["type"] == "layers" and c["containers"] == [BACKEND])
    return [[NODES], *(re.findall(r"\w+", layer) for layer in layers)]


def reached(start: str, edges: Edges) -> frozenset[str]:
    """Rooms that `start` imports, directly or by way of others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = {other for one, other in edges if one == waiting[-1]} - found
        waiting.pop()
        found |= new
        waiting += sorted(new)
    return frozenset(found)


def without_implied(edges: Edges) -> Edges:
    """The transitive reduction: edges whose target no other import of the same room reaches."""
    return frozenset(
        (one, other)
        for one, other in edges
        if not any(other in reached(between, edges) for start, between in edges if start == one and between != other)
    )


def colour(room: str, edges: Edges) -> str:
    """By the processes that import the room: ComfyUI's by way of the client, ranks' by way of `rank`."""
    on_rank = room == "rank" or room in reached("rank", edges)
    at_client = room == "client" or room in reached("client", edges) or "client" in reached(room, edges)
    if on_rank and at_client:
        return BOTH
    return RANK if on_rank else CLIENT


def says(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = ROOT / (NODES if room == NODES else f"{BACKEND}/{room}") / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def lines_of(room: str, edges: Edges, arrows: Edges, width: int) -> list[str]:
    """The text in a box of `width` pixels, below the room's name."""
    letters = LETTERS * width // BOX_WIDTH
    further = sorted(other for one, other in edges - arrows if one == room)
    also = textwrap.wrap("Also imports " + ", ".join(further) + ".", letters) if further else []
    return textwrap.wrap(says(room), letters) + also


def placed(rows: Sequence[Sequence[str]], edges: Edges, arrows: Edges) -> dict[str, Box]:
    """Boxes side by side; a floor with one room at the very top or bottom is as wide as the picture."""
    boxes = {}
    y = MARGIN
    for floor, rooms in enumerate(rows):
        bar = len(rooms) == 1 and floor in (0, len(rows) - 1)
        width = WIDTH - 2 * MARGIN if bar else BOX_WIDTH
        height = 32 + LINE * max(len(lines_of(room, edges, arrows, width)) for room in rooms)
        for place, room in enumerate(rooms):
            centre = MARGIN + (WIDTH - 2 * MARGIN) * (2 * place + 1) // (2 * len(rooms))
            boxes[room] = Box(centre - width // 2, y, width, height)
        y += height + BETWEEN
    return boxes


def ordered(rows: Sequence[Sequence[str]], edges: Edges, arrows: Edges) -> list[list[str]]:
    """Each floor's rooms in the order that makes the arrows short and keeps the rooms of TALK side by side."""
    best = [sorted(rooms) for rooms in rows]

    def length(order: Sequence[Sequence[str]]) -> int:
        boxes = placed(order, edges, arrows)
        return sum(abs(boxes[one].centre - boxes[other].centre) for one, other in (*arrows, *[TALK] * len(rows)))

    for _ in rows:
        for floor in range(len(best)):
            orders = ([*best[:floor], list(order), *best[floor + 1 :]] for order in itertools.permutations(best[floor]))
            best = min(orders, key=length)
    return best


def gaps(rooms: Iterable[str], boxes: Mapping[str, Box]) -> list[int]:
    """The x of the gaps beside and between the boxes of a floor."""
    ends = sorted(end for room in rooms for end in (boxes[room].x, boxes[room].x + boxes[room].width))
    edges = [MARGIN, *ends, WIDTH - MARGIN]
    return [(left + right) // 2 for left, right in zip(edges[::2], edges[1::2], strict=True)]


def route(arrow: Arrow, rows: Sequence[Sequence[str]], boxes: Mapping[str, Box]) -> list[tuple[int, int]]:
    """(floor, x) of the gaps that an arrow goes through between its rooms: on each floor the nearest to a straight line."""
    first, last = (next(floor for floor, rooms in enumerate(rows) if room in rooms) for room in arrow)
    end = boxes[arrow[1]]
    x = end.centre if boxes[arrow[0]].width > BOX_WIDTH else boxes[arrow[0]].centre
    points = []
    for floor in range(first + 1, last):
        aim = x if end.width > BOX_WIDTH else x + (end.centre - x) // (last - floor + 1)
        x = min(gaps(rows[floor], boxes), key=lambda gap, aim=aim: (abs(gap - aim), gap))
        points.append((floor, x))
    return points


def apart(routes: Mapping[Arrow, list[tuple[int, int]]], boxes: Mapping[str, Box]) -> dict[Arrow, list[tuple[int, int]]]:
    """The same routes with LANE pixels between arrows that share a gap."""
    sharing: dict[tuple[int, int], list[Arrow]] = {}
    for arrow in sorted(routes, key=lambda arrow: (boxes[arrow[1]].centre, boxes[arrow[0]].centre, arrow)):
        for point in routes[arrow]:
            sharing.setdefault(point, []).append(arrow)

    def lane(arrow: Arrow, point: tuple[int, int]) -> tuple[int, int]:
        users = sharing[point]
        return point[0], point[1] + LANE * (2 * users.index(arrow) - len(users) + 1) // 2

    return {arrow: [lane(arrow, point) for point in points] for arrow, points in routes.items()}


def ports(routes: Mapping[Arrow, list[tuple[int, int]]], boxes: Mapping[str, Box], end: int) -> dict[Arrow, int]:
    """The x at which each arrow leaves (`end` 0) or reaches (`end` 1) its box, in the order of the arrows' other ends."""
    found = {}
    for room, box in boxes.items():
        towards = {
            arrow: points[-end][1] if points else boxes[arrow[1 - end]].centre
            for arrow, points in routes.items()
            if arrow[end] == room
        }
        for place, arrow in enumerate(sorted(towards, key=lambda arrow: (towards[arrow], arrow))):
            spread = box.x + box.width * (2 * place + 1) // (2 * len(towards))
            found[arrow] = spread if box.width == BOX_WIDTH else towards[arrow]
    return found


def path(start: int, between: Sequence[tuple[int, Box]], end: int, first: Box, last: Box) -> str:
    """An arrow as an SVG path: straight down in the gaps `between` (x, a box of that floor), and curved between floors."""
    x, y = start, first.y + first.height
    text = f"M{x} {y}"
    for to, top, bottom in (*((x, box.y, box.y + box.height) for x, box in between), (end, last.y - TIP, last.y - TIP)):
        middle = (y + top) // 2
        text += f" C{x} {middle} {to} {middle} {to} {top}"
        if bottom > top:
            text += f" V{bottom}"
        x, y = to, bottom
    return text


def drawn_box(room: str, box: Box, fill: str, lines: Sequence[str]) -> Iterator[str]:
    name = f"{NODES}/" if room == NODES else f"{BACKEND}/{room}/"
    yield f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" fill="{fill}" stroke="#555"/>'
    yield f'<text x="{box.x + 8}" y="{box.y + 18}" font-size="13" font-weight="bold">{escape(name)}</text>'
    for number, line in enumerate(lines):
        yield f'<text x="{box.x + 8}" y="{box.y + 34 + LINE * number}" font-size="11">{escape(line)}</text>'


def drawn_talk(one: Box, other: Box) -> Iterator[str]:
    left, right = sorted((one, other), key=lambda box: box.x)
    start, end, y = left.x + left.width, right.x, left.y + left.height // 2
    yield (
        f'<path d="M{start + TIP} {y}H{end - TIP}" stroke="#333" stroke-width="1.3" stroke-dasharray="5 4" '
        'marker-start="url(#tip)" marker-end="url(#tip)"/>'
    )
    yield f'<text x="{(start + end) // 2}" y="{y - 8}" font-size="11" text-anchor="middle">messages</text>'


def drawn_legend(y: int) -> Iterator[str]:
    for number, (fill, words) in enumerate(LEGEND):
        x = MARGIN + 200 * number
        yield f'<rect x="{x}" y="{y}" width="16" height="16" fill="{fill}" stroke="#555"/>'
        yield f'<text x="{x + 22}" y="{y + 13}" font-size="12">{words}</text>'
    yield f'<text x="{MARGIN + 200 * len(LEGEND)}" y="{y + 13}" font-size="12">arrow: imports</text>'


def picture() -> str:
    """The SVG as text: the same text for the same imports, floors and docstrings."""
    edges = imports_between_rooms()
    arrows = without_implied(edges)
    rows = ordered(floors(), edges, arrows)
    boxes = placed(rows, edges, arrows)
    routes = apart({arrow: route(arrow, rows, boxes) for arrow in arrows}, boxes)
    leaves, reaches = (ports(routes, boxes, end) for end in (0, 1))
    last = boxes[rows[-1][0]]
    legend = last.y + last.height + MARGIN
    height = legend + 16 + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<!-- Drawn by scripts/architecture_picture.py. -->",
        '<marker id="tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        '<path d="M0 0L8 4L0 8z" fill="#333"/></marker>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for arrow in sorted(arrows):
        one, other = (boxes[room] for room in arrow)
        between = [(x, boxes[rows[floor][0]]) for floor, x in routes[arrow]]
        parts.append(
            f'<path d="{path(leaves[arrow], between, reaches[arrow], one, other)}" fill="none" stroke="#333" '
            f'stroke-width="1.3" marker-end="url(#tip)"><title>{arrow[0]} imports {arrow[1]}</title></path>'
        )
    for room in itertools.chain.from_iterable(rows):
        parts += drawn_box(room, boxes[room], colour(room, edges), lines_of(room, edges, arrows, boxes[room].width))
    parts += drawn_talk(*(boxes[room] for room in TALK))
    parts += drawn_legend(legend)
    return "\n".join((*parts, "</svg>")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed picture, and write nothing")
    text = picture()
    if not parser.parse_args().check:
        PICTURE.write_text(text, encoding="utf-8")
    elif not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PICTURE.name} is not the picture of this code: run python scripts/architecture_picture.py")


if __name__ == "__main__":
    main()
