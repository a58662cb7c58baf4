"""Places of a rank's weights: always on its device, or in host memory and on the device while their block computes."""
