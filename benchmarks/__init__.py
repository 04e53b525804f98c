"""Side-by-side measurements. Contenders alternate in one process; medians and ratios count."""
