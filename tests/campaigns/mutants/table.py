"""Which mutants there are, by room."""

from .door import DOOR
from .mutant import Mutant
from .two_events import TABLES, TWO_EVENTS

CORE = "parallel_backend/core/"
WIRE = "parallel_backend/wire/"
OWN_CLASS = "parallel_backend/own_class/"
CHECKPOINTS = "parallel_backend/checkpoints/"
RANK = "parallel_backend/rank/"
PROCESSES = "parallel_backend/processes/"
CLIENT = "parallel_backend/client/"
PLANNING = "parallel_backend/planning/"
PLACEMENT = "parallel_backend/placement/"
ACCEPTANCE = "parallel_backend/acceptance/"

CORE_MUTANTS = (
    Mutant(
        "step ratio not clamped",
        CORE + "extrapolation.py",
        "min(max((now - last) / (last - before), RATIO_LIMITS[0]), RATIO_LIMITS[1])",
        "(now - last) / (last - before)",
        ("tests/core",),
    ),
    Mutant(
        "patch shares ignored",
        CORE + "spans.py",
        "        total += share\n",
        "        total += 1 / len(shares)\n",
        ("tests/placement/test_pipeline_model.py", "-k", "share"),
    ),
    Mutant(
        "reference tokens of a row counted as the picture's",
        CORE + "token_order.py",
        "min(place - self._starts[row], self.row)",
        "(place - self._starts[row])",
        ("tests/core/test_token_order.py",),
    ),
    Mutant(
        "finite fp16 values overflow their sum",
        CORE + "finite.py",
        "torch.float32 if values.dtype == torch.float16 else None",
        "None",
        ("tests/rank/test_not_finite.py", "-k", "large or watch"),
    ),
    Mutant(
        "ulysses beside tensor parallelism held to all heads",
        CORE + "validate.py",
        "if degrees.ulysses > fewest:",
        "if degrees.ulysses > heads:",
        ("tests/core", "tests/rank/test_tensor_parallel.py", "-k", "heads or refused"),
    ),
    Mutant(
        "more devices than ranks not refused",
        CORE + "validate.py",
        "(all_known and len(devices) != degrees.world):",
        "(all_known and len(devices) < degrees.world):",
        ("tests/core",),
    ),
)

WIRE_MUTANTS = (
    Mutant(
        "a peer that does not know the key is let in",
        WIRE + "tcp.py",
        "                deliver_challenge(connection, self._key)\n",
        "                with contextlib.suppress(AuthenticationError):\n"
        "                    deliver_challenge(connection, self._key)\n",
        ("tests/wire/test_tcp.py",),
    ),
    Mutant(
        "tensors of a message are bounded one by one",
        WIRE + "encoding.py",
        "or self.nbytes > MAX_TENSOR_BYTES or",
        "or nbytes > MAX_TENSOR_BYTES or",
        ("tests/wire/test_messages.py",),
    ),
)

FAMILY_MUTANTS = (
    Mutant(
        "odd sizes padded with zeros",
        OWN_CLASS + "calls/patching.py",
        'F.pad(latent, padding, mode="circular")',
        "F.pad(latent, padding)",
        ("tests/own_class/test_patching.py",),
    ),
)

CHECKPOINT_MUTANTS = (
    Mutant(
        "scale of packed fp8 weights ignored",
        CHECKPOINTS + "packed_formats.py",
        "values if self.scale is None else torch.mul(values, self.scale, out=values)",
        "values",
        ("tests/checkpoints/test_formats.py", "-k", "expanded_form or round"),
    ),
    Mutant(
        "what is added to a group of values is left out",
        CHECKPOINTS + "quantised_formats.py",
        "+ added[:, :, None])",
        ")",
        ("tests/checkpoints/test_quantised_formats.py", "-k", "stay_as_small"),
    ),
    Mutant(
        "a cut inside a GGUF block",
        CHECKPOINTS + "packed_formats.py",
        "if columns.start % values or columns.stop % values:",
        "if columns.start % values:",
        ("tests/checkpoints/test_formats.py", "-k", "shards"),
    ),
    Mutant(
        "every part has the scales of the first rows",
        CHECKPOINTS + "reader.py",
        "torch.cat([scale[span.slice] for span in (spans if dim == 0 else [rows])])",
        "scale[: sum(map(len, spans if dim == 0 else [rows]))]",
        ("tests/checkpoints/test_formats.py", "-k", "shards"),
    ),
    Mutant(
        "a scale without a use is dropped",
        CHECKPOINTS + "checkpoint.py",
        "if _scales_values(key, entries)]",
        "if False]",
        ("tests/checkpoints/test_checkpoint.py", "-k", "refused"),
    ),
)

