"""Which mutants there are, by room."""

from .mutant import Mutant

CORE = "parallel_backend/core/"
WIRE = "parallel_backend/wire/"
FAMILIES = "parallel_backend/families/"
CHECKPOINTS = "parallel_backend/checkpoints/"
RANK = "parallel_backend/rank/"
PROCESSES = "parallel_backend/processes/"
CLIENT = "parallel_backend/client/"
PLANNING = "parallel_backend/planning/"
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
        ("tests/client/test_pipeline_model.py", "-k", "share"),
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
        "if len(devices) != degrees.world:",
        "if len(devices) < degrees.world:",
        ("tests/core",),
    ),
    Mutant(
        "more stages than blocks not refused",
        CORE + "validate.py",
        "if degrees.pipe > blocks:",
        "if degrees.pipe > blocks + 1:",
        ("tests/core", "tests/planning", "-k", "refused or search"),
    ),
    Mutant(
        "any number of ranks allowed",
        CORE + "validate.py",
        "if degrees.world > MOST_RANKS:",
        "if degrees.world > 10 * MOST_RANKS:",
        ("tests/core",),
    ),
)

WIRE_MUTANTS = (
    Mutant(
        "a header of any length is sent",
        WIRE + "encoding.py",
        "assert len(header) <= MAX_HEADER_BYTES and len(tensors)",
        "assert len(tensors)",
        ("tests/wire/test_messages.py",),
    ),
    Mutant(
        "a peer that does not know the key is let in",
        WIRE + "tcp.py",
        "            deliver_challenge(connection, self._key)\n",
        "            with contextlib.suppress(AuthenticationError):\n"
        "                deliver_challenge(connection, self._key)\n",
        ("tests/wire/test_tcp.py",),
    ),
    Mutant(
        "a rank beyond the last is let in",
        WIRE + "tcp.py",
        "rank >= self._world or",
        "rank > self._world or",
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
        FAMILIES + "base/patching.py",
        'F.pad(latent, padding, mode="circular")',
        "F.pad(latent, padding)",
        ("tests/families/test_patching.py",),
    ),
    Mutant(
        "heads that share keys cut one by one",
        FAMILIES + "base/tensor_plan.py",
        "features[HEADS] = size // key_heads",
        "features[HEADS] = size // heads",
        ("tests/rank/test_tensor_parallel.py", "-k", "heads"),
    ),
    Mutant(
        "z-image's padding ends too early",
        FAMILIES + "z_image.py",
        "return tokens + -tokens % MULTIPLE",
        "return tokens",
        ("tests/families/test_families.py", "-k", "z-image and diffusers"),
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
        "GGUF's arithmetic in half precision",
        CHECKPOINTS + "packed_formats.py",
        "values, size, torch.float32)",
        "values, size, torch.float16)",
        ("tests/checkpoints/test_formats.py", "-k", "expanded_form or rounds_once"),
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
        "scale and shift not exchanged",
        CHECKPOINTS + "reader.py",
        "        if source.swap_halves:\n            assert dim == 0\n",
        "        if False:\n            assert dim == 0\n",
        ("tests/checkpoints/test_checkpoint.py", "-k", "same_weights"),
    ),
    Mutant(
        "other names of keys ignored",
        CHECKPOINTS + "checkpoint.py",
        "in family.file.aliases.items():",
        "in {}.items():",
        ("tests/families/test_flux_families.py", "-k", "norms"),
    ),
    Mutant(
        "a tensor without a use is dropped",
        CHECKPOINTS + "checkpoint.py",
        "    if surplus:\n",
        "    if not surplus and missing:\n",
        ("tests/checkpoints/test_checkpoint.py", "tests/families/test_refusals.py", "-k", "refused"),
    ),
    Mutant(
        "a list's items held to the limit of any number",
        CHECKPOINTS + "limits.py",
        "_plausible(item, 0, most)",
        "_plausible(item, 0, MAX_SETTING)",
        ("tests/checkpoints/test_hostile_files.py", "-k", "setting"),
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
        "last.lerp_(now, 1 + ratio)",
        "last.lerp_(now, 1)",
        ("tests/rank/test_kv_buffer.py",),
        ("tests/client/test_step_cache.py", "-k", "old_keys"),
    ),
    Mutant(
        "two calls at one timestep count as two",
        RANK + "attention/kv_buffer.py",
        "if self._times and time == self._times[-1]:",
        "if False:",
        ("tests/rank/test_kv_buffer.py",),
    ),
    Mutant(
        "a stale band read as fresh",
        RANK + "attention/parallel_attention.py",
        "            if step.stale:\n",
        "            if False:\n",
        ("tests/system/test_exactness.py", "-k", "displaced"),
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
        "for span, part in zip(spans, flat.split(send), strict=True):",
        "for span, part in zip(reversed(spans), flat.split(send), strict=True):",
        ("tests/system/test_exactness.py", "-k", "one_call and (ulysses2 or ulysses_2 or ulysses)"),
    ),
    Mutant(
        "text mask dropped",
        RANK + "stage_forward.py",
        "None if text_mask is None else text_mask[step.entries.slice]",
        "None",
        ("tests/system/test_exactness.py", "-k", "text_mask"),
    ),
    Mutant(
        "guidance rounded to the compute dtype",
        RANK + "conditioning_store.py",
        "KEPT_EXACT = (REFERENCE_POSITIONS, GUIDANCE)",
        "KEPT_EXACT = (REFERENCE_POSITIONS,)",
        ("tests/families/test_families.py", "-k", "bf16_rounds and flux"),
    ),
    Mutant(
        "timestep rounded to the compute dtype",
        RANK + "stage/build.py",
        "given[names[0]] = embedding.model_time(timestep) * embedding.factor",
        "given[names[0]] = (embedding.model_time(timestep) * embedding.factor).to(dtype)",
        ("tests/families/test_families.py", "-k", "bf16_rounds and flux"),
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
        RANK + "stage/block_slots.py",
        "image + residual",
        "image + 0.5 * residual",
        ("tests/rank/test_block_slots.py",),
        ("tests/client/test_controlnet.py", "-k", "diffusers"),
    ),
    Mutant(
        "shared outputs outlive a LoRA",
        RANK + "engine.py",
        '        """All adapters are in place. Returns their bytes."""\n        self.stage.module_cache.forget()\n',
        '        """All adapters are in place. Returns their bytes."""\n',
        ("tests/rank/test_module_cache.py", "tests/rank/test_lora.py", "-k", "lora or adapt or weight"),
    ),
    Mutant(
        "own bytes counted as sent",
        RANK + "comm/collectives.py",
        "(sum(send) - send[axis.index]) * x.element_size()",
        "sum(send) * x.element_size()",
        ("tests/rank/test_collectives.py",),
        ("tests/rank/test_transfers.py", "-k", "ulysses"),
    ),
    Mutant(
        "packed values beyond what a byte holds",
        RANK + "comm/transfer_codec.py",
        '"int8": (torch.int8, 127.0)',
        '"int8": (torch.int8, 129.0)',
        ("tests/rank/test_transfer_codec.py", "-k", "close or zeros or own_group"),
    ),
    Mutant(
        "receives ahead beside collectives",
        "parallel_backend/core/communicators.py",
        "return not grouped_axes(degrees)",
        "return True",
        ("tests/rank/test_transfers.py", "-k", "its_own"),
    ),
    Mutant(
        "links that come up one after the other",
        "parallel_backend/core/communicators.py",
        "(line[stage], line[stage + 1]) for stage in senders for line in lines",
        "(line[stage], line[stage + 1]) for stage in sorted(senders) for line in lines",
        ("tests/core/test_communicators.py",),
    ),
    Mutant(
        "groups with the library's own timeout",
        RANK + "comm/mesh.py",
        "dist.new_group(list(ranks), timeout=timeout,",
        "dist.new_group(list(ranks), timeout=None,",
        ("tests/rank/test_mesh.py",),
    ),
    Mutant(
        "a store with the library's own timeout",
        RANK + "comm/rendezvous.py",
        "self.store.set_timeout(timeout)",
        "self.store.set_timeout(self.store.timeout)",
        ("tests/rank/test_rendezvous.py",),
    ),
    Mutant(
        "a self-test without a limit",
        RANK + "comm/guard.py",
        "if left is not None and left <= 0:",
        "if left is not None and left <= -3600:",
        ("tests/rank/test_guard.py",),
        ("tests/processes/test_links.py",),
    ),
    Mutant(
        "a self-test that does not look at what arrives",
        RANK + "comm/self_test.py",
        "    if wrong:",
        "    if wrong > len(expected):",
        ("tests/rank/test_self_test.py",),
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
        "parallel_backend/client/registry.py",
        'if error.backend != "nccl" or not self._pool.self_test.p2p',
        'if error.backend != "gloo" or not self._pool.self_test.p2p',
        ("tests/client/test_registry.py",),
    ),
    Mutant(
        "a transfer counted for the micro-step that waits for it",
        RANK + "comm/transfers.py",
        "add(TRANSFER, self._step,",
        "add(TRANSFER, self._traffic.recorder.step,",
        ("tests/rank/test_collectives.py",),
        ("tests/client/test_trace.py", "-k", "waits or transfer"),
    ),
    Mutant(
        "halo of the row behind",
        RANK + "vae/halo.py",
        "sent = x[:, :, :1].contiguous()",
        "sent = x[:, :, 1:2].contiguous()",
        ("tests/rank/test_vae.py", "-k", "equal or whole or halo"),
        tier="default",
    ),
    Mutant(
        "group norm by the rank's own mean",
        RANK + "vae/banded_layers.py",
        "mean = (share * means).sum(0)",
        "mean = means[bands.axis.index]",
        ("tests/rank/test_vae.py", "-k", "needed or group_norm"),
    ),
    Mutant(
        "unloading keeps the weights",
        RANK + "worker.py",
        "self.engine = self.decoder = None\n        self.channel",
        "self.decoder = None\n        self.channel",
        ("tests/client/test_unload.py", "-k", "gives_the_memory or unloaded"),
        (),
        "default",
    ),
)

