"""The checks by name, and their default sizes. Imports nothing, for a command line without torch."""

ABOUT = {
    "system": "driver, libraries, GPUs and how they are connected",
    "kernels": "attention kernels against fp64, on each device",
    "quantised": "one layer of each quantised format, on each device",
    "one rank": "one rank against diffusers on a CPU; half precision",
    "model file": "your model on one rank and on all",
    "links": "bandwidth of every link between ranks",
    "modes": "every mode and product of modes against one rank",
    "bands": "PipeFusion and displaced patches repeat bit for bit",
    "pictures": "PipeFusion and displaced patches against exact steps",
    "hop": "what a pipeline's hop costs",
    "lifetime": "memory after loading and unloading many times",
    "killed rank": "a rank is killed on purpose: named error, next call works",
    "out of memory": "a rank is made to run out of memory: named error, next call works",
    "hang": "a rank is made to hang: the watchdog names it",
    "stuck GPU": "a GPU is made to spin: the watchdog names its rank",
}
"""Name -> description, in the order of the checks. One rank comes early, since later checks compare with it."""
STEPS = 8
"""Steps of a sampling, with the user's model and with the bundled one."""
CYCLES = 20
"""Times that a model is loaded and unloaded."""