RANK_MUTANTS = (
    Mutant(
        "keys that other ranks sent are not committed",
        RANK + "attention/kv_buffer.py",
        "        buffer.commit_received()\n",
        "",
        ("tests/rank/test_kv_buffer.py",),
        ("tests/system/test_exactness.py", "-k", "displaced"),
    ),
    Mutant(
        "old keys used as they are",
        RANK + "attention/kv_buffer.py",
        "last.lerp_(now, weight)",
        "last.lerp_(now, 1)",
        ("tests/rank/test_kv_buffer.py",),
        ("tests/client/test_step_cache.py", "-k", "old_keys"),
    ),
    Mutant(
        "old values are not corrected",
        RANK + "attention/kv_buffer.py",
        ".add_(shift)",
        ".add_(0.0 * shift)",
        ("tests/rank/test_kv_buffer.py",),
    ),
    Mutant(
        "a stale band read as fresh",
        RANK + "attention/patch_keys.py",
        "    if step.stale:\n",
        "    if False:\n",
        ("tests/system/test_exactness.py", "-k", "displaced"),
        tier="default",
    ),
    Mutant(
        "masked calls go to a kernel that takes no mask",
        RANK + "attention/kernel_choice.py",
        "if mask_BK is not None and not self.kernel.masks:",
        "if False:",
        ("tests/rank/test_foreign_kernels.py",),
    ),
    Mutant(
        "a kernel that writes to its keys passes its trial",
        RANK + "attention/kernel_choice.py",
        "unchanged = torch.equal(tried_K3BHD, rows_K3BHD.to(device, dtype))",
        "unchanged = True",
        ("tests/rank/test_foreign_kernels.py",),
    ),
    Mutant(
        "ring parts merged by the larger log-sum-exp",
        RANK + "attention/ring.py",
        "torch.logaddexp(one[1], two[1])",
        "torch.maximum(one[1], two[1])",
        ("tests/rank/test_kernels.py",),
    ),
    Mutant(
        "ulysses sends heads to the wrong ranks",
        RANK + "attention/ulysses.py",
        "for span, part_n in zip(spans, flat_N.split(send), strict=True):",
        "for span, part_n in zip(reversed(spans), flat_N.split(send), strict=True):",
        ("tests/system/test_exactness.py", "-k", "one_call and (ulysses2 or ulysses_2 or ulysses)"),
    ),
    Mutant(
        "row-cut layers not added up",
        RANK + "stage/tensor_parallel.py",
        "lambda _module, _input, out: all_reduce(out, self.axis, traffic)",
        "lambda _module, _input, out: out",
        ("tests/system/test_exactness.py", "-k", "one_call and tensor"),
    ),
    Mutant(
        "a row-cut layer's bias added by every rank",
        RANK + "stage/tensor_parallel.py",
        "if self.axis.index > 0:  # it is added once",
        "if self.axis.index < 0:  # it is added once",
        ("tests/rank/test_tensor_parallel.py",),
        ("tests/system/test_exactness.py", "-k", "one_call and tensor"),
        tier="default",
    ),
    Mutant(
        "LoRA strength ignored",
        RANK + "stage/lora.py",
        "up = part.up.to(self._device, torch.float32) * part.scale",
        "up = part.up.to(self._device, torch.float32)",
        ("tests/rank/test_lora.py", "-k", "added_to_every_weight or strength"),
        tier="default",
    ),
    Mutant(
        "a ControlNet's residual halved",
        RANK + "stage_forward.py",
        "{name: added[index] for",
        "{name: 0.5 * added[index] for",
        ("tests/emulated/test_own_class.py", "-k", "residuals"),
        tier="default",
    ),
    Mutant(
        "shared outputs outlive a LoRA",
        RANK + "engine.py",
        "self.drop_graphs()\n        self.stage.module_cache.forget()\n        self._words",
        "self.drop_graphs()\n        self._words",
        ("tests/rank/test_module_cache.py", "tests/rank/test_lora.py", "-k", "lora or adapt or weight"),
    ),
    Mutant(
        "packed values beyond what a byte holds",
        RANK + "comm/transfer_codec.py",
        '"int8": (torch.int8, 127.0)',
        '"int8": (torch.int8, 129.0)',
        ("tests/rank/test_transfer_codec.py", "-k", "close or zeros or own_group"),
    ),
    Mutant(
        "the sender of changes does not add what it sent",
        RANK + "comm/change_codec.py",
        "self.codec.add(packed_y, local.view(-1), size)",
        "local.copy_(values)",
        ("tests/rank/test_change_codec.py", "-k", "hold_the_same_parts"),
    ),
    Mutant(
        "receives ahead beside collectives",
        "parallel_backend/core/communicators.py",
        "return not grouped_axes(degrees)",
        "return True",
        ("tests/rank/test_transfers.py", "-k", "its_own"),
    ),
    Mutant(
        "a self-test that does not look at what arrives",
        RANK + "comm/self_test.py",
        "    if wrong:",
        "    if wrong > len(expected_N):",
        ("tests/rank/test_self_test.py",),
    ),
    Mutant(
        "a self-test that does not try the pairs",
        RANK + "comm/peers.py",
        "for pairs in rounds(axis.size):",
        "for pairs in rounds(axis.size)[:-1]:",
        ("tests/rank/test_self_test.py", "-k", "named"),
        ("tests/system/test_transport.py", "-k", "opens"),
    ),
    Mutant(
        "any error of CUDA is called another rank's",
        RANK + "comm/transfers.py",
        "return plain and not CUDA_FAILED.search(str(error)) and not is_out_of_memory(error)",
        "return plain",
        ("tests/rank/test_collectives.py",),
    ),
    Mutant(
        "no second try without P2P",
        "parallel_backend/client/pools.py",
        'if error.backend == "nccl" else None',
        'if error.backend == "gloo" else None',
        ("tests/client/test_registry.py",),
    ),
    Mutant(
        "halo of the row behind",
        RANK + "vae/halo.py",
        "part = x.narrow(dim, *rows).contiguous()",
        "part = x.narrow(dim, (rows[0] + 1) % length, rows[1]).contiguous()",
        ("tests/rank/test_vae.py", "-k", "equal or whole or halo"),
        tier="default",
    ),
    Mutant(
        "group norm by the rank's own mean",
        RANK + "vae/banded_layers.py",
        "mean = (share * means).sum(0)",
        "mean = means[axis.index]",
        ("tests/rank/test_vae.py", "-k", "needed or group_norm"),
    ),
    Mutant(
        "unloading keeps the weights",
        RANK + "worker.py",
        "self.engines.pop(number).close()",
        "self.engines[number].close()",
        ("tests/client/test_unload.py", "-k", "gives_the_memory or unloaded"),
        tier="default",
    ),
)

