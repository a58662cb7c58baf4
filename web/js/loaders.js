/**
 * The loaders of diffusion models in the open workflow, subgraphs included, and the server's plans for them. Shared by the
 * commands of the menu, which run_on_several_gpus.js registers.
 */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { isChinese } from "./chinese.js";
import { chineseToast } from "./chinese_toasts.js";
import { isModel, linksFrom, NODE, wires } from "./wires.js";

const NO_LOADER = "This workflow has no loader of a diffusion model.";
const [NEVER, BYPASS] = [2, 4]; // modes of nodes that do not run
const SECONDS = { success: 12, info: 8, warn: 15, error: 15 };

const rootGraph = () => app.rootGraph ?? app.graph; // the former since 2025-10
const runs = (node) => node.mode !== NEVER && node.mode !== BYPASS;

/** Tell the user in a corner of the page, in the editor's language. `seconds`: how long, if not as usual. */
export function say(title, severity, detail, seconds = SECONDS[severity]) {
    const [summary, text] = isChinese(app) ? [title, detail].map(chineseToast) : [title, detail];
    app.extensionManager.toast.add({ severity, summary, detail: text, life: 1000 * seconds });
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
    const given = (input, slot) => isModel(input) || isModel(node.getInputLink(slot));
    return !node.isVirtualNode && !node.subgraph && node.outputs?.some(isModel) && !node.inputs?.some(given);
}

function isUsed(node) {
    return node.outputs.some((output, slot) => isModel(output) && node.isOutputConnected(slot));
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
    const links = node.outputs.flatMap((output, slot) => (isModel(output) ? linksFrom(node, slot) : []));
    const targets = links.map((link) => node.graph.getNodeById(link.target_id));
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

/** All nodes of the open workflow, those of its subgraphs too. */
export function allNodes() {
    const graphs = [rootGraph(), ...(rootGraph().subgraphs?.values() ?? [])];
    return graphs.flatMap((graph) => graph.nodes ?? graph._nodes);
}

/** Loaders that do not run: bypassed or muted, or in a subgraph that is. */
function idleLoaders(running) {
    return allNodes().filter((node) => isLoader(node) && isUsed(node) && !running.has(node));
}

/** A loader's title, the file that it loads, and the subgraph that it is in. */
export function nameOf(node, file) {
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

/**
 * What becomes of each loader, by the plans that the server has for its uses, in the order of the prompt's ids:
 * [{node, name, takes, parallel, why, weights, pipefusion}].
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
        const weights = Math.max(...uses.map((use) => use.weights));
        return { ...about, takes: true, weights, pipefusion: uses.map((use) => use.pipefusion).find(Boolean) ?? "" };
    });
}

/** The names of loaders, by what is said of them. */
export function grouped(entries, key) {
    const groups = new Map();
    for (const entry of entries) groups.set(entry[key], [...(groups.get(entry[key]) ?? []), entry.name]);
    return [...groups].map(([said, names]) => [said, names.join("; ")]);
}

/**
 * {decided: what becomes of each loader that runs, idle: [{name, why}] of those that do not, cards: the server's}. None if
 * the workflow has no loader, or nothing would be gained, which is said.
 */
export async function look(title) {
    const { output: prompt } = await app.graphToPrompt();
    const loaders = loadersOf(prompt);
    const idle = idleLoaders(loaders).map((node) => ({ name: nameOf(node), why: "it does not run (bypassed or muted)" }));
    const ids = [...loaders.values()].flat();
    if (!ids.length && !idle.length) return say(title, "warn", NO_LOADER);
    const answer = await plan(ids.map((id) => ({ class_type: prompt[id].class_type, inputs: prompt[id].inputs })));
    if (answer.why) return say(title, "warn", answer.why);
    const decided = decide(prompt, loaders, new Map(ids.map((id, index) => [id, answer.loaders[index]])));
    return { decided, idle, cards: answer.cards };
}

/** Say which loaders are on several GPUs already, and which ones stay as they are, after the words `stays`. */
export function sayOthers(title, { decided, idle }, stays, severity, seconds) {
    const already = decided.filter(({ parallel }) => parallel).map(({ name }) => name);
    if (already.length) say(title, "info", `On several GPUs already: ${already.join("; ")}.`, seconds);
    const left = [...decided.filter(({ takes, parallel }) => !takes && !parallel), ...idle];
    for (const [why, names] of grouped(left, "why")) {
        say(title, severity, `${stays}: ${names}: ${why.replace(/\.$/, "")}.`, seconds);
    }
}

/** The open workflow: its file's text, and its prompt's wires. */
async function now() {
    const { output } = await app.graphToPrompt();
    return { text: JSON.stringify(rootGraph().serialize()), wires: wires(output) };
}

/** Do `work()`, which changes the workflow and returns the graphs, as one step of undo. The error that it ended with. */
function asOneStep(work) {
    app.canvas.emitBeforeChange();
    try {
        for (const graph of work()) {
            graph.updateExecutionOrder(); // or the next run would change the workflow once more, which undo sees
        }
        return null;
    } catch (error) {
        console.error(error);
        return error;
    } finally {
        app.canvas.emitAfterChange();
        app.canvas.setDirty(true, true);
    }
}

/**
 * Change the workflow so that one undo takes it back, and nothing else. `work()`: changes it, and returns the graphs. Whether
 * every wire is still there. If not, the change is taken back, and said.
 */
export async function change(title, work) {
    const tracker = app.extensionManager.workflow?.activeWorkflow?.changeTracker;
    tracker?.captureCanvasState ? tracker.captureCanvasState() : tracker?.checkState?.();
    const before = await now();
    const error = asOneStep(work);
    const after = await now();
    const found = new Map(after.wires);
    const lost = before.wires.filter(([end, from]) => found.get(end) !== from).map(([end]) => nodeAt(end.split(" ")[0]).title);
    const names = [...new Set(lost)].join("; ");
    if (!error && !names) return true;
    if (after.text !== before.text) {
        await app.extensionManager.command.execute("Comfy.Undo");
        tracker?.redoQueue?.pop(); // redo would bring the loss
    }
    const why = error ? error.message : `this editor would lose the wire to ${names}`;
    say(title, "error", `Nothing was changed: ${why}. Please report it, and connect the nodes by hand.`);
    return false;
}
