"""Hundreds of prompts at random to a real ComfyUI.

    python -m tests.campaigns.soak [--prompts 500] [--seed 0] [--offload] [--out FILE.json]

Every finished picture must be bit for bit that of the same request alone, no process may grow, nothing may be left at the
end. Exit status 1 where that is not so.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from .report import table, write
from .soak import soak
from .verdict import problems

parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak", description=__doc__)
parser.add_argument("--prompts", type=int, default=500)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--offload", action="store_true", help="on emulated devices, where ranks give way and stream")
parser.add_argument("--out", type=Path, help="a JSON file for all that was seen, with a picture of the memory beside it")
parser.add_argument("--comfyui", type=Path, default=Path(os.environ.get("COMFYUI_PATH") or Path.home() / "ComfyUI"))
arguments = parser.parse_args()
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
log = logging.getLogger("soak")
log.setLevel(logging.INFO)
found = soak(arguments.comfyui, arguments.prompts, arguments.seed, log.info, arguments.offload)
if arguments.out is not None:
    write(found, arguments.out)
log.info("\n%s\n", table(found))
wrong = problems(found)
log.info("%s", "\n".join(wrong) if wrong else "All well.")
sys.exit(1 if wrong else 0)
