"""Where a rank's weights are: on its device, or in host memory and on the device for as long as their block computes."""
