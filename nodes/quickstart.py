"""The bundled mini model's prompt encoder and image decoder."""

from parallel_backend.quickstart.codec import decode
from parallel_backend.quickstart.prompt import encode_prompt, symbols

from .ui.input_checks import validate
from .ui.widgets import CATEGORY, link, text


def check_text(text: str | None) -> None:
    """Raise ValueError for a text that is not a prompt of the bundled model. None: another node's output is connected."""
    symbols(text or "")


@validate(early=check_text)
class QuickstartPrompt:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    DESCRIPTION = "Up to four digits for the bundled mini model. Empty text is the negative prompt."

    @classmethod
    def INPUT_TYPES(cls):
        tooltip = (
            "Up to four digits, such as '3 1 4 1'. _ leaves a cell empty. Leave the text empty for the negative prompt."
        )
        return {"required": {"text": text("3 1 4 1", tooltip)}}

    def encode(self, text):
        context, pooled = encode_prompt(text)
        return ([[context, {"pooled_output": pooled}]],)


@validate()
class QuickstartDecode:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"
    DESCRIPTION = "Decodes a latent of the bundled mini model by a fixed linear map. Needs no VAE file."

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": link("LATENT", "A latent of the bundled mini model.")}}

    def decode(self, samples):
        latent = samples["samples"]
        if latent.ndim != 4 or latent.shape[1] != 16:
            raise ValueError(f"samples: needs a latent with 16 channels, but its shape is {tuple(latent.shape)}.")
        return (decode(latent).unsqueeze(-1).repeat(1, 1, 1, 3).cpu(),)
