"""ComfyUI's own class of a model on ranks: by stages, split batch, tensor parallelism, Ulysses, ring, patches and bands.

Each rank runs the class's own forward. Prologue and epilogue run whole on every rank, and the blocks are shared out. A trial
proves it for the arguments of the actual call, before any weights are loaded. To read in this order:

- `core/own_class.py`: the records that a trial fills in, such as OwnBlock (how a block is cut) and OwnLatent (bands).
- `calls/`: a model call as data, and its smaller, random copies for trials (`tried_calls.py`).
- `cuts/stages.py`: a rank's blocks. `cuts/token_cut.py`: its tokens. `cuts/attention_calls.py`: how attention is reached.
- `trials/trial.py`: the steps of a trial. Each of them is a file: `stage_trial.py`, `token_trial.py`, `band_trial.py`,
  `feature_trial.py` (tensor parallelism). `comparison.py`: a rank's run, compared with the whole model's.
- `trials/change_trial.py`: changes that other nodes ask for, tried later.
- `plans/`: the proof, and files with proofs of published models.
- `adapters/`: changes to single classes that a trial needs. `built/`: the class without weights, its sizes and counts.
"""
