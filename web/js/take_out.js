/**
 * Run on one GPU again, the opposite of Run on several GPUs: takes every Parallelize Model and Apply PipeFusion out of the
 * open workflow, subgraphs included. What was connected to them is connected to what they were connected to.
 */
import { allNodes, change, say } from "./loaders.js";
import { beginAt, isModel, linksFrom, NODE, PIPELINE } from "./wires.js";

export const TAKE_OUT = "ParallelDiT.RunOnOneGPU";
export const TAKE_OUT_TITLE = "Run on one GPU again";
const LOADERS = ["ParallelDiTLoader", "ParallelCheckpointLoader"];

/** Take one node out. Wires behind it begin where its own began. */
function remove(node) {
    const graph = node.graph;
    const own = node.getInputLink(node.inputs.findIndex(isModel));
    for (const [slot, output] of node.outputs.entries()) {
        if (!own || !isModel(output)) continue;
        for (const link of linksFrom(node, slot)) beginAt(graph, link, own.origin_id, own.origin_slot);
    }
    graph.remove(node);
    return graph;
}

export async function takeOut() {
    const nodes = allNodes();
    const ours = nodes.filter(({ type }) => type === NODE || type === PIPELINE);
    const loaders = nodes.filter(({ type }) => LOADERS.includes(type)).map(({ title }) => title);
    if (ours.length) {
        const titles = [...new Set(ours.map(({ title }) => title))].join(" and ");
        if (!(await change(TAKE_OUT_TITLE, () => new Set(ours.map(remove))))) return;
        say(TAKE_OUT_TITLE, "success", `Removed: ${titles}. Undo reverts it.`);
    }
    if (loaders.length) {
        const names = [...new Set(loaders)].join("; ");
        say(TAKE_OUT_TITLE, ours.length ? "info" : "warn", `${names} was not removed: replace it by ComfyUI's own loader.`);
    } else if (!ours.length) {
        say(TAKE_OUT_TITLE, "warn", "Nothing in this workflow runs on several GPUs.");
    }
}