PROCESS_MUTANTS = (
    Mutant(
        "a rank is not ended",
        PROCESSES + "local.py",
        "                    process.kill()\n",
        "                    pass\n",
        ("tests/processes/test_failures.py", "tests/processes/test_watchdog.py", "-k", "close_leaves or closing"),
        tier="default",
    ),
    Mutant(
        "a silent rank is given ten times as long",
        PROCESSES + "watchdog.py",
        "if longest < self.silence:",
        "if longest < 10 * self.silence:",
        ("tests/processes/test_watchdog.py", "-k", "silen"),
    ),
    Mutant(
        "slow progress never counts as a stall",
        PROCESSES + "watchdog.py",
        "        self._stalled += seconds\n",
        "        self._stalled = seconds\n",
        ("tests/processes/test_watchdog.py", "-k", "stall or progress or missed"),
    ),
    Mutant(
        "every failure is rank 0's",
        PROCESSES + "failure_report.py",
        "failed(self._name(failure.rank), failure.doing",
        "failed(self._name(0), failure.doing",
        ("tests/processes/test_failure_report.py",),
        ("tests/processes/test_failures.py", "-k", "traceback or vanished"),
    ),
    Mutant(
        "a reply is taken for the oldest request",
        PROCESSES + "gathers.py",
        "self._open.get(request_id)",
        "self._open.get(request_id := next(iter(self._open), 0))",
        ("tests/processes/test_gathers.py",),
    ),
    Mutant(
        "Cancel not looked at",
        PROCESSES + "pool.py",
        "                return future.result()\n            poll()\n",
        "                return future.result()\n",
        ("tests/processes/test_wait.py",),
    ),
)

