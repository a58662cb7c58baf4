/**
 * What this pack says on a node, in Chinese. The server's lines are English (nodes/ui/node_text.py). Names stay as they are,
 * and so do errors, whose words are looked for in logs and issues. tests/browser/test_chinese.py holds the tables to the server's texts.
 */
import { translated } from "./chinese.js";

/** What a pool of ranks has found out about its links (processes/failure_text.py). */
const NOTES = [
    [
        /^P2P off: transfers go through host memory, because direct access between GPUs failed NCCL's self-test or was slower$/,
        "P2P 已关闭：显卡直连没有通过 NCCL 自检，或者更慢，所以数据经内存传输",
    ],
    [
        /^P2P over NVLink alone: other transfers go through host memory, because direct access over PCIe failed NCCL's self-test or was slower$/,
        "P2P 只经 NVLink：经 PCIe 直连没有通过 NCCL 自检，或者更慢，所以其余数据经内存传输",
    ],
    [
        /^NCCL off: its self-test of the links failed with and without direct access between GPUs, so Gloo copies each transfer through host memory on both sides. This is slower and does not overlap with computation$/,
        "NCCL 已关闭：无论显卡是否直连，NCCL 的互联自检都没有通过，所以由 Gloo 传输，每次都在两端经内存复制，较慢，也不能与计算同时进行",
    ],
];

/** Modes and steps, inside of other lines. */
const PARTS = [
    [/^one (?:GPU|rank)$/, "一张卡"],
    [/^(.*), (\d+) patches$/, "$1、$2 个分片"],
    [/^, (\d+) s$/, "，已 $1 秒"],
    [/^, (\d+) %(.*)$/, "，$1 %{2}"],
    [/^ by its shipped plan$/, "（按自带的方案）"],
    [/^ without its shipped plan, which is for other code$/, "（自带的方案是为其他版本的代码做的，未使用）"],
    [/^Decoded$/, "解码"],
    [/^Encoded$/, "编码"],
    [/^, at least (\d+) dB expected$/, "，预计至少 $1 dB"],
];