PROCESS_MUTANTS = (
    Mutant(
        "a rank is not ended",
        PROCESSES + "local.py",
        "                    process.kill()\n",
        "                    pass\n",
        ("tests/processes/test_failures.py", "tests/processes/test_watchdog.py", "-k", "close_leaves or closing"),
        (),
        "default",
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
        "gather = self._open.get(request_id)",
        "request_id = next(iter(self._open), None)\n            gather = self._open.get(request_id)",
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
        CLIENT + "registry.py",
        "(self._pool.error is not None or devices not in (None, self._pool.devices))",
        "devices not in (None, self._pool.devices)",
        ("tests/client/test_registry.py",),
    ),
    Mutant(
        "errors of forecasts not added up",
        CLIENT + "step_cache.py",
        "self._error += max(",
        "self._error = max(",
        ("tests/client/test_step_cache.py",),
    ),
    Mutant(
        "every call begins on the first replica",
        CLIENT + "call.py",
        "(replica - self.first_replica) % replicas",
        "replica",
        ("tests/client/test_micro_step_queue.py",),
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
        CLIENT + "remote_transformer.py",
        '            progress("loading", fmean(self._loading))\n',
        "",
        ("tests/client/test_unload.py", "-k", "how_far"),
        (),
        "default",
    ),
    Mutant(
        "the report has the last rank's bytes",
        CLIENT + "reports/run_report.py",
        "total.get(axis, 0) + count",
        "count",
        ("tests/client/test_run_report.py",),
    ),
    Mutant(
        "warm-up a step too short",
        CLIENT + "pipefusion/banded_run.py",
        "float(sigmas[warmup_steps]) * (1 + 1e-6)",
        "float(sigmas[warmup_steps - 1]) * (1 + 1e-6)",
        ("tests/client/test_banded_run.py",),
    ),
    Mutant(
        "the last odd row in no band",
        CLIENT + "pipefusion/banded_run.py",
        "rows = -(-size // patch)",
        "rows = size // patch",
        ("tests/client/test_banded_run.py", "-k", "cut_rows or odd"),
    ),
    Mutant(
        "stages cut by their sum",
        CLIENT + "placement/balance.py",
        "worst = max(best[stage][start], total[stage][stop] - total[stage][start])",
        "worst = best[stage][start] + total[stage][stop] - total[stage][start]",
        ("tests/client/test_pipeline_model.py", "tests/client/test_balance.py", "-k", "cut"),
    ),
    Mutant(
        "what ranks hold does not count as usable",
        CLIENT + "placement/memory_check.py",
        "USABLE_MEMORY * (room.free + room.held))",
        "USABLE_MEMORY * room.free)",
        ("tests/client/test_memory_model.py",),
    ),
    Mutant(
        "keys that a run keeps twice counted once",
        CLIENT + "memory_guard.py",
        "KV_COPIES if extrapolate else 1",
        "1",
        ("tests/client/test_memory_guard.py",),
    ),
)

