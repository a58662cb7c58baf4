"""The attention kernels, a module each: `attend` and, where the kernel returns it, `attend_lse` (interface.py).

A module has the name of its row in core/attention_kernels.py, and imports its package when it is called. kernel_choice.py
tries the kernel on the device, and passes it only calls that the kernel supports.
"""
