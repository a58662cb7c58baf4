"""Prompts with one node between loader and sampler, by what ComfyUI's server says of its nodes (`/object_info`)."""

from collections.abc import Iterable
from typing import Any

from tests.comfyui.graph import Graph, Link

STEPS, CFG, SEED, SIDE = 4, 3.0, 42, 128
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
LORA = "compatibility.safetensors"
IMAGE_LATENT = ["EmptySD3LatentImage", {"width": SIDE, "height": SIDE}]
LATENTS = {
    "flux-dev": IMAGE_LATENT,
    "sd3.5-medium": IMAGE_LATENT,
    "wan-2.1-t2v": ["EmptyHunyuanLatentVideo", {"width": SIDE, "height": SIDE, "length": 9}],
}
"""Model -> the node of its latent."""
SAMPLER = {"steps": STEPS, "cfg": CFG, "sampler_name": "euler", "scheduler": "simple"}
GIVEN: dict[str, list] = {
    "CLIP": ["CLIPLoader", {}],
    "VAE": ["VAELoader", {"vae_name": "vae"}],
    "positive": ["CLIPTextEncode", {"text": "a"}],
    "negative": ["CLIPTextEncode", {"text": "b"}],
    "other": ["CLIPTextEncode", {"text": "c"}],
    "IMAGE": ["LoadImage", {"image": "a.png"}],
    "MASK": ["SolidMask", {"value": 0.5, "width": SIDE, "height": SIDE}],
    "masked": ["SetLatentNoiseMask", {"samples": {"link": "picture"}, "mask": {"link": "MASK"}}],
    "picture": ["VAEEncode", {"pixels": {"link": "IMAGE"}}],
    "AUDIO": ["LoadAudio", {"audio": "a.wav"}],
    "CLIP_VISION": ["CLIPVisionLoader", {}],
    "CLIP_VISION_OUTPUT": ["CLIPVisionEncode", {}],
    "AUDIO_ENCODER": ["AudioEncoderLoader", {}],
    "AUDIO_ENCODER_OUTPUT": ["AudioEncoderEncode", {}],
    "NOISE": ["RandomNoise", {"noise_seed": SEED}],
    "SAMPLER": ["KSamplerSelect", {}],
    "SIGMAS": ["BasicScheduler", {}],
    "GUIDER": ["CFGGuider", {}],
    "LATENT_OPERATION": ["LatentOperationTonemapReinhard", {"multiplier": 0.5}],
    "second": ["LoraLoaderModelOnly", {"lora_name": LORA, "strength_model": 1.0}],
}
"""Type of an input, or name -> the node that it is linked to, with inputs: values, or {"link": a type or name}."""
SECOND = ("2", "negative", "refiner", "matched", "other")
"""In the name of an input for another MODEL than the first one."""

Info = dict[str, dict[str, Any]]


class Missing(Exception):
    """Nothing here stands in for an input of this type."""


def types_of(kind: Any) -> list[str]:
    """Names of an input's type."""
    return ["COMBO"] if isinstance(kind, list) else [each.strip() for each in str(kind).split(",")]


def inputs_of(node: dict[str, Any], group: str) -> dict[str, tuple[Any, dict]]:
    """Name -> (type, options)."""
    return {key: (value[0], value[1] if len(value) > 1 else {}) for key, value in node["input"].get(group, {}).items()}


def kind_of(node: dict[str, Any]) -> str | None:
    """The output that a node is tried by: "GUIDER", "SAMPLER", "SIGMAS", "LATENT" or "MODEL". None: it
    has nothing to do with a MODEL's way to its sampler."""
    takes = {
        each for group in ("required", "optional") for kind, _ in inputs_of(node, group).values() for each in types_of(kind)
    }
    gives = list(map(str, node["output"]))
    for each in ("GUIDER", "SAMPLER"):
        if each in gives:
            return each
    samples = "LATENT" in gives and {"LATENT"} < takes & {"LATENT", "CONDITIONING", "GUIDER"}
    if samples and takes & {"MODEL", "GUIDER"}:
        return "LATENT"
    return next((each for each in ("MODEL", "SIGMAS", "LATENT") if each in gives), None) if "MODEL" in takes else None


