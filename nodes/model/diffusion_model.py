"""The `diffusion_model` of the native MODEL: a stub without weights that hands each call to the ranks."""

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import comfy.model_patcher
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.lora import Delta
from parallel_backend.client.pipefusion.banded_run import BandedRun, NotLocal
from parallel_backend.client.registry import ModelKey, registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.devices import device_kind
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.families import Family
from parallel_backend.families.base.family import Inputs
from parallel_backend.families.base.patching import Latents, latents_of
from parallel_backend.families.parts.wan import TEXT_GUIDANCE
from parallel_backend.placement.expected_request import expected_request
from parallel_backend.placement.memory_model import Request
from parallel_backend.processes.pool import Poll

from ..ui.host import check_cancelled, refuse
from ..ui.loading_bar import LoadingBar
from ..ui.node_text import say
from ..ui.other_nodes import calling_nodes, named
from .block_patches import block_changes
from .concurrent_conds import EVALUATION_KEY, Evaluation, tell_if_together
from .controlnet import residuals
from .fun_control import FunControl, fun_controls
from .lora import PREFIX, NativeWeights, Patch
from .make_room import make_room
from .native_call import by_name, leaves_wrappers_to_parent, native_class, runs_wrappers, wrappers_of
from .native_names import NativeNames
from .reach import Unread, refuse_unread, refuse_what_does_not_reach_the_ranks
from .run_shapes import PART, Shapes, is_for_all
from .step_cache import SamplingCache
from .text_guidance import GUIDANCE_KEY, LAYERS, TextLayers
from .text_model import NativeText

log = logging.getLogger(__name__)

TAKING_TURNS = (
    "this MODEL and another one take turns on the same ranks, and are read anew at each turn. Give one of them other "
    "devices, or load it with a native loader."
)

BAND_KEY = "parallel_dit_band"
"""Key in `transformer_options` under which a band's model calls carry a `Band`."""


class Band:
    """Marks a model call as band `index` of `run`, whose latents have these `shapes`, with the model of `stub`. Calls at
    sigmas above `exact_above` are exact.

    `poll` runs while a call is waited for: the look at Cancel, where the call is made on ComfyUI's own thread.
    """

    def __init__(
        self,
        run: BandedRun,
        index: int,
        exact_above: float,
        stub: "RemoteDiffusionModel",
        shapes: Shapes,
        poll: Poll | None = None,
    ):
        self.run, self.index, self.exact_above, self.poll = run, index, exact_above, poll
        self.stub, self.shapes = stub, shapes

    def __deepcopy__(self, memo: dict[int, Any]) -> "Band":
        return self  # ComfyUI copies transformer_options; the run is one

    def takes(self, stub: "RemoteDiffusionModel", latents: Latents, options: dict[str, Any]) -> bool:
        """Whether a model call is one of the run. NotLocal if it is not, and the run is cut: there is no whole in a band."""
        if stub is self.stub and is_for_all(latents, options, self.shapes):
            return True
        if len(self.run.rows) > 1:
            raise NotLocal(PART)
        self.run.note_exact()
        return False


