"""scripts/draft_family.py drafts the families that there are: what it finds is compared with what their files say."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoints.checkpoint import to_original
from parallel_backend.families import FAMILIES
from parallel_backend.families.base import tensor_plan
from scripts import draft_family
from testing.cases import all_cases

CASES = {case.family: case for case in reversed(list(all_cases()))}
CUTS = {cut: name for name, cut in vars(tensor_plan).items() if isinstance(cut, tensor_plan.LayerCut)}


def layouts(case):
    """Parameters of the class, tensors of the file in a file's order, and for each parameter the tensor with its values."""
    family = FAMILIES[case.family]
    with torch.device("meta"):
        model = family.transformer_class()(**case.config)
    keys = family.file.key_map(dict(model.config))
    state = {name: tensor for name, tensor in model.state_dict().items() if name in keys}
    original = dict(sorted(to_original(family, dict(model.config), state).items()))
    ours, theirs = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (state, original))
    return ours, theirs, {name: keys[name].key for name in state}


@pytest.fixture(scope="module")
def drafts():
    found = {}
    for family, case in CASES.items():
        ours, theirs, keys = layouts(case)
        found[family] = draft_family.draft(ours, theirs), ours, keys
    return found


def module(name: str) -> str:
    return name.rpartition(".")[0] or name


def test_nearly_all_keys_are_found_and_most_errors_are_marked_as_guesses(drafts):
    right, wrong, unmarked = 0, 0, set()
    for family, (parts, _, keys) in drafts.items():
        named = dict(pair for part in parts for pair in part.names())
        guessed = {name for part in parts for name in part.guessed}
        for parameter, key in keys.items():
            if named.get(module(parameter), named.get(parameter)) in (module(key), key):
                right += 1
                continue
            wrong += 1
            if not any(module(parameter).endswith(name) for name in guessed):
                unmarked.add(family)
    assert right / (right + wrong) > 0.97
    # HunyuanDiT's norms have one another's numbers; Wan Animate's file has its face blocks in a list of their own, and
    # SeedVR2's has rotary frequencies in every block.
    assert unmarked <= {"hunyuan-dit", "hunyuan-video", "krea2", "seedvr2", "wan-animate"}


def test_nine_of_ten_layers_are_cut_as_the_family_says(drafts):
    got = []
    for family, (_, ours, _) in drafts.items():
        for name, blocks in draft_family.block_lists(ours).items():
            plan, cuts = FAMILIES[family].tensor_plan.get(name, {}), draft_family.cuts(blocks[min(blocks)])
            got += [CUTS.get(plan[layer]) == cut for layer, cut in cuts.items() if layer in plan]
    assert len(got) > 300
    assert sum(got) / len(got) > 0.9


def test_every_block_list_of_a_family_that_the_file_has_is_found(drafts):
    for family, (parts, ours, _) in drafts.items():
        lists = {one.name for one in FAMILIES[family].blocks.lists} & draft_family.block_lists(ours).keys()
        if family != "wan-vace":  # blocks of the class have the file's second list within
            assert lists <= {part.target for part in parts}, family


def test_blocks_with_other_parameters_are_a_part_of_their_own():
    block = {
        "attn.to_q.weight": (8, 8),
        "attn.to_out.weight": (8, 8),
        "ff.1.weight": (32, 8),
        "ff.2.weight": (8, 32),
        "norm.weight": (8,),
        "norm.bias": (8,),
    }
    ours = {f"blocks.{index}.{name}": shape for index in range(4) for name, shape in block.items()}
    theirs = {name.replace("to_q", "q").replace("to_out", "o").replace("ff", "mlp"): shape for name, shape in ours.items()}
    del ours["blocks.3.ff.2.weight"], theirs["blocks.3.mlp.2.weight"]
    parts = draft_family.draft(ours, theirs)
    assert [(part.target, part.blocks) for part in parts] == [("", ()), ("blocks", (0, 1, 2)), ("blocks", (3,))]
    assert dict(parts[1].names())["blocks.1.ff.2"] == "blocks.1.mlp.2"
    assert draft_family.spans((0, 1, 2, 4)) == "0-2, 4"


def test_the_command_prints_python_and_what_is_missing(tmp_path, monkeypatch, capsys):
    case = CASES["sd3"]
    _, theirs, _ = layouts(case)
    del theirs["context_embedder.weight"], theirs["context_embedder.bias"]
    path, comfyui = tmp_path / "model.safetensors", tmp_path / "ComfyUI" / "comfy"
    save_file({f"model.diffusion_model.{name}": torch.empty(shape) for name, shape in theirs.items()}, path)
    comfyui.mkdir(parents=True)
    (comfyui / "supported_models.py").write_text(
        "class SD3(Base):\n    def get_model(self):\n        return model_base.SD3(self)\n"
    )
    (comfyui / "model_base.py").write_text(
        "class BaseModel:\n    def extra_conds(self, **kwargs):\n        out = {}\n"
        "        out['c_concat'] = kwargs['noise']\n"
        "class SD3(BaseModel):\n    def extra_conds(self, **kwargs):\n        out = super().extra_conds(**kwargs)\n"
        "        out['c_crossattn'] = kwargs.get('cross_attn')\n"
    )
    arguments = ["--class", "SD3Transformer2DModel", "--settings", json.dumps(case.config)]
    monkeypatch.setattr(
        "sys.argv", ["draft_family", str(path), *arguments, "--comfyui", str(comfyui.parent), "--native", "SD3"]
    )
    draft_family.main()
    printed = capsys.readouterr().out
    assert 'BlockList("transformer_blocks"' in printed
    assert 'accepts=("c_concat", "c_crossattn")' in printed
    assert "cross_attn, noise" in printed
    assert re.search(
        r'block\.split\("x_block\.attn\.qkv", \{"attn\.to_q": \d+, "attn\.to_k": \d+, "attn\.to_v": \d+\}\)', printed
    )
    assert "#   context_embedder: nothing in the file fits" in printed
    with pytest.raises(ValueError, match=r"^--native: SD4 is no class"):
        draft_family.given(comfyui.parent, "SD4")
