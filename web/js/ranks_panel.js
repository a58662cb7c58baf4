/**
 * A panel in ComfyUI's sidebar: every rank with its device's memory and what it does, the models on the ranks, the last runs.
 * It asks ComfyUI's server (nodes/ui/routes.py) while it is open. All text is set as text.
 */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { isChinese } from "./chinese.js";
import { chinese } from "./chinese_lines.js";
import { ENDS, lines } from "./node_text.js";
import { place } from "./place.js";
import { size } from "./size.js";

const ID = "parallel-dit-ranks";
const MILLISECONDS = 1000; // from one question to the server to the next
const MOST_RUNS = 5;

const ENGLISH = {
    title: "Ranks",
    tooltip: "What Parallel DiT's ranks do",
    none: "No ranks run. They start with a workflow that has a loader of Parallel DiT, or Parallelize Model.",
    waitingForServer: "Asking ComfyUI …",
    starting: "starting",
    idle: "idle",
    waiting: "waiting for another rank",
    working: "computing",
    failed: "ended",
    weights: "weights",
    run: "keys, values, prompts",
    other: "other",
    of: (free, total) => `${free} of ${total} free`,
    machine: "the machine's memory",
    models: "Models",
    noModel: "no model",
    parked: "parked in host memory",
    onDevices: (size) => `${size} on the devices`,
    streamed: (size) => `${size} in host memory`,
    openTrace: "Add Trace",
    openTraceTip: "Put a Parallel Trace node into the workflow. It says how long each GPU computed and waited in the last run.",
    runs: "Last runs",
    logs: (folder) => `Logs: ${folder}`,
    unload: "Unload",
    unloadTip: "Free the memory of the ranks and of ComfyUI's models. The next run reads them again.",
    selfTest: "Add Self-Test",
    selfTestTip: "Put a Parallel Self-Test node into the workflow.",
};
const CHINESE = {
    title: "计算进程",
    tooltip: "Parallel DiT 的各个计算进程在做什么",
    none: "没有计算进程在运行。运行含有 Parallel DiT 加载器或“并行化模型”的工作流时它们会启动。",
    waitingForServer: "正在询问 ComfyUI …",
    starting: "启动中",
    idle: "空闲",
    waiting: "等待其他计算进程",
    working: "计算中",
    failed: "已结束",
    weights: "权重",
    run: "注意力缓存（K/V）与提示词",
    other: "其他",
    of: (free, total) => `可用 ${free} / ${total}`,
    machine: "内存",
    models: "模型",
    noModel: "没有模型",
    parked: "暂存在内存",
    onDevices: (size) => `设备上 ${size}`,
    streamed: (size) => `内存中 ${size}`,
    openTrace: "添加时间线节点",
    openTraceTip: "在工作流中放入“并行时间线”节点，它显示上次运行中每张卡计算和等待了多久。",
    runs: "最近的运行",
    logs: (folder) => `日志：\n${folder}`,
    unload: "释放显存",
    unloadTip: "释放各计算进程和 ComfyUI 模型的显存。下次运行会重新加载。",
    selfTest: "添加自检节点",
    selfTestTip: "在工作流中放入“并行自检”节点。",
};
const STYLE = `
.pdit { padding: 12px; color: var(--input-text, #ddd); font-size: 13px; overflow-y: auto; height: 100%; box-sizing: border-box; }
.pdit h3 { font-size: 13px; font-weight: 600; margin: 14px 0 6px; }
.pdit .row { margin: 8px 0; padding: 8px; border: 1px solid var(--border-color, #444); border-radius: 6px; }
.pdit .line { display: flex; justify-content: space-between; gap: 8px; flex-wrap: wrap; }
.pdit .device { font-weight: 600; overflow-wrap: anywhere; }
.pdit .quiet { color: var(--descrip-text, #999); overflow-wrap: anywhere; white-space: pre-line; }
.pdit .bar { display: flex; height: 10px; margin: 6px 0 4px; border-radius: 3px; overflow: hidden;
    background: var(--border-color, #444); }
.pdit .weights { background: #4c8bf5; }
.pdit .run { background: #a371f7; }
.pdit .other { background: repeating-linear-gradient(45deg, #6e7681 0 3px, #a3abb5 3px 6px); }
.pdit .dot { display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 6px; background: #8a8f98; }
.pdit .dot.working { background: #3fb950; }
.pdit .dot.waiting, .pdit .dot.starting { background: #d29922; }
.pdit .dot.failed { background: #f85149; }
.pdit .error { color: #f85149; overflow-wrap: anywhere; }
.pdit .buttons { display: flex; gap: 8px; margin-top: 14px; flex-wrap: wrap; }
.pdit button { padding: 4px 10px; border: 1px solid var(--border-color, #444); border-radius: 4px; cursor: pointer;
    background: var(--comfy-input-bg, #222); color: inherit; font: inherit; }
.pdit button:hover { background: var(--border-color, #444); }
.pdit .legend { display: flex; gap: 12px; }
.pdit .legend i { display: inline-block; width: 8px; height: 8px; margin-right: 4px; border-radius: 2px; }
`;

