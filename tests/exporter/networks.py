"""Small networks whose numbers depend on their images, and images for them."""

import numpy as np
import torch

from exporter.onnx.metadata import to_properties
from trainer.networks.embedder import BATCHNORMS, Embedder


def stripes(count=80, classes=10, size=16, seed=0):
    """uint8 (count, size, size, 3) and labels: a class is a direction and a colour."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    colours = np.random.default_rng(0).uniform(0.3, 1, (classes, 3))
    y, x = np.mgrid[:size, :size]
    angle = np.pi * labels[:, None, None] / classes
    phase = rng.uniform(0, 6, (count, 1, 1))
    wave = 0.5 + 0.5 * np.sin(x * np.cos(angle) + y * np.sin(angle) + phase)
    pictures = wave[..., None] * colours[labels][:, None, None]
    pictures += rng.normal(0, 0.1, pictures.shape)
    return np.uint8(np.clip(pictures, 0, 1) * 255), labels


def settled(backbone="smallcnn", size=16, seed=0, short=False, **options):
    """A network in evaluation mode that lets differences of images through.

    Fresh ones have BatchNorm statistics that fit nothing and blocks that are switched off; with
    statistics that fit, deep ones magnify rounding until torch itself is far from float64, unless
    their blocks add little, as those of trained networks do.

    short: leave out blocks that repeat an earlier one.
    """
    torch.manual_seed(seed)
    embedder = Embedder(backbone, image_size=size, **{"dim": 16} | options).eval()
    if short:
        leave_out_repeats(embedder, size)
    for name, parameter in embedder.named_parameters():
        if "layer_scale" in name:
            torch.nn.init.ones_(parameter)
    norms = [module for module in embedder.modules() if isinstance(module, BATCHNORMS)]
    for norm in norms:
        if norm.affine:
            torch.nn.init.constant_(norm.weight, 0.25)
    hooks = [norm.register_forward_pre_hook(fit) for norm in norms]
    noise = np.random.default_rng(1).integers(0, 256, (8, size, size, 3), np.uint8)
    images = np.concatenate([stripes(24, 8, size, seed=3)[0], noise])
    with torch.no_grad():
        embedder(torch.from_numpy(images).permute(0, 3, 1, 2) / 255)
    for hook in hooks:
        hook.remove()
    return embedder


def leave_out_repeats(network, size):
    """Replace blocks that have the layers of an earlier one: by the identity or, where the shape
    changes and all settings but the numbers of channels are those of the other, by one layer.

    What is left has every kind of block and every shape between blocks, and is traced faster.
    """
    shapes = {}

    def look(block, inputs, output):
        if isinstance(output, torch.Tensor):
            shapes[block] = (inputs[0].shape, output.shape)

    blocks = [block for block in network.modules() if len(list(block.children())) > 1]
    hooks = [block.register_forward_hook(look) for block in blocks]
    with torch.no_grad():
        network(torch.zeros(2, 3, size, size))
    for hook in hooks:
        hook.remove()
    seen = set()
    for parent in blocks:
        for name, block in parent.named_children():
            kind = (type(block), *(type(layer) for layer in block.modules()))
            exactly = tuple(settings(layer) for layer in block.modules())
            before, after = shapes.get(block, (None, None))
            if before and before == after and kind in seen:
                setattr(parent, name, torch.nn.Identity())
            elif before and exactly in seen and len(before) == len(after) == 4:
                stride = before[2] // after[2]
                setattr(parent, name, torch.nn.Conv2d(before[1], after[1], stride, stride))
            seen |= {kind, exactly}


def settings(layer):
    """What a layer does beside its numbers of channels, as far as its attributes tell."""
    plain = (bool, str, tuple)
    given = {name: value for name, value in vars(layer).items() if isinstance(value, plain)}
    return (type(layer), getattr(layer, "groups", 1) == 1, repr(sorted(given.items())))


def fit(norm, inputs):
    """Statistics of what comes in; no channel is far quieter than the others."""
    [values] = inputs
    axes = [axis for axis in range(values.dim()) if axis != 1]
    variance = values.var(axes)
    norm.running_mean.copy_(values.mean(axes))
    norm.running_var.copy_(variance.clamp(min=0.1 * variance.mean().item()))


def described(embedder, size=16, input="uint8-nhwc", normalize=False, **others):
    """What the metadata of a model say, as `describe_checkpoint` makes it."""
    layout, dtype = {"uint8-nhwc": ("nhwc", "uint8"), "float-nchw": ("nchw", "float32")}[input]
    return {
        "schema": 1,
        "arch": "smallcnn",
        "embedding_dim": embedder.dim,
        "l2_normalized": normalize,
        "input_layout": layout,
        "input_dtype": dtype,
        "normalizes_input": True,
        "resize": 0,
        "keep_ratio": True,
        "crop": size,
        "interpolation": "bilinear",
        **embedder.preprocessing,
        "precision": "fp32",
    } | others


def properties(*args, **others):
    """The metadata of a model."""
    return to_properties(described(*args, **others))
