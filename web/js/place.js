/** Where a new node goes on the canvas: near something, where no node is and where none grows to. */
import { NODE, PIPELINE } from "./wires.js";

const GAP = 40; // between nodes, in the canvas's units
const TITLE_HEIGHT = 30;
const LINES = 70; // by which a node grows when it says something
const ROOM = 90 + LINES; // of a node that is not drawn yet: in Nodes 2.0 it is taller than its size says

/** A node's box, its title and its lines included. An end of a subgraph has its title inside. */
function box({ id, type, pos, size }) {
    const drawn = document.querySelector(`[data-node-id="${id}"]`)?.offsetHeight; // in Nodes 2.0 alone
    const isNew = !drawn && (type === NODE || type === PIPELINE); // it may be drawn taller in a moment
    return [pos[0], pos[1] - TITLE_HEIGHT, size[0], Math.max(size[1] + TITLE_HEIGHT, drawn ?? 0) + (isNew ? ROOM : LINES)];
}

/** The first free place at or below [x, y], and how far below that is. */
function below([x, y], [width, height], taken) {
    const hits = (top) => ([ox, oy, ow, oh]) =>
        x < ox + ow + GAP / 2 && ox < x + width + GAP / 2 && top < oy + oh + GAP / 2 && oy < top + height + GAP / 2;
    let top = y;
    for (let over = taken.filter(hits(top)); over.length; over = taken.filter(hits(top))) {
        top = Math.max(...over.map(([, oy, , oh]) => oy + oh)) + GAP / 2;
    }
    return [x, top, top - y];
}

/** Put a node of the graph at the free place that is the least far below one of `starts`, upper left corners. */
export function place(graph, node, starts) {
    const ends = [graph.inputNode, graph.outputNode].filter(Boolean);
    const taken = [...(graph.nodes ?? graph._nodes), ...ends].filter((other) => other !== node).map(box);
    const size = [node.size[0], node.size[1] + TITLE_HEIGHT + ROOM];
    const [[x, y]] = starts.map((start) => below(start, size, taken)).sort((one, other) => one[2] - other[2]);
    node.pos = [x, y + TITLE_HEIGHT];
}

/** Put it near `before`, below it or to its right. */
export function placeNear(graph, node, before) {
    const [left, top, width, height] = box(before);
    place(graph, node, [
        [left, top + height + GAP / 2],
        [left + width + GAP, top],
    ]);
}
