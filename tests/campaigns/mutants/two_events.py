"""Mutants of the two kinds that once lived, state that a first event leaves for a second one, and rows that tables lack; and
waits that are left out."""

from .mutant import Mutant

CORE = "parallel_backend/core/"
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
        "the file is read into the buffer from which a copy is under way",
        RANK + "stage/store/weight_store.py",
        "self._slots.settle()  # `source` overwrites the buffer from which a copy under way may read",
        "pass",
        ("tests/rank/test_weight_store.py",),
        ("tests/emulated/test_weights.py",),
        tier="default",
    ),
    Mutant(
        "models of failed ranks are kept",
        CLIENT + "models_on_ranks.py",
        "if not each.model.on_ranks]:",
        "if each is None]:",
        ("tests/client/test_registry.py",),
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
        "an entry of transformer_options that cannot be sent is let pass",
        "nodes/model/patches/reach.py",
        "if name not in told and not isinstance",
        "if name in told and not isinstance",
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
        tier="default",
    ),
)
"""The second kind."""

WAITS = (
    Mutant(
        "a piece of a file is filled again too early",
        CORE + "device_copies.py",
        "                piece[1].synchronize()\n",
        "",
        ("tests/emulated/test_staged_upload.py",),
    ),
    Mutant(
        "memory is unpinned under copies from it",
        CORE + "pinned.py",
        "        torch.cuda.synchronize(device)\n",
        "",
        ("tests/client/test_shared_residuals.py", "-k", "unpinned"),
    ),
    Mutant(
        "an output is sent before it has come",
        RANK + "outbox.py",
        "                copied.synchronize()\n",
        "",
        ("tests/emulated/test_modes.py",),
    ),
    Mutant(
        "blocks do not wait for their weights",
        RANK + "stage/store/device_copies.py",
        "torch.cuda.current_stream(self._device).wait_event(self._done)",
        "pass",
        ("tests/emulated/test_weights.py", "-k", "shares_on_the_device"),
    ),
    Mutant(
        "a replay waits for nothing",
        RANK + "micro_step_graphs.py",
        "        return outputs, graph.replay\n",
        "\n        def replay() -> None:\n"
        "            with torch.cuda.stream(self._stream):\n"
        "                graph.replay()\n\n"
        "        return outputs, replay\n",
        ("tests/rank/test_micro_step_graphs.py", "-k", "same_bits"),
        tier="default",
    ),
)
"""Waits taken out. On a real card most of these give the right picture nearly always; emulated ones note each."""
