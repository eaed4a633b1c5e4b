"""Run a script with the real DeepSpeed on the CPU: `real.py SCRIPT ARGUMENTS...`."""

import os
import runpy
import sys

os.environ["DS_ACCELERATOR"] = "cpu"  # before it is imported

import deepspeed

# else init_distributed compiles a shared-memory all-reduce, which takes minutes and is not used
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
