/**
 * What this pack says on a node, in Chinese, for an editor in Chinese. The server's lines are English (nodes/ui/node_text.py);
 * reasons and errors inside of them, and lines that are not here, stay so.
 */

const LINES = [
    // of the end of a run (client/reports/run_report.py)
    [/^([\d.]+) s, ([\d.]+) x one GPU$/, "$1 秒，速度是单卡的 $2 倍"],
    [/^([\d.]+) s, ([\d.]+) x one rank$/, "$1 秒，速度是单个进程的 $2 倍"],
    [/^([\d.]+) s, ([\d.]+) s a step$/, "$1 秒，每步 $2 秒"],
    [/^exact, on (\d+) ranks?$/, "精确，$1 个进程"],
    [/^close to exact: (\d+) bands, (\d+) steps? exact$/, "接近精确：$1 个分片，$2 步精确"],
    [/^close to exact: patches, (\d+) steps? exact$/, "接近精确：分片并行，$1 步精确"],
    [/^close to exact: step cache, packed transfers$/, "接近精确：步缓存，压缩传输"],
    [/^close to exact: step cache$/, "接近精确：步缓存"],
    [/^close to exact: packed transfers$/, "接近精确：压缩传输"],
    [/^naive patches, a control$/, "互不交换的分片（对照）"],
    [/^not in (?:bands|patches): (.*)$/, "没有分片：$1"],
    [/^step cache: (\d+) of (\d+) model calls computed$/, "步缓存：$2 次模型调用算了 $1 次"],
    [/^degrees auto: one device, (.*), planned ([\d.]+) s$/, "auto 的选择：只用 $1，预计 $2 秒"],
    [/^degrees auto: (.*) on (.*), planned ([\d.]+) s$/, "auto 的选择：$1，设备 $2，预计 $3 秒"],
    [/^(.*) would take about ([\d.]+) s \(see Parallel Doctor\)$/, "换成 $1 约需 $2 秒（见并行诊断）"],
    // of long work (nodes/ui/loading_bar.py, client/loading.py)
    [/^starting (\d+) ranks$/, "正在启动 $1 个进程"],
    [/^loading, (\d+) %$/, "正在读取模型，$1 %"],
    [/^loading$/, "正在读取模型"],
    [/^([\d.]+) GB of weights on (\d+) ranks(.*)$/, "$2 个进程上有 $1 GB 权重$3"],
    [/^calibrating, about 10 s, once for this machine and kind of model, (\d+) s$/, "正在测量，约 10 秒，每种模型一次，已 $1 秒"],
    [/^calibrating, about 10 s, once for this machine and kind of model$/, "正在测量，约 10 秒，每种模型一次"],
    [/^trying (.*), ComfyUI's own class, before its weights are loaded, (\d+) s$/, "正在试算 ComfyUI 自己的类 $1，已 $2 秒"],
    [/^trying (.*), ComfyUI's own class, before its weights are loaded$/, "正在试算 ComfyUI 自己的类 $1"],
    [/^rank (\d+) compiles, (\d+) s$/, "进程 $1 正在编译，已 $2 秒"],
    [/^first step, (\d+) s$/, "第一步，已 $1 秒"],
    [/^first step \(each step copies ([\d.]+) GB of weights to the devices\), (\d+) s$/, "第一步（每步向设备复制 $1 GB 权重），已 $2 秒"],
    [/^(.*), ComfyUI's own class, verified$/, "ComfyUI 自己的类 $1，已验证"],
];
const PREFIX = "Parallel DiT: ";

function line(text) {
    const prefix = text.startsWith(PREFIX) ? PREFIX : "";
    const said = text.slice(prefix.length);
    const known = LINES.find(([pattern]) => pattern.test(said));
    return known ? prefix + said.replace(...known) : text;
}

/** All lines of what was said on a node, each in Chinese if it is known. */
export const chinese = (text) => text.split("\n").map(line).join("\n");

/** Whether the editor's language is Chinese. `app`: ComfyUI's. */
export const isChinese = (app) =>
    String(app.ui.settings.getSettingValue("Comfy.Locale") ?? navigator.language).startsWith("zh");
