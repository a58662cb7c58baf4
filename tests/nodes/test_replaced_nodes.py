"""Which of this pack's nodes another pack has replaced."""


class Ours:
    pass


class Theirs:
    RELATIVE_PYTHON_MODULE = "custom_nodes.other"


def test_nodes_of_another_pack_are_named(module):
    replaced = module("replaced_nodes").replaced
    ours = {name: type(name, (Ours,), {}) for name in ("ApplyPipeFusion", "ParallelTrace", "ParallelDoctor")}
    assert replaced(ours, {"KSampler": Theirs} | ours) == ""
    assert replaced(ours, {}) == ""  # before ComfyUI knows them
    said = replaced(ours, ours | {"ParallelTrace": Theirs, "ApplyPipeFusion": Theirs})
    assert said.startswith("These nodes belong to another pack (custom_nodes.other), not Parallel DiT's: ")
    assert "ApplyPipeFusion, ParallelTrace. " in said
