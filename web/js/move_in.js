/**
 * Move in from other packs: a workflow with nodes of ComfyUI-MultiGPU, raylight or SGLang, opened anew with ComfyUI's own
 * nodes. The open workflow stays as it is, in its own tab. nodes/move_in.py changes the file.
 */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { say } from "./loaders.js";

export const MOVE_IN = "ParallelDiT.MoveIn";
export const MOVE_IN_TITLE = "Move in from other packs";

const NONE = "This workflow has no node of ComfyUI-MultiGPU, raylight or SGLang.";
const listed = (titles) => [...new Set(titles)].join("; ");

/** `then()`: what follows with the new workflow. */
export async function moveIn(then) {
    const body = JSON.stringify((app.rootGraph ?? app.graph).serialize());
    const response = await api.fetchApi("/parallel_dit/move_in", { method: "POST", body });
    const { workflow, moved, left, error } = await response.json();
    if (error) return say(MOVE_IN_TITLE, "error", error);
    if (!moved.length && !left.length) return say(MOVE_IN_TITLE, "warn", NONE);
    if (moved.length) {
        await app.loadGraphData(workflow);
        say(MOVE_IN_TITLE, "success", `A new workflow has ComfyUI's own nodes in place of: ${listed(moved)}.`);
    }
    for (const sentence of new Set(left)) say(MOVE_IN_TITLE, "warn", sentence);
    if (moved.length) await then();
}