class RemoteDiffusionModel(torch.nn.Module):
    """Answers ComfyUI's model call with the ranks' output. Holds no parameters and no process.

    `patches`, `patches_uuid`, `hook_patches`, `cache`: those of `patcher`, the one under which it is sampled; its clones all
    share this module. `bypass_patches`: its LoRAs in bypass mode, as patches. `idle`: what was said in this sampling run
    about replicas that have nothing to do. `loaded`: what it was on ranks at its last call in this run. `turns`: how often
    that became another one, since another MODEL takes its ranks in between. `devices`: those that it may use. `key` has
    the ones that it does use; degrees `auto` set it before a run. `elsewhere`: see
    RemoteModelPatcher.get_nested_additional_models.
    """

    on_ranks = True
    """As of RemoteModelPatcher."""
    weights: NativeWeights  # set by make_model
    native_kind: str  # set by make_model: the class of ComfyUI's supported_models
    unet_config: dict[str, Any]  # set by make_model: arguments of the native model's class

    def __init__(self, checkpoint: Checkpoint, key: ModelKey, comm_overlap: bool):
        super().__init__()
        self.checkpoint, self.key, self.comm_overlap = checkpoint, key, comm_overlap
        self.devices = key.devices
        self.patches: dict[str, list[Patch]] = {}
        self.bypass_patches: dict[str, list[Patch]] = {}
        self.hook_patches: dict[Any, dict[str, list[Patch]]] = {}
        self.patches_uuid: UUID | None = None
        self.cache: SamplingCache | None = None
        self.patcher: Callable[[], comfy.model_patcher.ModelPatcher | None] = lambda: None
        self.idle: str | None = None
        self.loaded: Callable[[], RemoteTransformer | None] = lambda: None
        self.turns = 0
        self.elsewhere: dict[torch.device, comfy.model_patcher.ModelPatcher] = {}
        self.dtype = compute_dtype(key.dtype, torch.device(device_kind(key.devices[0])))
        values = checkpoint.family.native_values(checkpoint.config)
        self.patch_size = values.get("patch_size", checkpoint.family.patching.side)
        if "in_channels" in checkpoint.config:  # RenormCFG reads it
            self.in_channels = checkpoint.config["in_channels"]
        self._made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """ValueError for what another node would put into the native model, in the place of its layers or its forward.

        Marks that nothing of the model has the name of, as `_is_torch_compile`, are nobody's business.
        """
        own = name in self.__dict__ or name in type(self).__annotations__ or "_made" not in self.__dict__
        if not own and (not name.startswith("_") or hasattr(type(self), name)):
            _refuse_inside(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in self.__dict__:  # what __setattr__ has refused and is taken back, as unittest.mock does
            _refuse_inside(name)
        super().__delattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteDiffusionModel":
        copy = RemoteDiffusionModel(self.checkpoint, self.key, self.comm_overlap)
        copy.devices = self.devices
        copy.weights, copy.native_kind, copy.unet_config = self.weights, self.native_kind, self.unet_config
        return copy

    @functools.cached_property
    def _text(self) -> NativeText:
        return NativeText(self.checkpoint)

    @functools.cached_property
    def fun_control(self) -> FunControl:
        return FunControl(self.checkpoint, self.native, self.unet_config, self.dtype)

    @functools.cached_property
    def native(self) -> type:
        """The native model's class."""
        return native_class(self.native_kind)

    @functools.cached_property
    def native_tensors(self) -> dict[str, torch.Tensor]:
        """The family's native parameter names -> tensors on the meta device, which have a shape and no values."""
        return {name: torch.empty(shape, device="meta") for name, shape in self.checkpoint.original_shapes.items()}

    def __getattr__(self, name: str) -> Any:
        """ComfyUI's BaseModels read their native model's values, and shapes of its layers, such as `img_in.weight.shape`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "checkpoint":  # not set yet
                raise
            family = self.checkpoint.family
            if name == "preprocess_text_embeds" and family.text_model is not None:
                added = {
                    key: self.patches.get(key, []) + self.bypass_patches.get(key, [])
                    for key in (*self.patches, *self.bypass_patches)
                }
                return functools.partial(self._text.preprocess, added, self.patches_uuid)
            if name == LAYERS and TEXT_GUIDANCE in family.inputs.options:
                return TextLayers(self.checkpoint, self.native_tensors, f"{LAYERS}.")
            values = family.native_values(self.checkpoint.config)
            return values[name] if name in values else NativeNames(self.checkpoint, self.native_tensors, "").at(name)

    def state_dict(self, *_args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Names and shapes of the weights, which are elsewhere: what ComfyUI matches a LoRA's keys with."""
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in self.weights.tensors.items()})
        return destination

    def transformer(self, expected: Callable[[], Request | None]) -> RemoteTransformer:
        """The model on its ranks, patched. At first use they are started and loaded, for a run like `expected()`."""
        model = registry().model(self.key, check_cancelled, LoadingBar(), self.patcher(), make_room, expected)
        kinds = {(each.family.name, repr(each.config)) for each in (self.checkpoint, model.checkpoint)}
        if len(kinds) > 1:
            raise ValueError(
                f"model_name: {self.checkpoint.path.name} has been replaced on disk by a model of another kind. Have its "
                "loader read it again: change one of its widgets, and back."
            )
        if self.loaded() is not model:
            self.loaded, self.turns = weakref.ref(model), self.turns + 1
            if self.turns == 2:
                log.warning("Parallel DiT: %s", TAKING_TURNS)
                say(f"Parallel DiT: {TAKING_TURNS}")
        present = self.patches or self.bypass_patches or self.hook_patches
        name = (self.patches_uuid, *self.hook_patches) if present else None
        model.adapt(name, self._deltas(), check_cancelled, self._strengths())
        return model

    def _deltas(self) -> Iterator[Delta]:
        """All that the patcher adds to weights. Each hook of its conditionings is a group."""
        elsewhere = {PREFIX + key for key in self.checkpoint.text_keys("")}
        groups = enumerate(self.hook_patches.values(), 1)
        for group, patches in ((0, self.patches), (0, self.bypass_patches), *groups):
            yield from self.weights.deltas({key: each for key, each in patches.items() if key not in elsewhere}, group)

    def _strengths(self) -> tuple[float, ...]:
        """Of the hooks in this model call, in the order of `hook_patches`. ComfyUI joins conditionings of the same alone."""
        patcher = self.patcher()
        hooks = None if patcher is None else patcher.current_hooks
        found = {} if hooks is None else {hook.hook_ref: hook.strength for hook in hooks.hooks}
        return tuple(float(found.get(reference, 0.0)) for reference in self.hook_patches)

    @functools.cached_property
    def whole_bytes(self) -> int:
        """Bytes of all weights, as they are stored on ranks."""
        return sum(self.checkpoint.nbytes(target, self.key.dtype) for target in self.checkpoint.key_map)

    @torch.compiler.disable  # whoever compiles what calls this: sending has no graph
    def forward(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        timestep: torch.Tensor | Sequence[torch.Tensor],
        context: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **extra: Any,
    ) -> torch.Tensor | list[torch.Tensor]:
        """ComfyUI's diffusion_model call: latent x [B, C, (T,) H, W], timestep [B] or [B, T] -> the model's output.

        Nested latents come as a list, the video's first, and go out as one. So may their timesteps come, which then are
        joined along their second axis: [B, k + l]. Other nodes' wrappers are run where the native model runs them.
        """
        options = transformer_options or {}
        given = {"context": context, "control": control, "transformer_options": options, **extra}
        if self.wrappers(options):
            return self.native.forward(self, x, timestep, **given)
        if leaves_wrappers_to_parent(self.native):
            refuse_unread(Unread("a wrapper around the diffusion model", each) for each in wrappers_of(options))
        return self._call(x, timestep, **given)

    def wrappers(self, options: dict[str, Any], is_model_options: bool = False) -> list[Any]:
        """Other nodes' wrappers that a call with these transformer_options, or those in model_options, is run in."""
        return wrappers_of(options, is_model_options) if runs_wrappers(self.native) else []

    def _forward(self, *arguments: Any, **named: Any) -> torch.Tensor | list[torch.Tensor]:
        """The call of `_call` inside wrappers, with the arguments of the native class's own `_forward`.

        Latents are as the model takes them: the native `forward` has done what `Inputs.carried` does.
        """
        return self._call(**by_name(self.native, arguments, named), is_carried=False)

    def forward_orig(self, *_arguments: Any, **_named: Any) -> None:
        """ValueError: nodes that call it, or put another in its place, want the native model's inside."""
        _refuse_inside("forward_orig")

    def _call(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        timestep: torch.Tensor | Sequence[torch.Tensor],
        context: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        is_carried: bool = True,
        **extra: Any,
    ) -> torch.Tensor | list[torch.Tensor]:
        """As `forward`, without wrappers. `is_carried`: latents are as the sampler has them (Inputs.carried)."""
        options = transformer_options or {}
        family, config = self.checkpoint.family, self.checkpoint.config
        given = {name: value for name, value in extra.items() if value is not None}
        latents = latents_of(x)
        band: Band | None = options.get(BAND_KEY)
        if band is not None and not band.takes(self, latents, options):
            band = None
        changes, patches = block_changes(family, config, options, len(latents[0]))
        unknown = [name for name in given if name not in family.inputs.accepts]
        refuse_what_does_not_reach_the_ranks(options | patches, unknown, family, self.key.attention)
        check_latents(family, config, latents)
        if not isinstance(timestep, torch.Tensor):
            timestep = torch.cat([each.reshape(len(each), -1) for each in timestep], dim=1)
        if band is None and self.cache is not None:
            self.cache.see(latents, options)
        allowed = self.cache is not None and self.cache.may_forecast(options)
        given |= {name: options[name] for name in family.inputs.options if name in options}
        if GUIDANCE_KEY in options:
            if self.key.degrees.tensor > 1:
                refuse("guidance of the look at the text (WanVideoNAG)", "It needs a tensor_parallel_degree of 1.")
            given[TEXT_GUIDANCE] = options[GUIDANCE_KEY].of(len(latents[0]))
        if family.patching.companion is not None:
            given |= self._sizes(latents, band)
        given |= {"context": context, "latent": tuple(latents[0].shape)}
        tensors = family.inputs.conditioning(config, given)
        timestep = for_entries(timestep, tensors, len(latents[0]))
        carried = family.inputs.carried if is_carried else Inputs.carried
        latents, finish = carried(latents, timestep, given)
        if controls := fun_controls(family, options):
            layers = self.fun_control.model(
                [self.patches, self.bypass_patches], self.hook_patches.values(), self.patches_uuid
            )
            control = (control or {}) | self.fun_control.additions(layers, controls, latents[0], timestep, context, options)
        along = "rows" if band is None else band.run.patching.along
        added = residuals(family, config, control, tuple(latents[0].shape), along)
        evaluation: Evaluation = options.get(EVALUATION_KEY) or Evaluation([])
        call_options = {
            "first_replica": evaluation.first_replica(len(latents[0])),
            "on_posted": evaluation.start_next,
            "changes": changes,
        }
        if changes.together:
            tell_if_together(self)
        if band is None:
            cache = None if self.cache is None else self.cache.for_calls
            words, shape = 1 if context is None else context.shape[1], tuple(latents[0].shape)
            model = self.transformer(lambda: expected_request(self.checkpoint, shape, shape[0], words))
            overlap = self.comm_overlap
            outputs = model.predict(
                latents, timestep, tensors, check_cancelled, overlap, added, cache, allowed, **call_options
            )
        else:
            exact = float(options["sigmas"].max()) > band.exact_above
            outputs = band.run.predict(
                band.index, latents, timestep, tensors, exact, band.poll, added, allowed, **call_options
            )
        outputs = finish(outputs)
        return list(outputs) if len(outputs) > 1 else outputs[0]

    def _sizes(self, latents: Latents, band: "Band | None") -> dict[str, Any]:
        """What `Inputs.conditioning` gets of a call's latents, the same in every band."""
        if band is not None:
            return {"grid": band.run.grid, "companion_tokens": band.run.companion_tokens}
        patching, shapes = self.checkpoint.family.patching, [tuple(latent.shape) for latent in latents]
        return {"grid": patching.grid(shapes[0]), "companion_tokens": patching.companion_tokens(shapes)}


