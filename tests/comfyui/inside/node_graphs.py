"""Graphs that have one node between loader and sampler, and stand-ins for what it is linked to. Used by compatibility.py."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import comfy.patcher_extension
import comfy.utils
import folder_paths
import stand_ins
from boot import torch
from safetensors.torch import load_file
from templates import load_native

import nodes

STEPS, CFG, SEED = 4, 3.0, 42
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
Prompt = dict[str, dict[str, Any]]
Link = list


class Missing(Exception):
    """Nothing stands in for an input: its type."""


@dataclass
class Given:
    """What the graphs' own nodes give and get. `change`: of native MODELs."""

    values: dict[str, Callable[[], Any]] = field(default_factory=dict)
    wrappers: list[Any] = field(default_factory=list)
    result: torch.Tensor | None = None
    change: Callable[[Any], Any] = lambda model: model


GIVEN = Given()


class _Give:
    RETURN_TYPES, FUNCTION, CATEGORY = ("*",), "run", ""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"what": ("STRING", {})}}

    def run(self, what):
        return (GIVEN.values[what](),)


class _Keep:
    """Notes the wrappers of Apply PipeFusion, which have the reports."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", ""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def run(self, model):
        GIVEN.wrappers.extend(model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE))
        return (model,)


class _Result:
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "", True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("*",)}}

    def run(self, value):
        value = value["samples"] if isinstance(value, dict) else value
        GIVEN.result = (value.unbind()[0] if value.is_nested else value).detach().clone().cpu().float()
        return ()


def install(case: stand_ins.Case, latent_format: Any) -> None:
    """The graphs' own nodes, and what stands in for text encoders, pictures, files."""
    own = {"CompatibilityGive": _Give, "CompatibilityKeep": _Keep, "CompatibilityResult": _Result}
    nodes.NODE_CLASS_MAPPINGS.update(own)
    vae = stand_ins.install(case, latent_format)
    clip = stand_ins.Clip(case)
    shape = case.tensors["latent"].shape
    shape = (*shape[:-2], 16, 16) if len(shape) == 4 else (*shape[:2], 5, 8, 8)
    frames = vae._frames(stand_ins.FRAMES) if vae.video else 1

    def encoded(text: str) -> Callable[[], Any]:
        return lambda: clip.encode_from_tokens_scheduled({"text": text})

    GIVEN.values = {
        "positive": encoded("a"),
        "negative": encoded("b"),
        "other": encoded("c"),
        "CLIP": lambda: clip,
        "VAE": lambda: vae,
        "LATENT": lambda: {"samples": torch.zeros(shape)},
        "picture": lambda: {"samples": stand_ins.random("latent", *shape)},
        "masked": lambda: {
            "samples": stand_ins.random("latent", *shape),
            "noise_mask": torch.linspace(0, 1, 8 * shape[-1]).expand(1, 8 * shape[-2], -1),
        },
        "IMAGE": lambda: stand_ins.picture("a", frames),
        "MASK": stand_ins.hole,
        "AUDIO": lambda: stand_ins.sound("a"),
        "CLIP_VISION": lambda: stand_ins.ClipVision(case, 1),
        "CLIP_VISION_OUTPUT": lambda: stand_ins.ClipVision(case, 1).encode_image(stand_ins.picture("b")),
        "AUDIO_ENCODER_OUTPUT": lambda: stand_ins.AudioEncoder().encode_audio(torch.zeros(1), 16000),
        "LORA_MODEL": lambda: load_file(folder_paths.get_full_path_or_raise("loras", f"{case.name}.safetensors")),
    }
    for name in (case.name, f"{case.name}-2"):
        GIVEN.values[f"MODEL {name}"] = lambda name=name: GIVEN.change(load_native(f"{name}.safetensors"))


def declared(name: str) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Required and optional inputs of a node: name -> (type, options)."""
    inputs = nodes.NODE_CLASS_MAPPINGS[name].INPUT_TYPES()
    return tuple(
        {key: (*value, {})[:2] for key, value in inputs.get(group, {}).items() if isinstance(value, (tuple, list)) and value}
        for group in ("required", "optional")
    )


def types_of(kind: Any) -> list[str]:
    """The names of an input's type."""
    return ["COMBO"] if isinstance(kind, (list, tuple)) else [each.strip() for each in str(kind).split(",")]


