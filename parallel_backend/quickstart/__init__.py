"""quickstart-digits: a bundled miniature FLUX model, its fixed codec and its fixed prompt encoding.

`codec` and `prompt` are pure torch and are what the nodes need. `digits` makes the training pictures and reads
generated ones back; it needs scikit-learn and serves training and tests only. `model` holds the configuration.
"""
