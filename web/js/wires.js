/** The wires of a workflow: which ones a change must keep, and how a wire gets another beginning. */
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

/** A wire of a workflow file, which has a list for one in the outermost graph, and an object for one in a subgraph. */
function inFile(link) {
    if (!Array.isArray(link)) return link;
    const [id, origin_id, origin_slot, target_id, target_slot] = link;
    return { id, origin_id, origin_slot, target_id, target_slot };
}

/**
 * Of a workflow file: [end of a wire, its beginning, the title of the node that it ends at]. A wire through nodes of this pack
 * that are put behind loaders counts as one, and begins where the first of them gets its MODEL.
 */
export function wires(file) {
    return [file, ...(file.definitions?.subgraphs ?? [])].flatMap((graph) => {
        const links = new Map((graph.links ?? []).map(inFile).map((link) => [link.id, link]));
        const isOurs = ({ type }) => type === NODE || type === PIPELINE;
        const ours = new Map(graph.nodes.filter(isOurs).map((node) => [String(node.id), node]));
        const beginning = (id, passed = []) => {
            const link = passed.includes(id) ? undefined : links.get(id);
            if (!link) return null;
            const through = ours.get(String(link.origin_id));
            if (!through) return `${link.origin_id}.${link.origin_slot}`;
            return beginning(through.inputs.find(isModel)?.link, [...passed, id]);
        };
        const others = graph.nodes.filter((node) => !isOurs(node));
        const inputs = others.flatMap((node) =>
            (node.inputs ?? []).map(({ name, link }) => [`${node.id}.${name}`, beginning(link), node.title ?? node.type]),
        );
        const isNode = new Set(graph.nodes.map(({ id }) => String(id)));
        const outputs = [...links.values()].filter(({ target_id }) => !isNode.has(String(target_id)));
        const all = [...inputs, ...outputs.map(({ id, target_slot }) => [`.${target_slot}`, beginning(id), graph.name])];
        return all.filter(([, from]) => from).map(([end, ...rest]) => [`${graph.id} ${end}`, ...rest]);
    });
}

/** Titles of the nodes that have lost a wire, or whose wire begins elsewhere now. Both are `wires` of a workflow file. */
export function lost(before, after) {
    const found = new Map(after);
    return [...new Set(before.filter(([end, from]) => found.get(end) !== from).map(([, , title]) => title))];
}