CLIENT_MUTANTS = (
    Mutant(
        "ranks that have failed are used again",
        CLIENT + "pools.py",
        "        self.end_failed()\n        for other",
        "        for other",
        ("tests/client/test_registry.py",),
    ),
    Mutant(
        "the model used last gives way first",
        CLIENT + "models_on_ranks.py",
        "key=lambda each: each.used",
        "key=lambda each: -each.used",
        ("tests/client/test_registry.py",),
    ),
    Mutant(
        "micro-steps in the wrong order",
        CLIENT + "micro_step_queue.py",
        "step = waiting.popleft()",
        "step = waiting.pop()",
        ("tests/client/test_micro_step_queue.py",),
    ),
    Mutant(
        "loading tells no progress",
        CLIENT + "loading.py",
        '        progress("loading", fmean(ranks.loaded))\n',
        "",
        ("tests/client/test_unload.py", "-k", "how_far"),
        tier="default",
    ),
    Mutant(
        "warm-up a step too short",
        CLIENT + "pipefusion/banded_run.py",
        "float(sigmas[warmup_steps]) * (1 + 1e-6)",
        "float(sigmas[warmup_steps - 1]) * (1 + 1e-6)",
        ("tests/client/test_banded_run.py",),
    ),
    Mutant(
        "prompts that look at each other on two replicas",
        CLIENT + "call.py",
        "if self.changes.together else",
        "if False else",
        ("tests/rank/test_block_changes.py",),
    ),
    Mutant(
        "blocks that a call skips run",
        RANK + "stage_forward.py",
        "skipping(conditioning.changes.skipped)",
        "skipping(())",
        ("tests/rank/test_block_changes.py",),
    ),
    Mutant(
        "stages cut by their sum",
        PLACEMENT + "balance.py",
        "worst = max(best[stage][start], total[stage][stop] - total[stage][start])",
        "worst = best[stage][start] + total[stage][stop] - total[stage][start]",
        ("tests/placement/test_pipeline_model.py", "tests/placement/test_balance.py", "-k", "cut"),
    ),
    Mutant(
        "weights come back for the first conditioning of a run whose others need their room",
        CLIENT + "memory_guard.py",
        "for each in self._of_last_run]",
        "for each in ()]",
        ("tests/client/test_memory_guard.py",),
    ),
    Mutant(
        "a rank of several holds what a single one holds",
        PLACEMENT + "memory_model.py",
        "ACTIVATIONS[sizes.joint] * states_by_ranks(degrees)",
        "ACTIVATIONS[sizes.joint]",
        ("tests/benchmarks/test_real_sizes.py", "-k", "by_the_ratios"),
    ),
)

