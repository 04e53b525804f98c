"""The embedder: normalisation, projection, BatchNorm and precision."""

import copy

import pytest

torch = pytest.importorskip("torch")

from trainer.networks.embedder import Embedder  # noqa: E402


def small(**options) -> Embedder:
    torch.manual_seed(0)
    return Embedder("smallcnn", image_size=32, **options)


@pytest.fixture
def images():
    return torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("dim", "expected"), [(0, 512), (7, 7)])
@pytest.mark.parametrize("batchnorm", [False, True])
def test_dim_is_the_length_of_the_embedding(images, dim, expected, batchnorm):
    embedder = Embedder("resnet18", dim=dim, batchnorm=batchnorm, image_size=32)
    assert embedder.dim == expected
    assert embedder(images).shape == (8, expected)


def test_normalisation_inside_equals_normalisation_by_hand(images):
    embedder = Embedder("resnet18", image_size=32).eval()
    by_hand = images.clone()
    for channel, (mean, std) in enumerate([(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]):
        by_hand[:, channel] = (by_hand[:, channel] - mean) / std
    with torch.no_grad():
        torch.testing.assert_close(embedder(images), embedder.backbone(by_hand))
    assert embedder.preprocessing == {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def test_one_channel_averages_the_colours(images):
    embedder = small(channels=1).eval()
    grey = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    with torch.no_grad():
        torch.testing.assert_close(embedder(images), embedder(grey))
        assert not torch.allclose(small().eval()(images), small().eval()(grey))
        torch.testing.assert_close(embedder(images[:, [2, 0, 1]]), embedder(images))


def test_batchnorm_on_the_embedding_standardises_it_and_has_no_parameters(images):
    embedder = small(dim=5, batchnorm=True)
    embeddings = embedder(images).detach()
    torch.testing.assert_close(embeddings.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    plain = embedder.projection(embedder.backbone((images - 0.5) / 0.5)).detach()
    torch.testing.assert_close(
        embeddings, (plain - plain.mean(0)) / (plain.var(0, correction=0) + 1e-5).sqrt()
    )
    assert not list(embedder.norm.parameters())


@pytest.mark.parametrize("backbone", ["smallcnn", "resnet18", "timm:resnet10t"])
def test_frozen_batchnorm_keeps_its_statistics_while_the_embeddings_own_moves(images, backbone):
    if backbone.startswith("timm"):
        pytest.importorskip("timm")
    embedder = Embedder(backbone, dim=6, batchnorm=True, freeze_batchnorm=True, image_size=32)
    embedder.train()
    before = copy.deepcopy(embedder.state_dict())
    optimizer = torch.optim.SGD(embedder.parameters(), lr=0.1)
    (embedder(images) * torch.arange(48.0).view(8, 6)).sum().backward()
    optimizer.step()
    after = embedder.state_dict()
    statistics = [k for k in before if "running_" in k or "num_batches" in k]
    assert len([key for key in statistics if key.startswith("backbone.")]) >= 12
    for key in statistics:
        assert torch.equal(before[key], after[key]) == key.startswith("backbone."), key
    scales = [k for k, m in embedder.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert any(not torch.equal(before[f"{k}.bias"], after[f"{k}.bias"]) for k in scales)


def test_without_freezing_all_statistics_move_and_eval_stops_them(images):
    embedder = small(batchnorm=True)
    before = copy.deepcopy(embedder.state_dict())
    embedder(images)
    after = copy.deepcopy(embedder.state_dict())
    assert not any(torch.equal(before[k], after[k]) for k in before if "running_mean" in k)
    embedder.eval()(images)
    assert all(torch.equal(after[k], v) for k, v in embedder.state_dict().items())


@pytest.mark.parametrize("backbone", ["smallcnn", "resnet18", "googlenet", "mobilenet_v3_small"])
def test_gradients_reach_every_parameter(images, backbone):
    embedder = Embedder(backbone, dim=6, image_size=32)
    (embedder(images) * torch.arange(48.0).view(8, 6)).sum().backward()
    without = [k for k, p in embedder.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


def test_autocast_gives_float32_near_the_full_precision(images, bf16):
    embedder = small(dim=16, batchnorm=True).eval()
    with torch.no_grad():
        exact = embedder(images)
        with torch.autocast("cpu", bf16):
            cast = embedder(images)
    assert cast.dtype == torch.float32
    assert not torch.equal(cast, exact)
    torch.testing.assert_close(cast, exact, atol=0.05, rtol=0.05)


def test_memory_format_and_batch_size_do_not_matter_in_eval(images):
    embedder = small(dim=16, batchnorm=True).eval()
    with torch.no_grad():
        whole = embedder(images)
        alone = torch.cat([embedder(image[None]) for image in images])
        embedder.to(memory_format=torch.channels_last)
        last = embedder(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(alone, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, whole, atol=1e-5, rtol=1e-4)


def test_a_state_dict_rebuilds_the_network_without_its_weights(tmp_path, images):
    torch.manual_seed(4)
    source = Embedder("googlenet", image_size=32)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    trained = Embedder("googlenet", weights=str(tmp_path / "w.pth"), dim=8, image_size=32).eval()
    assert "pixel_mean" in trained.notes[0]  # said to be left out
    rebuilt = Embedder("googlenet", weights="none", dim=8, image_size=32).eval()
    rebuilt.load_state_dict(trained.state_dict())
    with torch.no_grad():
        assert torch.equal(rebuilt(images), trained(images))
        assert torch.equal(trained.backbone(images), source.eval().backbone(images))


def test_the_seed_decides_the_weights():
    first, second = small(dim=4).state_dict(), small(dim=4).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    torch.manual_seed(1)
    other = Embedder("smallcnn", dim=4, image_size=32).state_dict()
    assert not torch.equal(first["projection.weight"], other["projection.weight"])


@pytest.mark.parametrize("size", [16, 28, 31, 64])
def test_smallcnn_takes_many_sizes(size):
    assert small().eval()(torch.rand(1, 3, size, size)).shape == (1, small().dim)
