"""The checks by name, and their default sizes. Imports nothing, for a command line without torch."""

ABOUT = {
    "system": "driver, libraries, GPUs and how they are connected",
    "kernels": "attention kernels against fp64, on each device",
    "quantised": "one layer of each quantised format, on each device",
    "page-locked": "how much the driver page-locks, and how fast copies are",
    "one rank": "one rank against the class on a CPU; half precision",
    "graphs": "replays of CUDA graphs against the same calls without",
    "model file": "your model on one rank and on all",
    "links": "bandwidth of every link between ranks",
    "memory": "what ranks take of a GPU beside their models",
    "modes": "every mode against one rank",
    "hop": "what a pipeline's hop costs",
    "lifetime": "memory after loading and unloading many times",
    "killed rank": "a rank is killed on purpose: named error, next call works",
    "stuck GPU": "a GPU is made to spin: the watchdog names its rank",
}
"""Name -> description, in the order of the checks. One rank comes early, since later checks compare with it."""
STEPS = 8
"""Steps of a sampling with the user's model."""
CYCLES = 12
"""Times that a model is loaded and unloaded."""