def kind_of(name: str) -> str | None:
    """What a node is in a graph: see `graph`. None: it has nothing to do with a MODEL's way to its sampler."""
    try:
        inputs = [each for group in declared(name) for kind, _options in group.values() for each in types_of(kind)]
        gives = list(map(str, nodes.NODE_CLASS_MAPPINGS[name].RETURN_TYPES))
    except Exception:
        return None  # it looks for what is not there
    takes, called = set(inputs), "MODEL" in inputs or "GUIDER" in inputs
    if "GUIDER" in gives:
        return "guider"
    if "SAMPLER" in gives:
        return "sampler"
    if called and "LATENT" in gives and ({"CONDITIONING", "LATENT"} <= takes or {"GUIDER", "LATENT"} <= takes):
        return "latent"
    if "MODEL" in takes:
        return next((each.lower() for each in ("MODEL", "SIGMAS", "LATENT") if each in gives), None) or (
            "image" if "IMAGE" in gives and "CONDITIONING" in takes else None
        )
    return None


class Graph:
    """Its nodes, while it is put together."""

    def __init__(self, name: str, mode: str, settings: dict[str, Any]):
        self.name, self.mode, self.prompt = name, mode, Prompt()
        self.steps, self.cfg = settings.get("steps", STEPS), settings.get("cfg", CFG)
        self.floats = settings.get("floats")
        self.further: dict[str, list] = {}  # a name -> [node, its inputs]
        self.sampler, self.scheduler = settings.get("sampler", "euler"), settings.get("scheduler", "simple")
        self.model = self.source("model", name)

    def add(self, name: str, kind: str, /, **inputs: Any) -> Link:
        """Link to the first output of a new node, or of the one that has the name."""
        self.prompt.setdefault(name, {"class_type": kind, "inputs": inputs})
        return [name, 0]

    def give(self, what: str) -> Link:
        if what not in GIVEN.values:
            raise Missing(what)
        return self.add(f"given {what}", "CompatibilityGive", what=what)

    def source(self, name: str, file: str) -> Link:
        """The MODEL of a file. Modes: native; on two ranks ulysses, split batch, and PipeFusion by its warm-up."""
        if self.mode == "native":
            return self.give(f"MODEL {file}")
        config = {}
        piped = self.mode.endswith("warm-up")
        if self.mode == "ulysses":
            settings = {"ulysses_degree": 2, "ring_degree": 1, "patch_mode": "none", "patch_degree": 1}
            config["parallel_config"] = self.add(
                f"{name} config", "UlyssesConfig", attention="auto", comm_overlap=True, patch_warmup_steps=1, **settings
            )
        loaded = self.add(
            f"{name} loader",
            "ParallelDiTLoader",
            model_name=f"{file}.safetensors",
            weight_dtype="fp32",
            pipefusion_degree=2 if piped else 1,
            tensor_parallel_degree=1,
            split_batch_degree=2 if self.mode == "split batch" else 1,
            devices="cpu,cpu",
            stage_split="even",
            **config,
        )
        if not piped:
            return loaded
        steps = 1000 if self.mode == "full warm-up" else 1
        applied = self.add(
            f"{name} piped", "ApplyPipeFusion", model=loaded, num_pipeline_patch=2, warmup_steps=steps, overlap=True
        )
        return self.add(f"{name} kept", "CompatibilityKeep", model=applied)

    def link(self, name: str, kind: str) -> Link:
        """What an input of this name is linked to: by its type, or by a name. Missing."""
        if kind in self.further:
            node, given = self.further[kind]
            return self.add(kind, node, **self.inputs(node, given, ""))
        if kind == "MODEL":
            second = any(part in name for part in ("2", "negative", "refiner", "matched", "other"))
            return self.source("second", f"{self.name}-2") if second else self.model
        if kind == "CONDITIONING":
            what = "other" if name.endswith("2") or "empty" in name else "negative" if "neg" in name else "positive"
            return self.give(what)
        if kind == "NOISE":
            return self.add("noise", "RandomNoise", noise_seed=SEED)
        if kind == "SAMPLER":
            return self.add("sampler", "KSamplerSelect", sampler_name=self.sampler)
        if kind == "SIGMAS":
            return self.add(
                "sigmas", "BasicScheduler", model=self.model, scheduler=self.scheduler, steps=self.steps, denoise=1.0
            )
        if kind == "GUIDER":
            return self.add(
                "guider",
                "CFGGuider",
                model=self.model,
                positive=self.give("positive"),
                negative=self.give("negative"),
                cfg=self.cfg,
            )
        if kind == "LATENT_OPERATION":
            return self.add("operation", "LatentOperationTonemapReinhard", multiplier=0.5)
        return self.give(kind)

    def inputs(self, name: str, given: dict[str, Any], kind: str) -> dict[str, Any]:
        """Inputs of a node: those that are given, links by their types, widgets' defaults."""
        required, optional = declared(name)
        found: dict[str, Any] = {}
        sampling = ("CONDITIONING", "LATENT") if kind == "latent" else ()
        for key, (types, options) in {**required, **optional}.items():
            found |= self._input(key, types, options or {}, given, key in required, sampling)
        return found | {key: value for key, value in given.items() if key not in found and not isinstance(value, dict)}

    def _input(
        self, key: str, types: Any, options: dict[str, Any], given: dict[str, Any], required: bool, sampling: Iterable[str]
    ) -> dict[str, Any]:
        value = given.get(key)
        if isinstance(value, dict):  # {"link": a type or what stands in}
            return {key: self.link(key, value["link"])}
        if key in given:
            return {key: value}
        if str(types).startswith("COMFY_DYNAMICCOMBO"):
            chosen = options["options"][0]
            found = {key: chosen["key"]}
            for group in ("required", "optional"):
                for name, (kind, *rest) in chosen["inputs"].get(group, {}).items():
                    more = rest[0] if rest else {}
                    found |= self._input(f"{key}.{name}", kind, more, given, group == "required", sampling)
            return found
        names = types_of(types)
        if names[0] in WIDGETS and not options.get("forceInput"):
            return {key: self._widget(types, options, key)}
        if required or "MODEL" in names or set(names) & set(sampling):
            for kind in names:
                try:
                    return {key: self.link(key, kind)}
                except Missing:
                    continue
            if names[0].split(":")[0] in WIDGETS or required:
                if names[0].split(":")[0] in ("INT", "FLOAT", "STRING", "BOOLEAN"):
                    return {key: self._widget(names[0].split(":")[0], options)}
                raise Missing(names[0])
        return {}

    def _widget(self, kind: Any, options: dict[str, Any], key: str = "") -> Any:
        if key == "steps" and kind == "INT":
            return self.steps
        if kind == "FLOAT" and self.floats is not None:
            return self.floats
        choices = list(kind) if isinstance(kind, (list, tuple)) else options.get("options") or []
        if (own := f"{self.name}.safetensors") in choices:
            return own
        if "default" in options:
            return options["default"]
        if isinstance(kind, (list, tuple)) or kind == "COMBO":
            if not choices:
                raise Missing("a file for a list that is empty here")
            return choices[0]
        return {"INT": options.get("min", 0), "FLOAT": options.get("min", 0.0), "BOOLEAN": False}.get(kind, "")


