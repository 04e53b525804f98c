"""Tables of models and exports."""

import io

from rich.console import Console

from exporter.inspection import inspect_model
from exporter.tables import model_table


def test_a_hash_is_shown_in_full_on_a_narrow_terminal(exported):
    for width in (60, 80):
        console = Console(file=io.StringIO(), width=width)
        found = inspect_model(exported)[0]
        console.print(model_table(found))
        assert found["sha256"] in "".join(console.file.getvalue().split())
