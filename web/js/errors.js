/**
 * Errors of this pack, at the place they are about: the first line of each on its node, a refused widget alone marked. ComfyUI
 * shows an error's sentence only behind View details, and marks every widget that a node's check looks at.
 */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const PACK = new URL("..", import.meta.url).pathname.split("/").filter(Boolean).at(-1); // its folder under custom_nodes
const CATEGORY = "Parallel DiT";
const REFUSED = "custom_validation_failed"; // ComfyUI's name for what a node's check has refused
const TEXT = "$$node-text-preview"; // ComfyUI's name of the widget with a node's line
const AFTER = 200; // ms: the editor has dealt with the end, and node_text.js too

const told = new Set(); // ids of nodes with an error on them

const firstLine = (text) => text.trim().split("\n")[0];
const isOurs = (type) => LiteGraph.registered_node_types[type]?.nodeData?.category === CATEGORY;

function tell(nodeId, text) {
    told.add(nodeId);
    api.dispatchEvent(new CustomEvent("progress_text", { detail: { nodeId, text } }));
}

/** Take the errors off the nodes, as newer editors do themselves. */
function clear() {
    for (const id of told) {
        const [number, ...outer] = id.split(":").reverse();
        let graph = app.rootGraph ?? app.graph;
        for (const each of outer.reverse()) graph = graph?.getNodeById(each)?.subgraph;
        const node = graph?.getNodeById(number);
        const widget = node?.widgets?.find(({ name }) => name === TEXT);
        if (widget) node.removeWidget(widget);
    }
    told.clear();
}

/** Of each of our nodes that refused its widgets: tell the sentence, and leave the error of the widget that it names first. */
function refused(nodeErrors) {
    for (const [id, found] of Object.entries(nodeErrors ?? {})) {
        if (!isOurs(found.class_type)) continue;
        const sentence = ({ details, extra_info: { input_name } }) => details.replace(`${input_name} - `, "");
        const checks = found.errors.filter(({ type }) => type === REFUSED);
        if (!checks.length) continue;
        const words = sentence(checks[0]);
        const named = words.replace(/^Set /, "");
        const about = checks.find(({ extra_info: { input_name } }) => named.startsWith(input_name)) ?? checks[0];
        found.errors = found.errors.filter((error) => error.type !== REFUSED || error === about);
        tell(id, firstLine(words));
    }
}

const { queuePrompt } = api;
api.queuePrompt = async function (...args) {
    clear();
    try {
        const answer = await queuePrompt.apply(this, args);
        refused(answer?.node_errors);
        return answer;
    } catch (error) {
        refused(error.response?.node_errors);
        throw error;
    }
};

/** Raised in this pack's code, whichever node called it. `traceback`: Python's, a string for each call. */
const isRaisedHere = (traceback) => traceback?.at(-1)?.replaceAll("\\", "/").includes(`/${PACK}/`) ?? false;

api.addEventListener("execution_error", ({ detail }) => {
    if (!isOurs(detail.node_type) && !isRaisedHere(detail.traceback)) return;
    setTimeout(() => tell(String(detail.node_id), firstLine(detail.exception_message)), AFTER);
});
