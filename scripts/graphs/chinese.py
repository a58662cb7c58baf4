"""The Chinese of the bundled workflows: what stands behind each title, and under each note."""

TITLES = {
    "Behind the loader": "加载器之后",
    "Files, GPUs, what to turn": "文件、显卡、可调项",
    "Character": "角色",
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
    "Movement": "动作",
    "Image": "图像",
    "Image to change": "原图",
    "Pipeline": "流水线",
    "Prompt": "提示词",
    "Prompt and size": "提示词和尺寸",
    "Prompts": "提示词",
    "Report": "报告",
    "Sampler and image": "图像",
    "Sampling": "采样",
    "Sampling and size": "采样和尺寸",
    "Sampling, by ComfyUI's own node": "采样",
    "Shift": "偏移",
    "Size": "尺寸",
    "Text encoder and VAE": "编码器",
    "Text encoder, image encoder, VAE": "编码器",
    "The two experts": "专家模型",
    "VAE": "VAE",
    "VAEs": "VAE",
    "Video": "视频",
    "Video with audio": "带声音的视频",
    "What to turn": "可调项",
}

_BUNDLED = "任何机器都能运行，不用下载文件。要用自己的显卡：`devices` 设为 `auto`，`pipefusion_degree` 设为显卡数。"
_FILES = "先把上面列出的文件放好，或在加载器里选择自己的文件。"
_HALF = "每张放一半模型。只有一张卡时 `pipefusion_degree` 设为 1。"
_PROMPTS = "一张算正面提示词，一张算负面提示词，结果精确；`cfg` 要大于 1。只有一张卡时 `split_batch_degree` 设为 1。"
_NO_CONFIG = "只有一张卡时去掉“Ulysses 配置”。"
_FAST_LINKS = f"为 2 张有 NVLink 或 P2P 的显卡而设。{_NO_CONFIG}"
_FRAMES = "首帧和末帧的图像接到 `first_frame`、`last_frame`。"

NOTES = {
    "quickstart": f"{_BUNDLED}提示词最多四个数字，`_` 表示留空。",
    "native_ksampler": f"{_BUNDLED}“应用 PipeFusion”后面可以接 ComfyUI 的任何采样器。",
    "parallelize_model": f"{_FILES}为 2 张 16 GB 的显卡而设。除“并行化模型”外都是 ComfyUI 自己的节点："
    "把它接在你自己的加载器或 LoRA 后面即可。`gpus` 为 0 时用全部显卡。",
    "flux_schnell_pipefusion": f"{_FILES}为 2 张 16 GB 的显卡而设，{_HALF}",
    "sd3_split_batch": f"{_FILES}为 2 张 16 GB 的显卡而设，每张放整个模型：{_PROMPTS}",
    "flux_dev_ulysses_pipefusion": f"{_FILES}为 4 张显卡而设：两级流水线，每级两张卡用 Ulysses 分摊一张图。"
    "2 张卡时把 `ulysses_degree` 或 `pipefusion_degree` 设为 1。",
    "z_image_turbo_ring": f"{_FILES}为 2 张 16 GB 的显卡而设，每张放整个模型，任何互联都可以，结果精确。{_NO_CONFIG}",
    "flux_2_dev_tensor": f"{_FILES}为 2 张有 NVLink 的 24 GB 显卡而设，每张放每个块的一半，"
    "结果精确。只有一张卡时 `tensor_parallel_degree` 设为 1。",
    "flux_dev_displaced": f"{_FILES}为 2 张没有 NVLink 的 24 GB 显卡而设，每张放整个模型，"
    f"第一步精确，之后接近。{_NO_CONFIG}",
    "pixart_2048": f"{_FILES}为 4 张显卡而设，任何显卡和互联都可以。`pipefusion_degree` 设为显卡数。",
    "krea_2": f"{_FILES}为 2 张 12 GB 的显卡而设，{_HALF}",
    "qwen_edit_2511": f"{_FILES}为 2 张 24 GB 的显卡而设，{_HALF}显存不够时关闭 `extrapolate`。",
    "qwen_image_2_1": f"{_FILES}需要 ComfyUI 0.37 或更新。{_FAST_LINKS}",
    "qwen_image_2_1_edit": f"{_FILES}需要 ComfyUI 0.37 或更新。{_FAST_LINKS}更多图像接到 image_2 等输入。",
    "wan_2_2": f"{_FILES}为 2 张 24 GB 的显卡而设，每张都放得下一个专家模型：{_PROMPTS}",
    "wan_animate_2": f"{_FILES}再准备一张角色的图像，和一段取景相同的动作视频。{_FAST_LINKS}",
    "ltx_2_3": f"{_FILES}为 2 张 24 GB 的显卡而设，{_HALF}",
    "minimax_h3": f"{_FILES}为 4 张 24 GB 的显卡而设，每张放四分之一的模型。`pipefusion_degree` 设为显卡数。{_FRAMES}",
    "fasth3": f"{_FILES}需要 ComfyUI 0.38 或更新和 comfy-kitchen 0.2.40。{_FAST_LINKS}{_FRAMES}",
}
"""Workflow -> what its note says in short: whom it is made for and what to turn."""


def titled(english: str) -> str:
    """A title in both languages, or once where they are the same."""
    chinese = TITLES[english]
    return english if chinese == english else f"{english} / {chinese}"