class Prompt:
    """A prompt under way. `settings`: see settings.py. Missing for a node that nothing stands in for."""

    def __init__(self, info: Info, model: str, settings: dict[str, Any]):
        self.info, self.file, self.graph = info, f"{model}.safetensors", Graph()
        self.sampling = SAMPLER | {key: value for key, value in settings.get("settings", {}).items() if key in SAMPLER}
        self.floats = settings.get("floats")
        self.given = GIVEN | {"MODEL": ["UNETLoader", {}], "LATENT": LATENTS[model]} | settings.get("nodes", {})
        self.links: dict[str, Link] = {}

    def link(self, name: str, key: str = "") -> Link:
        """To the node of a type or name. `key`: of the input."""
        if name == "CONDITIONING":
            name = "other" if key.endswith("2") or "empty" in key else "negative" if "neg" in key else "positive"
        if name == "MODEL" and any(part in key for part in SECOND):
            name = "second"
        if name not in self.given:
            raise Missing(name)
        if name not in self.links:
            kind, inputs = self.given[name]
            self.links[name] = self.graph.add(kind, **self.inputs(kind, inputs))
        return self.links[name]

    def inputs(self, kind: str, given: dict[str, Any], wanted: Iterable[str] = ()) -> dict[str, Any]:
        """Those that are given, links by their types, widgets' defaults. `wanted`: types of optional inputs."""
        node, found = self.info[kind], {}
        for group in ("required", "optional"):
            for key, (types, options) in inputs_of(node, group).items():
                found |= self._input(key, types, options, given, group == "required", {"MODEL", *wanted})
        return found | {key: value for key, value in given.items() if key not in found and not isinstance(value, dict)}

    def _input(
        self, key: str, types: Any, options: dict[str, Any], given: dict[str, Any], required: bool, wanted: set[str]
    ) -> dict[str, Any]:
        value = given.get(key)
        if isinstance(value, dict):
            return {key: self.link(value["link"])}
        if key in given:
            return {key: value}
        if str(types).startswith("COMFY_DYNAMICCOMBO"):
            chosen = options["options"][0]
            found = {key: chosen["key"]}
            for group in ("required", "optional"):
                for name, (kind, more) in inputs_of({"input": chosen["inputs"]}, group).items():
                    found |= self._input(f"{key}.{name}", kind, more, given, group == "required", wanted)
            return found
        names = types_of(types)
        if names[0] in WIDGETS and not options.get("forceInput"):
            return {key: self._widget(key, types, options)}
        if not required and not wanted & set(names):
            return {}
        known = next((name for name in names if name in self.given or name == "CONDITIONING"), None)
        if known is None:
            raise Missing(names[0])
        return {key: self.link(known, key)}

    def _widget(self, key: str, kind: Any, options: dict[str, Any]) -> Any:
        if key in self.sampling and kind != "BOOLEAN":
            return self.sampling[key]
        if kind == "FLOAT" and self.floats is not None:
            return self.floats
        choices = kind if isinstance(kind, list) else options.get("options") or []
        for own in (self.file, LORA):
            if own in choices:
                return own
        if "default" in options:
            return options["default"]
        if isinstance(kind, list) or kind == "COMBO":
            return choices[0] if choices else ""
        return {"INT": options.get("min", 0), "FLOAT": options.get("min", 0.0), "BOOLEAN": False}.get(kind, "")


def prompt(info: Info, model: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """In API form, with the node of this name. By `kind_of` it KSampler takes the MODEL, and CONDITIONING and LATENT that
    the node gives too, or SamplerCustomAdvanced takes the guider, sampler or sigmas."""
    made, node = Prompt(info, model, settings), info[name]
    kind, gives = kind_of(node), list(map(str, node["output"]))
    inputs = made.inputs(name, settings.get("inputs", {}), ("CONDITIONING", "LATENT") if kind == "LATENT" else ())
    place = made.graph.add(name, **inputs)[0]
    latent = made.link(settings.get("settings", {}).get("latent", "LATENT"))
    if kind in ("GUIDER", "SAMPLER", "SIGMAS"):
        links = {each.lower(): made.link(each) for each in ("NOISE", "GUIDER", "SAMPLER", "SIGMAS") if each != kind}
        made.graph.add("SamplerCustomAdvanced", latent_image=latent, **links, **{kind.lower(): [place, gives.index(kind)]})
    elif kind == "MODEL":
        takes = {each for types, _ in inputs_of(node, "required").values() for each in types_of(types)}
        conds = [made.link("positive"), made.link("negative")]
        if "CONDITIONING" in takes:
            given = [[place, slot] for slot, each in enumerate(gives) if each == "CONDITIONING"][:2]
            conds[: len(given)] = given
        if "LATENT" in gives and takes & {"LATENT", "VAE"}:
            latent = [place, gives.index("LATENT")]
        sampler = {
            "model": [place, gives.index("MODEL")],
            "positive": conds[0],
            "negative": conds[1],
            "latent_image": latent,
        }
        made.graph.add("KSampler", seed=SEED, denoise=1.0, **made.sampling, **sampler)
    return made.graph.prompt
