"""The Chinese of the bundled workflows: what stands behind each title, and under each note."""

TITLES = {
    "Behind the loader": "加载器之后",
    "Files, GPUs, what to turn": "中文在下方",
    "Character": "角色",
    "Character and background": "角色和背景",
    "ComfyUI's own sampler": "采样",
    "First frame": "首帧",
    "GPUs that share the image": "分摊",
    "GPUs that share the video": "分摊",
    "Image encoder": "图像编码器",
    "Model": "模型",
    "Model and LoRA": "模型",
    "Model and text encoder": "模型",
    "Model and text encoders": "模型",
    "Model, on two processes": "模型",
    "Model, text encoder, audio VAE": "模型",
    "Model, text encoders, VAE": "模型",
    "KSampler (high noise)": "高噪声",
    "KSampler (low noise)": "低噪声",
    "Motion": "动作描述",
    "Movement": "动作",
    "Negative (unused at cfg 1)": "负面（不用）",
    "Negative prompt": "负面提示词",
    "Image": "图像",
    "Image to change": "原图",
    "Pipeline": "流水线",
    "Positive prompt": "正面提示词",
    "Prompt": "提示词",
    "Prompt and size": "提示词和尺寸",
    "Prompts": "提示词",
    "Report": "报告",
    "Sampler and image": "图像",
    "Sampling": "采样",
    "Sampling and size": "采样和尺寸",
    "Shift": "偏移",
    "Size": "尺寸",
    "Text encoder and VAE": "编码器",
    "Text encoder, image encoder, VAE": "编码器",
    "The two experts": "专家模型",
    "VAE": "VAE",
    "VAEs": "VAE",
    "What the ranks did": "运行情况",
    "What to change": "改什么",
    "Video": "视频",
    "Video with audio": "带声音的视频",
    "What to turn": "中文在下方",
}

_PIPE, _ULYSSES, _RING = (
    "流水线并行度（`pipefusion_degree`）",
    "Ulysses 并行度（`ulysses_degree`）",
    "环形并行度（`ring_degree`）",
)
_TENSOR, _BATCH = "张量并行度（`tensor_parallel_degree`）", "批次并行度（`split_batch_degree`）"
_BUNDLED = f"任何机器都能运行，不用下载文件。要用自己的显卡：设备（`devices`）设为 `auto`，{_PIPE}设为显卡数。"
_FILES = "先把上面列出的文件放好，或在加载器里选择自己的文件。"
_HALF = "每张放一半模型。"
_PROMPTS = "一张算正面提示词，一张算负面提示词，结果精确；`cfg` 要大于 1。"
_ONE_PIPE = f"**1 张**：{_PIPE}设为 1。"
_ONE_CONFIG = "**1 张**：去掉“Ulysses 配置”。"
_NO_PIPE = f"{_PIPE}设为 1"
_WITH_ULYSSES = f"接上“Ulysses 配置”，{_ULYSSES}设为 2"
_PIPE_INSTEAD = f"去掉“Ulysses 配置”，{_PIPE}设为 2，接上“应用 PipeFusion”：图像接近。"
_FAST_LINKS = "有 NVLink 或显卡间能直接传数据（P2P）"
_FRAMES = "首帧和末帧的图像接到 `first_frame`、`last_frame`。"


def _note(made_for: str, *others: str) -> str:
    """What it is made for, and a list of what to set on other machines."""
    return "\n".join([made_for, *(f"- {each}" for each in others)])


_QWEN_2_1 = (
    f"{_FILES}需要 ComfyUI 0.37 或更新。为 2 张 12 GB、{_FAST_LINKS}的显卡而设，每张放整个 int8 文件，结果精确。",
    f"**2 张，没有 P2P**：{_PIPE_INSTEAD}",
    f"**2 张 8 GB**：去掉“Ulysses 配置”，{_PIPE}设为 2：每张放一半模型，精确。",
    f"**4 张**：{_ULYSSES}设为 4。{_ONE_CONFIG}",
)

