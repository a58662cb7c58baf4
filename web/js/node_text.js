/**
 * The lines that this pack says on a node stay when a run has ended. Editors from 1.50 on take every node's line away then;
 * the last one of each node is handed to the editor once more, which shows it in its own way.
 */
import { api } from "../../../scripts/api.js";

const SAID = "parallel_dit.said"; // of nodes/ui/node_text.py
const ENDS = ["execution_success", "execution_error", "execution_interrupted"];
const AFTER = 100; // ms: the editor has dealt with the end

const lines = new Map(); // node -> its last line in this run

function sayAgain() {
    for (const [nodeId, text] of lines) api.dispatchEvent(new CustomEvent("progress_text", { detail: { nodeId, text } }));
}

api.addEventListener("execution_start", () => lines.clear());
api.addEventListener(SAID, ({ detail }) => lines.set(detail.node, detail.text));
for (const end of ENDS) api.addEventListener(end, () => setTimeout(sayAgain, AFTER));
