"""The attention kernels, a module each: `attend` and, where the kernel gives it, `attend_lse` (interface.py).

A module has the name of its row in core/attention_kernels.py. It imports the package that it needs when it is called, and
knows nothing of what else there is: kernel_choice.py tries it on the device, and gives it only calls that it can take.
"""
