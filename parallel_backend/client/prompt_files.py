"""The model files of the present prompt, as it first saw them: later changes of a file do not affect the prompt's
results."""

from dataclasses import replace

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_setup, with_class
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Setup, TensorSizes

from .models_on_ranks import OnRanks


class PromptFiles:
    """The checkpoints that the present prompt computes with. To be used under the registry's lock."""

    def __init__(self):
        self._prompt: str | None = None
        self._seen: dict[tuple[str, OwnClass, TensorSizes], Checkpoint] = {}

    def begin(self, prompt: str | None) -> None:
        """Forget the files of other prompts. `prompt`: id of the present one. None: unknown, and different from all
        others."""
        if prompt is None or prompt != self._prompt:
            self._prompt = prompt
            self._seen.clear()

    def of(self, setup: Setup, on_ranks: OnRanks | None, opened: Checkpoint | None) -> Checkpoint:
        """Return the checkpoint of `setup`, fixed by the prompt's first call.

        That call takes the checkpoint of the model `on_ranks`, or the one that a node has `opened`, unless its file has
        changed; or otherwise opens the file now. Raises ValueError for a file that cannot be opened as this class.
        """
        own = setup.own_class
        key = str(setup.path), replace(own, blocks=()), setup.enlarged
        if key not in self._seen:
            known = None if on_ranks is None else on_ranks.model.checkpoint, opened
            present = next((each for each in known if each is not None and not each.has_changed), None)
            self._seen[key] = present or open_setup(setup)
        seen = self._seen[key]
        if seen.built.own != own:  # its blocks have been proven since
            self._seen[key] = seen = with_class(seen, own)
        if opened is not None and opened.built.own == own and opened.built is not seen.built:
            self._seen[key] = seen = replace(seen, built=opened.built)  # it has the call that is about to be made
        return seen
