"""Hundreds of prompts at random to a real ComfyUI.

    python -m tests.campaigns.soak [--prompts 500] [--seed 0] [--out FILE.json]

Every finished image must be bit for bit that of the same request alone, no process may grow, nothing may be left at the
end. Exit status 1 if that is not so.
"""

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from .soak import soak

parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak", description=__doc__)
parser.add_argument("--prompts", type=int, default=500)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, help="a JSON file for all that was seen")
parser.add_argument("--comfyui", type=Path, default=Path(os.environ.get("COMFYUI_PATH") or Path.home() / "ComfyUI"))
arguments = parser.parse_args()
found = soak(arguments.comfyui, arguments.prompts, arguments.seed, print)
if arguments.out is not None:
    arguments.out.write_text(json.dumps(asdict(found), indent=1) + "\n")
print(dict(Counter(found.status)), *(found.wrong or ["All well."]), sep="\n")
sys.exit(1 if found.wrong else 0)
