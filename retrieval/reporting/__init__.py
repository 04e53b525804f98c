"""The report: one view of an embedding file, and the page that shows it."""
