/**
 * The entries of ComfyUI's menu. Run on several GPUs puts Parallelize Model behind every loader of a diffusion model in the
 * open workflow, subgraphs included, and Apply PipeFusion behind that where the server says so. One undo takes it back.
 */
import { app } from "../../../scripts/app.js";
import { explain, EXPLAIN, EXPLAIN_TITLE } from "./explain_workflow.js";
import { change, grouped, look, say, sayOthers } from "./loaders.js";
import { MOVE_IN, MOVE_IN_TITLE, moveIn } from "./move_in.js";
import { placeNear } from "./place.js";
import { takeOut, TAKE_OUT, TAKE_OUT_TITLE } from "./take_out.js";
import { beginAt, isModel, linksFrom, NODE, PIPELINE } from "./wires.js";

const ID = "ParallelDiT.RunOnSeveralGPUs";
const TITLE = "Run on several GPUs";

/** A new node between an output and all that it goes to. */
function insert(type, before, slot) {
    const graph = before.graph;
    const node = LiteGraph.createNode(type);
    if (!node) throw new Error(`${type} is not registered`);
    graph.add(node);
    placeNear(graph, node, before);
    for (const link of linksFrom(before, slot)) beginAt(graph, link, node.id, 0);
    before.connect(slot, node, node.inputs.findIndex(isModel));
    return node;
}

/** Both nodes behind all MODEL outputs of these loaders. */
function insertBehind(chosen) {
    for (const { node, pipefusion } of chosen) {
        for (const [slot, output] of node.outputs.entries()) {
            if (!isModel(output) || !node.isOutputConnected(slot)) continue;
            const parallel = insert(NODE, node, slot);
            if (pipefusion) insert(PIPELINE, parallel, 0);
        }
    }
    return new Set(chosen.map(({ node }) => node.graph));
}

async function runOnSeveralGpus() {
    if (!LiteGraph.registered_node_types[NODE]) return say(TITLE, "error", "Parallel DiT's nodes are not loaded.");
    const found = await look(TITLE);
    if (!found) return;
    const still = ({ node }) => node.graph?.getNodeById(node.id) === node; // the server was asked meanwhile
    const chosen = found.decided.filter((each) => each.takes && still(each));
    if (chosen.length && !(await change(TITLE, () => insertBehind(chosen)))) return;
    for (const [pipefusion, names] of grouped(chosen, "pipefusion")) {
        const more = pipefusion ? `, and Apply PipeFusion, because ${pipefusion}` : "";
        say(TITLE, "success", `Parallelize Model is now behind ${names}${more}. Undo reverts it.`);
    }
    sayOthers(TITLE, found, "Not changed", chosen.length ? "info" : "warn");
}

app.registerExtension({
    name: ID,
    commands: [
        { id: ID, label: TITLE, icon: "pi pi-microchip", function: runOnSeveralGpus },
        { id: TAKE_OUT, label: TAKE_OUT_TITLE, icon: "pi pi-undo", function: takeOut },
        { id: EXPLAIN, label: EXPLAIN_TITLE, icon: "pi pi-info-circle", function: explain },
        { id: MOVE_IN, label: MOVE_IN_TITLE, icon: "pi pi-sign-in", function: () => moveIn(runOnSeveralGpus) },
    ],
    menuCommands: [{ path: ["Parallel DiT"], commands: [ID, TAKE_OUT, EXPLAIN, MOVE_IN] }],
});