PLANNING_MUTANTS = (
    Mutant(
        "the slowest mode advised",
        PLANNING + "planner.py",
        "limit = AS_GOOD * min(prediction.seconds for prediction in fitting)",
        "limit = AS_GOOD * max(prediction.seconds for prediction in fitting)",
        ("tests/planning",),
    ),
    Mutant(
        "another machine's calibration taken",
        CORE + "kept_file.py",
        'if _text(file["key"]) != _text(key):',
        "if False:",
        ("tests/planning/test_planner.py", "-k", "stale or once"),
    ),
)

ACCEPTANCE_MUTANTS = (
    Mutant(
        "the self-test's file says the user's name",
        ACCEPTANCE + "report.py",
        '((socket.gethostname(), "HOST"), *((user, "USER") for user in _users())):',
        '((socket.gethostname(), "HOST"),):',
        ("tests/acceptance/test_self_test.py", "-k", "whose_machine"),
    ),
)

NODE_MUTANTS = (
    Mutant(
        "numbers above their limit accepted",
        "nodes/ui/input_checks.py",
        "if not least <= number <= most:",
        "if not least <= number:",
        ("tests/nodes/test_input_checks.py",),
    ),
    Mutant(
        "a ControlNet sees this step of bands that have not made it",
        "nodes/sampling/band_controlnet.py",
        "last = turn if exact else turn - 1",
        "last = turn - 1",
        ("tests/client/test_controlnet.py", "-k", "it_sees"),
    ),
    Mutant(
        "bands share what a guidance function keeps between steps",
        "nodes/sampling/band_guidance.py",
        "band_function = with_separate_closure(value, changed)",
        "band_function = value",
        ("tests/comfyui/test_guidance_in_bands.py", "-k", "exact_steps"),
        tier="default",
    ),
    Mutant(
        "every band gets the first band's noise",
        "nodes/sampling/noise.py",
        "return cut.band(noise, index).clone()",
        "return cut.band(noise, 0).clone()",
        ("tests/comfyui/test_samplers.py", "-k", "plain_model"),
        tier="default",
    ),
    Mutant(
        "LoRA strength ignored by the node",
        "nodes/model/lora/lora.py",
        "scale = strength * (1.0 if alpha is None else alpha / len(down))",
        "scale = 1.0 if alpha is None else alpha / len(down)",
        ("tests/comfyui/test_lora.py", "-k", "native_model"),
        tier="default",
    ),
    Mutant(
        "model patches not refused",
        "nodes/model/patches/reach.py",
        "                yield Unread(f\"{what} '{name}'\", function)",
        "                yield from ()",
        ("tests/comfyui/test_controlnet.py", "-k", "cannot_reach"),
        tier="default",
    ),
    Mutant(
        "ComfyUI's process reads the transformer of an all-in-one file",
        "nodes/model/loading/all_in_one.py",
        "_shape_alone(slices[name]) for name in left_out",
        "file.get_tensor(name) for name in left_out",
        ("tests/comfyui/test_all_in_one.py",),
        tier="default",
    ),
)

YOUNGEST = (
    Mutant(
        "block-sparse attention in the order of ranks",
        "parallel_backend/rank/attention/sparse.py",
        "        if torch.equal(order, torch.arange(start)):",
        "        if len(order) == start:",
        ("tests/rank/test_sparse_attention.py",),
    ),
    Mutant(
        "additions to an idle model stay on the device",
        "parallel_backend/client/remote_transformer.py",
        "        added, idle = 0, not (working or self._memory.in_run or self._posting.busy)",
        "        added, idle = 0, False",
        ("tests/client/test_several_models.py",),
    ),
)

MUTANTS = (
    *CORE_MUTANTS,
    *WIRE_MUTANTS,
    *FAMILY_MUTANTS,
    *CHECKPOINT_MUTANTS,
    *RANK_MUTANTS,
    *PROCESS_MUTANTS,
    *CLIENT_MUTANTS,
    *PLANNING_MUTANTS,
    *ACCEPTANCE_MUTANTS,
    *NODE_MUTANTS,
    *TWO_EVENTS,
    *TABLES,
    *YOUNGEST,
    *DOOR,
)
