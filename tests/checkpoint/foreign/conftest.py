"""What no test imports: a script that needs DeepSpeed."""

collect_ignore = ["real_deepspeed.py"]
