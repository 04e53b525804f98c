"""The import of torchvision, with and without its compiled operators."""

import pytest

from tests.forks import Forked


def run(code: str) -> str:
    """What it prints, in a process that has imported torch and no torchvision."""
    start = "import sys, warnings\nassert 'torchvision' not in sys.modules\n"
    ended, told, errors = Forked("-c", start + "warnings.simplefilter('error')\n" + code).end()
    assert (ended, errors) == (0, "")
    return told


FAKE = """
import importlib, sys, types
real = importlib.import_module
calls = []
def fake(name, *rest):
    if name != "torchvision":
        return real(name, *rest)
    calls.append(name)
    {answer}
importlib.import_module = fake
"""


def test_operators_are_not_declared_where_torchvision_imports():
    answer = "return types.ModuleType('torchvision')"
    run(
        FAKE.format(answer=answer)
        + "from trainer.networks import vision\nimport torch\n"
        + "assert calls == ['torchvision'] and not vision.declared\n"
        + "assert not hasattr(torch.ops.torchvision, 'qnms')"
    )


def test_operators_are_declared_after_the_import_failed_on_them():
    answer = """
    if len(calls) == 1:
        sys.modules['torchvision.half'] = types.ModuleType('torchvision.half')
        raise RuntimeError('operator torchvision::nms does not exist')
    assert 'torchvision.half' not in sys.modules
    return types.ModuleType('torchvision')
"""
    run(
        FAKE.format(answer=answer)
        + "from trainer.networks import vision\nimport torch\n"
        + "assert len(calls) == 2 and len(vision.declared) == 1\n"
        + "assert hasattr(torch.ops.torchvision, 'nms') and hasattr(torch.ops.torchvision, 'qnms')"
    )


def test_torchvision_imports_here_without_a_warning():
    code = "from trainer.networks.vision import torchvision; import torchvision.transforms.v2"
    assert run(code) == ""


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (
            "ModuleNotFoundError('No module named torchvision', name='torchvision')",
            "needs torchvision",
        ),
        ("RuntimeError('built for another torch')", "cannot be imported"),
    ],
)
def test_other_failures_of_the_import_are_told_and_nothing_is_declared(raised, words):
    told = run(
        FAKE.format(answer=f"raise {raised}")
        + "from retrieval.errors import DmlError\n"
        + "try:\n    from trainer.networks import vision\n"
        + "except DmlError as error:\n    print(error)\n"
        + "import torch\nassert not hasattr(torch.ops.torchvision, 'qnms')"
    )
    assert words in told
    assert 'pip install -c constraints.txt ".[cpu]"' in told
