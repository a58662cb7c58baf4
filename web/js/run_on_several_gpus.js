/**
 * Run on several GPUs, in ComfyUI's menu: puts Parallelize Model behind every loader of a diffusion model in the open
 * workflow, subgraphs included, and Apply PipeFusion behind that where the server says so. One undo takes it back.
 */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const ID = "ParallelDiT.RunOnSeveralGPUs";
const TITLE = "Run on several GPUs";
const NODE = "ParallelizeModel";
const PIPELINE = "ApplyPipeFusion";
const GAP = 40; // between nodes, in the canvas's units
const TITLE_HEIGHT = 30;
const [NEVER, BYPASS] = [2, 4]; // modes of nodes that do not run
const SECONDS = { success: 12, info: 8, warn: 15, error: 15 };

const rootGraph = () => app.rootGraph ?? app.graph; // the former since 2025-10
const isModel = (slot) => slot?.type === "MODEL";
const linkOf = (graph, id) => (id == null ? undefined : graph.links.get(id));
const runs = (node) => node.mode !== NEVER && node.mode !== BYPASS;

function say(severity, detail) {
    app.extensionManager.toast.add({ severity, summary: TITLE, detail, life: 1000 * SECONDS[severity] });
}

/** The node of an id of a prompt: numbers of subgraph nodes, outer to inner, and its own. */
function nodeAt(id) {
    let [graph, node] = [rootGraph(), undefined];
    for (const part of id.split(":")) {
        node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
        graph = node?.subgraph;
    }
    return node ?? undefined;
}

/** It gives out a MODEL that it was not given. */
function isLoader(node) {
    const given = (input) => isModel(input) || isModel(linkOf(node.graph, input.link));
    return !node.isVirtualNode && !node.subgraph && node.outputs?.some(isModel) && !node.inputs?.some(given);
}

function isUsed(node) {
    return node.outputs.some((output) => isModel(output) && output.links?.length);
}

/** Whether Parallelize Model is somewhere behind a node of the prompt. */
function isParallel(prompt, id) {
    const behind = new Set([id]);
    for (const reached of behind) { // goes on to what is added meanwhile
        const takes = (value) =>
            Array.isArray(value) && value[0] === reached && isModel(nodeAt(reached)?.outputs?.[value[1]]);
        for (const [other, { class_type, inputs }] of Object.entries(prompt)) {
            if (!Object.values(inputs).some(takes)) continue;
            if (class_type === NODE) return true;
            behind.add(other);
        }
    }
    return false;
}

/** Parallelize Model behind it is there, but bypassed or muted. */
function isSwitchedOff(node) {
    const links = node.outputs.filter(isModel).flatMap((output) => output.links ?? []);
    const targets = links.map((id) => node.graph.getNodeById(linkOf(node.graph, id)?.target_id));
    return targets.some((target) => target?.type === NODE && !runs(target));
}

/** Of the open workflow: node -> {ids: where it is in the prompt, which is once for each use of its subgraph}. */
function loadersOf(prompt) {
    const found = new Map();
    for (const id of Object.keys(prompt)) {
        const node = nodeAt(id);
        if (!node || !isLoader(node) || !isUsed(node)) continue;
        found.set(node, [...(found.get(node) ?? []), id]);
    }
    return found;
}

/** Loaders that do not run: bypassed or muted, or in a subgraph that is. */
function idleLoaders(running) {
    const graphs = [rootGraph(), ...(rootGraph().subgraphs?.values() ?? [])];
    const nodes = graphs.flatMap((graph) => graph.nodes ?? graph._nodes);
    return nodes.filter((node) => isLoader(node) && isUsed(node) && !running.has(node));
}

/** A loader's title, the file that it loads, and the subgraph that it is in. */
function nameOf(node, file) {
    const where = node.graph === rootGraph() ? "" : ` in ${node.graph.name}`;
    return `${node.title}${file ? ` (${file})` : ""}${where}`;
}

async function plan(loaders) {
    const body = JSON.stringify({ loaders });
    const response = await api.fetchApi("/parallel_dit/plan", { method: "POST", body });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
}

/** Near `before`, to its right or below it, where no node is. */
function place(graph, node, before) {
    const box = ({ pos, size }) => [pos[0], pos[1] - TITLE_HEIGHT, size[0], size[1] + TITLE_HEIGHT];
    const ends = [graph.inputNode, graph.outputNode].filter(Boolean); // of a subgraph; they have a title inside
    const taken = [...(graph.nodes ?? graph._nodes), ...ends].filter((other) => other !== node).map(box);
    const [, , width, height] = box(node);
    const [left, top, wide, high] = box(before);
    const free = (x, start) => {
        const hit = (y) => ([ox, oy, ow, oh]) =>
            x < ox + ow + GAP / 2 && ox < x + width + GAP / 2 && y < oy + oh + GAP / 2 && oy < y + height + GAP / 2;
        let y = start;
        for (let over = taken.filter(hit(y)); over.length; over = taken.filter(hit(y))) {
            y = Math.max(...over.map(([, oy, , oh]) => oy + oh)) + GAP / 2;
        }
        return [x, y, y - start];
    };
    const places = [free(left, top + high + GAP / 2), free(left + wide + GAP, top)];
    const [x, y] = places[0][2] <= places[1][2] ? places[0] : places[1];
    node.pos = [x, y + TITLE_HEIGHT];
}

