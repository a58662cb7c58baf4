/** The wires of a workflow: what a change must keep, and how a wire gets another beginning. */
export const NODE = "ParallelizeModel";
export const PIPELINE = "ApplyPipeFusion";

export const isModel = (slot) => slot?.type === "MODEL";

/** The wires that leave an output of a node. */
export function linksFrom(node, slot) {
    const leaves = (link) => String(link.origin_id) === String(node.id) && link.origin_slot === slot;
    return [...node.graph.links.values()].filter(leaves);
}

/** The list of wires that begin where this one does. Editors from 1.53 on derive a node's list from the wires themselves. */
function beginnings(graph, { origin_id, origin_slot, originIsIoNode }) {
    if (originIsIoNode) return graph.inputNode.slots[origin_slot].linkIds;
    return (graph.getNodeById(origin_id).outputs[origin_slot].links ??= []);
}

/**
 * Let a wire begin at `slot` of the node, or of the subgraph's inputs, with this id. The wire keeps its id, its end and its
 * reroutes, so that nodes that change their inputs as these are connected, and a subgraph's outputs, stay as they are.
 */
export function beginAt(graph, link, id, slot) {
    const left = beginnings(graph, link);
    [link.origin_id, link.origin_slot] = [id, slot];
    const joined = beginnings(graph, link);
    if (left.includes(link.id)) left.splice(left.indexOf(link.id), 1);
    if (!joined.includes(link.id)) joined.push(link.id);
}

/**
 * Of a prompt: [a node's id and input, what it gets] for each wire. What a node of this pack that is put behind loaders gives
 * out counts as what that node gets.
 */
export function wires(prompt) {
    const isOurs = (id) => [NODE, PIPELINE].includes(prompt[id]?.class_type);
    const from = (wire) => (isOurs(wire?.[0]) ? from(prompt[wire[0]].inputs.model) : String(wire));
    const others = Object.entries(prompt).filter(([id]) => !isOurs(id));
    return others.flatMap(([id, { inputs }]) => Object.entries(inputs)
        .filter(([, value]) => Array.isArray(value))
        .map(([name, wire]) => [`${id} ${name}`, from(wire)]));
}