def _refuse_inside(name: str) -> None:
    refuse_unread([Unread(f"another '{name}' in the native model", by=named(calling_nodes()))])


def for_entries(timestep: torch.Tensor, tensors: dict[str, torch.Tensor], entries: int) -> torch.Tensor:
    """The timestep of each of a call's batch entries. ValueError for a conditioning that is not for as many of them."""
    if len(timestep) == 1:
        timestep = timestep.expand(entries, *timestep.shape[1:])
    for name, count in {"timestep": len(timestep), **{name: len(tensor) for name, tensor in tensors.items()}}.items():
        if count != entries:
            raise ValueError(
                f"model: another node calls it with {entries} latents at a time, and with {count} of '{name}'. Remove that "
                "node, or load the model with a native loader."
            )
    return timestep


def check_latents(family: Family, config: dict[str, Any], latents: Latents) -> None:
    """ValueError for latents that the family does not take."""
    companion = family.patching.companion
    if len(latents) > (1 if companion is None else 2) or (
        len(latents) == 1 and companion is not None and companion.required
    ):
        wanted = "a video and its sound" if companion is not None and companion.required else "one latent alone"
        raise ValueError(
            f"latent_image: a latent of {len(latents)} parts cannot be sampled by this model, which takes {wanted}. Use the "
            "Empty Latent node made for this model."
        )
    axes = [5 if family.patching.video else 4]
    channels = [family.sizes.latent_channels(config)]
    if len(latents) > 1:
        sizes = companion.sizes(latents[0].shape[2] if latents[0].ndim > 2 else 1)
        axes, channels = [*axes, 1 + len(sizes)], [*channels, sizes[0]]
    for latent, count, needed in zip(latents, axes, channels, strict=False):
        if latent.ndim != count or (0 in latent.shape and latent is latents[0]):
            raise ValueError(
                f"latent_image: a latent of the shape {list(latent.shape)} cannot be sampled by this model, which takes "
                f"{count} axes, none of them empty. Use the Empty Latent node made for this model."
            )
        if latent.shape[1] != needed:
            raise ValueError(
                f"latent_image: the latent has {latent.shape[1]} channels, this model needs {needed}. "
                "Use the Empty Latent node made for this model, or a latent encoded with its own VAE."
            )


def remote_stub(model: comfy.model_patcher.ModelPatcher) -> RemoteDiffusionModel:
    """The stub inside a MODEL. ValueError if the MODEL is a native one."""
    stub = getattr(getattr(model, "model", None), "diffusion_model", None)
    if not isinstance(stub, RemoteDiffusionModel):
        raise ValueError(
            "model: this MODEL runs in ComfyUI itself. Load it with Parallel DiT Loader, or put Parallelize Model before "
            "this node."
        )
    return stub
