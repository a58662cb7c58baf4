"""Lines of this pack, and their files, that a warm model call executes from KSampler to the attention kernel of a rank; and
microseconds of ComfyUI's thread for the call.

    python -m benchmarks.speed.warm_call --comfyui ~/ComfyUI --files
"""

import tempfile
from pathlib import Path

from benchmarks.harness.comfyui_pictures import SCRIPTS
from benchmarks.one_gpu.kept import keep, parser
from scripts.comfyui_server import find_python
from testing import mini
from testing.comfyui.scripted import ComfyUI, Inside


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options.add_argument("--files", action="store_true", help="tell the lines of each file")
    given = options.parse_args()
    checkout = given.comfyui.resolve()
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory) / "models" / "diffusion_models"
        models.mkdir(parents=True)
        mini.save(mini.random_model(mini.IN_COMFYUI), models / "tiny.safetensors")
        inside = Inside(ComfyUI(checkout, find_python(checkout)), Path(directory), SCRIPTS)
        modes, _ = inside.run("warm_call", files=given.files)
        inside.close()
    said = ", ".join(f"{mode} {row['lines']} lines in {row['files']} files" for mode, row in modes.items() if "lines" in row)
    keep(given.out, {"summary": said, "modes": modes})


if __name__ == "__main__":
    main()
