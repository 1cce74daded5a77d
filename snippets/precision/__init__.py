"""Numerical alignment after swapping in fused kernels: references, three gates, and the proof that they work.

    python -m snippets.precision check --op rms_norm --kernel my_pkg.my_kernel:rms_norm

``references`` are the PyTorch truths, ``cases`` draws adversarial inputs, ``judge`` compares,
``gate1`` / ``gate2`` / ``gate3`` decide; ``mutants`` and ``controls`` are the broken and the
correct kernels on which the gates are tried.
"""
