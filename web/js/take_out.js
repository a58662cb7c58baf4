/**
 * Run on one GPU again, the opposite of Run on several GPUs: takes every Parallelize Model and Apply PipeFusion out of the
 * open workflow, subgraphs included. What was connected to them is connected to what they were connected to.
 */
import { allNodes, change, isModel, linkOf, NODE, PIPELINE, say } from "./loaders.js";

export const TAKE_OUT = "ParallelDiT.RunOnOneGPU";
export const TAKE_OUT_TITLE = "Run on one GPU again";
const LOADERS = ["ParallelDiTLoader", "ParallelCheckpointLoader"];
const SUBGRAPH_INPUT = -10; // the id of a subgraph's inputs, as where a link comes from

/** The outputs that a link comes from: of a node, or of the subgraph's inputs. It has the ids of the links from there. */
function origin(graph, link) {
    if (link.origin_id === SUBGRAPH_INPUT) return graph.inputNode.slots[link.origin_slot].linkIds;
    const output = graph.getNodeById(link.origin_id).outputs[link.origin_slot];
    output.links ??= [];
    return output.links;
}

/** Take one node out. Links behind it keep their ids, and begin where the node's own link began. */
function remove(node) {
    const graph = node.graph;
    const own = linkOf(graph, node.inputs.find(isModel)?.link);
    for (const output of node.outputs) {
        if (!own || !isModel(output)) continue;
        const ids = output.links ?? [];
        for (const id of ids) {
            const link = linkOf(graph, id);
            [link.origin_id, link.origin_slot] = [own.origin_id, own.origin_slot];
        }
        origin(graph, own).push(...ids);
        output.links = [];
    }
    graph.remove(node);
    return graph;
}

export function takeOut() {
    const nodes = allNodes();
    const ours = nodes.filter(({ type }) => type === NODE || type === PIPELINE);
    const loaders = nodes.filter(({ type }) => LOADERS.includes(type)).map(({ title }) => title);
    if (ours.length) {
        change(() => new Set(ours.map(remove)));
        const titles = [...new Set(ours.map(({ title }) => title))].join(" and ");
        say(TAKE_OUT_TITLE, "success", `Taken out: ${titles}. Undo brings it back.`);
    }
    if (loaders.length) {
        const names = [...new Set(loaders)].join("; ");
        say(TAKE_OUT_TITLE, ours.length ? "info" : "warn", `${names} stays: put ComfyUI's own loader in its place.`);
    } else if (!ours.length) {
        say(TAKE_OUT_TITLE, "warn", "Nothing in this workflow runs on several GPUs.");
    }
}
