"""Mutants of what users meet first: files and LoRAs as they circulate, the editor, cards, files that change in a run."""

from .mutant import Mutant

CHECKPOINTS = "parallel_backend/checkpoints/"
CLIENT = "parallel_backend/client/"
RANK = "parallel_backend/rank/"
LORA_TESTS = ("tests/nodes/test_lora_patches.py",)
BROWSER = ("tests/browser/test_menu.py",)

DOOR = (
    Mutant(
        "a kernel option that decides P2P is not part of its verdict",
        CLIENT + "p2p_verdicts.py",
        ', "/proc/cmdline"',
        "",
        ("tests/client/test_registry.py", "-k", "p2p"),
    ),
    Mutant(
        "a proof outlives another einops",
        "nodes/model/loading/kept_proofs.py",
        '"torch", "comfy-kitchen", "einops"',
        '"torch", "comfy-kitchen"',
        ("tests/nodes/test_kept_proofs.py",),
    ),
    Mutant(
        "fp32 attends in cubes where ComfyUI attends in full",
        RANK + "attention/sparse.py",
        "if cubes and dtype != torch.bfloat16:",
        "if cubes and dtype == torch.float16:",
        ("tests/rank/test_sparse_attention.py",),
    ),
    Mutant(
        "torch 2.15 makes its new NCCL groups",
        RANK + "comm/process_group.py",
        '    NEW_NCCL: "0",\n',
        "",
        ("tests/rank/test_process_group.py",),
    ),
    Mutant(
        "a communicator on another GPU is not noticed",
        RANK + "comm/process_group.py",
        "        if index != own:",
        "        if index is None:",
        ("tests/rank/test_process_group.py",),
    ),
    Mutant(
        "an idle rank whose driver does not answer is no hang",
        "parallel_backend/processes/watchdog.py",
        "(beat.doing != m.IDLE or r in deaf)",
        "beat.doing != m.IDLE",
        ("tests/processes/test_watchdog.py",),
    ),
    Mutant(
        "a rank is bound to cores that its process may not use",
        RANK + "numa.py",
        "if not cores or not cores < allowed:",
        "if not cores:",
        ("tests/rank",),
    ),
    Mutant(
        "the next prompt computes with the files of the last one",
        CLIENT + "prompt_files.py",
        "            self._seen.clear()\n",
        "",
        ("tests/client/test_registry.py",),
    ),
    Mutant(
        "Unload frees a model in the middle of a run",
        CLIENT + "registry.py",
        "if self.unload_asked and not prompt_runs():",
        "if self.unload_asked:",
        ("tests/client/test_registry.py", "tests/nodes/test_ranks_panel.py"),
    ),
    Mutant(
        "files with the prefix net. do not open",
        CHECKPOINTS + "single_file.py",
        '"model.model.", "net.")',
        '"model.model.")',
        ("tests/checkpoints/test_published_layouts.py", "tests/checkpoints/test_checkpoint.py"),
    ),
    Mutant(
        "an own class's header may state any number of layers",
        CHECKPOINTS + "single_file.py",
        "            most = len(shapes)\n",
        "            most = MAX_SETTING\n",
        ("tests/checkpoints/test_hostile_files.py",),
    ),
    Mutant(
        "a LoRA that fits no layer is silent",
        "nodes/model/lora/left_out.py",
        "    if not any(fits) and not (count == 1 and _is_part(patch[1])):",
        "    if False:",
        LORA_TESTS,
    ),
    Mutant(
        "the second of two patches of a layer is checked against the file's shape",
        "nodes/model/lora/left_out.py",
        "            patches.append(patch)\n",
        "            pass\n",
        LORA_TESTS,
    ),
    Mutant(
        "a wire that a change lost is not noticed",
        "web/js/wires.js",
        "found.get(end) !== from",
        "false",
        BROWSER,
        tier="default",
    ),
    Mutant(
        "a gain of more than the number of ranks is believed",
        "parallel_backend/planning/planner.py",
        "if not fastest.lacks and not credible(gain, ranks):",
        "if False:",
        ("tests/planning/test_doctor.py",),
    ),
)