/** Why something is so: behind "since" or a colon. */
export const REASONS = [
    // why a run is not cut into bands (nodes/sampling, nodes/model/run/run_shapes.py)
    [/^the conditioning has its own (.*)$/, "条件自带 $1"],
    [/^(.*)'s wrapper of the model needs whole calls$/, "$1 在模型外加的函数要看完整的调用"],
    [/^(.*)'s wrapper of the sampler needs the whole latent$/, "$1 在采样器外加的函数要看整个 latent"],
    [/^context windows call the model for parts of the latent$/, "上下文窗口对 latent 的局部调用模型"],
    [/^the guider (.*) calls two models$/, "引导器 $1 调用两个模型"],
    [/^the guider (.*) may need the whole latent$/, "引导器 $1 可能要看整个 latent"],
    [/^Z-Image's Fun control needs the whole latent$/, "Z-Image 的 Fun 控制要看整个 latent"],
    [/^a Fun control needs the whole latent$/, "Fun 控制要看整个 latent"],
    [
        /^Model Sparse Attention needs whole sequences\. Use ulysses_degree instead to split them over GPUs$/,
        "Model Sparse Attention 需要完整的序列。改用 ulysses_degree 也能分到多张卡上",
    ],
    [/^random inpaint noise is drawn for the whole latent$/, "局部重绘的随机噪声是为整个 latent 生成的"],
    [/^(.*)'s (\S*) wrapper may need the whole latent$/, "$1 在 $2 外加的函数可能要看整个 latent"],
    [/^(.*)'s (\S*) may need the whole latent$/, "$1 的 $2 可能要看整个 latent"],
    [/^(.*) is notified of each evaluation in turn$/, "$1 要依次得知每次计算"],
    [/^a PDD acceleration LoRA has other output heads in each step$/, "PDD 加速 LoRA 每一步的输出层都不同"],
    [/^dpm_adaptive computes its step size from the whole latent$/, "dpm_adaptive 按整个 latent 决定步长"],
    [/^ar_video computes one block of frames after the other$/, "ar_video 逐段计算视频帧"],
    [/^(.*) is not one of ComfyUI's samplers$/, "$1 不是 ComfyUI 自带的采样器"],
    [/^(.*) wraps a sampler that has its own noise$/, "$1 包着一个自带噪声的采样器"],
    [
        /^another node calls the model for parts of the latent, or for several latents at a time$/,
        "另一个节点对 latent 的局部、或对多个 latent 一起调用模型",
    ],
    [/^a function on the MODEL needs a different latent from the sampler's$/, "MODEL 上的函数要的不是采样器的 latent"],
    [
        /^a function on the MODEL makes its own conditioning for a part of the latent$/,
        "MODEL 上的函数为 latent 的局部另做了条件",
    ],
    [/^the conditioning's mask and the latent differ in size$/, "条件的遮罩与 latent 大小不同"],
    [
        /^a patch calls the model differently from the whole latent in the trial$/,
        "分片调用模型的方式与已验证的整个 latent 不同",
    ],
    [/^a patch has different conditioning from the whole latent$/, "分片的条件与整个 latent 的不同"],
    [/^the latent's height or width is not a multiple of the model's patch size$/, "latent 的高或宽不是模型 patch 大小的整数倍"],
    [/^the patches did not make the same number of model calls$/, "各分片调用模型的次数不同"],
    [/^the patches are at different timesteps$/, "各分片处在不同的时间步"],
    // why replicas wait for each other (nodes/model/call/concurrent_conds.py)
    [/^ComfyUI's own multi-GPU node distributes them$/, "ComfyUI 自己的多卡节点在分配它们"],
    [/^another node's (\S*) wrapper may keep a state from one call to the next$/, "另一个节点在 $1 外加的函数可能在两次计算之间保留状态"],
    [/^another node's (\S*) may keep a state from one call to the next$/, "另一个节点的 $1 可能在两次计算之间保留状态"],
    [
        /^another node's wrapper around the diffusion model may keep a state from one call to the next$/,
        "另一个节点在扩散模型外加的函数可能在两次计算之间保留状态",
    ],
    [/^another node is notified of each call$/, "另一个节点要得知每次计算"],
    // why a VAE is not cut (nodes/vae, client/vae.py)
    [/^a VAE of this kind \((.*)\) cannot be cut$/, "这种 VAE（$1）不能切分"],
    [/^another node has changed this VAE$/, "另一个节点改动了这个 VAE"],
    [/^another node has changed this VAE's layers$/, "另一个节点改动了这个 VAE 的层"],
    [/^there is only one device for it$/, "只有一个设备可用"],
    [/^the latent has at most (\d+) rows or columns, too few for (\d+) ranks$/, "latent 最多 $1 行（列），不够分给 $2 个计算进程"],
    [
        /^the image has at most (\d+) rows or columns, too few for (\d+) ranks with (\d+) each$/,
        "图像最多 $1 行（列），不够 $2 个计算进程各分 $3 行",
    ],
    [/^this VAE cannot split (\d+) frames evenly$/, "这个 VAE 不能均匀处理 $1 帧"],
    [/^a device has less than the ([\d.]+) GB that its part needs$/, "有设备放不下它那一部分所需的 $1 GB"],
    // why GPUs are hidden (core/device_choice.py)
    [
        /^ ComfyUI was started with (.*), which hides all other GPUs: restart it with (.*)\.$/,
        "ComfyUI 启动时带有 $1，其他显卡因此不可见：请改用 $2 重新启动。",
    ],
    [/^ On Windows ComfyUI shows the first GPU only, unless it is started with (.*)\.$/, "在 Windows 上 ComfyUI 只显示第一张显卡，除非启动时加 $1。"],
    [
        /^ (.*) is '(.*)' in ComfyUI's environment, which hides all other GPUs: remove it, or list the numbers of all in it, such as 0,1, and restart ComfyUI\.$/,
        "ComfyUI 的环境变量 $1 为 '$2'，其他显卡因此不可见：请删除它，或写上所有显卡的编号（例如 0,1），再重启 ComfyUI。",
    ],
    // how much is streamed (placement/memory_check.py)
    [/^weights streamed from host memory: (.*)$/, "其余权重用到时才从内存复制：{1}"],
    [/^([\d.]+) of ([\d.]+) GB on rank (\d+), (.*)$/, "计算进程 $3 有 $1 GB（共 $2 GB），{4}"],
    [/^([\d.]+) of ([\d.]+) GB on rank (\d+)$/, "计算进程 $3 有 $1 GB（共 $2 GB）"],
    ...NOTES,
    ...PARTS,
];

const LINES = [
    ...NOTES,
    // of the end of a run (client/reports/run_report.py)
    [/^([\d.]+) s, ([\d.]+) x one GPU$/, "$1 秒，速度是单卡的 $2 倍"],
    [/^([\d.]+) s, ([\d.]+) x one rank$/, "$1 秒，速度是单个计算进程的 $2 倍"],
    [/^([\d.]+) s, ([\d.]+) s a step$/, "$1 秒，每步 $2 秒"],
    [/^exact, on (\d+) ranks?$/, "精确，$1 个计算进程"],
    [/^close to exact: (\d+) patches, warm-up (\d+), exact to the last step$/, "精确到最后一步：$1 个分片，预热 $2 步"],
    [/^close to exact: patches, warm-up (\d+), exact to the last step$/, "精确到最后一步：分片并行，预热 $1 步"],
    [/^close to exact: (\d+) patches, warm-up (\d+)(, .*)?$/, "接近：$1 个分片，预热 $2 步{3}"],
    [/^close to exact: patches, warm-up (\d+)(, .*)?$/, "接近：分片并行，预热 $1 步{2}"],
    [
        /^min_closeness was not used, because of a step cache, a ControlNet or a guidance node$/,
        "最低接近度没有使用，因为有步缓存、ControlNet 或引导节点",
    ],
    [/^min_closeness was not used, because the run is exact$/, "最低接近度没有使用，因为这次运行是精确的"],
    [/^close to exact: step cache, packed transfers$/, "接近：步缓存，压缩传输"],
    [/^close to exact: step cache$/, "接近：步缓存"],
    [/^close to exact: packed transfers$/, "接近：压缩传输"],
    [/^naive patches, for comparison$/, "互不交换的分片（对照）"],
    [/^not in patches: (.*)$/, "没有分片：{1}"],
    [/^step cache: (\d+) of (\d+) model calls computed$/, "步缓存：$2 次模型调用算了 $1 次"],
    [/^step cache: not used, because (.*)$/, "步缓存：没有使用，因为{1}"],
    [
        /^step cache: every call is computed, because the conditioning has LoRAs of its own \(hooks\)$/,
        "步缓存：每次都要计算，因为条件自带 LoRA（hooks）",
    ],
    [/^context windows: (\d+) at a time$/, "上下文窗口：同时计算 $1 个"],
    [/^degrees auto: one device, (.*), planned ([\d.]+) s$/, "auto 的选择：只用 $1，预计 $2 秒"],
    [/^degrees auto: (.*) on (.*), planned ([\d.]+) s$/, "auto 的选择：$1，设备 $2，预计 $3 秒"],
    [/^degrees auto: (.*) on (.*), because (.*) cannot be timed$/, "auto 的选择：$1，设备 $2，因为无法为 $3 计时"],
    [/^degrees auto has one device only\.(.*)$/, "degrees 为 auto，但只有一个设备。{1}"],
    [/^(.*) would take about ([\d.]+) s \(see Parallel Doctor\)$/, "换成 {1} 约需 $2 秒（见并行诊断）"],
    // of what is said in a run (nodes/model, client/memory_guard.py, processes/failure_text.py)
    [
        /^split_batch_degree (\d+), but there is work for only (\d+) of (\d+) copies of the model at a time\. Raise batch_size\. To split one image over GPUs, use pipefusion_degree or ulysses_degree instead\.$/,
        "split_batch_degree 为 $1，但同一时间 $3 份模型里只有 $2 份有事做。请调大 batch_size；或改用 pipefusion_degree 或 ulysses_degree，把一张图分给多张卡一起算。",
    ],
    [
        /^split_batch_degree (\d+), but there is work for only (\d+) of (\d+) copies of the model at a time, because (.*)\.$/,
        "split_batch_degree 为 $1，但同一时间 $3 份模型里只有 $2 份有事做，因为{4}。",
    ],
    [
        /^split_batch_degree (\d+), but NAG needs both prompts in one call, so 1 of (\d+) copies of the model computes them\. To split one image over GPUs, use pipefusion_degree or ulysses_degree instead\.$/,
        "split_batch_degree 为 $1，但 NAG 要同时看两个提示词，所以 $2 份模型里只有 1 份在算。请改用 pipefusion_degree 或 ulysses_degree，把一张图分给多张卡一起算。",
    ],
    [
        /^(\d+) of (\d+) layers of this LoRA do not fit this model and are left out$/,
        "这个 LoRA 的 $2 层里有 $1 层与此模型不符，已略去",
    ],
    [/^this LoRA asks for an attention kernel, and is used with that of the MODEL$/, "这个 LoRA 要求的注意力内核没有使用，按 MODEL 的内核计算"],
    [/^no layer of this LoRA is in this model, so it changes nothing$/, "这个 LoRA 没有此模型的层，不起作用"],
    [/^(.*) of this LoRA does not fit this model and is left out$/, "这个 LoRA 的 $1 与此模型不符，已略去"],
    [
        /^torch\.compile is skipped, because this MODEL's layers are on its ranks\. To compile them there, turn on compile in Parallel DiT Loader\.$/,
        "跳过了 torch.compile：这个 MODEL 的层在各计算进程里。要在那里编译，请打开加载器的 compile（Parallel DiT 加载器有它）。",
    ],
    [
        /^(.*) ran out of memory\. One more try with new ranks: ([\d.]+) GB more of rank (\d+)'s weights are streamed from host memory$/,
        "$1 显存不足。现在用新的计算进程再试一次，计算进程 $3 的权重再有 $2 GB 用到时才从内存复制",
    ],
    [/^the ranks did not answer in step (\d+) of (\d+)\. The run goes on with (.*)$/, "第 $1 步（共 $2 步）各计算进程没有响应，运行用 $3 继续"],
    [/^(.*) did not answer in step (\d+) of (\d+)\. The run goes on with (.*)$/, "第 $2 步（共 $3 步）$1 没有响应，运行用 $4 继续"],
    [/^(.*) died in step (\d+) of (\d+)\. The run goes on with (.*)$/, "第 $2 步（共 $3 步）$1 的计算进程意外结束，运行用 $4 继续"],
    [/^(.*) failed in step (\d+) of (\d+)\. The run goes on with (.*)$/, "第 $2 步（共 $3 步）$1 出错，运行用 $4 继续"],
    [/^step (\d+) of (\d+) was computed again, ([\d.]+) s$/, "第 $1 步（共 $2 步）已重算，用了 $3 秒"],
    [
        /^left out, as in ComfyUI, because no part of the model uses them: (\d+) tensors \((.*)\)$/,
        "文件里有 $1 个张量模型用不到，已略去（与 ComfyUI 相同）：$2",
    ],
    [/^ranks do not follow these start options of ComfyUI: (.*)$/, "各计算进程不遵循 ComfyUI 的这些启动选项：$1"],
    // of long work (nodes/ui/loading_bar.py, client/loading.py, nodes/self_test.py)
    [/^starting (\d+) ranks$/, "正在启动 $1 个计算进程"],
    [/^loading((?:, \d+ %)?)$/, "正在加载模型{1}"],
    [/^([\d.]+ [GM]B) of weights on (\d+) ranks?, (.*)$/, "已加载：$2 个计算进程共 $1 权重，{3}"],
    [/^([\d.]+ [GM]B) of weights on (\d+) ranks?$/, "已加载：$2 个计算进程共 $1 权重"],
    [/^calibrating, about 10 s, once for this machine and kind of model(.*)$/, "正在测量，约 10 秒，每种模型一次{1}"],
    [/^trying (.*) for a few steps(.*)$/, "正在用 {1} 试跑几步{2}"],
    [/^trying skipped blocks of (.*), ComfyUI's own class(.*)$/, "正在试算 $1 跳过的块怎样分到多张卡（用 ComfyUI 的模型代码）{2}"],
    [/^trying (NAG|WanVideoNAG) of (.*), ComfyUI's own class(.*)$/, "正在试算 $2 的 $1 怎样分到多张卡（用 ComfyUI 的模型代码）{3}"],
    [/^trying (.*), ComfyUI's own class, before its weights are loaded(.*)$/, "正在试算 $1 怎样分到多张卡（用 ComfyUI 的模型代码）{2}"],
    [/^rank (\d+) compiles, (\d+) s$/, "计算进程 $1 正在编译，已 $2 秒"],
    [/^first step, (\d+) s$/, "第一步，已 $1 秒"],
    [/^first step \(each step copies ([\d.]+) GB of weights to the devices\), (\d+) s$/, "第一步（每步向设备复制 $1 GB 权重），已 $2 秒"],
    [/^(.*), ComfyUI's own class, verified(.*): (\d+) of (\d+) blocks are shared out$/, "$1（用 ComfyUI 的模型代码），已验证{2}：$4 个块中有 $3 个分给各计算进程"],
    [/^(.*), ComfyUI's own class, verified(.*)$/, "$1（用 ComfyUI 的模型代码），已验证{2}"],
    [/^([\d.]+) % of a step's operations are shared out$/, "每步 $1% 的运算分给各计算进程"],
    [/^self-test passed: (\d+) of (\d+) checks, (\d+) not looked at$/, "自检通过：$1/$2 项，$3 项未检查"],
    [/^self-test passed: (\d+) of (\d+) checks$/, "自检通过：$1/$2 项"],
    [/^self-test FAILED: (.*); (\d+) of (\d+) checks passed$/, "自检未通过：$1；通过 $2/$3 项"],
    [/^advice: stay on one (?:GPU|CPU rank) \((.*)\), ([\d.]+) s$/, "建议：只用一个设备（$1），$2 秒"],
    [
        /^advice: none, because ([\d.]+)x on (\d+) ranks is not credible: the machine was busy while one device was measured\. Run this again when the machine is idle\.$/,
        "没有建议：$2 个计算进程快到 $1 倍并不可信，测量单个设备时机器在忙别的事。请在机器空闲时再运行一次。",
    ],
    [
        /^advice: nothing fits these devices\. Use a smaller image, weight_dtype (\S+), or more devices with (\S+)\.$/,
        "建议：这些设备都放不下。请缩小图像，或把 weight_dtype 设为 $1，或用 $2 增加设备。",
    ],
    [/^advice: (.*), ([\d.]+) s, ([\d.]+) x one device$/, "建议：{1}，$2 秒，速度是单个设备的 $3 倍"],
    [/^advice: (.*), ([\d.]+) s$/, "建议：{1}，$2 秒"],
    [/^with (.*), predicted: nothing fits$/, "加上 $1（推算）：仍然放不下"],
    [/^with (.*), predicted: no gain$/, "加上 $1（推算）：不会更快"],
    [/^with (.*), predicted: (.*), ([\d.]+) s a step, without it nothing fits$/, "加上 $1（推算）：{2}，每步 $3 秒；没有它放不下"],
    [/^with (.*), predicted: (.*), ([\d.]+) s a step, ([\d.]+) x without it$/, "加上 $1（推算）：{2}，每步 $3 秒，速度是现在的 $4 倍"],
    [/^(.*), (\d+) of (\d+) checks$/, "正在自检 $1，已完成 $2/$3 项"],
    [/^(\S*_degree \d+.*) on (.*)$/, "$1，设备 $2"],
    // of a VAE (nodes/vae)
    [/^(Decoded|Encoded) in (\d+) parts on (.*)\.$/, "分 $2 份{1}，设备 $3。"],
    [/^(Decoded|Encoded) in tiles on (.*)\.$/, "分块{1}，设备 $2。"],
    [/^(Decoded|Encoded) whole by ComfyUI, because (.*)\.$/, "由 ComfyUI 整体{1}，因为{2}。"],
];
const PREFIX = "Parallel DiT: ";

function line(text) {
    const prefix = text.startsWith(PREFIX) ? PREFIX : "";
    return prefix + translated(text.slice(prefix.length), LINES, REASONS);
}

/** All lines of what was said on a node, each in Chinese if it is known. */
export const chinese = (text) => text.split("\n").map(line).join("\n");
