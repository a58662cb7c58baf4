"""Where a rank's weights are: on its device for good, or in host memory and on the device while their block computes."""