def graph(request: dict[str, Any], model_name: str, mode: str) -> Prompt:
    """A prompt with the node of this name, or none. `nodes` of the request: others, that its inputs are linked to by name.
    How it is used, by `kind`:

    model: KSampler takes its MODEL, and its CONDITIONING and LATENT where they come from what it is given.
    guider, sampler, sigmas: SamplerCustomAdvanced takes it. latent, image: its output is the result.
    passed: KSampler takes its first output as the latent.
    """
    made = Graph(model_name, mode, request.get("settings", {}))
    made.further = request.get("nodes", {})
    name, kind, outputs = request.get("name"), request["kind"], ()
    model, conds, latent = made.model, [made.give("positive"), made.give("negative")], made.give("LATENT")
    if "latent" in request.get("settings", {}):
        latent = made.give(request["settings"]["latent"])
    if name is not None:
        inputs = made.inputs(name, request.get("inputs", {}), kind)
        made.add("node", name, **inputs)
        outputs = list(map(str, nodes.NODE_CLASS_MAPPINGS[name].RETURN_TYPES))
    if kind in ("latent", "image"):
        made.add("result", "CompatibilityResult", value=["node", outputs.index(kind.upper())])
        return made.prompt
    if kind in ("guider", "sampler", "sigmas"):
        links = {each: made.link(each, each.upper()) for each in ("noise", "guider", "sampler", "sigmas")}
        links[kind] = ["node", outputs.index(kind.upper())]
        made.add("sampled", "SamplerCustomAdvanced", latent_image=latent, **links)
    else:
        if kind == "passed":
            latent = ["node", 0]
        elif name is not None:
            model = ["node", outputs.index("MODEL")]
            takes = {each for types, _options in declared(name)[0].values() for each in types_of(types)}
            if "CONDITIONING" in takes:
                for place, output in enumerate([at for at, each in enumerate(outputs) if each == "CONDITIONING"][:2]):
                    conds[place] = ["node", output]
            if "LATENT" in outputs and takes & {"LATENT", "VAE"}:
                latent = ["node", outputs.index("LATENT")]
        made.add(
            "sampled",
            "KSampler",
            model=model,
            seed=SEED,
            steps=made.steps,
            cfg=made.cfg,
            sampler_name=made.sampler,
            scheduler=made.scheduler,
            positive=conds[0],
            negative=conds[1],
            latent_image=latent,
            denoise=1.0,
        )
    made.add("result", "CompatibilityResult", value=["sampled", 0])
    return made.prompt
