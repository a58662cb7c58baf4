"""Mutants of the two kinds that once lived: state that a first event leaves for a second one, and rows that tables lack."""

from .mutant import Mutant

CLIENT, RANK, PROCESSES = "parallel_backend/client/", "parallel_backend/rank/", "parallel_backend/processes/"

TWO_EVENTS = (
    Mutant(
        "a merge into a block that is in its slot does not show",
        RANK + "stage/store/weight_store.py",
        "self._slots.forget(group.name)",
        "pass",
        ("tests/rank/test_weight_store.py", "-k", "in_its_slot"),
    ),
    Mutant(
        "a merge writes to memory from which a copy is under way",
        RANK + "stage/store/weight_store.py",
        "self._slots.settle()  # a copy under way may read the memory that is written to below",
        "pass",
        ("tests/rank/test_weight_store.py",),
        ("tests/emulated/test_weights.py",),
        "default",
    ),
    Mutant(
        "the file is read into the buffer from which a copy is under way",
        RANK + "stage/store/weight_store.py",
        "self._slots.settle()  # `source` overwrites the buffer from which a copy under way may read",
        "pass",
        ("tests/rank/test_weight_store.py",),
        ("tests/emulated/test_weights.py",),
        "default",
    ),
    Mutant(
        "what was used again in one run counts as used again in the next",
        CLIENT + "models_on_ranks.py",
        "used.again, used.run = used.run == self.run, self.run",
        "used.again, used.run = used.again or used.run == self.run, self.run",
        ("tests/client/test_registry.py",),
    ),
    Mutant(
        "models of failed ranks are kept",
        CLIENT + "models_on_ranks.py",
        "if not each.model.on_ranks]:",
        "if each is None]:",
        ("tests/client/test_registry.py",),
    ),
    Mutant(
        "only the first exact step renews what changes are relative to",
        RANK + "attention/patch_keys.py",
        "buffer.held[layer, step.entries] = Held(context.changes, parts_2BshD)",
        "buffer.held.setdefault((layer, step.entries), Held(context.changes, parts_2BshD))",
        ("tests/rank/test_change_codec.py", "-k", "renews"),
        tier="default",
    ),
    Mutant(
        "requests count bands along rows for videos cut along time",
        CLIENT + "memory_guard.py",
        "family.patching.cut(layout.along).band_dim",
        'family.patching.cut("rows").band_dim',
        ("tests/client/test_memory_guard.py", "tests/client/test_requests.py"),
    ),
    Mutant(
        "another sound is the same conditioning",
        CLIENT + "call.py",
        "(self.layout, self.changes) != (layout, call.changes)",
        "(self.layout.grid, self.changes) != (layout.grid, call.changes)",
        ("tests/client/test_micro_step_queue.py",),
    ),
    Mutant(
        "another model that loads ends the allowance for compiling",
        PROCESSES + "watchdog.py",
        "self._compiling = {each for each in self._compiling if model not in (None, each)}",
        "self._compiling = set()",
        ("tests/processes/test_watchdog.py",),
    ),
    Mutant(
        "compiling is no allowance",
        PROCESSES + "watchdog.py",
        "new = bool(self._compiling) or slow",
        "new = slow",
        ("tests/processes/test_watchdog.py",),
    ),
    Mutant(
        "who died of it is named before who said why",
        PROCESSES + "failure_report.py",
        "        if causes:\n            failure = causes[0]",
        "        if causes and not died_unheard:\n            failure = causes[0]",
        ("tests/processes/test_failure_report.py",),
    ),
    Mutant(
        "a run that was given up counts on",
        CLIENT + "remote_transformer.py",
        "        self._memory.forget(run)\n        if self.on_ranks:",
        "        if self.on_ranks:",
        ("tests/client/test_several_models.py", "-k", "given_up"),
        tier="default",
    ),
    Mutant(
        "other factors keep the strengths of those before",
        CLIENT + "lora.py",
        "                self._strengths = ()\n",
        "",
        ("tests/rank/test_lora.py",),
        ("tests/campaigns/test_states.py",),
        tier="default",
    ),
    Mutant(
        "a LoRA keeps the scale of its first use",
        CLIENT + "lora.py",
        "Rescale(tuple(same[number].scale",
        "Rescale(tuple(known[number].scale",
        ("tests/rank/test_lora.py",),
        tier="default",
    ),
    Mutant(
        "modules' outputs outlive a change of weights",
        RANK + "engine.py",
        "        self.stage.module_cache.forget()\n        self._texts.forget()\n        self.conditionings",
        "        self._texts.forget()\n        self.conditionings",
        ("tests/rank/test_module_cache.py",),
        ("tests/rank/test_lora.py",),
        "default",
    ),
    Mutant(
        "host memory of a merge is not counted",
        CLIENT + "resident_weights.py",
        "replace(held, host_bytes=reply.host_bytes)",
        "held",
        ("tests/client/test_larger_than_the_device.py", "-k", "merge"),
        tier="default",
    ),
)
"""The first kind."""

TABLES = (
    Mutant(
        "a node's wrappers are not carried over",
        "nodes/model/carry_over.py",
        "            if key not in without:\n",
        "            if key in without:\n",
        ("tests/nodes",),
    ),
    Mutant(
        "a hook's patch is carried over unchecked",
        "nodes/model/carry_over.py",
        "_fitting(weights, hooked, target.patches, hooked=True)",
        "{key: list(patches) for key, patches in hooked.items()}",
        ("tests/nodes",),
    ),
    Mutant(
        "an unknown entry of transformer_options is let pass",
        "nodes/model/patches/reach.py",
        "elif name not in READ_BY or (_is_read",
        "elif name in READ_BY and (_is_read",
        ("tests/nodes",),
    ),
    Mutant(
        "a region of the conditioning is cut into bands",
        "nodes/sampling/eligibility.py",
        "cond.get(key) is not None and cond.get(key) is not False",
        "cond.get(key) is False",
        ("tests/nodes",),
    ),
    Mutant(
        "unknown guidance is taken for pixel-wise",
        "nodes/sampling/band_guidance.py",
        "not isinstance(value, types.FunctionType) or (changed",
        "isinstance(value, types.FunctionType) or (changed",
        ("tests/nodes",),
        ("tests/comfyui/test_guidance_in_bands.py",),
        "default",
    ),
)
"""The second kind."""
