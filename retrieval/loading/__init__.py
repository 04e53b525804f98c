"""Load embedding files: find what a name stands for, read it, and attach labels and a gallery."""
