"""What scripts/gpu_check.py is made of: the machine, the steps, running them, the report; and two of the steps."""
