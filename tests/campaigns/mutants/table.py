"""Which mutants there are, by room; then those of what users meet first; last, waits that are taken out: on a real card most
of these give the right picture nearly always, emulated ones note each."""

import shlex
from collections.abc import Iterator

from .mutant import Mutant

TABLE = r"""
# parallel_backend/core/extrapolation.py
step ratio not clamped | tests/core
-min(max((now - last) / (last - before), RATIO_LIMITS[0]), RATIO_LIMITS[1])
+(now - last) / (last - before)
# parallel_backend/core/spans.py
patch shares ignored | tests/placement/test_pipeline_model.py -k share
-        total += share
+        total += 1 / len(shares)
# parallel_backend/core/token_order.py
reference tokens of a row counted as the picture's | tests/core/test_token_order.py
-min(place - self._starts[row], self.row)
+(place - self._starts[row])
# parallel_backend/client/not_finite.py
finite values whose sum is not are refused | tests/rank/test_not_finite.py -k large
-bool(total.isfinite()) or bool(tensor.isfinite().all())
+bool(total.isfinite())
# parallel_backend/core/validate.py
ulysses beside tensor parallelism held to all heads | tests/core
-if degrees.ulysses > fewest:
+if degrees.ulysses > heads:
more devices than ranks not refused | tests/core
-(all_known and len(devices) != degrees.world):
+(all_known and len(devices) < degrees.world):
# parallel_backend/wire/tcp.py
a peer that does not know the key is let in | tests/wire/test_tcp.py
-                deliver_challenge(connection, self._key)
+                with contextlib.suppress(AuthenticationError):
+                    deliver_challenge(connection, self._key)
# parallel_backend/wire/encoding.py
tensors of a message are bounded one by one | tests/wire/test_messages.py
-max(self.nbytes,
+max(nbytes,
# parallel_backend/own_class/calls/patching.py
odd sizes padded with zeros | tests/own_class/test_patching.py
-F.pad(latent, padding, mode="circular")
+F.pad(latent, padding)
# parallel_backend/own_class/cuts/tensor_plan.py
a row-cut layer's bias added by every rank | tests/rank/test_tensor_parallel.py | tests/system/test_exactness.py -k "one_call and tensor" | default
-return Shard(0, ()) if index else None
+return None
# parallel_backend/checkpoints/packed_formats.py
scale of packed fp8 weights ignored | tests/checkpoints/test_formats.py -k "expanded_form or round"
-values if self.scale is None else torch.mul(values, self.scale, out=values)
+values
# parallel_backend/checkpoints/quantised_formats.py
what is added to a group of values is left out | tests/checkpoints/test_quantised_formats.py -k stay_as_small
-"zeros": scales["weight_zeros"]
+"zeros": torch.zeros_like(scales["weight_zeros"])
# parallel_backend/checkpoints/packed_formats.py
a cut inside a GGUF block | tests/checkpoints/test_formats.py -k shards
-if columns.start % values or columns.stop % values:
+if columns.start % values:
# parallel_backend/checkpoints/quantised_formats.py
every part has the scales of the first rows | tests/checkpoints/test_formats.py -k shards
-joined([scales[span.slice] for span in rows]) if len(scales) == size[0]
+scales[: sum(map(len, rows))] if len(scales) == size[0]
# parallel_backend/checkpoints/checkpoint.py
a scale without a use is dropped | tests/checkpoints/test_checkpoint.py -k refused
-if _scales_values(key, entries)]
+if False]
# parallel_backend/rank/attention/kv_buffer.py
keys that other ranks sent are not committed | tests/rank/test_kv_buffer.py | tests/system/test_exactness.py -k displaced
-        buffer.commit_received()
old keys used as they are | tests/rank/test_kv_buffer.py | tests/client/test_step_cache.py -k old_keys
-last.lerp_(now, weight)
+last.lerp_(now, 1)
old values are not corrected | tests/rank/test_kv_buffer.py
-.add_(shift)
+.add_(0.0 * shift)
# parallel_backend/rank/attention/bands.py
a stale band read as fresh | tests/system/test_exactness.py -k displaced | default
-        if at.step.message.stale:
+        if False:
# parallel_backend/rank/attention/kernel_choice.py
masked calls go to a kernel that takes no mask | tests/rank/test_foreign_kernels.py
-if mask_BK is not None and not self.kernel.masks:
+if False:
a kernel that writes to its keys passes its trial | tests/rank/test_foreign_kernels.py
-unchanged = torch.equal(tried_K3BHD, rows_K3BHD.to(device, dtype))
+unchanged = True
# parallel_backend/rank/attention/ring.py
ring parts merged by the larger log-sum-exp | tests/rank/test_kernels.py
-torch.logaddexp(one[1], two[1])
+torch.maximum(one[1], two[1])
# parallel_backend/rank/attention/ulysses.py
ulysses sends heads to the wrong ranks | tests/system/test_exactness.py -k "one_call and (ulysses2 or ulysses_2 or ulysses)"
-for x in tensors_BsHD]) for span in group.spans]
+for x in tensors_BsHD]) for span in reversed(group.spans)]
# parallel_backend/rank/stage/tensor_parallel.py
row-cut layers not added up | tests/system/test_exactness.py -k "one_call and tensor"
-lambda _module, _input, out: all_reduce(out, self.axis, traffic)
+lambda _module, _input, out: out
# parallel_backend/rank/stage/lora.py
LoRA strength ignored | tests/rank/test_lora.py -k "added_to_every_weight or strength" | default
-up = part.up.to(self._device, torch.float32) * part.scale
+up = part.up.to(self._device, torch.float32)
# parallel_backend/rank/stage_forward.py
a ControlNet's residual halved | tests/emulated/test_own_class.py -k residuals | default
-{name: added[index] for
+{name: 0.5 * added[index] for
# parallel_backend/rank/engine.py
shared outputs outlive a LoRA | tests/rank/test_module_cache.py tests/rank/test_lora.py -k "lora or adapt or weight"
-self.drop_graphs()
-        self.stage.module_cache.forget()
-        self._words
+self.drop_graphs()
+        self._words
# parallel_backend/rank/comm/transfer_codec.py
packed values beyond what a byte holds | tests/rank/test_transfer_codec.py -k "close or zeros or own_group"
-"int8": (torch.int8, 127.0)
+"int8": (torch.int8, 129.0)
# parallel_backend/rank/comm/change_codec.py
the sender of changes does not add what it sent | tests/rank/test_change_codec.py -k hold_the_same_parts
-self.codec.add(packed_y, local.view(-1), size)
+local.copy_(values)
# parallel_backend/rank/comm/mesh.py
receives ahead beside collectives | tests/rank/test_transfers.py -k its_own
-return not grouped_axes(degrees)
+return True
# parallel_backend/rank/comm/self_test.py
a self-test that does not look at what arrives | tests/rank/test_self_test.py
-    if wrong:
+    if wrong > len(expected_N):
# parallel_backend/rank/comm/peers.py
a self-test that does not try the pairs | tests/rank/test_self_test.py -k named | tests/system/test_transport.py -k opens
-for pairs in rounds(axis.size):
+for pairs in rounds(axis.size)[:-1]:
# parallel_backend/rank/comm/transfers.py
any error of CUDA is called another rank's | tests/rank/test_collectives.py
-return plain and not CUDA_FAILED.search(str(error)) and not is_out_of_memory(error)
+return plain
# parallel_backend/client/pools.py
no second try without P2P | tests/client/test_registry.py
-if error.backend == "nccl" else None
+if error.backend == "gloo" else None
# parallel_backend/rank/vae/halo.py
halo of the row behind | tests/rank/test_vae.py -k "equal or whole or halo" | default
-sendable(x.narrow(dim, *rows).contiguous(), axis.group)
+sendable(x.narrow(dim, (rows[0] + 1) % length, rows[1]).contiguous(), axis.group)
# parallel_backend/rank/vae/banded_layers.py
group norm by the rank's own mean | tests/rank/test_vae.py -k "needed or group_norm"
-mean = (share * means).sum(0)
+mean = means[axis.index]
# parallel_backend/rank/worker.py
unloading keeps the weights | tests/client/test_unload.py -k "gives_the_memory or unloaded" | default
-self.engines.pop(number).close()
+self.engines[number].close()
# parallel_backend/processes/local.py
a rank is not ended | tests/processes/test_failures.py tests/processes/test_watchdog.py -k "close_leaves or closing" | default
-                    process.kill()
+                    pass
# parallel_backend/processes/watchdog.py
a silent rank is given ten times as long | tests/processes/test_watchdog.py -k silen
-if longest < self.silence:
+if longest < 10 * self.silence:
slow progress never counts as a stall | tests/processes/test_watchdog.py -k "stall or progress or missed"
-        self._stalled += seconds
+        self._stalled = seconds
# parallel_backend/processes/failure_report.py
every failure is rank 0's | tests/processes/test_failure_report.py | tests/processes/test_failures.py -k "traceback or vanished"
-failed(self._name(failure.rank), failure.doing
+failed(self._name(0), failure.doing
# parallel_backend/processes/gathers.py
a reply is taken for the oldest request | tests/processes/test_gathers.py
-self._open.get(request_id)
+self._open.get(request_id := next(iter(self._open), 0))
# parallel_backend/processes/pool.py
Cancel not looked at | tests/processes/test_wait.py
-                return future.result()
-            poll()
+                return future.result()
# parallel_backend/client/pools.py
ranks that have failed are used again | tests/client/test_registry.py
-        self.end_failed()
-        for other
+        for other
# parallel_backend/client/models_on_ranks.py
the model used last gives way first | tests/client/test_registry.py
-key=lambda each: each.used
+key=lambda each: -each.used
# parallel_backend/client/posting.py
micro-steps in the wrong order | tests/client/test_posting.py
-step = waiting.popleft()
+step = waiting.pop()
# parallel_backend/client/loading.py
loading tells no progress | tests/client/test_unload.py -k how_far | default
-        progress("loading", fmean(ranks.loaded))
# parallel_backend/client/pipefusion/banded_run.py
warm-up a step too short | tests/client/test_banded_run.py
-float(sigmas[warmup_steps]) * (1 + 1e-6)
+float(sigmas[warmup_steps - 1]) * (1 + 1e-6)
# parallel_backend/client/call.py
prompts that look at each other on two replicas | tests/rank/test_block_changes.py
-if self.changes.together else
+if False else
# parallel_backend/rank/stage_forward.py
blocks that a call skips run | tests/rank/test_block_changes.py
-stage.blocks.skipped = conditioning.changes.skipped
+stage.blocks.skipped = ()
# parallel_backend/placement/balance.py
stages cut by their sum | tests/placement/test_pipeline_model.py tests/placement/test_balance.py -k cut
-worst = max(best[stage][start], total[stage][stop] - total[stage][start])
+worst = best[stage][start] + total[stage][stop] - total[stage][start]
# parallel_backend/client/memory_guard.py
weights come back for the first conditioning of a run whose others need their room | tests/client/test_memory_guard.py
-for each in self._of_last_run]
+for each in ()]
# parallel_backend/placement/memory_model.py
a rank of several holds what a single one holds | tests/benchmarks/test_real_sizes.py -k by_the_ratios
-ACTIVATIONS[sizes.joint] * states_by_ranks(degrees)
+ACTIVATIONS[sizes.joint]
# parallel_backend/planning/planner.py
the slowest mode advised | tests/planning
-limit = AS_GOOD * min(prediction.seconds for prediction in fitting)
+limit = AS_GOOD * max(prediction.seconds for prediction in fitting)
# parallel_backend/core/kept_file.py
another machine's calibration taken | tests/planning/test_planner.py -k "stale or once"
-if _text(file["key"]) != _text(key):
+if False:
# parallel_backend/acceptance/report.py
the self-test's file says the user's name | tests/acceptance/test_self_test.py -k whose_machine
-((socket.gethostname(), "HOST"), *((user, "USER") for user in _users())):
+((socket.gethostname(), "HOST"),):
# nodes/ui/input_checks.py
numbers above their limit accepted | tests/nodes/test_input_checks.py
-if not least <= number <= most:
+if not least <= number:
# nodes/sampling/band_exchange.py
a ControlNet sees this step of bands that have not made it | tests/nodes/test_band_controlnet.py -k it_sees
-last = turn if exact or band <= index else turn - 1
+last = turn if band <= index else turn - 1
# nodes/sampling/band_guidance.py
bands share what a guidance function keeps between steps | tests/comfyui/test_guidance_in_bands.py -k exact_steps | default
-band_function = with_separate_closure(value, changed)
+band_function = value
# nodes/sampling/noise.py
every band gets the first band's noise | tests/comfyui/test_samplers.py -k plain_model | default
-return cut.band(noise, index).clone()
+return cut.band(noise, 0).clone()
# nodes/model/lora/lora.py
LoRA strength ignored by the node | tests/comfyui/test_lora.py -k native_model | default
-scale = strength * (1.0 if alpha is None else alpha / len(down))
+scale = 1.0 if alpha is None else alpha / len(down)
# nodes/model/call/prepared_call.py
a prepared call outlives the setup that it was made for | tests/nodes/test_prepared_call.py
-found is None or found.setup is not stub.setup
+found is None
# nodes/model/patches/reach.py
model patches not refused | tests/comfyui/test_controlnet.py -k cannot_reach | default
-                yield Unread(f"{what} '{name}'", function)
+                yield from ()
# nodes/model/loading/all_in_one.py
ComfyUI's process reads the transformer of an all-in-one file | tests/comfyui/test_all_in_one.py | default
-_shape_alone(slices[name]) for name in left_out
+file.get_tensor(name) for name in left_out
# parallel_backend/rank/attention/sparse.py
block-sparse attention in the order of ranks | tests/rank/test_sparse_attention.py
-        if torch.equal(order, torch.arange(start)):
+        if len(order) == start:
# parallel_backend/client/remote_transformer.py
additions to an idle model stay on the device | tests/client/test_several_models.py
-        added, idle = 0, not (working or self._memory.in_run or self._posting.busy)
+        added, idle = 0, False
# parallel_backend/rank/stage/store/weight_store.py
a merge into a block that is in its slot does not show | tests/rank/test_weight_store.py -k in_its_slot
-self._slots.forget(group.name)
+pass
the file is read into the buffer from which a copy is in progress | tests/rank/test_weight_store.py | tests/emulated/test_weights.py | default
-self._slots.settle()  # `source` overwrites the buffer from which a copy in progress may read
+pass
# parallel_backend/client/models_on_ranks.py
models of failed ranks are kept | tests/client/test_registry.py
-if not each.model.on_ranks]:
+if each is None]:
# parallel_backend/processes/failure_report.py
who died of it is named before who said why | tests/processes/test_failure_report.py
-        if causes:
-            failure = causes[0]
+        if causes and not died_unheard:
+            failure = causes[0]
# parallel_backend/client/remote_transformer.py
a run that was given up counts on | tests/client/test_several_models.py -k given_up | default
-        self._memory.forget(run)
-        if self.on_ranks:
+        if self.on_ranks:
# parallel_backend/client/lora.py
other factors keep the strengths of those before | tests/rank/test_lora.py | tests/campaigns/test_states.py | default
-                weighed = ()
# nodes/model/carry_over.py
a node's wrappers are not carried over | tests/nodes
-            if key not in without:
+            if key in without:
# nodes/model/patches/reach.py
an entry of transformer_options that cannot be sent is let pass | tests/nodes
-if name not in told and not isinstance
+if name in told and not isinstance
# nodes/sampling/eligibility.py
a region of the conditioning is cut into bands | tests/nodes
-cond.get(key) is not None and cond.get(key) is not False
+cond.get(key) is False
# nodes/sampling/band_guidance.py
unknown guidance is taken for pixel-wise | tests/nodes | tests/comfyui/test_guidance_in_bands.py | default
-not isinstance(value, types.FunctionType) or (changed
+isinstance(value, types.FunctionType) or (changed
# parallel_backend/client/transports.py
a kernel option that decides P2P is not part of its verdict | tests/client/test_registry.py -k p2p
-, "/proc/cmdline"
# nodes/model/loading/kept_proofs.py
a proof outlives another einops | tests/nodes/test_kept_proofs.py
-"torch", "comfy-kitchen", "einops"
+"torch", "comfy-kitchen"
# parallel_backend/rank/attention/sparse.py
fp32 attends in cubes where ComfyUI attends in full | tests/rank/test_sparse_attention.py
-if cubes and dtype != torch.bfloat16:
+if cubes and dtype == torch.float16:
# parallel_backend/rank/comm/process_group.py
torch 2.15 makes its new NCCL groups | tests/rank/test_process_group.py
-    NEW_NCCL: "0",
# parallel_backend/processes/watchdog.py
an idle rank whose driver does not answer is no hang | tests/processes/test_watchdog.py
-(beat.doing != m.IDLE or r in deaf)
+beat.doing != m.IDLE
# parallel_backend/rank/numa.py
a rank is bound to cores that its process may not use | tests/rank
-if not cores or not cores < allowed:
+if not cores:
# nodes/model/call/diffusion_model.py
the next prompt computes with the files of the last one | tests/nodes/test_model_files.py
-        if self.checkpoint.has_changed:
+        if prompt is None and self.checkpoint.has_changed:
# parallel_backend/checkpoints/single_file.py
files with the prefix net. do not open | tests/checkpoints/test_published_layouts.py tests/checkpoints/test_checkpoint.py
-"model.model.", "net.")
+"model.model.")
an own class's header may state any number of layers | tests/checkpoints/test_hostile_files.py
-            most = len(shapes)
+            most = MAX_SETTING
# nodes/model/lora/left_out.py
a LoRA that fits no layer is silent | tests/nodes/test_lora_patches.py
-    if not any(fits) and not (count == 1 and _is_part(patch[1])):
+    if False:
the second of two patches of a layer is checked against the file's shape | tests/nodes/test_lora_patches.py
-            patches.append(patch)
+            pass
# web/js/loaders.js
a wire that a change lost is not noticed | tests/browser/test_menu.py | default
-found.get(end) !== from
+false
# parallel_backend/planning/planner.py
a gain of more than the number of ranks is believed | tests/planning/test_doctor.py
-if not fastest.lacks and not credible(gain, ranks):
+if False:
# parallel_backend/core/device_copies.py
a piece of a file is filled again too early | tests/emulated/test_staged_upload.py
-                piece[1].synchronize()
# parallel_backend/core/pinned.py
memory is unpinned under copies from it | tests/client/test_shared_residuals.py -k unpinned
-        torch.cuda.synchronize(device)
# parallel_backend/rank/outbox.py
an output is sent before it has come | tests/emulated/test_modes.py
-                copied.synchronize()
# parallel_backend/rank/stage/store/device_copies.py
blocks do not wait for their weights | tests/emulated/test_weights.py -k shares_on_the_device
-torch.cuda.current_stream(self._device).wait_event(self._done)
+pass
# parallel_backend/rank/micro_step_graphs.py
a replay waits for nothing | tests/rank/test_micro_step_graphs.py -k same_bits | default
-        return outputs, graph.replay
+
+        def replay() -> None:
+            with torch.cuda.stream(self._stream):
+                graph.replay()
+
+        return outputs, replay
"""  # noqa: E501
"""By file: a mutant's name, the tests of its room, those that the default tier runs beside them, and "default" if it is that
tier that has to catch it; then the old text behind "-", and the new one behind "+"."""


def _read(table: str) -> Iterator[Mutant]:
    file, head, changed = "", "", dict[str, list[str]]()
    for line in (*table.strip().split("\n"), "# "):
        if head and line[:1] not in ("-", "+"):
            name, tests, *more = head.split(" | ")
            wider = [each for each in more if each != "default"]
            texts = ("\n".join(changed[sign]) for sign in "-+")
            arguments = tuple(shlex.split(tests)), tuple(shlex.split(*wider or [""]))
            yield Mutant(name, file, *texts, *arguments, "default" if "default" in more else "quick")
        if line.startswith("# "):
            file, head = line[2:], ""
        elif line[:1] in ("-", "+"):
            changed[line[0]].append(line[1:])
        else:
            head, changed = line, {"-": [], "+": []}


MUTANTS = tuple(_read(TABLE))
