"""Linear layers that multiply in FP8: casts (operands.py, kernels.py), products and layers (linear.py), checks."""
