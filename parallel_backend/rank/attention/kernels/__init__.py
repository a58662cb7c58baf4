"""The attention kernels, one module each: `attend`, and `attend_lse` if the kernel returns the log-sum-exp (interface.py).

A module has the name of its row in core/attention_kernels.py, and imports its package when it is called. kernel_choice.py
tries the kernel on the device, and passes it only calls that the kernel supports.
"""