PLANNING_MUTANTS = (
    Mutant(
        "the last call's peak for the largest",
        PLANNING + "rehearsed_costs.py",
        "else max(of_rank) for of_rank in peaks",
        "else of_rank[-1] for of_rank in peaks",
        ("tests/planning/test_doctor.py",),
    ),
    Mutant(
        "the slowest mode advised",
        PLANNING + "planner.py",
        "limit = AS_GOOD * min(found.seconds for found in fitting)",
        "limit = AS_GOOD * max(found.seconds for found in fitting)",
        ("tests/planning",),
    ),
    Mutant(
        "another machine's calibration taken",
        PLANNING + "calibration_file.py",
        'if _text(content["key"]) != _text(key):',
        "if False:",
        ("tests/planning/test_planner.py", "-k", "stale or once"),
    ),
)

ACCEPTANCE_MUTANTS = (
    Mutant(
        "the self-test's file says the user's name",
        ACCEPTANCE + "document.py",
        '((socket.gethostname(), "HOST"), (_user(), "USER")):',
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
        ("tests/pack/test_input_checks.py",),
        ("tests/comfyui/test_inputs.py",),
    ),
    Mutant(
        "a ControlNet sees this step of bands that have not made it",
        "nodes/sampling/band_controlnet.py",
        "last = turn if exact else turn - 1",
        "last = turn - 1",
        ("tests/client/test_controlnet.py", "-k", "it_sees"),
    ),
    Mutant(
        "every band gets the first band's noise",
        "nodes/sampling/noise.py",
        "return cut.band(noise, index).clone()",
        "return cut.band(noise, 0).clone()",
        ("tests/comfyui/test_samplers.py", "-k", "plain_model"),
        (),
        "default",
    ),
    Mutant(
        "LoRA strength ignored by the node",
        "nodes/model/lora.py",
        "scale = strength * (1.0 if alpha is None else alpha / len(down))",
        "scale = 1.0 if alpha is None else alpha / len(down)",
        ("tests/comfyui/test_lora.py", "-k", "native_model"),
        (),
        "default",
    ),
    Mutant(
        "model patches not refused",
        "nodes/model/diffusion_model.py",
        """    found += [f"model patch '{name}'" for name, patches in options.get("patches", {}).items() if patches]\n""",
        "",
        ("tests/comfyui/test_controlnet.py", "-k", "cannot_reach"),
        (),
        "default",
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
)
