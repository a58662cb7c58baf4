/** What the menu's entries say in a corner of the page, in Chinese. Names and a model file's errors stay as they are. */
import { translated } from "./chinese.js";
import { REASONS } from "./chinese_lines.js";

/** Why a loader is left as it is, or nothing is gained (nodes/run_on_several_gpus.py, loaders.js). */
const WHY = [
    [/^no GPU holds the whole model$/, "没有一张卡放得下整个模型"],
    [/^the GPUs have no direct link \(P2P\)$/, "显卡之间不能直接通信（P2P）"],
    [/^Parallelize Model behind it is bypassed or muted$/, "它后面的“并行化模型”被绕过或禁用了"],
    [/^it does not run \(bypassed or muted\)$/, "它不运行（被绕过或禁用）"],
    [/^its model file is unknown$/, "不知道它加载的是哪个模型文件"],
    [
        /^ComfyUI shows no GPU on this machine\. To try it on the CPU, use Parallel DiT Loader with cpu,cpu as devices\.(.*)$/,
        "ComfyUI 在这台机器上没有可用的显卡。要在 CPU 上试用，请用“Parallel DiT 加载器”，并把 devices 设为 cpu,cpu。{1}",
    ],
    [/^ComfyUI shows one GPU on this machine\.(.*)$/, "ComfyUI 在这台机器上只显示一张显卡。{1}"],
    ...REASONS,
];

const TOASTS = [
    [/^Run on several GPUs$/, "在多张显卡上运行"],
    [/^Run on one GPU again$/, "恢复在单张显卡上运行"],
    [/^Explain this workflow$/, "说明此工作流"],
    [/^Move in from other packs$/, "从其他节点包迁入"],
    [/^This workflow has no node of ComfyUI-MultiGPU, raylight or SGLang\.$/, "这个工作流里没有 ComfyUI-MultiGPU、raylight 或 SGLang 的节点。"],
    [/^(.*) was left: this ComfyUI has no (.*)\.$/, "$1 保留：这个 ComfyUI 没有 $2。"],
    [/^(.*) was removed: set `compile` on Parallel DiT Loader\.$/, "$1 已移除：请用 Parallel DiT 加载器的 `compile`。"],
    [/^(.*) was removed: use Parallel Step Cache\.$/, "$1 已移除：请用“并行步缓存”。"],
    [/^(.*) was removed: ranks and ComfyUI make room for each other\.$/, "$1 已移除：计算进程和 ComfyUI 会互相腾出显存。"],
    [/^(.*) was removed: ComfyUI's loaders choose the device\.$/, "$1 已移除：设备由 ComfyUI 的加载器选择。"],
    [
        /^(.*) was removed: set the number of GPUs and the mode on Parallelize Model\.$/,
        "$1 已移除：请在“并行化模型”上设置显卡数量和方式。",
    ],
    [/^A new workflow has ComfyUI's own nodes in place of: (.*)\.$/, "新工作流用 ComfyUI 自己的节点代替了：$1。"],
    [/^Parallel DiT's nodes are not loaded\.$/, "Parallel DiT 的节点没有加载。"],
    [/^This workflow has no loader of a diffusion model\.$/, "这个工作流里没有扩散模型的加载器。"],
    [
        /^Nothing was changed: this editor would lose the wire to (.*)\. Please report it, and connect the nodes by hand\.$/,
        "没有改动：这个编辑器会断开到 $1 的连线。请报告此问题，并手动连接节点。",
    ],
    [/^Nothing was changed: (.*)\. Please report it, and connect the nodes by hand\.$/, "没有改动：$1。请报告此问题，并手动连接节点。"],
    [
        /^Parallelize Model is now behind (.*), and Apply PipeFusion, because (.*)\. Undo reverts it\.$/,
        "$1 后面接上了“并行化模型”和“应用 PipeFusion”，因为{2}。可以撤销。",
    ],
    [/^Parallelize Model is now behind (.*)\. Undo reverts it\.$/, "$1 后面接上了“并行化模型”。可以撤销。"],
    [/^On several GPUs already: (.*)\.$/, "已经在多张显卡上：$1。"],
    [/^Not changed: (.*?): (.*)\.$/, "保持原样：$1：{2}。"],
    [/^Would not be changed: (.*?): (.*)\.$/, "会保持原样：$1：{2}。"],
    [
        /^(.*): ([\d.]+ [GM]B) of weights on (.*)\. Parallelize Model would split each image over the GPUs; every step equals that of one GPU\.$/,
        "$1：$2 权重，设备 $3。“并行化模型”会把每张图分给各张显卡一起算；每一步都和单卡结果相同。",
    ],
    [
        /^(.*): ([\d.]+ [GM]B) of weights on (.*)\. Parallelize Model would split each image over the GPUs; Apply PipeFusion would be added too, because (.*): its first step is exact, and the others are close\. warmup_steps makes more of them exact\.$/,
        "$1：$2 权重，设备 $3。“并行化模型”会把每张图分给各张显卡一起算，还会接上“应用 PipeFusion”，因为{4}：第一步精确，之后接近，调大 warmup_steps 可让更多步精确。",
    ],
    [/^Removed: (.*) and (.*)\. Undo reverts it\.$/, "已取下：$1、$2。可以撤销。"],
    [/^Removed: (.*)\. Undo reverts it\.$/, "已取下：$1。可以撤销。"],
    [/^(.*) was not removed: replace it by ComfyUI's own loader\.$/, "$1 保留：请用 ComfyUI 自己的加载器代替它。"],
    [/^Nothing in this workflow runs on several GPUs\.$/, "这个工作流里没有在多张显卡上运行的节点。"],
];

const TEXTS = [...TOASTS, ...WHY]; // Explain this workflow may say a reason alone

/** A toast's title or text. */
export const chineseToast = (text) => translated(text, TEXTS, WHY);
