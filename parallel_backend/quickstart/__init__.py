"""quickstart-digits: a bundled miniature FLUX model, its fixed codec and its fixed prompt encoding.

`codec` and `prompt` are pure torch and are what the nodes need; `model` holds the configuration. scripts/digits.py makes the
training pictures and reads generated ones back.
"""