const runs = []; // what was said in the last runs, the newest first
let shown = null; // the panel's element
let state = null; // what the server has told last
let told = ""; // the same, as text
let asking; // the timer while the panel is open
let words = ENGLISH;
const inWords = (text) => (words === CHINESE ? chinese(text) : text); // what the server said

function element(kind, className = "", text = "") {
    const made = document.createElement(kind);
    if (className) made.className = className;
    if (text) made.textContent = text;
    return made;
}

const sum = (values) => values.reduce((total, each) => total + each, 0);

/** The bar of a device's memory: weights and runs of all ranks on it, what else is taken, what is free. */
function bar({ weights, run, free, total }) {
    const made = element("div", "bar");
    const taken = Math.max(0, total - free);
    const parts = [
        ["weights", Math.min(weights, taken)],
        ["run", Math.min(run, Math.max(0, taken - weights))],
        ["other", Math.max(0, taken - weights - run)],
    ];
    for (const [kind, bytes] of parts) {
        const part = element("div", kind);
        part.style.width = `${(100 * bytes) / total}%`;
        part.title = `${words[kind]}: ${size(bytes)}`;
        made.append(part);
    }
    made.setAttribute("role", "img");
    made.setAttribute("aria-label", parts.map(([kind, bytes]) => `${words[kind]} ${size(bytes)}`).join(", "));
    return made;
}

/** `onSame`: all ranks on this rank's device. */
function rankRow(rank, number, onSame) {
    const row = element("div", "row");
    const line = element("div", "line");
    const name = element("span", "device");
    name.append(element("span", `dot ${rank.state}`), `${number}  ${rank.device}`);
    line.append(name, element("span", "", words[rank.state] ?? rank.state));
    row.append(line);
    if (rank.total) {
        row.append(bar({ ...rank, weights: sum(onSame.map((each) => each.weights)), run: sum(onSame.map((each) => each.run)) }));
        const memory = element("div", "line quiet");
        const where = rank.device.includes("cpu") ? ` (${words.machine})` : "";
        memory.append(element("span", "", `${words.weights} ${size(rank.weights)}`));
        memory.append(element("span", "", words.of(size(rank.free), size(rank.total)) + where));
        row.append(memory);
    }
    if (rank.doing) row.append(element("div", "quiet", rank.doing));
    return row;
}

function modelRow(model) {
    const row = element("div", "row");
    row.append(element("div", "device", model.name), element("div", "quiet", model.degrees));
    const streamed = sum(model.streamed);
    const parts = model.parked ? [words.parked] : [words.onDevices(size(sum(model.weights)))];
    if (!model.parked && streamed) parts.push(words.streamed(size(streamed)));
    row.append(element("div", "quiet", parts.join(", ")));
    return row;
}

