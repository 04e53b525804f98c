"""The command line: parses, calls one library function, renders. Heavy imports live in commands."""

from __future__ import annotations

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dmltool", prog_name="dmltool")
def main() -> None:
    """Train, export and exactly evaluate embedding networks."""
