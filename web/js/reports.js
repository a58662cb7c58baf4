/**
 * The reports of this pack's nodes, in ComfyUI's own read-only text box, which it has for its node Preview as Text. Without
 * it the report is the node's output only.
 */
import { app } from "../../../scripts/app.js";

const NODES = ["ParallelDoctor", "ParallelSelfTest", "ParallelTrace"];
const [WIDTH, HEIGHT] = [520, 160]; // of a new node, for lines of a report; HEIGHT beside what its widgets need
const { addTextPreviewWidgets, updateTextPreviewWidgets } = window.comfyAPI?.textPreviewWidgets ?? {};
const show = (node, output) => output?.text && updateTextPreviewWidgets(node, output);

/** The node of a key of the editor's outputs: its number, behind its subgraph's id and a colon if it is in one. */
function nodeOf(key) {
    const [id, subgraph] = key.split(":").reverse();
    const root = app.rootGraph ?? app.graph;
    return (subgraph ? root.subgraphs?.get(subgraph) : root)?.getNodeById(id);
}

app.registerExtension({
    name: "ParallelDiT.Reports",
    beforeRegisterNodeDef({ prototype }, { name }) {
        if (!NODES.includes(name) || !addTextPreviewWidgets) return;
        const { onNodeCreated, onExecuted } = prototype;
        prototype.onNodeCreated = function (...args) {
            onNodeCreated?.apply(this, args);
            addTextPreviewWidgets(this);
            this.setSize([WIDTH, this.computeSize()[1] + HEIGHT]);
        };
        prototype.onExecuted = function (output) {
            onExecuted?.call(this, output);
            show(this, output);
        };
    },
    onNodeOutputsUpdated(outputs) { // of a workflow that is opened again
        for (const [key, output] of Object.entries(outputs)) {
            const node = nodeOf(key);
            if (NODES.includes(node?.type)) show(node, output);
        }
    },
});
