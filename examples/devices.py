"""Spare a machine without an accelerator JAX's search for one.

Importing JAX where libtpu is installed and no TPU is attached prints alarming lines about host
bounds and worker hostnames. Import this module before JAX.
"""

import glob
import os
import sys

ACCELERATORS = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/kfd", "/dev/dri/*", "/dev/dxg")
"""Where Linux shows TPUs and GPUs."""

if sys.platform == "linux" and not any(map(glob.glob, ACCELERATORS)):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
