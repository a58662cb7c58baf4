"""quickstart-digits: a bundled miniature FLUX model, its fixed codec and its fixed prompt encoding.

`codec` and `prompt` are pure torch, for the nodes. scripts/train_quickstart.py has the model's configuration, and
scripts/digits.py makes the training pictures and reads generated ones back.
"""
