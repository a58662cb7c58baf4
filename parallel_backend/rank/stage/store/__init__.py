"""Where a rank's weights are: always on its device, or in host memory and on the device only while their block computes."""
