"""quickstart-digits: a bundled miniature FLUX model, its class, its fixed codec and its fixed prompt encoding.

`mini_flux` is the class: ranks build it as they build ComfyUI's classes, and it says what they need of one.
`codec` and `prompt` are pure torch, for the nodes. scripts/train_quickstart.py has the model's configuration, and
scripts/digits.py makes the training images and reads generated ones back.
"""
