"""Downloads that fail, and the comparison of weights."""

import urllib.error

import torch


def refuse(*_, **__):
    raise urllib.error.URLError("Name or service not known")


def same(module, state) -> bool:
    return all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