function poolParts(pool) {
    const parts = [];
    if (pool.error) parts.push(element("div", "error", pool.error));
    for (const [number, rank] of pool.ranks.entries()) {
        const onSame = pool.ranks.filter(({ device }) => device === rank.device);
        parts.push(rankRow(rank, number, onSame));
    }
    for (const note of pool.notes) parts.push(element("div", "quiet", inWords(note)));
    parts.push(element("h3", "", words.models));
    if (!pool.models.length) parts.push(element("div", "quiet", words.noModel));
    parts.push(...[...pool.models].reverse().map(modelRow));
    if (pool.logs) parts.push(element("div", "quiet", words.logs(pool.logs)));
    return parts;
}

function legend() {
    const made = element("div", "legend quiet");
    for (const kind of ["weights", "run", "other"]) {
        const entry = element("span");
        entry.append(element("i", kind), words[kind]);
        made.append(entry);
    }
    return made;
}

function button(label, tip, act) {
    const made = element("button", "", label);
    made.title = tip;
    made.addEventListener("click", act);
    return made;
}

function draw() {
    if (!shown) return;
    const at = shown.scrollTop;
    const focused = [...shown.querySelectorAll("button")].indexOf(document.activeElement);
    const parts = [element("style", "", STYLE)];
    if (!state) parts.push(element("div", "quiet", words.waitingForServer));
    else if (!state.pools.length) parts.push(element("div", "quiet", words.none));
    else parts.push(legend(), ...state.pools.flatMap(poolParts));
    if (runs.length) {
        parts.push(element("h3", "", words.runs));
        for (const text of runs) parts.push(element("div", "row quiet", text));
    }
    const buttons = element("div", "buttons");
    const unload = () => api.fetchApi("/free", { method: "POST", body: JSON.stringify({ unload_models: true }) });
    buttons.append(
        button(words.unload, words.unloadTip, unload),
        button(words.openTrace, words.openTraceTip, () => addNode("ParallelTrace")),
        button(words.selfTest, words.selfTestTip, () => addNode("ParallelSelfTest")),
    );
    parts.push(buttons);
    shown.replaceChildren(...parts);
    shown.scrollTop = at;
    if (focused >= 0) shown.querySelectorAll("button")[focused]?.focus(); // the keyboard's place stays
}

/** Put a node into the middle of the graph that is looked at, where the panel does not cover it. */
function addNode(type) {
    const node = LiteGraph.createNode(type);
    if (!node) return;
    const graph = app.canvas.graph ?? app.graph;
    const [left, top, width, height] = app.canvas.visible_area;
    graph.add(node);
    place(graph, node, [[left + width / 2, top + height / 2]]);
}

async function ask() {
    const answered = (response) => (response.ok ? response.text() : "");
    const text = await api.fetchApi("/parallel_dit/ranks").then(answered).catch(() => ""); // "" from no server
    if (text === told) return;
    told = text;
    state = text ? JSON.parse(text) : null;
    draw();
}

function noteRun() {
    runs.unshift(...lines.values());
    runs.length = Math.min(runs.length, MOST_RUNS);
    draw();
}

app.registerExtension({
    name: "ParallelDiT.RanksPanel",
    setup() {
        if (!app.extensionManager?.registerSidebarTab) return; // an editor without a sidebar
        words = isChinese(app) ? CHINESE : ENGLISH;
        for (const end of ENDS) api.addEventListener(end, noteRun);
        app.extensionManager.registerSidebarTab({
            id: ID,
            icon: "pi pi-server",
            title: words.title,
            tooltip: words.tooltip,
            type: "custom",
            render(place) {
                shown = element("div", "pdit");
                shown.setAttribute("aria-label", words.tooltip);
                place.replaceChildren(shown);
                draw();
                clearInterval(asking);
                asking = setInterval(ask, MILLISECONDS);
                ask();
            },
            destroy() {
                shown = null;
                clearInterval(asking);
            },
        });
    },
});