NOTES = {
    "quickstart": _note(
        f"{_BUNDLED}提示词最多四个数字，`_` 表示留空。",
        "**预热步数（`warmup_steps`）**：设为步数时每一步都精确，可以用来比较图像。",
        "**流水线分片数（`num_pipeline_patch`）**：Latent 分成几片；0 为自动选择。",
    ),
    "native_ksampler": f"{_BUNDLED}提示词最多四个数字，`_` 表示留空。“应用 PipeFusion”后面可以接 ComfyUI 的任何采样器；"
    "绕过它时每一步都精确。",
    "parallelize_model": _note(
        f"{_FILES}为 2 张 16 GB 的显卡而设，任何互联都可以。除“并行化模型”外都是 ComfyUI 自己的节点："
        "把它接在你自己的加载器或 LoRA 后面即可。",
        "**显卡数不同**：改显卡数（`gpus`），0 为全部。",
        "**每张放得下整个模型，有 NVLink**：方式（`mode`）用 ulysses，精确。",
        "**不确定**：方式用 auto；图像可以只是接近时，后面再接“应用 PipeFusion”。",
    ),
    "flux_schnell_pipefusion": _note(
        f"{_FILES}为 2 张 16 GB、没有 NVLink 的显卡而设，{_HALF}",
        f"**4 张**：{_PIPE}设为 4。只有四步，提速少；每张放不下一半模型时才用。",
        f"**2 张，有 NVLink，每张放得下整个模型**：{_NO_PIPE}，{_WITH_ULYSSES}：精确。",
        f"**1 张**：{_PIPE}设为 1，权重精度（`weight_dtype`）fp8_e4m3fn。",
    ),
    "sd3_split_batch": _note(
        f"{_FILES}为 2 张 16 GB 的显卡而设，每张放整个模型：{_PROMPTS}",
        f"**4 张**：再把{_PIPE}设为 2，在 ModelSamplingSD3 前面接“应用 PipeFusion”。",
        f"**1 张**：{_BATCH}设为 1。",
    ),
    "flux_dev_ulysses_pipefusion": _note(
        f"{_FILES}为 4 张两两之间互联快的显卡而设：两级流水线，每级两张卡用 Ulysses 分摊一张图。"
        "在设备（`devices`）里把同一对写在一起。",
        f"**2 张，互联慢**：{_ULYSSES}设为 1，每张放一半模型。",
        f"**2 张，互联快，每张放得下整个模型**：{_PIPE}设为 1，精确。",
        f"**8 张**：{_ULYSSES}设为 4。**1 张**：两个都设为 1。",
    ),
    "z_image_turbo_ring": _note(
        f"{_FILES}为 2 张 16 GB 的显卡而设，每张放整个模型，任何互联都可以，结果精确。",
        f"**{_FAST_LINKS}**：{_RING}设为 1，{_ULYSSES}设为 2，传输更少。",
        f"**4 张**：{_RING}设为 4，或者两个都设为 2。{_ONE_CONFIG}",
        f"**2 张 8 GB**：{_PIPE_INSTEAD}",
    ),
    "flux_2_dev_tensor": _note(
        f"{_FILES}为 2 张有 NVLink 的 24 GB 显卡而设，每张放每个块的一半，结果精确。",
        f"**2 张，没有 NVLink**：{_TENSOR}设为 1，{_PIPE}设为 2，接上“应用 PipeFusion”：图像接近。",
        f"**4 张**：{_TENSOR}设为 2，{_PIPE}设为 2，接上“应用 PipeFusion”。",
        f"**2 张 16 GB**：设置相同，放不下的权重用到时才从内存传送。**1 张**：{_TENSOR}设为 1。",
    ),
    "flux_dev_displaced": _note(
        f"{_FILES}为 2 张没有 NVLink 的 24 GB 显卡而设，每张以 fp8 放整个模型，第一步精确，之后接近。",
        "**32 GB 的显卡**：权重精度（`weight_dtype`）default。",
        f"**有 NVLink**：分片方式（`patch_mode`）none，分片并行度（`patch_degree`）1，{_ULYSSES}设为 2：精确。",
        f"**16 GB 的显卡**：{_PIPE_INSTEAD}",
        _ONE_CONFIG,
    ),
    "pixart_2048": _note(
        f"{_FILES}为 4 张显卡而设，任何显卡和互联都可以。",
        f"**显卡数不同**：{_PIPE}设为显卡数。",
        f"**互联快**：{_NO_PIPE}，接上“Ulysses 配置”，{_ULYSSES}设为 4：精确。",
        f"**两两一组**：{_PIPE}设为 2，{_BATCH}设为 2，每组算一个提示词。",
    ),
    "krea_2": _note(
        f"{_FILES}为 2 张 12 GB 的显卡而设，任何互联都可以，{_HALF}",
        f"**2 张，有 NVLink**：{_NO_PIPE}，{_WITH_ULYSSES}：精确。",
        f"**4 张**：{_WITH_ULYSSES}，{_PIPE}设为 2。",
        _ONE_PIPE,
    ),
    "qwen_edit_2511": _note(
        f"{_FILES}为 2 张 24 GB 的显卡而设，任何互联都可以，{_HALF}显存不够时关闭外推（`extrapolate`）。",
        f"**2 张 16 GB，互联快**：{_TENSOR}设为 2，{_NO_PIPE}，去掉“应用 PipeFusion”：精确。",
        f"**2 张，每张放得下整个模型（24 GB）**：{_BATCH}设为 2，{_NO_PIPE}，去掉“应用 PipeFusion”：精确。",
        f"**4 张**：{_BATCH}设为 2，{_PIPE}设为 2。{_ONE_PIPE}",
    ),
    "qwen_image_2_1": _note(*_QWEN_2_1),
    "qwen_image_2_1_edit": _note(*_QWEN_2_1, "更多图像接到 image_2 等输入，提示词里写 `<image2>`。"),
    "wan_2_2": _note(
        f"{_FILES}为 2 张 24 GB 的显卡而设，任何互联都可以，每张都放得下一个专家模型：{_PROMPTS}以下设置两个加载器都要改。",
        f"**4 张**：两个加载器都接上“Ulysses 配置”，{_ULYSSES}设为 2（互联快），或{_RING}设为 2。",
        f"**1 张**：两个加载器的{_BATCH}都设为 1。",
        "用四步的 LoRA 时 `cfg` 为 1：改用 Ulysses 或 ring。",
    ),
    "wan_animate_2": _note(
        f"{_FILES}再准备一张角色的图像，和一段取景相同的动作视频。为 2 张 24 GB、{_FAST_LINKS}的显卡而设，结果精确。",
        f"**2 张，没有 P2P**：{_ULYSSES}设为 1，{_RING}设为 2。",
        f"**2 张 12 GB**：去掉“Ulysses 配置”，{_TENSOR}设为 2：每张放一半模型，精确。",
        f"**4 张**：{_ULYSSES}设为 4。{_ONE_CONFIG}",
    ),
    "ltx_2_3": _note(
        f"{_FILES}为 2 张 24 GB 的显卡而设，任何互联都可以，{_HALF}",
        f"**2 张，有 NVLink**：{_NO_PIPE}，{_WITH_ULYSSES}，去掉“应用 PipeFusion”：精确。",
        f"**4 张**：{_WITH_ULYSSES}，{_PIPE}设为 2。",
        _ONE_PIPE,
    ),
    "minimax_h3": _note(
        f"{_FILES}为 4 张 24 GB 的显卡而设，任何互联都可以，每张放四分之一的模型。{_FRAMES}",
        f"**2 张 24 GB**：{_NO_PIPE}，接上“Ulysses 配置”，{_ULYSSES}（互联快）或{_RING}设为 2，"
        "去掉“应用 PipeFusion”：精确。",
        f"**2 张 32 GB**：{_PIPE}设为 2。{_ONE_PIPE}",
    ),
    "fasth3": _note(
        f"{_FILES}需要 ComfyUI 0.38 或更新和 comfy-kitchen 0.2.40。为 2 张 24 GB、{_FAST_LINKS}的显卡而设。{_FRAMES}",
        f"**4 张**：{_ULYSSES}设为 4。{_ONE_CONFIG}",
        f"**2 张 16 GB**：{_ULYSSES}设为 1，{_TENSOR}设为 2：每张放一半模型。",
        f"**2 张，没有 P2P**：{_ULYSSES}设为 1，{_PIPE}设为 2，接上“应用 PipeFusion”，去掉 Model Sparse Attention。",
    ),
}
"""Workflow -> what its note says in short: whom it is made for and what to turn."""


def titled(english: str) -> str:
    """A title in both languages, or once where they are the same."""
    chinese = TITLES[english]
    return english if chinese == english else f"{english} / {chinese}"