/**
 * A new node between an output and all that it goes to. Links keep their ids, so that reroutes, a subgraph's outputs and
 * nodes that change their inputs as these are connected stay as they are.
 */
function insert(type, before, slot) {
    const graph = before.graph;
    const node = LiteGraph.createNode(type);
    if (!node) throw new Error(`${type} is not registered`);
    graph.add(node);
    place(graph, node, before);
    const links = before.outputs[slot].links ?? [];
    for (const id of links) {
        const link = linkOf(graph, id);
        [link.origin_id, link.origin_slot] = [node.id, 0];
    }
    before.outputs[slot].links = [];
    node.outputs[0].links = [...links];
    before.connect(slot, node, node.inputs.findIndex(isModel));
    return node;
}

/** Both nodes behind all MODEL outputs of these loaders. One undo takes all of it back, and nothing else. */
function change(chosen) {
    const tracker = app.extensionManager.workflow?.activeWorkflow?.changeTracker;
    tracker?.captureCanvasState ? tracker.captureCanvasState() : tracker?.checkState?.();
    app.canvas.emitBeforeChange();
    try {
        for (const { node, pipefusion } of chosen) {
            for (const [slot, output] of node.outputs.entries()) {
                if (!isModel(output) || !output.links?.length) continue;
                const parallel = insert(NODE, node, slot);
                if (pipefusion) insert(PIPELINE, parallel, 0);
            }
            node.graph.updateExecutionOrder(); // or the next run would change the workflow once more, which undo sees
        }
    } finally {
        app.canvas.emitAfterChange();
        app.canvas.setDirty(true, true);
    }
}

/**
 * What becomes of each loader, by the plans that the server has for its uses, in the order of the prompt's ids:
 * [{node, name, takes, parallel, why, pipefusion}].
 */
function decide(prompt, loaders, plans) {
    return [...loaders].map(([node, ids]) => {
        const uses = ids.map((id) => plans.get(id));
        const files = [...new Set(uses.map((use) => use.file).filter(Boolean))];
        const about = { node, name: nameOf(node, files.join(", ")), takes: false, parallel: false };
        if (isSwitchedOff(node)) return { ...about, why: "Parallelize Model behind it is bypassed or muted" };
        if (uses.every((use) => use.parallel) || ids.some((id) => isParallel(prompt, id))) {
            return { ...about, parallel: true };
        }
        const refused = uses.find((use) => !use.takes);
        if (refused) return { ...about, why: refused.why };
        return { ...about, takes: true, pipefusion: uses.map((use) => use.pipefusion).find(Boolean) ?? "" };
    });
}

/** The names of loaders, by what is said of them. */
function grouped(entries, key) {
    const groups = new Map();
    for (const entry of entries) groups.set(entry[key], [...(groups.get(entry[key]) ?? []), entry.name]);
    return [...groups].map(([said, names]) => [said, names.join("; ")]);
}

async function runOnSeveralGpus() {
    if (!LiteGraph.registered_node_types[NODE]) return say("error", "Parallel DiT's nodes are not loaded.");
    const { output: prompt } = await app.graphToPrompt();
    const loaders = loadersOf(prompt);
    const idle = idleLoaders(loaders).map((node) => ({ name: nameOf(node), why: "it does not run (bypassed or muted)" }));
    const ids = [...loaders.values()].flat();
    if (!ids.length && !idle.length) return say("warn", "No loader of a diffusion model is in this workflow.");
    const answer = await plan(ids.map((id) => ({ class_type: prompt[id].class_type, inputs: prompt[id].inputs })));
    if (answer.why) return say("warn", `Nothing was changed. ${answer.why}`);
    const decided = decide(prompt, loaders, new Map(ids.map((id, index) => [id, answer.loaders[index]])));
    const still = ({ node }) => node.graph?.getNodeById(node.id) === node; // the server was asked meanwhile
    const chosen = decided.filter((each) => each.takes && still(each));
    if (chosen.length) change(chosen);
    for (const [pipefusion, names] of grouped(chosen, "pipefusion")) {
        const more = pipefusion ? `, and Apply PipeFusion, as ${pipefusion}` : "";
        say("success", `Parallelize Model is now behind ${names}${more}. Undo takes it back.`);
    }
    const already = decided.filter((each) => each.parallel);
    if (already.length) say("info", `On several GPUs already: ${already.map((each) => each.name).join("; ")}.`);
    const left = [...decided.filter((each) => !each.takes && !each.parallel), ...idle];
    for (const [why, names] of grouped(left, "why")) {
        say(chosen.length ? "info" : "warn", `Left as it is: ${names}: ${why.replace(/\.$/, "")}.`);
    }
}

app.registerExtension({
    name: ID,
    commands: [{ id: ID, label: TITLE, icon: "pi pi-microchip", function: runOnSeveralGpus }],
    menuCommands: [{ path: ["Parallel DiT"], commands: [ID] }],
});
