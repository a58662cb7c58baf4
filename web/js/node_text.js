/**
 * The lines that this pack says on a node: in Chinese where the editor is, and they stay when a run has ended. Editors from
 * 1.50 on take every node's line away then; the last one of each node is handed to the editor once more, which shows it in
 * its own way.
 */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { isChinese } from "./chinese.js";
import { chinese } from "./chinese_lines.js";

const SAID = "parallel_dit.said"; // of nodes/ui/node_text.py, which sends it behind ComfyUI's own event of the same line
export const ENDS = ["execution_success", "execution_error", "execution_interrupted"];
const AFTER = 100; // ms: the editor has dealt with the end

export const lines = new Map(); // node -> its last line in this run

const show = (nodeId, text) => api.dispatchEvent(new CustomEvent("progress_text", { detail: { nodeId, text } }));

function sayAgain() {
    for (const [node, text] of lines) show(node, text);
}

api.addEventListener("execution_start", () => lines.clear());
api.addEventListener(SAID, ({ detail: { node, text } }) => {
    const translated = isChinese(app) ? chinese(text) : text;
    lines.set(node, translated);
    if (translated !== text) show(node, translated);
});
for (const end of ENDS) api.addEventListener(end, () => setTimeout(sayAgain, AFTER));
